"""The background scrub: every block on NVMe is read and verified once per pass, at a bounded rate.

    idle ──interval is over, or asked──► running ──behind the last slot──► idle
                                            │ ▲
                              Verify, a few MiB │ its result, and the bytes' time has passed

A pass goes over the slots in their order, one batch at a time. Blocks that come or move behind the
cursor are verified by the next pass; whatever is promoted meanwhile is verified by that. A restart
forgets the cursor, not when the last pass ended.
"""

import math
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtierd.core.actions import Note, SaveScrub, Verify
from kvtierd.core.blocks import F_DOOMED, F_FILLING, F_LOST, F_VERIFYING, Rows
from kvtierd.core.copies import IO_ERROR, MISMATCH, Copies
from kvtierd.core.tenant import Pool
from kvtierd.core.world import Batch, World

BATCH_BYTES: Final = 4 << 20
"""What is verified at a time (or one block): the mover has as much memory for it."""
SLABS_PER_STEP: Final = 1024
"""Slabs looked at in one step, most of them empty in a tier that is."""
LATE_S: Final = 0.1
"""A batch that begins late by so much, because time comes in ticks, does not delay the next."""
_SKIPPED: Final = F_FILLING | F_DOOMED | F_LOST


class Pass(msgspec.Struct):
    """What a pass over the slots has found so far."""

    number: int = 0
    checked_blocks: int = 0
    checked_bytes: int = 0
    bad_blocks: int = 0
    """Their bytes are not those that were written."""
    unreadable_blocks: int = 0
    """The medium gave an error; they are tried again when somebody asks for them."""
    lost_blocks: int = 0
    """Held ones among the bad that had no other copy."""


class Scrub:
    """Decides what is verified when."""

    def __init__(self, world: World, copies: Copies) -> None:
        self.world, self.copies = world, copies
        self.running = False
        self.ended_s = -math.inf
        """When the last pass ended, of earlier lives too."""
        self.last = Pass()
        """The pass that runs, or the last one."""
        self._slot = 0  # the cursor
        self._due_s = 0.0  # no batch begins before this time

    @property
    def progress(self) -> float:
        """How much of the tier the pass has behind it, from 0 to 1."""
        return self._slot / len(self.world.nvme.words) if self.running else 1.0

    def report(self) -> dict[str, object]:
        """What operators see: the pass that runs or was the last, and when one ended."""
        ended = self.ended_s > -math.inf
        return msgspec.structs.asdict(self.last) | {
            "running": self.running,
            "progress": round(self.progress, 4),
            "since_pass_s": round(self.world.now_s - self.ended_s, 1) if ended else None,
            "rate_bytes": self.world.limits.scrub_rate_bytes,
        }

    def start(self) -> bool:
        """Begin a pass now; False when one is under way already."""
        if self.running:
            return False
        self.running, self._slot = True, 0
        self.last = Pass(self.last.number + 1)
        self._step()
        return True

    def tick(self) -> None:
        """Let time pass."""
        interval_s = self.world.limits.scrub_interval_s
        due = interval_s < math.inf and self.ended_s + interval_s <= self.world.now_s
        if self.running or not due:
            self._step()
        else:
            self.start()

    def verified(self, status: NDArray[np.uint8]) -> Pool:
        """The blocks of the `Verify` were read; returns their pool."""
        world, now = self.world, self.last
        done, world.verifying = world.verifying, None
        assert done is not None
        world.table.flags[done.rows] &= ~np.uint8(F_VERIFYING)
        bad = int(np.count_nonzero(status == MISMATCH))
        failed = int(np.count_nonzero(status == IO_ERROR))
        lost = self.copies.verified(done.pool, done.rows, done.slots, status)
        now.checked_blocks += len(status)
        now.checked_bytes += len(status) * done.pool.layout.block_bytes
        now.bad_blocks += bad
        now.unreadable_blocks += failed
        now.lost_blocks += lost
        world.counters["scrubbed_blocks"] += len(status)
        world.counters["scrubbed_bytes"] += len(status) * done.pool.layout.block_bytes
        world.counters["scrub_bad_blocks"] += bad + failed
        if bad or failed:
            text = (
                f"{bad} blocks of tenant {done.pool.tenant.name} on NVMe are not what was written, "
                f"{failed} cannot be read; {lost} held ones are lost, the others were dropped or "
                "are still in DRAM: check the disk"
            )
            world.actions.append(Note("scrub", text))
        self._step()
        return done.pool

    # ---------------------------------------------------------------- a pass

    def _step(self) -> None:
        """Have the next blocks verified, if it is time."""
        world = self.world
        if not self.running or world.verifying is not None or world.now_s < self._due_s:
            return
        pool, rows = self._next()
        if pool is not None:
            table = world.table
            size_bytes = len(rows) * pool.slot_bytes
            begun_s = max(self._due_s, world.now_s - LATE_S)
            self._due_s = begun_s + size_bytes / world.limits.scrub_rate_bytes
            table.flags[rows] |= F_VERIFYING
            slots = table.nvme[rows]
            world.verifying = Batch(pool, rows, slots)
            number, world.next_batch = world.next_batch, world.next_batch + 1
            world.actions.append(Verify(number, pool, rows, slots, table.checksum[rows]))
        elif self._slot >= len(world.nvme.words):
            self.running = False
            self.ended_s = world.now_s
            world.counters["scrub_passes"] += 1
            world.actions.append(SaveScrub())

    def _next(self) -> tuple[Pool | None, Rows]:
        """Blocks from the cursor on, which moves behind them; None when there are none so far."""
        nvme, table = self.world.nvme, self.world.table
        first_slab = self._slot // nvme.max_slots
        for slab in range(first_slab, min(first_slab + SLABS_PER_STEP, nvme.slabs)):
            base, part = slab * nvme.max_slots, nvme.pool_of[slab]
            begin = max(self._slot, base)
            self._slot = base + nvme.max_slots
            if part is None or slab in part.empty:
                continue
            rows = nvme.row_of[begin : base + part.slots_per_slab].astype(np.int64) - 1
            rows = rows[rows >= 0]
            rows = rows[(table.flags[rows] & _SKIPPED) == 0]
            n = max(BATCH_BYTES // part.slot_bytes, 1)
            if len(rows) > n:
                rows = rows[:n]
                self._slot = int(table.nvme[rows[-1]]) + 1
            if len(rows):
                return self.world.pools[part.number], rows
        return None, np.empty(0, np.int64)
