"""commit: what was written becomes visible, under its names. Nothing else makes a block."""

from typing import Any

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
from kvtierd.core.blocks import F_HELD, F_LOST, NONE, Places, Rows, Slots, rising, span
from kvtierd.core.copies import Copies
from kvtierd.core.leases import (
    Kind,
    Lease,
    Peer,
    unpack_places,
    unpack_u32,
)  # fmt: skip
from kvtierd.core.slabs import NO_SLOT, QUARANTINED, READY, WRITING, ready_words, word
from kvtierd.core.tenant import Pool
from kvtierd.core.tree import PAGE_GAP_MAX, Node, Run, Session
from kvtierd.core.world import NodeBlocks, OneBlock, World
from kvtierd.core.writes import Writes

_NO_ROWS: Rows = np.empty(0, np.int64)


def check_repeated(stored: NDArray[np.bool_], repeated: NDArray[np.bool_]) -> None:
    """A slot may be named again only by the name that it got. Errors: InvalidArgument."""
    if not stored[repeated].all():
        raise InvalidArgument("a slot of this commit was committed before, under another name")


def distinct(values: NDArray[np.int64]) -> bool:
    """Whether no value comes twice; those of a commit nearly always rise."""
    return rising(values) or rising(np.sort(values))


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
        if not len(req.index) == len(req.pages) == len(req.valid) != 0:
            raise InvalidArgument("index, pages and valid must have the same length, at least 1")
        if node is None:
            raise UnknownBranch(f"session {session.sid:016x} has no node {req.node}")
        if req.retention not in (HELD, CACHED):
            raise InvalidArgument(f"retention {req.retention} is neither HELD (1) nor CACHED (2)")
        lease = peer.group.leases.get(req.lease)
        if lease is None or lease.kind is not Kind.WRITE or lease.expired:
            done = self._repeated(peer, req, node, pages, valid)
            if lease is not None and lease.kind is Kind.WRITE:
                self._written(lease, unpack_u32(req.index))
            return done
        run = self._run(lease, node)
        if not rising(pages):
            raise InvalidArgument("a commit names its pages in rising order")
        slots, index = self.take(lease, req.index, valid)
        checksums = self.checksums(req.checksums, len(pages))
        first, last, kept = pages.item(0), pages.item(-1), req.retention == HELD
        if first < run.start or last >= self._pages_end(lease.pool, run):
            raise InvalidArgument(
                f"pages {first}..{last} are outside what node {node.id} can have (from "
                f"{run.start}, at most {PAGE_GAP_MAX} past its last, below {lease.pool.pages_max})"
            )
        if first >= run.start + run.length and not np.count_nonzero(slots < 0):
            run.reach(last + 1)
            rows = self.publish(lease, slots, index, pages, valid, checksums, node, kept)
            run.data[span(pages - run.start)] = rows
        else:
            index = unpack_u32(req.index)
            self._merge(lease, slots, index, pages, valid, checksums, node, run, kept)
        self._note_length(node, last * lease.pool.layout.block_tokens + valid.item(-1))
        if not lease.left:
            self.writes.end_if_done(lease)
        return Done(req.id, self.world.boot, peer.acked, len(pages))

    @staticmethod
    def _pages_end(pool: Pool, run: Run) -> int:
        """Before which page a block may be named."""
        return min(run.start + run.length + PAGE_GAP_MAX, pool.pages_max)

    def _merge(
        self,
        lease: Lease,
        slots: Slots,
        index: NDArray[np.int64],
        pages: NDArray[np.int64],
        valid: NDArray[np.int64],
        checksums: NDArray[np.uint64],
        node: Node,
        run: Run,
        asked: bool,
    ) -> None:
        """Publish those slots whose pages are not stored as well already."""
        repeated = slots < 0
        if repeated.any():
            # A CACHED block may have been dropped since it was committed.
            stored = self._stored(run, pages, valid) | (not asked)
            check_repeated(stored, repeated)
        run.reach(int(pages[-1]) + 1)
        named = run.rows[pages - run.start]
        new = self._fresh(named, valid, repeated, checksums, asked)
        kept = self._held(named) | asked
        self._free_duplicates(lease, slots[~new & ~repeated], index)
        if new.any():
            rows = self.publish(
                lease, slots[new], index[new], pages[new], valid[new], checksums[new], node,
                kept[new],
            )  # fmt: skip
            run.rows[pages[new] - run.start] = rows
            old = named[new]
            self.copies.drop(old[old != NONE])

    def _run(self, lease: Lease, node: Node) -> Run:
        """The node's run in the part that a lease is for."""
        run = self._part(lease.pool, node)
        if node.ended:
            raise UnknownBranch(f"node {node.id} was pruned down to what its children share")
        return run

    @staticmethod
    def _part(pool: Pool, node: Node) -> Run:
        try:
            return node.runs[node.session.part_of(pool)]
        except ValueError:
            raise LayoutMismatch("the lease's layout is not one of the session's") from None

    def _free_duplicates(self, lease: Lease, slots: Slots, index: NDArray[np.int64]) -> None:
        """Free slots whose pages are stored already; the slots of a commit are used up."""
        if len(slots):
            lease.pool.tenant.arena.free(lease.pool.dram, slots, WRITING)
            self.world.counters["duplicate_blocks"] += len(slots)
            lease.left -= len(slots)
        lease.slots[index] = NONE

    def _commit_one(self, peer: Peer, req: Commit, node: Node) -> bool:
        """The short path: one block of a lease, under a new name. False, and nothing done, for
        all else. It uses memoryviews, which cost a fraction of numpy's scalar access."""
        lease = peer.group.leases.get(req.lease)
        if lease is None or lease.kind is not Kind.WRITE or lease.expired or node.ended:
            return False
        pool, world = lease.pool, self.world
        page, valid = int.from_bytes(req.pages, "little"), int.from_bytes(req.valid, "little")
        index = int.from_bytes(req.index, "little")
        slot = lease.slot_at(index)
        if (
            len(req.index) != 4 or len(req.valid) != 4 or slot < 0
            or not 0 < valid <= pool.layout.block_tokens or req.retention not in (HELD, CACHED)
            or len(req.checksums) != (8 if world.limits.end_to_end else 0)
            or pool not in node.session.pools
        ):  # fmt: skip
            return False
        run = node.runs[node.session.part_of(pool)]
        place = page - run.start
        if place < 0 or page >= self._pages_end(pool, run):
            return False
        if place >= run.length:
            run.reach(page + 1)
        elif run.view[place] != NONE:
            return False
        kept = req.retention == HELD
        checksum = int.from_bytes(req.checksums, "little")
        block = OneBlock(pool, node, slot, page, valid, world.seq + 1, checksum, kept, lease.id)
        world.publisher.publish_one(block)
        run.view[place] = self._add_one(block)
        lease.left -= 1
        if lease.array is None:
            lease.one, lease.array = NO_SLOT, _NO_ROWS
        else:
            lease.array[index] = NONE
        if not lease.left and not lease.promise:
            self.writes.end(lease, max(len(lease.array), 1))
        return True

    def _add_one(self, block: OneBlock) -> int:
        """Make the row of a block whose body is written, and its word READY; returns the row."""
        pool, node, slot, kept = block.pool, block.node, block.slot, block.kept
        world, session = self.world, node.session
        row = world.add_row()
        table = world.table
        world.seq = seq = block.seq
        table.fill_one(
            row, slot, NONE,
            (
                session.owner0, session.owner1, block.checksum, seq, pool.number, node.index,
                block.page, block.valid, int(world.now_s * 4.0),
            ),
            (F_HELD if kept else 0, session.priority, 0, 0),
        )  # fmt: skip
        self._note_length(node, block.page * pool.layout.block_tokens + block.valid)
        arena, counts = pool.tenant.arena, pool.dram.counts
        arena.row_view[slot] = row + 1
        arena.word_view[slot] = word(READY, tag=seq)
        counts[WRITING] -= 1
        counts[READY] += 1
        pool.held += kept
        world.counters["committed_blocks"] += 1
        world.counters["committed_bytes"] += pool.layout.block_bytes
        return row

    def take(self, lease: Lease, packed: bytes, valid: NDArray[np.int64]) -> tuple[Slots, Places]:
        """Check what a commit names; returns slots (NONE: committed before) and their places."""
        index = unpack_places(packed)
        total, tokens = len(lease.slots), lease.pool.layout.block_tokens
        if isinstance(index, slice):
            good = index.stop <= total
        else:
            good = len(index) > 0 and index.max() < total and distinct(index)
        if not good or np.count_nonzero((valid > 0) & (valid <= tokens)) < len(packed) // 4:
            raise InvalidArgument(
                f"a commit names distinct slots of its lease, and 1..{tokens} valid tokens of each"
            )
        return lease.slots[index].copy(), index

    def _stored(
        self, run: Run, pages: NDArray[np.int64], valid: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Which pages have at least so many valid tokens already."""
        stored = np.zeros(len(pages), np.bool_)
        places = pages - run.start
        inside = np.flatnonzero((places >= 0) & (places < run.length))
        rows = run.rows[places[inside]]
        there = rows != NONE
        enough = self.world.table.valid[rows[there]] >= valid[inside[there]]
        stored[inside[there]] = enough
        return stored

    def _outlived(self, run: Run, pages: NDArray[np.int64], valid: NDArray[np.int64]) -> bool:
        """Whether a page has a shorter HELD copy: a longer one would have taken its place, and
        been HELD like it, so none was ever stored."""
        places = pages - run.start
        inside = (places >= 0) & (places < run.length)
        named = run.rows[places[inside]]
        return bool((self._held(named) & (self.world.table.valid[named] < valid[inside])).any())

    def _held(self, named: Rows) -> NDArray[np.bool_]:
        """Which names have a HELD block: a longer copy of it is HELD too, whatever it asks for."""
        held: NDArray[np.bool_] = (named != NONE) & ((self.world.table.flags[named] & F_HELD) != 0)
        return held

    def _fresh(
        self,
        named: Rows,
        valid: NDArray[np.int64],
        repeated: NDArray[np.bool_],
        checksums: NDArray[np.uint64],
        kept: bool,
    ) -> NDArray[np.bool_]:
        """Which blocks are new, longer than what is stored, or HELD where that is not; under
        `end_to_end` also those with other bytes: what was stored was found changed."""
        table = self.world.table
        lost = (table.flags[named] & F_LOST) != 0
        fresh: NDArray[np.bool_] = (named == NONE) | (table.valid[named] < valid) | lost
        if kept:
            fresh |= (table.flags[named] & F_HELD) == 0
        if self.world.limits.end_to_end:
            fresh |= (table.valid[named] == valid) & (table.checksum[named] != checksums)
        fresh &= ~repeated
        return fresh

    def publish(
        self,
        lease: Lease,
        slots: Slots,
        index: Places,
        pages: NDArray[np.int64],
        valid: NDArray[np.int64],
        checksums: NDArray[np.uint64],
        node: Node | None,
        kept: NDArray[np.bool_] | bool,
        keys: NDArray[np.uint64] | None = None,
    ) -> Rows:
        """Make rows for slots of a lease and publish them as READY, for a node or under keys."""
        world, pool, n = self.world, lease.pool, len(slots)
        rows, seqs = world.add_rows(n), world.take_seqs(n)
        columns: dict[str, NDArray[Any]] = {
            "seq": seqs, "page": pages, "valid": valid,
        }  # fmt: skip
        if world.limits.end_to_end:
            columns["checksum"] = checksums
        if not isinstance(kept, bool):
            columns["flags"] = np.where(kept, F_HELD, 0)
        owner0 = owner1 = priority = 0
        if node is not None:
            owner0, owner1 = node.session.owner0, node.session.owner1
            priority = node.session.priority
        elif keys is not None:
            columns["owner0"], columns["owner1"] = keys[:, 0], keys[:, 1]
        at = span(rows)
        world.table.fill(
            at, slots, NONE,
            (
                owner0, owner1, 0, 0, pool.number, NONE if node is None else node.index, 0, 0,
                world.touch,
            ),
            (F_HELD if kept is True else 0, priority, 0, 0),
            **columns,
        )  # fmt: skip
        if node is not None and isinstance(kept, bool) and not world.limits.end_to_end:
            world.publisher.publish_node(
                NodeBlocks(pool, node, slots, pages, valid, seqs, kept, lease.id)
            )
        else:
            world.publisher.publish(pool, rows, slots, lease.id)
        arena, into = pool.tenant.arena, span(slots)
        arena.row_of[into] = rows + 1
        arena.set_state(pool.dram, into, WRITING, ready_words(seqs))
        held = n * kept if isinstance(kept, bool) else int(np.count_nonzero(kept))
        pool.held += held
        lease.slots[index] = NONE
        lease.left -= n
        world.counters["committed_blocks"] += n
        world.counters["committed_bytes"] += n * pool.layout.block_bytes
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

    def _written(self, lease: Lease, index: NDArray[np.int64]) -> None:
        """A commit came after its lease had run out, and what it names is stored already: its
        owner, who is told so, writes to these slots no more, and will not speak of them again."""
        index = np.unique(index[index < len(lease.slots)])
        index = index[lease.slots[index] >= 0]
        if len(index):
            arena = lease.pool.tenant.arena
            arena.free(lease.pool.dram, lease.slots[index], QUARANTINED)
            lease.slots[index] = NONE
            lease.left -= len(index)
            self.writes.end_if_done(lease)

    def _repeated(
        self,
        peer: Peer,
        req: Commit,
        node: Node,
        pages: NDArray[np.int64],
        valid: NDArray[np.int64],
    ) -> Done:
        """A commit whose lease has ended: its first result, if what it names is there.

        Of which part it is, only the lease says; of one that is not known any more, all parts must
        have the pages: a page of another part is not what was written."""
        lease, ended = peer.group.leases.get(req.lease), peer.group.ended.get(req.lease)
        pool = lease.pool if lease is not None else ended[1] if ended is not None else None
        runs = node.runs if pool is None else [self._part(pool, node)]
        if all(self._stored(run, pages, valid).all() for run in runs):
            return Done(req.id, self.world.boot, peer.acked, len(pages))
        replaced = not any(self._outlived(run, pages, valid) for run in runs)
        if req.lease in peer.group.ended and req.retention == CACHED and replaced:
            return Done(req.id, self.world.boot, peer.acked, len(pages))  # dropped since
        self.writes.lease(peer, req.lease)
        raise LeaseExpired(
            f"lease {req.lease:#x} ran out before its commit; nothing of it was published"
        )
