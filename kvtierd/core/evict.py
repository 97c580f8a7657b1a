"""Who has to leave a tier, and when: the order of victims, watermarks, and room on demand.

Order in DRAM: CACHED with an NVMe copy (free) < CACHED < HELD with an NVMe copy (free) < HELD by
priority; within HELD by the tokens of the branch (long decodes have more to lose), then least
recently used, then the tail of a prefix before its head. To change the order, change `_keys`.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtierd.core.blocks import F_BUSY, F_HELD, NONE, Rows, Slots
from kvtierd.core.copies import Copies
from kvtierd.core.slabs import READY, Slabs
from kvtierd.core.tenant import Pool, Tenant
from kvtierd.core.world import World

BALANCE_BYTES: Final = 64 << 20
"""Bytes of one tenant that watermark eviction has on their way at a time."""
NVME_SCAN_SLABS: Final = 64
"""Slabs looked at for one request for NVMe room."""

_CACHED_CLEAN, _CACHED, _HELD_CLEAN, _HELD = range(4)


class Evictor:
    """Makes room in DRAM and NVMe."""

    def __init__(self, world: World, copies: Copies) -> None:
        self.world, self.copies = world, copies
        self._hand: dict[int, int] = {}  # pool number -> next NVMe slab to look at

    # ------------------------------------------------------------ on demand

    def make_room(self, pool: Pool, n: int, *, write: bool, patient: bool) -> None:
        """Free, or start to free, DRAM slots of a pool until `n` can be allocated.

        `write`: the slots are for a writer, who may not use the exchange headroom. `patient`:
        whoever asks can wait for copies to NVMe; if not, CACHED blocks are dropped instead.
        """
        short = n - pool.tenant.arena.available(pool.dram)
        if short > 0:
            short -= self._leave_clean([pool], short)
        if write:
            dirty = pool.dram.used - pool.clean
            short = max(short, n + dirty + pool.headroom - pool.dram_capacity)
        short -= pool.moving
        if short > 0:
            short -= self._move_dirty([pool], short, patient=patient, urgent=True)
        if short > 0:
            self._evacuate(pool)

    def _leave_clean(self, pools: list[Pool], n: int) -> int:
        rows = self._victims(pools, n, clean=True)
        for pool, mine in self.world.by_pool(rows):
            self.copies.leave_dram(pool, mine)
        self.world.counters["evicted_clean_blocks"] += len(rows)
        return len(rows)

    def _move_dirty(self, pools: list[Pool], n: int, *, patient: bool, urgent: bool) -> int:
        """Demote (or drop) up to `n` victims; returns how many slots will be free."""
        world, table, started = self.world, self.world.table, 0
        for pool, victims in world.by_pool(self._victims(pools, n, clean=False)):
            mine = victims
            droppable = ((table.flags[mine] & F_HELD) == 0) & (table.pins[mine] == 0)
            if not patient and droppable.any():
                started += self._drop_cached(mine[droppable])
                mine, droppable = mine[~droppable], droppable[~droppable]
            if world.now_s < pool.tenant.spill_retry_s:
                continue
            moved = self.copies.demote(pool, mine, urgent)
            started += moved
            left, droppable = mine[moved:], droppable[moved:]
            if len(left):
                self._make_nvme_room(pool, len(left))
                started += self._drop_cached(left[droppable])
        return started

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
            n = min(excess, BALANCE_BYTES - moving) // slot_bytes
            if n > 0:
                n -= self._leave_clean(pools, n)
            if n > 0:
                self._move_dirty(pools, n, patient=True, urgent=False)
        return tenant.pressure != before

    def evict(self, tenant: Tenant, n: int) -> int:
        """Move up to `n` blocks out of DRAM because an operator asked; returns how many."""
        pools = list(tenant.pools.values())
        left = self._leave_clean(pools, n)
        return left + self._move_dirty(pools, n - left, patient=True, urgent=True)

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

    # ------------------------------------------------------------ victims

    def _victims(self, pools: list[Pool], n: int, *, clean: bool) -> Rows:
        """Up to `n` rows that may leave DRAM, first victims first."""
        table = self.world.table
        parts = []
        for pool in pools:
            arena = pool.tenant.arena
            if pool.dram.counts[READY]:
                parts.append(rows_at(arena, arena.slots_of(pool.dram)))
        if not parts or n <= 0:
            return np.empty(0, np.int64)
        rows: Rows = np.concatenate(parts)
        free = ((table.flags[rows] & F_BUSY) == 0) & (table.readers[rows] == 0)
        rows = rows[free & ((table.nvme[rows] != NONE) == clean)]
        keys = self._keys(rows)
        if len(rows) > n:
            chosen = np.argpartition(keys, n - 1)[:n]
            rows, keys = rows[chosen], keys[chosen]
        victims: Rows = rows[np.argsort(keys, kind="stable")]
        return victims

    def _keys(self, rows: Rows) -> NDArray[np.uint64]:
        """Sort keys of victims: class and priority, branch length, last use, place from the end."""
        table = self.world.table
        kept = ((table.flags[rows] & F_HELD) != 0) | (table.pins[rows] > 0)
        in_nvme = table.nvme[rows] != NONE
        group = np.where(in_nvme, _CACHED_CLEAN, _CACHED)
        group[kept] = np.where(in_nvme[kept], _HELD_CLEAN, _HELD + table.priority[rows[kept]])
        tokens = self.world.node_table.tokens[np.maximum(table.node[rows], 0)]
        length = np.where(kept & ~in_nvme, np.log2(tokens + 1.0).astype(np.int64), 0)
        tail = 0xFFFF - np.minimum(table.page[rows], 0xFFFF).astype(np.uint64)
        touch = table.touch[rows].astype(np.uint64)
        high = ((group.astype(np.int64) << 5) | np.minimum(length, 31)).astype(np.uint64)
        keys: NDArray[np.uint64] = (high << np.uint64(48)) | (touch << np.uint64(16)) | tail
        return keys

    # ------------------------------------------------------------ slabs

    def _evacuate(self, pool: Pool) -> None:
        """Empty the sparsest slab of the tenant's other pools, so that `pool` can have it."""
        tenant, table = pool.tenant, self.world.table
        best: tuple[int, Pool, int, Rows] | None = None
        for other in tenant.pools.values():
            if other.dram.draining:
                return
            if other is pool or not other.dram.free:
                continue
            slab = max(other.dram.free, key=lambda s, free=other.dram.free: free[s])  # type: ignore[misc]
            rows = rows_at(tenant.arena, tenant.arena.slots_of(other.dram, slab))
            used = other.dram.slots_per_slab - other.dram.free[slab]
            stuck = (table.readers[rows] > 0).any() or len(rows) < used
            if not stuck and (best is None or used < best[0]):
                best = used, other, slab, rows
        if best is None:
            return
        _, other, slab, rows = best
        tenant.arena.drain(other.dram, slab)
        idle = rows[(table.flags[rows] & F_BUSY) == 0]
        clean = table.nvme[idle] != NONE
        if clean.any():
            self.copies.leave_dram(other, idle[clean])
        self.copies.demote(other, idle[~clean], urgent=True)

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
        if not slabs:
            return
        hand = self._hand.get(pool.number, 0)
        for _ in range(min(NVME_SCAN_SLABS, len(slabs))):
            hand = (hand + 1) % len(slabs)
            rows = rows_at(nvme, nvme.slots_of(pool.nvme, slabs[hand]))
            idle = rows[((table.flags[rows] & F_BUSY) == 0)]
            kept = ((table.flags[idle] & F_HELD) != 0) | (table.pins[idle] > 0)
            in_dram = table.dram[idle] != NONE
            drop = idle[~kept & ~in_dram][:n]
            n -= self._drop_cached(drop)
            dirty_room = pool.dram_capacity - pool.headroom - (pool.dram.used - pool.clean)
            may_leave = in_dram if not world.limits.power else in_dram & ~kept
            leave = idle[may_leave][: max(min(n, dirty_room), 0)]
            if len(leave):
                self.copies.leave_nvme(pool, leave)
                n -= len(leave)
            if n <= 0:
                break
        self._hand[pool.number] = hand


def rows_at(slabs: Slabs, slots: Slots) -> Rows:
    """The rows whose copies are in `slots` of a tier."""
    found = slabs.row_of[slots]
    rows: Rows = found[found > 0].astype(np.int64) - 1
    return rows
