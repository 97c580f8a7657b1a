"""Copies of blocks in the tiers: dropping them, moving them, and what came of the moves.

A row's DRAM slot is freed when it is demoted (or has an NVMe copy already), dropped, or doomed and
no longer read. An NVMe slot is freed in two steps: its header is cleared on the medium first, so
that no crash can bring the old block back over a new one's bytes.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtierd.core.actions import Clear, Demote, Promote
from kvtierd.core.blocks import (
    F_DOOMED,
    F_FILLING,
    F_HELD,
    F_LOST,
    F_MOVING,
    NONE,
    U_BUSY,
    U_KEPT,
    Places,
    Rows,
    Slots,
    not_none,
    span,
)  # fmt: skip
from kvtierd.core.slabs import (
    CLEARING,
    FILLING,
    NO_OWNER,
    READER_BITS,
    READY,
    ready_words,
    word,
)  # fmt: skip
from kvtierd.core.tenant import Pool
from kvtierd.core.world import World
from kvtierd.fair import OWN_WORK

BATCH_BYTES: Final = 32 << 20
BATCH_BYTES_MIN: Final = 4 << 20
BATCH_ARENA_SHARE: Final = 16
"""Blocks of one move have at most this fraction (1/16) of the arena, between these bounds: they are
completed together, and slots should come free as a long demotion proceeds."""

OK: Final = 0
MISMATCH: Final = 1
IO_ERROR: Final = 2
CANCELLED: Final = 3

_KEPT, _BUSY = int(U_KEPT), int(U_BUSY)


def batch_blocks(pool: Pool) -> int:
    """How many blocks of a pool are moved together."""
    share_bytes = max(pool.tenant.arena_bytes() // BATCH_ARENA_SHARE, BATCH_BYTES_MIN)
    return max(min(share_bytes, BATCH_BYTES) // pool.slot_bytes, 1)


class Copies:
    """Moves and frees the copies of rows."""

    def __init__(self, world: World) -> None:
        self.world = world

    # ------------------------------------------------------------ freeing

    def drop(self, rows: Rows) -> int:
        """Forget rows that nothing names any more; those read or moved are freed when that ends."""
        for pool, mine in self.world.by_pool(rows):
            self.drop_of(pool, mine)
        return len(rows)

    def drop_of(self, pool: Pool, rows: Rows) -> int:
        """The same for rows of one pool, NONE among them; returns how many there were."""
        world, table = self.world, self.world.table
        rows, at = not_none(rows)
        n = len(rows)
        if not n:
            return 0
        use = table.use[at]
        first = use.item(0)
        if np.count_nonzero(use == first) == n:  # as nearly always
            kept, idle = n * bool(first & _KEPT), not first & _BUSY
        else:
            kept, idle = int(np.count_nonzero(use & U_KEPT)), not np.count_nonzero(use & U_BUSY)
        pool.held -= kept
        if idle:
            self._free_rows(pool, rows, at)
            return n
        busy = (use & U_BUSY) != 0
        doomed, rest = rows[busy], rows[~busy]
        table.flags[doomed] = (table.flags[doomed] & ~np.uint8(F_HELD)) | F_DOOMED
        table.pins[doomed] = 0
        world.doomed += len(doomed)
        if len(rest):
            self._free_rows(pool, rest, rest)
        return n

    def _free_rows(self, pool: Pool, rows: Rows, at: Places) -> None:
        table = self.world.table
        dram = table.dram[at]
        if pool.nvme.counts[READY]:  # else none of its rows has a copy there
            nvme = table.nvme[at]
            in_nvme = nvme != NONE
            if np.count_nonzero(in_nvme):
                pool.clean -= int(np.count_nonzero(in_nvme & (dram != NONE)))
                self.clear(pool, nvme[in_nvme])
        pool.tenant.arena.free(pool.dram, dram, READY)
        table.remove(rows)

    def clear(self, pool: Pool, slots: Slots, old: int = READY) -> None:
        """Start to free NVMe slots."""
        world = self.world
        world.nvme.set_state(pool.nvme, slots, old, np.full(len(slots), word(CLEARING), np.uint64))
        world.nvme.row_of[slots] = 0
        batch = world.start_batch(pool, np.empty(0, np.int64), slots)
        world.actions.append(Clear(batch, pool, slots))

    def cleared(self, batch: int) -> None:
        """The headers of NVMe slots are clear on the medium: they are free."""
        done = self.world.batches.pop(batch)
        self.world.nvme.free(done.pool.nvme, done.slots, CLEARING)

    def leave_dram(self, pool: Pool, rows: Rows) -> None:
        """Free the DRAM slots of unread rows that have an NVMe copy."""
        table = self.world.table
        slots = table.dram[rows]
        table.dram[rows] = NONE
        pool.clean -= len(rows)
        pool.tenant.arena.free(pool.dram, slots, READY)

    def leave_nvme(self, pool: Pool, rows: Rows) -> None:
        """Free the NVMe slots of rows that are readable in DRAM."""
        table = self.world.table
        slots = table.nvme[rows]
        table.nvme[rows] = NONE
        pool.clean -= len(rows)
        pool.tenant.arena.epoch += 1
        self.clear(pool, slots)

    def unread(self, pool: Pool, rows: Rows) -> None:
        """Readers of rows went away: free those that were doomed or lost meanwhile."""
        table = self.world.table
        if not np.count_nonzero(table.flags[span(rows)] & (F_DOOMED | F_LOST)):
            return
        flags = table.flags[rows]
        idle = (table.use[rows] & U_BUSY) == 0
        doomed = (flags & F_DOOMED) != 0
        gone, lost = rows[idle & doomed], rows[idle & ~doomed & ((flags & F_LOST) != 0)]
        if len(gone):
            self.world.doomed -= len(gone)
            self._free_rows(pool, gone, gone)
        lost = lost[table.dram[lost] != NONE]
        if len(lost):
            self.leave_dram(pool, lost)

    def unpin(self, pool: Pool, rows: Rows) -> None:
        """Undo one `World.pin`; lost blocks that nobody holds any more are forgotten."""
        world, table = self.world, self.world.table
        table.pins[rows] -= 1
        pool.held -= len(rows) - world.kept(rows)
        lost = rows[((table.flags[rows] & F_LOST) != 0) & (table.pins[rows] == 0)]
        if len(lost):
            world.unname(lost)
            self.drop(lost)

    # ------------------------------------------------------------- moving

    def demote(self, pool: Pool, rows: Rows, urgent: bool) -> int:
        """Start to copy rows to NVMe, as many leading ones as have room there."""
        world, table = self.world, self.world.table
        n = min(len(rows), pool.nvme_available)
        per_batch = batch_blocks(pool)
        for start in range(0, n, per_batch):
            part = rows[start : min(start + per_batch, n)]
            slots = world.nvme.alloc(pool.nvme, len(part), FILLING, NO_OWNER, 0)
            assert slots is not None, "nvme_available said that there is room"
            table.flags[part] |= F_MOVING
            pool.moving += len(part)
            batch = world.start_batch(pool, part, slots)
            world.actions.append(Demote(batch, pool, part, table.dram[part], slots, urgent))
        return n

    def demoted(self, batch: int, status: NDArray[np.uint8], checksums: NDArray[np.uint64]) -> None:
        """Blocks of a `Demote` were written or not (MISMATCH: they were changed in DRAM since they
        were committed or fetched, and were written so that a restart finds their loss)."""
        world, table = self.world, self.world.table
        done = world.batches.pop(batch)
        pool, rows, slots = done.pool, done.rows, done.slots
        table.flags[rows] &= ~np.uint8(F_MOVING)
        pool.moving -= len(rows)
        ok = (status == OK) | (status == MISMATCH)
        changed = status[ok] == MISMATCH
        pool.tenant.spill_fails = bool((status == IO_ERROR).any())
        if not ok.all():
            self.clear(pool, slots[~ok], FILLING)
            if pool.tenant.spill_fails:
                world.counters["io_errors"] += int(np.count_nonzero(status == IO_ERROR))
                pool.tenant.spill_retry_s = world.now_s + 1.0
            self._settle(pool, rows[~ok])
            rows, slots, checksums = rows[ok], slots[ok], checksums[ok]
        if not len(rows):
            return
        world.nvme.set_state(pool.nvme, slots, FILLING, ready_words(table.seq[rows]))
        world.nvme.row_of[slots] = rows + 1
        table.nvme[rows] = slots
        table.checksum[rows] = checksums
        pool.clean += len(rows)
        world.counters["spilled_blocks"] += len(rows)
        world.counters["spilled_bytes"] += len(rows) * pool.layout.block_bytes
        self.lose(pool, self._settle(pool, rows[changed]))
        rows = self._settle(pool, rows[~changed])
        unread = rows[table.readers[rows] == 0]
        if len(unread):
            self.leave_dram(pool, unread)

    def _settle(self, pool: Pool, rows: Rows) -> Rows:
        """Free those of the rows that were doomed while they moved; returns the others."""
        doomed = (self.world.table.flags[rows] & F_DOOMED) != 0
        if not doomed.any():
            return rows
        self.unread(pool, rows[doomed])
        named: Rows = rows[~doomed]
        return named

    def promote(
        self, pool: Pool, rows: Rows, slots: Slots, *, urgent: bool, client: int = OWN_WORK
    ) -> None:
        """Start to copy rows from NVMe into DRAM slots that were allocated as FILLING."""
        world, table = self.world, self.world.table
        pool.tenant.arena.epoch += 1
        table.flags[rows] |= F_FILLING
        table.dram[rows] = slots
        pool.tenant.arena.row_of[slots] = rows + 1
        pool.clean += len(rows)
        per_batch = batch_blocks(pool)
        for start in range(0, len(rows), per_batch):
            part, dst = rows[start : start + per_batch], slots[start : start + per_batch]
            batch = world.start_batch(pool, part, dst)
            sums = table.checksum[part]
            world.actions.append(
                Promote(batch, pool, part, table.nvme[part], dst, sums, urgent, client)
            )

    def promoted(self, batch: int, status: NDArray[np.uint8]) -> None:
        """Blocks of a `Promote` were read and verified (status OK) or not."""
        world, table = self.world, self.world.table
        done = world.batches.pop(batch)
        pool, rows, slots = done.pool, done.rows, done.slots
        table.flags[rows] &= ~np.uint8(F_FILLING)
        ok = status == OK
        if not ok.all():
            bad = ~ok
            table.dram[rows[bad]] = NONE
            pool.clean -= int(np.count_nonzero(bad))
            pool.tenant.arena.free(pool.dram, slots[bad], FILLING)
            world.counters["io_errors"] += int(np.count_nonzero(status == IO_ERROR))
            self.lose(pool, rows[status == MISMATCH])
            self._settle(pool, rows[bad & (status != MISMATCH)])
            rows, slots = rows[ok], slots[ok]
        if not len(rows):
            return
        world.publisher.publish(pool, rows, slots, 0)
        arena = pool.tenant.arena
        waiting = arena.words[slots] & READER_BITS
        words = (ready_words(table.seq[rows]) & ~READER_BITS) | waiting
        arena.set_state(pool.dram, slots, FILLING, words)
        table.touch[rows] = world.touch
        world.counters["restored_blocks"] += len(rows)
        world.counters["restored_bytes"] += len(rows) * pool.layout.block_bytes
        self._settle(pool, rows)

    def verified(self, pool: Pool, rows: Rows, slots: Slots, status: NDArray[np.uint8]) -> int:
        """NVMe copies were verified (status OK) or not; returns how many held blocks are lost.

        A bad one goes where DRAM has the block, which is then demoted again like any other; else
        the block is lost. What the medium could not read stays, as after a failed `Promote`.
        """
        world, table = self.world, self.world.table
        flags = table.flags[rows]
        # a copy that is being promoted is judged by that
        mine = ((flags & (F_DOOMED | F_FILLING | F_LOST)) == 0) & (table.nvme[rows] == slots)
        in_dram = table.dram[rows] != NONE
        again = rows[mine & (status != OK) & (status != CANCELLED) & in_dram]
        if len(again):
            self.leave_nvme(pool, again)
        before = world.counters["lost_blocks"]
        self.lose(pool, rows[mine & (status == MISMATCH) & ~in_dram])
        self.unread(pool, rows[(flags & F_DOOMED) != 0])
        return world.counters["lost_blocks"] - before

    def lose(self, pool: Pool, rows: Rows) -> None:
        """No copy of rows is good: those that are kept become LOST, the others go.

        A LOST one keeps its NVMe slot for as long as it is named: a restart finds it there, and
        that it is lost, instead of forgetting both.
        """
        if not len(rows):
            return
        world, table = self.world, self.world.table
        world.counters["checksum_mismatches"] += len(rows)
        doomed = (table.flags[rows] & F_DOOMED) != 0
        named = rows[~doomed]
        kept = table.kept(named)
        table.flags[named[kept]] |= F_LOST
        world.counters["lost_blocks"] += int(np.count_nonzero(kept))
        world.unname(named[~kept])
        table.flags[named[~kept]] |= F_DOOMED
        world.doomed += int(np.count_nonzero(~kept))
        self.unread(pool, rows)
