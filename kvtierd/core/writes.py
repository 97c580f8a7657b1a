"""reserve, commit, abort: how bytes get in. Only a commit makes a block visible."""

import numpy as np
from numpy.typing import NDArray

from kvtier_client.errors import (
    ArenaFull,
    InvalidArgument,
    LayoutMismatch,
    LeaseExpired,
    NotOwner,
    QuotaExceeded,
    SpillFull,
    UnknownBranch,
)  # fmt: skip
from kvtier_client.wire import (
    CACHED,
    HELD,
    Abort,
    Acquire,
    AcquireKeys,
    Commit,
    Done,
    Granted,
    Prefetch,
    Reserve,
    ReserveKeys,
)  # fmt: skip
from kvtierd.core.actions import Publish, PublishOne
from kvtierd.core.blocks import F_HELD, F_LOST, NONE, Rows, Slots
from kvtierd.core.copies import Copies
from kvtierd.core.evict import Evictor
from kvtierd.core.leases import (
    ENDED_MAX,
    Kind,
    Lease,
    Peer,
    Ticket,
    unpack_u32,
)  # fmt: skip
from kvtierd.core.slabs import NO_SLOT, QUARANTINED, READY, WRITING, ready_words, word
from kvtierd.core.tenant import Pool
from kvtierd.core.tree import PAGE_GAP_MAX, Node, Session
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
        """The full id for a client's counter."""
        if not 0 < counter <= 0xFFFFFFFF:
            raise InvalidArgument(f"lease counter {counter} is outside 1..2^32-1")
        if peer.member.index << 32 | counter in peer.group.leases:
            raise InvalidArgument(f"lease counter {counter} is in use for something else")
        limit = self.world.limits.leases_per_group
        if len(peer.group.leases) >= limit:
            raise QuotaExceeded(f"the group holds {limit} leases (limits.leases_per_group)")
        return peer.member.index << 32 | counter

    def reserve(self, peer: Peer, req: Reserve) -> Granted | Ticket:
        """Grant slots at once, or return the ticket of a request that may wait."""
        lease = peer.group.leases.get(peer.member.index << 32 | req.lease)
        if lease is not None and lease.kind is Kind.WRITE:
            return self.granted(peer, req.id, lease)
        pool = self.pool(peer, req.layout)
        self.new_lease_id(peer, req.lease)
        wait_s = self.world.wait_s(req.wait_s)
        ttl_s = self.world.ttl_s(req.ttl_s)
        if not req.ahead and not req.draw and req.blocks > 0 and pool.take_slack(req.blocks):
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
        most = pool.dram_capacity - pool.headroom
        tenant = pool.tenant
        allowed = int(self.world.limits.quarantine_fraction * tenant.arena_bytes())
        if tenant.quarantined_bytes() > allowed:
            raise QuotaExceeded(
                f"more than {allowed} bytes of tenant {tenant.name}'s arena are quarantined "
                "(limits.quarantine_fraction); abort the leases that ran out, or end their clients"
            )
        if blocks > most and blocks > tenant.arena.slabs * pool.dram.slots_per_slab - pool.headroom:
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
        if not pool.admits(n + ahead - drawn):
            return None
        if n > pool.write_room:
            self.evictor.make_room(pool, n, write=True, patient=patient)
            if n > pool.write_room:
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

    def retry(self, ticket: Ticket) -> Lease | None:
        """Try a reservation that waits once more."""
        req = ticket.request
        assert isinstance(req, Reserve)
        drawn = self._draw(ticket.peer, ticket.pool, req)
        return self.try_reserve(ticket.peer, ticket.pool, req, req.blocks, drawn, patient=True)

    def taken(self, ticket: Ticket) -> Granted | InvalidArgument | None:
        """What a request gets whose lease was made while it waited, by a repeat of it."""
        req = ticket.request
        if isinstance(req, Prefetch):
            return None
        assert isinstance(req, Reserve | ReserveKeys | Acquire | AcquireKeys)
        lease = ticket.peer.group.leases.get(ticket.peer.member.index << 32 | req.lease)
        if lease is None:
            return None
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
            lease.checksums, lease.index,
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
        group.ended[lease.id] = count
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
            return Done(req.id, self.world.boot, peer.acked, ended)
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

    # ------------------------------------------------------------- commit

    def commit(self, peer: Peer, req: Commit, session: Session) -> Done:
        """Publish slots as pages of a node; a longer copy of a page replaces a shorter one."""
        node = session.nodes.get(req.node)
        if len(req.pages) == 4 and node is not None and self._commit_one(peer, req, node):
            return Done(req.id, self.world.boot, peer.acked, 1)
        pages, valid = unpack_u32(req.pages), unpack_u32(req.valid)
        if node is None:
            raise UnknownBranch(f"session {session.sid:016x} has no node {req.node}")
        if req.retention not in (HELD, CACHED):
            raise InvalidArgument(f"retention {req.retention} is neither HELD (1) nor CACHED (2)")
        lease = peer.group.leases.get(req.lease)
        if lease is None or lease.kind is not Kind.WRITE or lease.expired:
            return self._repeated(peer, req, node, pages, valid)
        pool = lease.pool
        try:
            part = session.part_of(pool)
        except ValueError:
            raise LayoutMismatch("the lease's layout is not one of the session's") from None
        run = node.runs[part]
        if node.ended:
            raise UnknownBranch(f"node {node.id} was pruned down to what its children share")
        slots, index = self.take(lease, req.index, pages, valid)
        checksums = self.checksums(req.checksums, len(pages))
        if int(pages[0]) < run.start or int(pages[-1]) >= run.start + run.length + PAGE_GAP_MAX:
            raise InvalidArgument(
                f"pages {pages[0]}..{pages[-1]} are outside what node {node.id} can have "
                f"(from {run.start}, at most {PAGE_GAP_MAX} past its last)"
            )
        run.reach(int(pages[-1]) + 1)
        named = run.rows[pages - run.start]
        fresh = self._fresh(named, valid)
        kept = req.retention == HELD
        if fresh is None:
            rows = self.publish(lease, slots, index, pages, valid, checksums, node, kept)
            run.rows[pages - run.start] = rows
        else:
            stale = slots[~fresh]
            if len(stale):
                pool.tenant.arena.free(pool.dram, stale, WRITING)
                self.world.counters["duplicate_blocks"] += len(stale)
            if fresh.any():
                rows = self.publish(
                    lease, slots[fresh], index[fresh], pages[fresh], valid[fresh],
                    checksums[fresh], node, kept,
                )  # fmt: skip
                run.rows[pages[fresh] - run.start] = rows
                old = named[fresh]
                self.copies.drop(old[old != NONE])
            lease.slots[index] = NONE
            lease.left -= int(np.count_nonzero(~fresh))
        self._note_length(node, int(pages[-1]) * pool.layout.block_tokens + int(valid[-1]))
        if not lease.left:
            self.end_if_done(lease)
        return Done(req.id, self.world.boot, peer.acked, len(pages))

    def _commit_one(self, peer: Peer, req: Commit, node: Node) -> bool:
        """The short path: the one block of a lease, under a new name. False, and nothing done, for
        all else. It uses memoryviews, which cost a fraction of numpy's scalar access."""
        lease = peer.group.leases.get(req.lease)
        if lease is None or lease.kind is not Kind.WRITE or lease.expired or node.ended:
            return False
        pool, world = lease.pool, self.world
        page, valid = int.from_bytes(req.pages, "little"), int.from_bytes(req.valid, "little")
        index = int.from_bytes(req.index, "little")
        if (
            len(req.index) != 4 or len(req.valid) != 4 or index or lease.one < 0
            or not 0 < valid <= pool.layout.block_tokens or req.retention not in (HELD, CACHED)
            or len(req.checksums) != (8 if world.limits.end_to_end else 0)
            or pool not in node.session.pools
        ):  # fmt: skip
            return False
        run = node.runs[node.session.part_of(pool)]
        slot, place = lease.one, page - run.start
        if not 0 <= place < run.length + PAGE_GAP_MAX:
            return False
        if place >= run.length:
            run.reach(page + 1)
        elif run.view[place] != NONE:
            return False
        kept = req.retention == HELD
        checksum = int.from_bytes(req.checksums, "little")
        run.view[place] = self._add_one(slot, page, valid, pool, node, kept, checksum)
        world.actions.append(
            PublishOne(pool, node, slot, page, valid, world.seq, checksum, kept, lease.id)
        )
        lease.one, lease.left, lease.array = NO_SLOT, 0, _NO_ROWS
        if not lease.promise:
            self.end(lease, 1)
        return True

    def _add_one(
        self, slot: int, page: int, valid: int, pool: Pool, node: Node, kept: bool, checksum: int
    ) -> int:
        """Make the row of a session's block that becomes READY in DRAM; returns the row."""
        world, session = self.world, node.session
        row = world.add_row()
        table = world.table
        world.seq = seq = world.seq + 1
        table.fill_one(
            row, session.owner0, session.owner1, checksum, seq, slot, NONE, pool.number, node.index,
            page, valid, int(world.now_s * 4.0), 0, 0, F_HELD if kept else 0, session.priority,
        )  # fmt: skip
        self._note_length(node, page * pool.layout.block_tokens + valid)
        arena, counts = pool.tenant.arena, pool.dram.counts
        arena.row_view[slot] = row + 1
        arena.word_view[slot] = word(READY, tag=seq)
        counts[WRITING] -= 1
        counts[READY] += 1
        pool.held += kept
        world.counters["committed_blocks"] += 1
        world.counters["committed_bytes"] += pool.layout.block_bytes
        return row

    def take(
        self, lease: Lease, packed: bytes, pages: NDArray[np.int64], valid: NDArray[np.int64]
    ) -> tuple[Slots, NDArray[np.int64]]:
        """Check what a commit names; returns the slots and their places in the lease."""
        index = unpack_u32(packed)
        n = len(index)
        if not n or len(pages) != n or len(valid) != n:
            raise InvalidArgument("index, pages and valid must have the same length, at least 1")
        tokens = lease.pool.layout.block_tokens
        if n == 1:
            bad = not (0 < valid[0] <= tokens and index[0] < len(lease.slots))
        else:
            bad = bool(
                valid.min() < 1
                or valid.max() > tokens
                or index.max() >= len(lease.slots)
                or not (pages[1:] > pages[:-1]).all()
                or len(np.unique(index)) != n
            )
        if bad:
            raise InvalidArgument(
                "a commit names distinct slots of its lease, pages in rising order and "
                f"1..{tokens} valid tokens"
            )
        slots = lease.slots[index]
        if int(slots.min()) < 0:
            raise InvalidArgument("a slot of this commit was committed before, under another name")
        return slots, index

    def _fresh(self, named: Rows, valid: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Which blocks are new or longer than what is stored; None when all are new."""
        if int(named.max()) == NONE:
            return None
        table = self.world.table
        lost = (table.flags[named] & F_LOST) != 0
        fresh: NDArray[np.bool_] = (named == NONE) | (table.valid[named] < valid) | lost
        return fresh

    def publish(
        self,
        lease: Lease,
        slots: Slots,
        index: NDArray[np.int64],
        pages: NDArray[np.int64],
        valid: NDArray[np.int64],
        checksums: NDArray[np.uint64],
        node: Node | None,
        kept: bool,
    ) -> Rows:
        """Make rows for slots of a lease and publish them as READY.

        Keyed rows get their keys from the caller, before the actions of this event are done."""
        world, pool, n = self.world, lease.pool, len(slots)
        rows = world.add_rows(n)
        table = world.table
        seqs = world.take_seqs(n)
        if node is not None:
            table.owner0[rows], table.owner1[rows] = node.session.owner0, node.session.owner1
        table.checksum[rows] = checksums
        table.seq[rows] = seqs
        table.dram[rows] = slots
        table.nvme[rows] = NONE
        table.pool[rows] = pool.number
        table.node[rows] = NONE if node is None else node.index
        table.page[rows] = pages
        table.valid[rows] = valid
        table.touch[rows] = world.touch
        table.readers[rows] = 0
        table.pins[rows] = 0
        table.flags[rows] = F_HELD if kept else 0
        table.priority[rows] = 0 if node is None else node.session.priority
        arena = pool.tenant.arena
        arena.row_of[slots] = rows + 1
        arena.set_state(pool.dram, slots, WRITING, ready_words(seqs))
        if kept:
            pool.held += n
        lease.slots[index] = NONE
        lease.left -= n
        world.counters["committed_blocks"] += n
        world.counters["committed_bytes"] += n * pool.layout.block_bytes
        world.actions.append(Publish(pool, rows, slots, lease.id))
        return rows

    def checksums(self, packed: bytes, n: int) -> NDArray[np.uint64]:
        """The client's checksums: one per block under `end_to_end`, none otherwise."""
        if len(packed) != (8 * n if self.world.limits.end_to_end else 0):
            raise InvalidArgument(
                "checksums are one u64 per block with integrity end_to_end, else empty"
            )
        return np.frombuffer(packed, "<u8") if packed else np.zeros(n, np.uint64)

    def _note_length(self, node: Node, end_tokens: int) -> None:
        """A block that ends at `end_tokens` of the branch was stored."""
        if node.tokens < end_tokens:
            node.tokens = end_tokens
            self.world.node_table.tokens_view[node.index] = end_tokens

    def _repeated(
        self,
        peer: Peer,
        req: Commit,
        node: Node,
        pages: NDArray[np.int64],
        valid: NDArray[np.int64],
    ) -> Done:
        """A commit whose lease has ended: its first result, if what it names is there."""
        table = self.world.table
        if len(pages) and len(pages) == len(valid):
            for run in node.runs:
                places = pages - run.start
                if places.min() < 0 or places.max() >= run.length:
                    continue
                rows = run.rows[places]
                if (rows != NONE).all() and (table.valid[rows] >= valid).all():
                    return Done(req.id, self.world.boot, peer.acked, len(pages))
        self.lease(peer, req.lease)
        raise LeaseExpired(
            f"lease {req.lease:#x} ran out before its commit; nothing of it was published"
        )
