"""Rebuilds the tables from what the media say of themselves and what the catalog knows.

Each block found in a header names its session, node and page (or its key); of several copies of
one name the longest wins, then the newest. Blocks of closed sessions and pruned nodes are freed;
blocks of sessions that the catalog does not know become orphans, kept until their client resumes
them or their time is over. Slots that an earlier life's client may still write or read stay as
they are until that client has come back and said what it holds, or is dead.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvtier_client.wire import HELD, NO_NODE
from kvtierd.core.actions import Note, RecordMember
from kvtierd.core.blocks import F_HELD, F_LOST, NONE, Rows, Slots
from kvtierd.core.leases import FIRST_RECOVERED_ID, Group, Kind, Lease, Member
from kvtierd.core.slabs import (
    FILLING,
    NO_OWNER,
    QUARANTINED,
    READY,
    WRITING,
    Slabs,
    ready_words,
    word,
)  # fmt: skip
from kvtierd.core.state import State
from kvtierd.core.tenant import Pool, Tenant
from kvtierd.core.tree import Node, Run, Session

_U64 = NDArray[np.uint64]


@dataclass(slots=True)
class Found:
    """Blocks found in the headers of one tier, as columns; all of one pool once split."""

    slots: Slots
    owner0: _U64
    owner1: _U64
    node: _U64
    page: _U64
    valid: _U64
    checksum: _U64
    seq: _U64
    lease: _U64
    parent: _U64
    fork_tokens: _U64
    keyed: NDArray[np.bool_]
    held: NDArray[np.bool_]
    lost: NDArray[np.bool_]
    in_dram: NDArray[np.bool_]

    def take(self, which: NDArray[np.generic]) -> "Found":
        """The chosen blocks."""
        return Found(*(getattr(self, name)[which] for name in self.__slots__))

    def __len__(self) -> int:
        return len(self.slots)


def join(first: Found, second: Found) -> Found:
    """All blocks of both."""
    return Found(
        *(np.concatenate([getattr(first, n), getattr(second, n)]) for n in Found.__slots__)
    )


@dataclass(slots=True)
class FoundNode:
    """A node as the catalog knows it."""

    node: int
    parent: int
    fork_tokens: int
    retention: int
    retention_seq: int
    ended: bool


@dataclass(slots=True)
class FoundSession:
    """A session as the catalog knows it."""

    token_hash: bytes
    name: str
    priority: int
    layouts: list[bytes]
    since_seq: int
    idle_s: float
    closed: bool
    nodes: list[FoundNode]
    pruned: list[int]
    blob_versions: dict[int, int]
    holds: list[tuple[bytes, bytes]]


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


@dataclass(slots=True)
class Outcome:
    """What a recovery did, for the log."""

    blocks: int = 0
    sessions: int = 0
    orphans: int = 0
    discarded: int = 0
    lost: int = 0
    forgotten: list[tuple[Tenant, bytes]] = field(default_factory=list)


class Recovery:
    """One start's rebuilding; used once, then thrown away."""

    def __init__(self, state: State) -> None:
        self.state, self.world = state, state.world
        self.outcome = Outcome()
        self._closed: dict[tuple[str, bytes], FoundSession] = {}
        self._next_id = 0

    # ------------------------------------------------------------- catalog

    def session(self, tenant: Tenant, found: FoundSession) -> None:
        """Put a session of the catalog back; its layouts must be registered already."""
        if found.closed:
            self._closed[tenant.name, found.token_hash] = found
            return
        pools = [tenant.pools[fingerprint] for fingerprint in found.layouts]
        session = self.state.sessions.add_session(tenant, found.token_hash, pools, found.name)
        session.priority = found.priority
        session.idle_since_s = self.world.now_s - found.idle_s
        session.pruned = set(found.pruned)
        session.blob_version = found.blob_versions.get(NO_NODE, 0)
        session.since_seq = found.since_seq
        self.outcome.sessions += 1
        waiting = {each.node: each for each in found.nodes}
        while waiting:
            ready = [
                each for each in waiting.values()
                if each.parent == NO_NODE or each.parent in session.nodes
            ]  # fmt: skip
            for each in ready or list(waiting.values()):
                parent = None if each.parent == NO_NODE else session.nodes.get(each.parent)
                parent = parent or (session.nodes.get(0) if each.node else None)
                node = self.state.sessions.add_node(
                    session, each.node, parent, each.fork_tokens, each.retention
                )
                node.ended = each.ended
                node.retention_seq = each.retention_seq
                node.blob_version = found.blob_versions.get(each.node, 0)
                del waiting[each.node]
        if 0 not in session.nodes:
            self.state.sessions.add_node(session, 0, None, 0, HELD)

    # -------------------------------------------------------------- blocks

    def blocks(self, pool: Pool, found: Found) -> None:
        """Make rows of the blocks found in a pool's slabs; what is left over is freed."""
        if not len(found):
            return
        order = np.lexsort(
            (~found.in_dram, ~found.seq, ~found.valid, found.page, found.node, found.owner1,
             found.owner0, found.keyed)
        )  # fmt: skip
        found = found.take(order)
        same = self._same_name(found)
        first = np.flatnonzero(~same)
        group = np.cumsum(~same) - 1
        winner = first[group]  # place of each block's winner
        twin = same & (found.seq == found.seq[winner]) & (found.in_dram != found.in_dram[winner])
        twin &= np.concatenate([[False], group[1:] == group[:-1]])
        rows = self._rows(pool, found, first, np.flatnonzero(twin), winner)
        keep = self._name(pool, found, first, rows)
        used = np.zeros(len(found), np.bool_)
        used[first[keep]] = True
        used |= twin & np.isin(winner, first[keep])
        used &= ~(found.lost & ~found.in_dram)
        self._free(pool, found, ~used)
        self.outcome.blocks += int(keep.sum())

    @staticmethod
    def _same_name(found: Found) -> NDArray[np.bool_]:
        """True where a block has the name of the one before it."""
        same = np.zeros(len(found), np.bool_)
        keyed = found.keyed
        equal = (found.owner0[1:] == found.owner0[:-1]) & (found.owner1[1:] == found.owner1[:-1])
        equal &= keyed[1:] == keyed[:-1]
        paged = (found.node[1:] == found.node[:-1]) & (found.page[1:] == found.page[:-1])
        same[1:] = equal & (keyed[1:] | paged)
        return same

    def _rows(
        self,
        pool: Pool,
        found: Found,
        first: NDArray[np.int64],
        twins: NDArray[np.int64],
        winner: NDArray[np.int64],
    ) -> Rows:
        """Rows for the winners, with the slots of both their copies."""
        world = self.world
        rows = world.add_rows(len(first))
        table = world.table
        table.owner0[rows], table.owner1[rows] = found.owner0[first], found.owner1[first]
        table.checksum[rows], table.seq[rows] = found.checksum[first], found.seq[first]
        table.pool[rows] = pool.number
        table.node[rows] = NONE
        table.page[rows], table.valid[rows] = found.page[first], found.valid[first]
        table.touch[rows] = world.touch
        table.readers[rows] = 0
        table.pins[rows] = 0
        table.priority[rows] = 0
        dram, nvme = np.full(len(found), NONE), np.full(len(found), NONE)
        for places in (first, twins):
            good = places[~(found.lost[places] & ~found.in_dram[places])]
            at = winner[good]
            into = found.in_dram[good]
            dram[at[into]] = found.slots[good[into]]
            nvme[at[~into]] = found.slots[good[~into]]
            table_sum = found.checksum[good[~into]]
            table.checksum[rows[np.searchsorted(first, at[~into])]] = table_sum
        table.dram[rows], table.nvme[rows] = dram[first], nvme[first]
        flags = np.where(found.held[first], F_HELD, 0).astype(np.uint8)
        flags[(dram[first] == NONE) & (nvme[first] == NONE)] |= F_LOST
        table.flags[rows] = flags
        world.seq = max(world.seq, int(found.seq.max()))
        return rows

    def _name(
        self, pool: Pool, found: Found, first: NDArray[np.int64], rows: Rows
    ) -> NDArray[np.bool_]:
        """Put the winners' rows into the tree or the KeyIndex; returns which found their place."""
        world, table = self.world, self.world.table
        keep = np.zeros(len(first), np.bool_)
        keyed = found.keyed[first]
        lost = (table.flags[rows] & F_LOST) != 0
        fresh = keyed & ~lost
        if fresh.any():
            twice = world.keys.insert(rows[fresh].astype(np.int32))
            keep |= fresh & ~np.isin(rows, twice)
        of_nodes = np.flatnonzero(~keyed)
        if len(of_nodes):
            names = first[of_nodes]
            starts = np.flatnonzero(np.concatenate([[True], self._next_node(found, names)]))
            for start, end in zip(starts, [*starts[1:].tolist(), len(names)], strict=True):
                some = of_nodes[start:end]
                keep[some] = self._name_node(pool, found, first[some], rows[some])
        kept = rows[keep]
        pool.clean += int(((table.dram[kept] != NONE) & (table.nvme[kept] != NONE)).sum())
        pool.held += world.kept(kept)
        for slabs, column in ((pool.tenant.arena, table.dram), (world.nvme, table.nvme)):
            there = kept[column[kept] != NONE]
            slabs.row_of[column[there]] = there + 1
        table.remove(rows[~keep])
        self.outcome.lost += int((lost & keep).sum())
        return keep

    @staticmethod
    def _next_node(found: Found, names: NDArray[np.int64]) -> NDArray[np.bool_]:
        """True where a block's node is not that of the block before it."""
        a, b = names[1:], names[:-1]
        changed: NDArray[np.bool_] = (
            (found.owner0[a] != found.owner0[b])
            | (found.owner1[a] != found.owner1[b])
            | (found.node[a] != found.node[b])
        )
        return changed

    def _name_node(
        self, pool: Pool, found: Found, places: NDArray[np.int64], rows: Rows
    ) -> NDArray[np.bool_]:
        """Give one node its rows; returns which it can have."""
        table, nothing = self.world.table, np.zeros(len(rows), np.bool_)
        at = int(places[0])
        owner = np.array([found.owner0[at], found.owner1[at]], np.uint64).tobytes()
        node_id = int(found.node[at])
        session = self._session_of(pool, owner)
        if session is None or node_id in session.pruned:
            return nothing
        node = session.nodes.get(node_id) or self._node_from_header(session, found, at)
        run = node.runs[self._part(session, pool)]
        pages = found.page[places].astype(np.int64)
        good = (pages >= run.start) & (found.seq[places] >= session.since_seq)
        lost = (table.flags[rows] & F_LOST) != 0
        held = found.held[places].copy()
        old = found.seq[places] <= node.retention_seq
        held[old] = node.retention == HELD
        if session.found_in_headers:
            held[:] = True
        good &= ~lost | held
        table.flags[rows] = np.where(held, F_HELD, 0).astype(np.uint8) | np.where(lost, F_LOST, 0)
        table.node[rows] = node.index
        table.priority[rows] = session.priority
        mine = rows[good]
        if len(mine):
            run.reach(int(pages[good].max()) + 1)
            run.rows[pages[good] - run.start] = mine
            last = int(pages[good].max()) * pool.layout.block_tokens + int(table.valid[mine[-1]])
            node.tokens = max(node.tokens, last)
            self.world.node_table.tokens[node.index] = node.tokens
        return good

    def _session_of(self, pool: Pool, owner: bytes) -> Session | None:
        """The session of blocks found; an unknown one becomes an orphan, a closed one is None."""
        tenant = pool.tenant
        session = tenant.sessions.get(int.from_bytes(owner[:8], "little"))
        if session is not None:
            return session
        closed = self._closed.get((tenant.name, owner))
        if closed is not None:
            closed.blob_versions[NO_NODE] = -1  # its blocks are still on a medium
            return None
        session = self.state.sessions.add_session(tenant, owner, [pool], "")
        session.found_in_headers = True
        self.state.sessions.add_node(session, 0, None, 0, HELD)
        self.outcome.orphans += 1
        self.world.actions.append(
            Note("orphan_found", f"session {session.sid:016x} is in headers, not in the catalog")
        )
        return session

    def _node_from_header(self, session: Session, found: Found, at: int) -> Node:
        """A node that the catalog does not know, from what its blocks say of it."""
        parent_id, fork = int(found.parent[at]), int(found.fork_tokens[at])
        parent = session.nodes.get(parent_id) or session.nodes[0]
        return self.state.sessions.add_node(session, int(found.node[at]), parent, fork, HELD)

    @staticmethod
    def _part(session: Session, pool: Pool) -> int:
        if pool not in session.pools:
            session.pools.append(pool)
            for node in session.nodes.values():
                node.runs.append(Run(node.runs[0].start))
        return session.pools.index(pool)

    def _free(self, pool: Pool, found: Found, which: NDArray[np.bool_]) -> None:
        """Free the slots of blocks that did not become rows."""
        for in_dram in (True, False):
            slots = found.slots[which & (found.in_dram == in_dram)]
            if not len(slots):
                continue
            self.outcome.discarded += len(slots)
            if in_dram:
                pool.tenant.arena.free(pool.dram, slots, READY)
            else:
                self.state.copies.clear(pool, slots)

    # ------------------------------------------------------------- clients

    def clients(
        self, tenant: Tenant, members: list[FoundMember], busy: Slots, read: Slots
    ) -> list[Member]:
        """Put back the groups whose processes live, and the leases that the words of slots show.

        `busy`: slots that are WRITING, FILLING or QUARANTINED; `read`: READY ones with readers.
        Returns the members whose processes have to be watched."""
        self._groups(tenant, members)
        arena = tenant.arena
        for pool in tenant.pools.values():
            mine = busy[[arena.pool_of[s] is pool.dram for s in (busy // arena.max_slots).tolist()]]
            if len(mine):
                self._write_leases(tenant, pool, mine)
        words = arena.words[read]
        arena.words[read] = ready_words(words >> np.uint64(32))
        rows = arena.row_of[read].astype(np.int64) - 1
        owners = ((words >> np.uint64(16)) & np.uint64(0xFFFF)).astype(np.int64)
        for owner in np.unique(owners).tolist():
            self._read_leases(tenant, owner, rows[(owners == owner) & (rows >= 0)])
        return list(tenant.members.values())

    def _groups(self, tenant: Tenant, members: list[FoundMember]) -> None:
        for found in members:
            if not found.alive:
                dead = Group(found.group, found.secret_hash, tenant)
                gone = Member(
                    found.index, dead, found.pid, found.start_time, found.uid, alive=False
                )
                self.world.actions.append(RecordMember(tenant, gone))
                continue
            group = tenant.groups.get(found.group)
            if group is None:
                group = Group(found.group, found.secret_hash, tenant)
                tenant.groups[found.group] = group
            member = Member(
                found.index, group, found.pid, found.start_time, found.uid, returned=False
            )
            tenant.members[found.index] = member
            group.members.append(member)

    def _write_leases(self, tenant: Tenant, pool: Pool, slots: Slots) -> None:
        """Give slots being written back to their owners' leases; those of the dead are free."""
        arena = tenant.arena
        words = arena.words[slots]
        states = (words & np.uint64(0xFF)).astype(np.int64)
        owners = ((words >> np.uint64(16)) & np.uint64(0xFFFF)).astype(np.int64)
        alive = np.isin(owners, np.array(sorted(tenant.members), np.int64)) & (states != FILLING)
        for state in (WRITING, FILLING, QUARANTINED):
            gone = slots[(states == state) & ~alive]
            if len(gone):
                arena.free(pool.dram, gone, state)
        ids = (owners << 32) | (words >> np.uint64(32)).astype(np.int64)
        for lease_id in np.unique(ids[alive]).tolist():
            mine = slots[alive & (ids == lease_id)]
            expired = bool((states[alive & (ids == lease_id)] == QUARANTINED).any())
            writing = mine[(arena.words[mine] & np.uint64(0xFF)) == WRITING]
            owner, counter = lease_id >> 32, lease_id & 0xFFFFFFFF
            if expired and len(writing):
                values = np.full(len(writing), word(QUARANTINED, owner, counter), np.uint64)
                arena.set_state(pool.dram, writing, WRITING, values)
            lease = Lease(
                lease_id, tenant.members[owner].group, pool, Kind.WRITE,
                float("inf") if expired else self.world.now_s + self.world.limits.lease_ttl_s,
                mine, np.empty(0, np.int64), arena.offsets(pool.dram, mine).tobytes(),
                left=len(mine), expired=expired, recovered=True,
            )  # fmt: skip
            self.state.writes.add_lease(lease)

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
                    self.world.now_s + self.world.limits.lease_ttl_s,
                    self.world.table.dram[mine], mine, b"", recovered=True,
                )  # fmt: skip
                self._next_id += 1
                self.state.reads.add_readers(lease, owner)
                self.state.writes.add_lease(lease)

    # ----------------------------------------------------------------- end

    def finish(self, tenant: Tenant, holds: list[FoundSession]) -> None:
        """Restore holds, trim what ended, and name the tombstones that nothing needs any more."""
        for found in holds:
            session = tenant.sessions.get(int.from_bytes(found.token_hash[:8], "little"))
            if session is not None and found.holds:
                self._holds(tenant, session, found.holds)
        for (name, hashed), closed in self._closed.items():
            if name == tenant.name and closed.blob_versions.get(NO_NODE) != -1:
                self.outcome.forgotten.append((tenant, hashed))

    def _holds(self, tenant: Tenant, session: Session, holds: list[tuple[bytes, bytes]]) -> None:
        for fingerprint in {layout for layout, _ in holds}:
            pool = tenant.pools.get(fingerprint)
            if pool is None:
                continue
            keys = b"".join(key for layout, key in holds if layout == fingerprint)
            packed = np.frombuffer(keys, "<u8").reshape(-1, 2)
            rows = self.world.keys.find(packed[:, 0], packed[:, 1], pool.number).astype(np.int64)
            rows = rows[rows != NONE]
            if len(rows):
                self.world.pin(pool, rows)
                session.holds[pool.number] = set(rows.tolist())


def adopt_slabs(slabs: Slabs, pool: Pool, numbers: list[int], *, dram: bool) -> None:
    """Take over the slabs that a directory gives to a pool."""
    part = pool.dram if dram else pool.nvme
    for slab in numbers:
        slabs.adopt(slab, part)
