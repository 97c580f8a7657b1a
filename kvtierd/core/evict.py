"""When blocks leave a tier: watermarks, and room on demand. `victims.py` says which go first."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtierd.core.blocks import F_BUSY, F_HELD, NONE, Rows
from kvtierd.core.copies import Copies
from kvtierd.core.slabs import CLEARING
from kvtierd.core.tenant import Pool, Tenant
from kvtierd.core.victims import Victims, rows_at
from kvtierd.core.world import World

BALANCE_BYTES: Final = 64 << 20
"""Bytes of one tenant that watermark eviction has on their way at a time."""
NVME_SCAN_SLABS: Final = 64
"""Slabs looked at for one request for NVMe room."""


class Evictor:
    """Makes room in DRAM and NVMe."""

    def __init__(self, world: World, copies: Copies) -> None:
        self.world, self.copies = world, copies
        self._victims = Victims(world)
        self._hand: dict[int, int] = {}  # pool number -> next NVMe slab to look at

    # ------------------------------------------------------------ on demand

    def make_room(self, pool: Pool, n: int, *, write: bool, patient: bool) -> None:
        """Free, or start to free, DRAM slots of a pool until `n` can be allocated.

        `write`: the slots are for a writer, who may not use the exchange headroom. `patient`:
        whoever asks can wait for copies to NVMe; if not, or while NVMe is stuck, CACHED blocks are
        dropped instead.
        """
        patient = patient and not self.world.nvme_stuck
        short = n - pool.tenant.arena.available(pool.dram)
        if short > 0:
            short -= self._leave_clean([pool], short)
        if write:
            short = max(short, n + pool.dirty - pool.dirty_max)
        if not patient and short > 0:
            rows = self._victims.first([pool], short, clean=False)
            short -= self._drop_cached(rows[self._droppable(rows)])
        if not self.world.nvme_stuck:
            short -= pool.moving
        if short > 0:
            short -= self._move_dirty([pool], short, urgent=True)
        if short > 0:
            self._evacuate(pool, patient=patient)

    def make_places(self, pool: Pool, n: int, *, patient: bool) -> None:
        """Free, or start to free, slabs that other pools of the tenant use for more than they were
        promised, until `n` more blocks of a pool can be admitted."""
        while not pool.admits(n) and self._evacuate(pool, patient=patient):
            pass
        if not pool.admits(n) and not any(each.nvme.counts[CLEARING] for each in self.world.pools):
            self._empty_nvme_slab(pool)

    def _leave_clean(self, pools: list[Pool], n: int) -> int:
        rows = self._victims.first(pools, n, clean=True)
        for pool, mine in self.world.by_pool(rows):
            self.copies.leave_dram(pool, mine)
        self.world.counters["evicted_clean_blocks"] += len(rows)
        return len(rows)

    def _move_dirty(self, pools: list[Pool], n: int, *, urgent: bool) -> int:
        """Demote up to `n` victims; returns how many slots will be free."""
        started = 0
        for pool, rows in self.world.by_pool(self._victims.first(pools, n, clean=False)):
            if self.world.now_s >= pool.tenant.spill_retry_s:
                started += self._demote(pool, rows, urgent=urgent)
        return started

    def _demote(self, pool: Pool, rows: Rows, *, urgent: bool) -> int:
        """Demote rows; where NVMe has no room, CACHED ones are dropped instead."""
        moved = self.copies.demote(pool, rows, urgent)
        left = rows[moved:]
        if len(left):
            self._make_nvme_room(pool, len(left))
            moved += self._drop_cached(left[self._droppable(left)])
        return moved

    def _droppable(self, rows: Rows) -> NDArray[np.bool_]:
        """Which rows nobody holds."""
        return ~self.world.table.kept(rows)

    def _drop_cached(self, rows: Rows) -> int:
        if len(rows):
            self.world.unname(rows)
            self.copies.drop(rows)
            self.world.counters["dropped_cached_blocks"] += len(rows)
        return len(rows)

    # ------------------------------------------------------------ watermarks

    def balance(self, tenant: Tenant) -> bool:
        """Evict in the background from above the high watermark to below the low one.

        Returns whether the pressure changed."""
        total = tenant.arena_bytes()
        used = tenant.used_bytes()
        limits = self.world.limits
        before = tenant.pressure
        if used > limits.high_watermark * total:
            tenant.pressure = True
        elif used <= limits.low_watermark * total:
            tenant.pressure = False
        if not tenant.pressure:
            tenant.calm_bytes = int(limits.high_watermark * total) - used
            tenant.calm_epoch = tenant.arena.epoch
        else:
            pools = [pool for pool in tenant.pools.values() if pool.dram.used]
            moving = sum(pool.moving * pool.slot_bytes for pool in pools)
            excess = used - moving - int(limits.low_watermark * total)
            slot_bytes = min(pool.slot_bytes for pool in pools)
            n = -(-min(excess, BALANCE_BYTES - moving) // slot_bytes)
            if n > 0:
                n -= self._leave_clean(pools, n)
            if n > 0:
                self._move_dirty(pools, n, urgent=False)
        return tenant.pressure != before

    def evict(self, tenant: Tenant, n: int) -> int:
        """Move up to `n` blocks out of DRAM because an operator asked; returns how many."""
        pools = list(tenant.pools.values())
        left = self._leave_clean(pools, n)
        return left + self._move_dirty(pools, n - left, urgent=True)

    def save(self, tenant: Tenant) -> int:
        """Start to copy to NVMe all that is only in DRAM, what is being read too, HELD first:
        the memory ends with the daemon. Returns how many blocks."""
        table, started = self.world.table, 0
        if self.world.now_s < tenant.spill_retry_s:
            return 0
        for pool in tenant.pools.values():
            rows = rows_at(tenant.arena, tenant.arena.slots_of(pool.dram))
            rows = rows[(table.nvme[rows] == NONE) & ((table.flags[rows] & F_BUSY) == 0)]
            rows = rows[np.argsort((table.flags[rows] & F_HELD) == 0, kind="stable")]
            moved = self.copies.demote(pool, rows, urgent=True)
            if moved < len(rows):
                self._make_nvme_room(pool, len(rows) - moved)
            started += moved
        return started

    # ------------------------------------------------------------ slabs

    def _evacuate(self, pool: Pool, *, patient: bool) -> bool:
        """Empty the sparsest slab that one of the tenant's other pools can do without, so that
        `pool` can have it. Returns whether it came free at once."""
        tenant, table = pool.tenant, self.world.table
        best: tuple[int, Pool, int, Rows] | None = None
        for other in tenant.pools.values():
            if other.dram.draining:
                return False
            if other is pool or not other.dram.free or not other.can_leave_slab():
                continue
            slab = max(other.dram.free, key=lambda s, free=other.dram.free: free[s])  # type: ignore[misc]
            rows = rows_at(tenant.arena, tenant.arena.slots_of(other.dram, slab))
            used = other.dram.slots_per_slab - other.dram.free[slab]
            stuck = (table.readers[rows] > 0).any() or len(rows) < used
            if not stuck and (best is None or used < best[0]):
                best = used, other, slab, rows
        if best is None:
            return False
        _, other, slab, rows = best
        tenant.arena.drain(other.dram, slab)
        if other.demand:
            other.secure(0)
        idle = rows[(table.flags[rows] & F_BUSY) == 0]
        clean = table.nvme[idle] != NONE
        if clean.any():
            self.copies.leave_dram(other, idle[clean])
        dirty = idle[~clean]
        if not patient:
            droppable = self._droppable(dirty)
            self._drop_cached(dirty[droppable])
            dirty = dirty[~droppable]
        self._demote(other, dirty, urgent=True)
        return slab not in other.dram.free

    def end_stuck_drains(self, tenant: Tenant) -> None:
        """Use slabs again whose evacuation did not end (a reader stayed, or NVMe was full)."""
        for pool in tenant.pools.values():
            if pool.dram.draining and not pool.moving:
                pool.dram.draining.clear()

    def _make_nvme_room(self, pool: Pool, n: int) -> None:
        """Start to free up to `n` NVMe slots of a pool: CACHED blocks go; without power
        durability, also the NVMe copies of HELD blocks that are in DRAM."""
        world, table, nvme = self.world, self.world.table, self.world.nvme
        slabs = sorted(pool.nvme.free)
        hand = self._hand.get(pool.number, 0)
        some = [slabs[(hand + i) % len(slabs)] for i in range(min(NVME_SCAN_SLABS, len(slabs)))]
        self._hand[pool.number] = hand + len(some)
        parts = [rows_at(nvme, nvme.slots_of(pool.nvme, slab)) for slab in some]
        rows = np.concatenate([np.empty(0, np.int64), *parts])
        idle = rows[(table.flags[rows] & F_BUSY) == 0]
        kept, in_dram = table.kept(idle), table.dram[idle] != NONE
        only_there = idle[~kept & ~in_dram]
        if len(only_there):
            n -= self._drop_cached(self._victims.last_on_nvme(pool, only_there, n))
        dirty_room = pool.fitting(pool.dram.capacity) - pool.dirty
        may_leave = in_dram if not world.limits.power else in_dram & ~kept
        leave = idle[may_leave][: max(min(n, dirty_room), 0)]
        if len(leave):
            self.copies.leave_nvme(pool, leave)
            n -= len(leave)
        if n > 0:
            self._empty_nvme_slab(pool)

    def _empty_nvme_slab(self, pool: Pool) -> None:
        """Start to clear an NVMe slab of the tenant's other pools that has CACHED blocks only."""
        nvme, table = self.world.nvme, self.world.table
        for other in pool.tenant.pools.values():
            if other is pool or other.surplus < other.nvme.slots_per_slab:
                continue
            for slab in sorted(other.nvme.free)[:NVME_SCAN_SLABS]:
                rows = rows_at(nvme, nvme.slots_of(other.nvme, slab))
                used = other.nvme.slots_per_slab - other.nvme.free[slab]
                idle = (table.flags[rows] & F_BUSY) == 0
                if len(rows) == used > 0 and idle.all() and self._droppable(rows).all():
                    in_dram = table.dram[rows] != NONE
                    if in_dram.any():
                        self.copies.leave_nvme(other, rows[in_dram])
                    self._drop_cached(rows[~in_dram])
                    return
