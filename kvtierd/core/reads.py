"""acquire, prefetch, release: how bytes come back out.

An acquire is granted a leading window of what it asked for: the blocks that are in DRAM, or for
which DRAM slots could be had at once. It never holds some while it waits for others: what it has
allocated is on its way, so every wait ends.
"""

import numpy as np
from numpy.typing import NDArray

from kvtier_client.errors import (
    ArenaFull,
    BlockLost,
    InvalidArgument,
    KvtierError,
    LayoutMismatch,
    QuotaExceeded,
    Timeout,
    UnknownBranch,
    UnknownSession,
)  # fmt: skip
from kvtier_client.wire import (
    Acquire,
    AcquireKeys,
    Cancel,
    Done,
    Granted,
    Prefetch,
    Ready,
    Release,
)  # fmt: skip
from kvtierd.core.actions import Hurry, Send
from kvtierd.core.blocks import F_FILLING, F_LOST, NONE, READERS_END, Rows, span
from kvtierd.core.copies import Copies
from kvtierd.core.evict import Evictor
from kvtierd.core.keyed import Keyed, check_distinct, leading
from kvtierd.core.leases import Kind, Lease, Peer, Ticket, pack_u32, pack_u64
from kvtierd.core.one_read import acquire_one, unread_one
from kvtierd.core.read_ahead import ReadAhead
from kvtierd.core.slabs import FILLING, NO_OWNER, READER_BITS, READERS_MAX
from kvtierd.core.tenant import Pool, Tenant
from kvtierd.core.tree import Session, resolve
from kvtierd.core.world import World
from kvtierd.core.writes import Writes

_OWNER_MASK = np.uint64(0xFFFF0000)
_NO_OWNER = np.uint64(NO_OWNER << 16)


class Reads:
    """Read leases, pins, and the blocks that are fetched for them."""

    def __init__(
        self, world: World, copies: Copies, evictor: Evictor, writes: Writes, keyed: Keyed
    ) -> None:
        self.world, self.copies, self.evictor = world, copies, evictor
        self.writes, self.keyed = writes, keyed
        self.ahead = ReadAhead(world, copies)

    # ------------------------------------------------------------ acquire

    def acquire(self, peer: Peer, req: Acquire, session: Session) -> Granted | Ticket:
        """Lease pages of a branch for reading."""
        held = self._repeated(peer, req.lease, req.id)
        if held is not None:
            return held
        granted: Granted | Ticket | None = None
        if req.pages == 1:
            granted = acquire_one(self.world, self.writes, peer, req, session)
        if granted is None:
            pool, rows, divided = self._branch_rows(peer, req, session)
            granted = self._start(peer, req, pool, rows, divided, req.wait_s, req.ttl_s)
        self.ahead.note(peer.group.tenant.pools[req.layout], session, req)
        return granted

    def acquire_keys(self, peer: Peer, req: AcquireKeys) -> Granted | Ticket:
        """Lease the leading stored ones of some keys; none stored is an empty grant."""
        held = self._repeated(peer, req.lease, req.id)
        if held is not None:
            return held
        pool = self.writes.pool(peer, req.layout)
        rows = self.keyed.find(pool, req.keys)
        check_distinct(req.keys)
        rows = rows[: leading(rows != NONE)]
        if not len(rows):
            return Granted(req.id, self.world.boot, peer.acked, 0, 0.0, b"")
        return self._start(peer, req, pool, rows, {}, req.wait_s, req.ttl_s)

    def _repeated(self, peer: Peer, counter: int, request_id: int) -> Granted | None:
        lease = peer.group.leases.get(peer.member.index << 32 | counter)
        if lease is None or lease.kind is not Kind.READ:
            return None
        return self.writes.granted(peer, request_id, lease)

    def _branch_rows(
        self, peer: Peer, req: Acquire | Prefetch, session: Session
    ) -> tuple[Pool, Rows, dict[int, int]]:
        node = session.nodes.get(req.node)
        if node is None:
            raise UnknownBranch(f"session {session.sid:016x} has no node {req.node}")
        pool = self.writes.pool(peer, req.layout)
        try:
            part = session.part_of(pool)
        except ValueError:
            raise LayoutMismatch("the layout is not one of the session's") from None
        limit = self.world.limits.blocks_per_request
        if not 0 < req.pages <= limit or not 0 <= req.first <= 0xFFFFFFFF:
            raise InvalidArgument(f"{req.pages} pages from {req.first}: allowed are 1..{limit}")
        rows, divided = resolve(node, part, req.first, req.pages)
        return pool, rows, divided

    def _start(
        self,
        peer: Peer,
        req: Acquire | AcquireKeys,
        pool: Pool,
        rows: Rows,
        divided: dict[int, int],
        wait_s: float,
        ttl_s: float,
    ) -> Granted | Ticket:
        world = self.world
        wait_s = world.wait_s(wait_s)
        world.ttl_s(ttl_s)
        self.writes.new_lease_id(peer, req.lease)
        rows = self._stored(rows, getattr(req, "first", 0))
        ticket = Ticket(peer, req, pool, world.now_s + wait_s, rows, divided, asked=len(rows))
        if self.advance(ticket):
            return self.grant(ticket)
        if not ticket.loading and not wait_s:
            raise self.refusal(ticket)
        return ticket

    def _stored(self, rows: Rows, first: int) -> Rows:
        """Cut rows before the first page that is not stored or is lost."""
        good = (rows != NONE) & ((self.world.table.flags[span(rows)] & F_LOST) == 0)
        stored = leading(good)
        if stored:
            return rows[:stored]
        if int(rows[0]) == NONE:
            raise InvalidArgument(f"page {first} of this branch is not stored")
        lost = (rows != NONE) & ((self.world.table.flags[rows] & F_LOST) != 0)
        pages = tuple((np.flatnonzero(lost) + first).tolist())
        raise BlockLost(
            f"page {first} is lost: its medium failed or changed it; recompute these tokens", pages
        )

    def advance(self, ticket: Ticket) -> bool:
        """Go on with a ticket that waits for room: True when all of its window is in DRAM.
        Errors: QuotaExceeded.

        Sets `loading` and counts its readers once slots for a leading window were found.
        """
        table, pool, rows = self.world.table, ticket.pool, ticket.rows
        at = span(rows)
        absent = table.dram[at] == NONE
        if not ticket.prefetch:
            if np.count_nonzero(table.readers[at] == READERS_END):
                raise QuotaExceeded(f"{READERS_END} requests read one of these blocks already")
            self._hurry(ticket)
        if np.count_nonzero(absent):
            window = self._find_slots(ticket, absent)
            if not window:
                return False
            ticket.rows = rows = rows[:window]
            at = span(rows)
        ticket.loading = True
        if not ticket.prefetch:
            self._read(ticket.peer.member.index, pool, rows)
        if not np.count_nonzero(table.flags[at] & F_FILLING):
            return True
        ticket.seqs = table.seq[rows]
        return False

    def _hurry(self, ticket: Ticket) -> None:
        """Blocks that were to be fetched ahead of need are needed."""
        filling = (self.world.table.flags[span(ticket.rows)] & F_FILLING) != 0
        if np.count_nonzero(filling):
            client = ticket.peer.member.pid
            self.world.actions.append(Hurry(ticket.pool, ticket.rows[filling], client))

    def _find_slots(self, ticket: Ticket, absent: NDArray[np.bool_]) -> int:
        """Start to fetch absent rows; returns how long the window is for which there are slots."""
        pool, rows = ticket.pool, ticket.rows
        arena = pool.tenant.arena
        want = min(int(np.count_nonzero(absent)), max(pool.dram_capacity - 1, 1))
        if ticket.prefetch:
            want = min(want, pool.write_room)
        elif want > arena.available(pool.dram):
            lead = leading(~absent)
            self._read(ticket.peer.member.index, pool, rows[:lead])
            patient = ticket.deadline_s > self.world.now_s
            self.world.table.pins[rows] += 1  # none of the window is dropped for another of it
            self.evictor.make_room(pool, want, write=False, patient=patient)
            self.world.table.pins[rows] -= 1
            self._unread(pool, rows[:lead])
        have = max(min(want, arena.available(pool.dram)), 0)
        places = np.flatnonzero(self.world.table.dram[rows] == NONE)
        window = len(rows) if have >= len(places) else int(places[have])
        places = places[:have]
        if not len(places):
            return window
        slots = arena.alloc(pool.dram, len(places), FILLING, NO_OWNER, 0)
        assert slots is not None, "available said that there is room"
        self.copies.promote(
            pool, rows[places], slots, urgent=not ticket.prefetch, client=ticket.peer.member.pid
        )
        ticket.restored = len(places)
        return window

    def _read(self, owner: int, pool: Pool, rows: Rows) -> None:
        """Count a reader on rows, in the table and in the words of their slots."""
        table, words, at = self.world.table, pool.tenant.arena.words, span(rows)
        readers = table.readers[at] + np.uint16(1)
        table.readers[at] = readers
        table.touch[at] = self.world.touch
        slots = span(table.dram[at])
        old = words[slots]
        first = readers == 1
        if np.count_nonzero(first) == len(rows):
            words[slots] = (old & ~READER_BITS) | np.uint64(1 << 8 | owner << 16)
            return
        mine = np.uint64(owner << 16)
        owners = np.where(first | ((old & _OWNER_MASK) == mine), mine, _NO_OWNER)
        count = np.minimum(readers, READERS_MAX).astype(np.uint64)
        words[slots] = (old & ~READER_BITS) | (count << np.uint64(8)) | owners

    def add_readers(self, lease: Lease, owner: int) -> None:
        """Count the readers of a lease that was rebuilt after a restart."""
        self._read(owner, lease.pool, lease.rows)

    def _unread(self, pool: Pool, rows: Rows) -> None:
        """Undo one `_read` and free what was doomed meanwhile."""
        table, words, at = self.world.table, pool.tenant.arena.words, span(rows)
        readers = table.readers[at] - np.uint16(1)
        table.readers[at] = readers
        slots = span(table.dram[at])
        old = words[slots]
        if np.count_nonzero(readers) == 0:
            words[slots] = (old & ~READER_BITS) | _NO_OWNER
        else:
            count = np.minimum(readers, READERS_MAX).astype(np.uint64)
            owners = np.where(readers == 0, _NO_OWNER, old & _OWNER_MASK)
            words[slots] = (old & ~READER_BITS) | (count << np.uint64(8)) | owners
        self.copies.unread(pool, rows)

    def grant(self, ticket: Ticket) -> Granted:
        """Make the read lease of a ticket whose window is in DRAM."""
        world, table, pool, rows = self.world, self.world.table, ticket.pool, ticket.rows
        req = ticket.request
        assert isinstance(req, Acquire | AcquireKeys)
        at = span(rows)
        slots, valid = table.dram[at].copy(), table.valid[at].copy()
        for page, tokens in ticket.divided.items():
            place = page - getattr(req, "first", 0)
            if place < len(valid):
                valid[place] = min(int(valid[place]), tokens)
        checksums = pack_u64(table.checksum[at]) if world.limits.end_to_end else b""
        lease = Lease(
            ticket.peer.member.index << 32 | req.lease, ticket.peer.group, pool, Kind.READ,
            world.now_s + world.ttl_s(req.ttl_s), slots, rows,
            arena_offsets(pool, slots), pack_u32(valid), checksums, restored=ticket.restored,
        )  # fmt: skip
        self.writes.add_lease(lease)
        world.counters["acquired_blocks"] += len(rows)
        world.counters["acquired_bytes"] += len(rows) * pool.layout.block_bytes
        return self.writes.granted(ticket.peer, req.id, lease)

    # ------------------------------------------------------------ tickets

    def finish_loading(self, ticket: Ticket) -> Granted | KvtierError | None:
        """What became of a loading ticket: None while blocks are still on their way."""
        table, rows = self.world.table, ticket.rows
        same = table.seq[rows] == ticket.seqs
        if ((table.flags[rows] & F_FILLING != 0) & same).any():
            return None
        there = (table.dram[rows] != NONE) & ((table.flags[rows] & F_LOST) == 0) & same
        if ticket.prefetch:
            loaded = int(np.count_nonzero(there))
            self.end_prefetch(ticket, loaded, ticket.asked - loaded)
            return None
        good = leading(there)
        if good < len(rows):
            self._give_up(ticket.pool, rows[good:])
            ticket.rows = rows[:good]
        if not good and isinstance(ticket.request, AcquireKeys):  # a miss
            peer = ticket.peer
            return Granted(ticket.request.id, self.world.boot, peer.acked, 0, 0.0, b"")
        if not good:
            first = getattr(ticket.request, "first", 0)
            return BlockLost(
                f"page {first} could not be read back from NVMe; see the daemon's log", (first,)
            )
        taken = self.writes.taken(ticket)
        if taken is not None:
            self._give_up(ticket.pool, ticket.rows)
            return taken
        return self.grant(ticket)

    def _give_up(self, pool: Pool, rows: Rows) -> None:
        """Take a ticket's readers off rows, of which some have no DRAM copy any more."""
        table = self.world.table
        there = table.dram[rows] != NONE
        if there.any():
            self._unread(pool, rows[there])
        table.readers[rows[~there]] -= 1
        self.copies.unread(pool, rows[~there])

    def refresh(self, ticket: Ticket, session: Session | None) -> None:
        """Find the rows of a waiting ticket again: its branch may have changed meanwhile."""
        req = ticket.request
        if isinstance(req, AcquireKeys):
            rows = self.keyed.find(ticket.pool, req.keys)
            ticket.rows = rows[: leading(rows != NONE)]
            return
        assert isinstance(req, Acquire | Prefetch)
        if session is None:
            raise UnknownSession(f"session {req.session:016x} was closed")
        _, rows, ticket.divided = self._branch_rows(ticket.peer, req, session)
        rows = self._stored(rows, req.first)
        ticket.rows = rows[self.world.table.dram[rows] == NONE] if ticket.prefetch else rows

    def refusal(self, ticket: Ticket) -> KvtierError:
        """The error for a ticket whose deadline has passed."""
        if ticket.loading:
            self._give_up(ticket.pool, ticket.rows)
            return Timeout("the blocks did not arrive from NVMe before the deadline")
        return ArenaFull(
            f"no DRAM slot came free in tenant {ticket.pool.tenant.name}'s arena for blocks that "
            "are on NVMe; release leases, or wait longer with wait_s"
        )

    def cancel_ticket(self, ticket: Ticket) -> None:
        """Nobody waits for a ticket any more."""
        if ticket.loading and not ticket.prefetch:
            self._give_up(ticket.pool, ticket.rows)

    # ----------------------------------------------------------- prefetch

    def prefetch(self, peer: Peer, req: Prefetch, session: Session) -> Done:
        """Start to bring blocks to DRAM without leasing them; a `Ready` push says how it ended."""
        world = self.world
        if req.ticket in peer.tickets:
            return Done(req.id, world.boot, peer.acked, len(peer.tickets[req.ticket].rows))
        pool, rows, _ = self._branch_rows(peer, req, session)
        rows = self._stored(rows, req.first)
        if req.deadline_s < 0.0 or len(peer.tickets) >= world.limits.leases_per_group:
            raise InvalidArgument("a negative deadline, or too many prefetches in flight")
        rows = rows[world.table.dram[rows] == NONE]
        ticket = Ticket(
            peer, req, pool, world.now_s + world.wait_s(req.deadline_s or world.limits.wait_max_s),
            rows, prefetch=True, priority=req.priority, asked=len(rows),
        )  # fmt: skip
        peer.tickets[req.ticket] = ticket
        if not len(rows):
            self.end_prefetch(ticket, 0, 0)
        elif not self.advance(ticket):
            tenant = pool.tenant
            if ticket.loading:
                tenant.loading.append(ticket)
            else:
                tenant.waiting.append(ticket)
        return Done(req.id, world.boot, peer.acked, len(rows))

    def cancel(self, peer: Peer, req: Cancel) -> Done:
        """Forget a prefetch; blocks that are being read already still arrive."""
        ticket = peer.tickets.pop(req.ticket, None)
        if ticket is None:
            return Done(req.id, self.world.boot, peer.acked, 0)
        tenant = ticket.pool.tenant
        for queue in (tenant.waiting, tenant.loading):
            if ticket in queue:
                queue.remove(ticket)
        self.world.counters["cancelled_prefetch_blocks"] += len(ticket.rows)
        return Done(req.id, self.world.boot, peer.acked, len(ticket.rows))

    def cancel_prefetches(self, tenant: Tenant, sid: int, nodes: list[int] | None) -> None:
        """End the prefetches of a session's pruned nodes (None: of all its nodes)."""
        for queue in (tenant.waiting, tenant.loading):
            for ticket in [t for t in queue if t.prefetch]:
                req = ticket.request
                assert isinstance(req, Prefetch)
                if req.session == sid and (nodes is None or req.node in nodes):
                    queue.remove(ticket)
                    self.world.counters["cancelled_prefetch_blocks"] += len(ticket.rows)
                    self.end_prefetch(ticket, 0, len(ticket.rows))

    def end_prefetch(self, ticket: Ticket, loaded: int, failed: int) -> None:
        """Tell the peer how a prefetch ended."""
        req, peer = ticket.request, ticket.peer
        assert isinstance(req, Prefetch)
        ticket.ended = True
        peer.tickets.pop(req.ticket, None)
        self.world.actions.append(
            Send(peer, Ready(0, self.world.boot, peer.acked, req.ticket, loaded, failed))
        )

    # ------------------------------------------------------------ release

    def release(self, peer: Peer, req: Release) -> Done:
        """End a read lease or a lookup's pin."""
        ended = peer.group.ended.get(req.lease)
        if ended is not None and req.lease not in peer.group.leases:
            return Done(req.id, self.world.boot, peer.acked, ended[0])
        lease = self.writes.lease(peer, req.lease)
        if lease.kind is Kind.WRITE:
            raise InvalidArgument(f"lease {req.lease:#x} is for writing; commit or abort it")
        return Done(req.id, self.world.boot, peer.acked, self.end_lease(lease))

    def end_lease(self, lease: Lease) -> int:
        """Take a read lease's readers, or a pin, off its rows and forget it."""
        if lease.kind is Kind.READ:
            if len(lease.rows) == 1:
                if unread_one(self.world, lease.pool, lease.rows.item()):
                    self.copies.unread(lease.pool, lease.rows)
            else:
                self._unread(lease.pool, lease.rows)
        else:
            self.copies.unpin(lease.pool, lease.rows)
        self.writes.end(lease, len(lease.rows))
        return len(lease.rows)


def arena_offsets(pool: Pool, slots: Rows) -> bytes:
    """Packed byte offsets of a pool's DRAM slots."""
    arena = pool.tenant.arena
    if len(slots) == 1:
        return arena.offset(pool.dram, int(slots[0])).to_bytes(8, "little")
    return arena.offsets(pool.dram, slots).tobytes()
