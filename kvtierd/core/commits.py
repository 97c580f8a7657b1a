"""commit: what was written becomes visible, under its names. Nothing else makes a block."""

import numpy as np
from numpy.typing import NDArray

from kvtier_client.errors import (
    InvalidArgument,
    LayoutMismatch,
    LeaseExpired,
    UnknownBranch,
)  # fmt: skip
from kvtier_client.wire import (
    CACHED,
    HELD,
    Commit,
    Done,
)  # fmt: skip
from kvtierd.core.actions import Publish, PublishOne
from kvtierd.core.blocks import F_HELD, F_LOST, NONE, Rows, Slots
from kvtierd.core.copies import Copies
from kvtierd.core.leases import (
    Kind,
    Lease,
    Peer,
    unpack_u32,
)  # fmt: skip
from kvtierd.core.slabs import NO_SLOT, READY, WRITING, ready_words, word
from kvtierd.core.tenant import Pool
from kvtierd.core.tree import PAGE_GAP_MAX, Node, Session
from kvtierd.core.world import World
from kvtierd.core.writes import Writes

_NO_ROWS: Rows = np.empty(0, np.int64)


class Commits:
    """Publishes slots of write leases as blocks."""

    def __init__(self, world: World, copies: Copies, writes: Writes) -> None:
        self.world, self.copies, self.writes = world, copies, writes

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
            self.writes.end_if_done(lease)
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
            self.writes.end(lease, 1)
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
        self.writes.lease(peer, req.lease)
        raise LeaseExpired(
            f"lease {req.lease:#x} ran out before its commit; nothing of it was published"
        )
