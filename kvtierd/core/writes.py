"""reserve and abort: slots for writers, and what becomes of the leases on them."""

import numpy as np

from kvtier_client.errors import (
    ArenaFull,
    InvalidArgument,
    LayoutMismatch,
    LeaseExpired,
    NotOwner,
    QuotaExceeded,
    SpillFull,
)  # fmt: skip
from kvtier_client.wire import (
    Abort,
    Acquire,
    AcquireKeys,
    Done,
    Granted,
    Prefetch,
    Reserve,
    ReserveKeys,
)  # fmt: skip
from kvtierd.core.blocks import Rows, Slots
from kvtierd.core.copies import Copies
from kvtierd.core.evict import Evictor
from kvtierd.core.leases import (
    ENDED_MAX,
    Kind,
    Lease,
    Peer,
    Ticket,
)  # fmt: skip
from kvtierd.core.slabs import NO_SLOT, QUARANTINED, WRITING, word
from kvtierd.core.tenant import Pool
from kvtierd.core.world import World

_NO_ROWS: Rows = np.empty(0, np.int64)


class Writes:
    """Write leases and what becomes of their slots."""

    def __init__(self, world: World, copies: Copies, evictor: Evictor) -> None:
        self.world, self.copies, self.evictor = world, copies, evictor

    # ------------------------------------------------------------ reserve

    def pool(self, peer: Peer, fingerprint: bytes) -> Pool:
        """The peer's pool for a registered layout."""
        pool = peer.group.tenant.pools.get(fingerprint)
        if pool is None:
            raise LayoutMismatch(
                f"layout {fingerprint.hex()} is not registered; send register_layout first"
            )
        return pool

    def new_lease_id(self, peer: Peer, counter: int) -> int:
        """The full id for a client's counter. Errors: InvalidArgument, QuotaExceeded."""
        if not 0 < counter <= 0xFFFFFFFF:
            raise InvalidArgument(f"lease counter {counter} is outside 1..2^32-1")
        if peer.member.index << 32 | counter in peer.group.leases:
            raise InvalidArgument(f"lease counter {counter} is in use for something else")
        if len(peer.group.leases) >= self.world.limits.leases_per_group:
            raise self._too_many()
        return peer.member.index << 32 | counter

    def _too_many(self) -> QuotaExceeded:
        limit = self.world.limits.leases_per_group
        return QuotaExceeded(f"the group holds {limit} leases (limits.leases_per_group)")

    def reserve(self, peer: Peer, req: Reserve) -> Granted | Ticket:
        """Grant slots at once, or return the ticket of a request that may wait."""
        lease = peer.group.leases.get(peer.member.index << 32 | req.lease)
        if lease is not None and lease.kind is Kind.WRITE:
            return self.granted(peer, req.id, lease)
        pool = self.pool(peer, req.layout)
        self.new_lease_id(peer, req.lease)
        wait_s = self.world.wait_s(req.wait_s)
        ttl_s = self.world.ttl_s(req.ttl_s)
        plain = not req.ahead and not req.draw
        plain = plain and 0 < req.blocks <= self.world.limits.blocks_per_request
        if plain and pool.take_slack(req.blocks):
            lease = self._allocate(peer, pool, req.lease, req.blocks, ttl_s)
            return Granted(req.id, self.world.boot, peer.acked, lease.id, ttl_s, lease.offsets)
        self.check_reserve(pool, req.blocks, req.ahead)
        drawn = self._draw(peer, pool, req)
        lease = self.try_reserve(peer, pool, req, req.blocks, drawn, patient=wait_s > 0)
        if lease is not None:
            return self.granted(peer, req.id, lease)
        if not wait_s:
            raise self.refusal(pool, req.blocks + req.ahead - drawn)
        return Ticket(peer, req, pool, self.world.now_s + wait_s, _NO_ROWS, asked=req.blocks)

    def check_reserve(self, pool: Pool, blocks: int, ahead: int) -> None:
        """Refuse what can never be granted. Errors: InvalidArgument, QuotaExceeded, ArenaFull."""
        limit = self.world.limits.blocks_per_request
        if not 0 <= blocks <= limit or ahead < 0 or blocks + ahead == 0:
            raise InvalidArgument(
                f"cannot reserve {blocks} blocks and {ahead} ahead: allowed are 1..{limit} "
                "(limits.blocks_per_request)"
            )
        most = pool.dirty_max
        tenant = pool.tenant
        allowed = int(self.world.limits.quarantine_fraction * tenant.arena_bytes())
        if tenant.quarantined_bytes() > allowed:
            raise QuotaExceeded(
                f"more than {allowed} bytes of tenant {tenant.name}'s arena are quarantined "
                "(limits.quarantine_fraction); abort the leases that ran out, or end their clients"
            )
        if blocks > max(most, pool.fitting(tenant.arena.slabs * pool.dram.slots_per_slab)):
            raise ArenaFull(
                f"{blocks} blocks can never be in tenant {tenant.name}'s arena at once (room for "
                f"{most}); reserve them in windows"
            )

    def _draw(self, peer: Peer, pool: Pool, req: Reserve) -> int:
        """How many of the blocks an earlier promise covers."""
        if not req.draw:
            return 0
        source = self.lease(peer, req.draw)
        if source.pool is not pool:
            raise LayoutMismatch("the promise to draw from is of another layout")
        return min(source.promise, req.blocks)

    def try_reserve(
        self,
        peer: Peer,
        pool: Pool,
        req: Reserve | ReserveKeys,
        n: int,
        drawn: int,
        *,
        patient: bool,
    ) -> Lease | None:
        """Allocate `n` slots and make the lease; None when there is no room yet.

        Nothing has changed when it returns None, except that eviction may have started.
        """
        ahead = req.ahead if isinstance(req, Reserve) else 0
        more = n + ahead - drawn
        if more > 0 and not pool.admits(more):
            self.evictor.make_places(pool, more, patient=patient)
            if not pool.admits(more):
                return None
        slots = n or int(not pool.anchored)  # a promise too needs a way to DRAM
        if slots > pool.write_room:
            self.evictor.make_room(pool, slots, write=True, patient=patient)
            if slots > pool.write_room:
                return None
        if not pool.secure(more, writing=n):
            return None
        lease = self._allocate(peer, pool, req.lease, n, self.world.ttl_s(req.ttl_s))
        lease.promise = ahead
        pool.promised += ahead
        pool.tenant.arena.epoch += 1
        if drawn and isinstance(req, Reserve):
            source = peer.group.leases[req.draw]
            source.promise -= drawn
            pool.promised -= drawn
            self.end_if_done(source)
        return lease

    def _allocate(self, peer: Peer, pool: Pool, counter: int, n: int, ttl_s: float) -> Lease:
        """Take slots that are known to be there, under a new lease."""
        tenant, owner = pool.tenant, peer.member.index
        arena = tenant.arena
        slots: Slots | None = None
        slot = arena.alloc_one(pool.dram, word(WRITING, owner, counter)) if n == 1 else NO_SLOT
        if slot == NO_SLOT:
            slots = arena.alloc(pool.dram, n, WRITING, owner, counter) if n else _NO_ROWS
            assert slots is not None, "there was said to be room"
            if n == 1:
                slot, slots = slots.item(), None
        if slots is None:
            offsets = arena.offset(pool.dram, slot).to_bytes(8, "little")
        else:
            offsets = arena.offsets(pool.dram, slots).tobytes()
        tenant.calm_bytes -= n * pool.slot_bytes
        lease_id = owner << 32 | counter
        lease = Lease(
            lease_id, peer.group, pool, Kind.WRITE, self.world.now_s + ttl_s, slots, _NO_ROWS,
            offsets, left=n, one=slot,
        )  # fmt: skip
        peer.group.leases[lease_id] = tenant.leases[lease_id] = lease
        return lease

    def retry(self, ticket: Ticket) -> Granted | None:
        """Try a reservation that waits once more."""
        req, peer = ticket.request, ticket.peer
        assert isinstance(req, Reserve)
        drawn = self._draw(peer, ticket.pool, req)
        lease = self.try_reserve(peer, ticket.pool, req, req.blocks, drawn, patient=True)
        return None if lease is None else self.granted(peer, req.id, lease)

    def taken(self, ticket: Ticket) -> Granted | InvalidArgument | QuotaExceeded | None:
        """What a request gets whose lease was made while it waited, by a repeat of it, or that can
        have none any more."""
        req = ticket.request
        if isinstance(req, Prefetch):
            return None
        assert isinstance(req, Reserve | ReserveKeys | Acquire | AcquireKeys)
        lease = ticket.peer.group.leases.get(ticket.peer.member.index << 32 | req.lease)
        if lease is None:
            full = len(ticket.peer.group.leases) >= self.world.limits.leases_per_group
            return self._too_many() if full else None
        if lease.kind is (Kind.WRITE if isinstance(req, Reserve | ReserveKeys) else Kind.READ):
            return self.granted(ticket.peer, req.id, lease)
        return InvalidArgument(f"lease counter {req.lease} is in use for something else")

    def refusal(self, pool: Pool, n: int) -> ArenaFull | SpillFull:
        """The error for a reservation that found no room."""
        self.world.counters["refused_reserves"] += 1
        tenant = pool.tenant
        if not pool.admits(n):
            return SpillFull(
                f"{n} more blocks of {pool.slot_bytes} bytes do not fit beside tenant "
                f"{tenant.name}'s {pool.demand} HELD, leased and promised ones in arena and spill "
                "files together; close or prune sessions, or raise spill.capacity"
            )
        return ArenaFull(
            f"no room for {n} blocks of {pool.slot_bytes} bytes in tenant {tenant.name}'s arena "
            f"now ({pool.write_room} free for writers); wait with wait_s, or ask for less"
        )

    @staticmethod
    def add_lease(lease: Lease) -> None:
        """Register a lease with its group and tenant."""
        lease.group.leases[lease.id] = lease
        lease.group.tenant.leases[lease.id] = lease

    def granted(self, peer: Peer, request_id: int, lease: Lease) -> Granted:
        """A lease as a reply."""
        return Granted(
            request_id, self.world.boot, peer.acked, lease.id,
            max(lease.deadline_s - self.world.now_s, 0.0), lease.offsets, lease.valid,
            lease.checksums, lease.index, lease.restored,
        )  # fmt: skip

    # ------------------------------------------------------------- leases

    def lease(self, peer: Peer, lease_id: int) -> Lease:
        """The group's live lease. Errors: NotOwner, LeaseExpired."""
        lease = peer.group.leases.get(lease_id)
        if lease is None:
            if lease_id in peer.group.tenant.leases:
                raise NotOwner(f"lease {lease_id:#x} belongs to another group")
            raise LeaseExpired(f"lease {lease_id:#x} has ended or never was")
        return lease

    def end(self, lease: Lease, count: int) -> None:
        """Forget a lease whose slots and rows are settled; repeats get `count`."""
        group = lease.group
        lease.pool.promised -= lease.promise
        lease.promise = 0
        del group.leases[lease.id], group.tenant.leases[lease.id]
        group.ended[lease.id] = count, lease.pool
        if len(group.ended) > ENDED_MAX:
            del group.ended[next(iter(group.ended))]

    def end_if_done(self, lease: Lease) -> None:
        """End a write lease that has neither slots nor a promise left."""
        if not lease.left and not lease.promise:
            self.end(lease, len(lease.slots))

    def abort(self, peer: Peer, req: Abort) -> Done:
        """Free what a write lease has not committed: its owner says that nothing writes to it."""
        ended = peer.group.ended.get(req.lease)
        if ended is not None and req.lease not in peer.group.leases:
            return Done(req.id, self.world.boot, peer.acked, ended[0])
        lease = self.lease(peer, req.lease)
        if lease.kind is not Kind.WRITE:
            raise InvalidArgument(f"lease {req.lease:#x} is for reading; release it")
        return Done(req.id, self.world.boot, peer.acked, self.free_write_lease(lease))

    def free_write_lease(self, lease: Lease) -> int:
        """Give back the uncommitted slots of a write lease and end it."""
        left = lease.slots[lease.slots >= 0]
        if len(left):
            state = QUARANTINED if lease.expired else WRITING
            lease.pool.tenant.arena.free(lease.pool.dram, left, state)
        self.end(lease, len(left))
        return len(left)

    def quarantine(self, lease: Lease) -> None:
        """A write lease ran out: nobody may use its slots until the owner speaks or is dead."""
        left = lease.slots[lease.slots >= 0]
        lease.expired = True
        lease.pool.promised -= lease.promise
        lease.promise = 0
        self.world.counters["expired_leases"] += 1
        if len(left):
            owner, counter = lease.id >> 32, lease.id & 0xFFFFFFFF
            words = np.full(len(left), word(QUARANTINED, owner, counter), np.uint64)
            lease.pool.tenant.arena.set_state(lease.pool.dram, left, WRITING, words)
        else:
            self.end(lease, 0)
