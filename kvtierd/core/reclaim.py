"""What clients of an earlier life of the daemon may still write or read, until they have spoken.

At a start, the words of slots say who was writing to and reading from them. Those slots stay as
they are under *recovered* leases until their client has come back and said what it holds, or is
dead; a client that comes back takes over the leases that it claims, and the others end.
"""

from dataclasses import dataclass

import numpy as np

from kvtier_client.wire import HeldLease
from kvtierd.core.actions import RecordMember
from kvtierd.core.blocks import F_DOOMED, NONE, Rows, Slots
from kvtierd.core.leases import FIRST_RECOVERED_ID, Group, Kind, Lease, Member, owner_of
from kvtierd.core.reads import Reads
from kvtierd.core.slabs import (
    CLEARING,
    FILLING,
    NO_OWNER,
    QUARANTINED,
    WRITING,
    ready_words,
    word,
)  # fmt: skip
from kvtierd.core.tenant import Pool, Tenant
from kvtierd.core.world import World
from kvtierd.core.writes import Writes


@dataclass(slots=True)
class FoundMember:
    """A client process of an earlier life."""

    index: int
    pid: int
    start_time: int
    uid: int
    group: bytes
    secret_hash: bytes
    alive: bool


class Reclaim:
    """Gives leases of an earlier life back to their holders."""

    def __init__(self, world: World, writes: Writes, reads: Reads) -> None:
        self.world, self.writes, self.reads = world, writes, reads
        self._next_id = 0

    # -------------------------------------------------------------- at a start

    def clients(
        self, tenant: Tenant, members: list[FoundMember], busy: Slots, read: Slots
    ) -> list[Member]:
        """Put back the groups whose processes live, and the leases that the words of slots show.

        `busy`: slots that are WRITING, FILLING, QUARANTINED or CLEARING; `read`: READY ones that
        have readers.
        Returns the members whose processes have to be watched."""
        self._groups(tenant, members)
        arena, table = tenant.arena, self.world.table
        for pool in tenant.pools.values():
            mine = busy[[arena.pool_of[s] is pool.dram for s in (busy // arena.max_slots).tolist()]]
            if len(mine):
                self._write_leases(tenant, pool, mine)
        read = read[arena.row_of[read] > 0]
        rows = arena.row_of[read].astype(np.int64) - 1
        words = arena.words[read]
        arena.words[read] = ready_words(words >> np.uint64(32))
        owners = ((words >> np.uint64(16)) & np.uint64(0xFFFF)).astype(np.int64)
        for owner in np.unique(owners).tolist():
            self._read_leases(tenant, owner, rows[owners == owner])
        doomed = rows[((table.flags[rows] & F_DOOMED) != 0) & (table.readers[rows] == 0)]
        for pool, mine in self.world.by_pool(doomed):
            self.reads.copies.unread(pool, mine)
        return [member for member in tenant.members.values() if member.alive]

    def _groups(self, tenant: Tenant, members: list[FoundMember]) -> None:
        """Groups live as long as one of their processes does; what the dead ones held is theirs."""
        living = {found.group for found in members if found.alive}
        for found in members:
            group = tenant.groups.get(found.group)
            if group is None:
                group = Group(found.group, found.secret_hash, tenant)
            member = Member(
                found.index, group, found.pid, found.start_time, found.uid, alive=found.alive,
                returned=False,
            )  # fmt: skip
            if found.group not in living:
                self.world.actions.append(RecordMember(tenant, member))
                continue
            tenant.groups[found.group] = group
            tenant.members[found.index] = member
            group.members.append(member)

    def _write_leases(self, tenant: Tenant, pool: Pool, slots: Slots) -> None:
        """Give slots being written back to their owners' leases; those of the dead are free."""
        arena = tenant.arena
        words = arena.words[slots]
        states = (words & np.uint64(0xFF)).astype(np.int64)
        owners = ((words >> np.uint64(16)) & np.uint64(0xFFFF)).astype(np.int64)
        alive = np.isin(owners, np.array(sorted(tenant.members), np.int64))
        alive &= (states == WRITING) | (states == QUARANTINED)
        for state in (WRITING, FILLING, QUARANTINED, CLEARING):
            gone = slots[(states == state) & ~alive]
            if len(gone):
                arena.free(pool.dram, gone, state)
        ids = (owners << 32) | (words >> np.uint64(32)).astype(np.int64)
        for lease_id in np.unique(ids[alive]).tolist():
            mine = slots[alive & (ids == lease_id)]
            expired = bool((states[alive & (ids == lease_id)] == QUARANTINED).any())
            lease = Lease(
                lease_id, tenant.members[owner_of(lease_id)].group, pool, Kind.WRITE,
                self.world.now_s + self.world.limits.lease_ttl_s, mine, np.empty(0, np.int64),
                arena.offsets(pool.dram, mine).tobytes(), left=len(mine), recovered=True,
            )  # fmt: skip
            self.writes.add_lease(lease)
            if expired:
                self._quarantine(lease)

    def _quarantine(self, lease: Lease) -> None:
        """Nobody may use the slots of a lease until its owner speaks or is dead."""
        arena, dram = lease.pool.tenant.arena, lease.pool.dram
        left = lease.slots[lease.slots >= 0]
        writing = left[(arena.words[left] & np.uint64(0xFF)) == WRITING]
        if len(writing):
            value = word(QUARANTINED, owner_of(lease.id), lease.id & 0xFFFFFFFF)
            arena.set_state(dram, writing, WRITING, np.full(len(writing), value, np.uint64))
        lease.expired, lease.deadline_s = True, float("inf")

    def _read_leases(self, tenant: Tenant, owner: int, rows: Rows) -> None:
        """Keep rows that an earlier life's readers may still read: of one group, or of all."""
        if owner == NO_OWNER:
            groups = list(tenant.groups.values())
        else:
            member = tenant.members.get(owner)
            groups = [] if member is None else [member.group]
        for group in groups:
            for pool, mine in self.world.by_pool(rows):
                lease = Lease(
                    FIRST_RECOVERED_ID | owner << 32 | self._next_id, group, pool, Kind.READ,
                    float("inf"), self.world.table.dram[mine], mine, b"", recovered=True,
                )  # fmt: skip
                self._next_id += 1
                self.reads.add_readers(lease, owner)
                self.writes.add_lease(lease)

    # ------------------------------------------------------- when clients return

    def returned(self, group: Group, member: Member, claims: list[HeldLease]) -> list[int]:
        """Match what a returning client says it holds with what is known; returns what has ended.

        Leases of an earlier life that it does not claim have ended: it holds them no more."""
        lost, kept = [], set()
        for claim in claims:
            lease = group.leases.get(claim.lease)
            if lease is None and not claim.write:
                lease = self._read_again(group, claim)
            elif lease is not None and lease.recovered:
                lease.recovered = False
                if not self._reorder(lease, claim):
                    self._quarantine(lease)
            if lease is None or (lease.expired and lease.kind is Kind.WRITE):
                lost.append(claim.lease)
            else:
                lease.deadline_s = self.world.now_s + self.world.limits.lease_ttl_s
                lease.expired = False
            if lease is not None:
                kept.add(lease.id)
        member.returned = True
        self.end_unclaimed(group, member, kept)
        return lost

    def end_unclaimed(self, group: Group, member: Member, kept: set[int]) -> None:
        """End leases of an earlier life that a member who has spoken, or is dead, did not claim."""
        owners = {each.index: each for each in group.members}
        for lease in [x for x in group.leases.values() if x.recovered and x.id not in kept]:
            owner = owners.get(owner_of(lease.id))
            nobodys = group.returned and (owner is None or not owner.alive)
            if nobodys or (owner is member and member.alive):
                self.end(lease)

    def end(self, lease: Lease) -> None:
        """End a lease: its holder neither writes nor reads any more."""
        if lease.kind is Kind.WRITE:
            self.writes.free_write_lease(lease)
        else:
            self.reads.end_lease(lease)

    def _reorder(self, lease: Lease, claim: HeldLease) -> bool:
        """Put a recovered write lease's slots in the order in which its holder got them.

        Slots that were committed may be of another layout by now; False for any other mismatch."""
        if lease.kind is not Kind.WRITE or len(claim.offsets) % 8:
            return False
        arena, dram = lease.group.tenant.arena, lease.pool.dram
        offsets = np.frombuffer(claim.offsets, "<u8").astype(np.int64)
        slab, inside = np.divmod(offsets, arena.slab_bytes)
        place, rest = np.divmod(inside, dram.slot_bytes)
        slots = np.where(rest == 0, slab * arena.max_slots + place, NONE)
        mine = np.isin(slots, lease.slots)
        if int(mine.sum()) != len(lease.slots) or len(np.unique(slots[mine])) != len(lease.slots):
            return False
        lease.array = np.where(mine, slots, NONE)
        lease.offsets = claim.offsets
        return True

    def _read_again(self, group: Group, claim: HeldLease) -> Lease | None:
        """Rebuild a read lease from the arena offsets that its holder still reads."""
        tenant, table = group.tenant, self.world.table
        if not claim.offsets or len(claim.offsets) % 8 or claim.lease in tenant.leases:
            return None
        if not any(each.index == claim.lease >> 32 for each in group.members):
            return None
        slots = tenant.arena.slots_at(np.frombuffer(claim.offsets, "<u8"))
        if slots is None or len(np.unique(slots)) != len(slots):
            return None
        rows = tenant.arena.row_of[slots].astype(np.int64) - 1
        earlier = [
            lease.rows for lease in group.leases.values()
            if lease.recovered and lease.kind is Kind.READ
        ]  # fmt: skip
        if int(rows.min()) < 0 or not earlier or not np.isin(rows, np.concatenate(earlier)).all():
            return None
        lease = Lease(
            claim.lease, group, self.world.pools[int(table.pool[rows[0]])], Kind.READ,
            self.world.now_s + self.world.limits.lease_ttl_s, slots, rows, claim.offsets,
        )  # fmt: skip
        self.reads.add_readers(lease, claim.lease >> 32)
        self.writes.add_lease(lease)
        return lease
