"""Who leaves first: DRAM, and NVMe when that is full.

Order in DRAM: CACHED with an NVMe copy (free) < CACHED < HELD with an NVMe copy (free) < HELD by
priority; within HELD by the tokens of the branch (long decodes have more to lose), then least
recently used, then the tail of a prefix before its head. To change the order, change `_keys`. Of
NVMe only CACHED blocks are dropped, in the same order, so that no tails stay whose heads are gone.

A scan looks at every block in DRAM. Where there are many, it keeps the first sixteenth of them, and
the next requests take theirs from there, as long as they are what they were.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtierd.core.blocks import (
    F_BUSY,
    F_VERIFYING,
    NONE,
    U_BUSY,
    U_KEPT,
    Rows,
    Slots,
    span,
)  # fmt: skip
from kvtierd.core.slabs import READY, Slabs
from kvtierd.core.tenant import Pool
from kvtierd.core.tree import Node, subtree
from kvtierd.core.world import World

SCAN_ROWS: Final = 4096
"""Up to so many blocks are looked at anew for each request."""
KEEP_SHARE: Final = 16
"""Of more, a scan finds this fraction (1/16)."""
KEEP_S: Final = 1.0
"""How long what a scan has found is used."""

_CACHED_CLEAN, _CACHED, _HELD_CLEAN, _HELD = range(4)
_UNFIT: Final = U_BUSY | np.uint64(F_BUSY)
_UNFIT_CLEAN: Final = _UNFIT & ~np.uint64(F_VERIFYING)
"""A clean block only leaves DRAM; the NVMe copy that is being verified stays."""


@dataclass(slots=True)
class _Found:
    """What a scan has found, first victims first."""

    rows: Rows
    seqs: NDArray[np.uint64]
    uses: NDArray[np.uint64]
    touch: int
    until_s: float
    taken: int = 0


class Victims:
    """Finds victims among the blocks of pools."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._found: dict[tuple[int, ...], _Found] = {}

    def first(self, pools: list[Pool], n: int, *, clean: bool) -> Rows:
        """Up to `n` rows of a tenant's pools that may leave DRAM, first victims first.

        `clean`: those that are on NVMe too, so that their DRAM slots are free at once.
        """
        pools = [pool for pool in pools if (pool.clean if clean else pool.dram.counts[READY])]
        if n <= 0 or not pools:
            return np.empty(0, np.int64)
        ready = sum(pool.dram.counts[READY] for pool in pools)
        if ready <= SCAN_ROWS:
            return self._scan(pools, n, clean)
        key, arena = (clean, *(pool.number for pool in pools)), pools[0].tenant.arena
        found, rows = self._found.get(key), np.empty(0, np.int64)
        if found is not None and self.world.now_s < found.until_s:
            rows = self._take(arena, found, n, clean)
        if len(rows) < n:
            chosen = self._scan(pools, max(n, ready // KEEP_SHARE), clean)
            found = self._found[key] = self._keep(chosen)
            rows = self._take(arena, found, n, clean)
        return rows

    def _keep(self, rows: Rows) -> _Found:
        world, table = self.world, self.world.table
        return _Found(rows, table.seq[rows], table.use[rows], world.touch, world.now_s + KEEP_S)

    def _take(self, arena: Slabs, found: _Found, n: int, clean: bool) -> Rows:
        """The next `n` that are still what they were when the scan found them.

        A row may be nobody's by now, or another block's: then its slot or its seq says so.
        """
        table, row_of, left = self.world.table, arena.row_of, n
        parts = [np.empty(0, np.int64)]
        while left and found.taken < len(found.rows):
            part = slice(found.taken, found.taken + left)
            rows = found.rows[part]
            slots = table.dram[rows]
            same = (table.use[rows] == found.uses[part]) & (table.seq[rows] == found.seqs[part])
            same &= (table.touch[rows] <= found.touch) & ((table.nvme[rows] != NONE) == clean)
            same &= (slots != NONE) & (row_of[slots] == rows + 1)
            rows = rows[same]
            found.taken = part.stop
            parts.append(rows)
            left -= len(rows)
        return np.concatenate(parts)

    def _scan(self, pools: list[Pool], n: int, clean: bool) -> Rows:
        """The same, by looking at every block of the pools."""
        table, arena = self.world.table, pools[0].tenant.arena
        parts = [rows_at(arena, arena.slots_of(pool.dram)) for pool in pools]
        rows = np.concatenate(parts)
        at = span(rows)
        unfit = _UNFIT_CLEAN if clean else _UNFIT
        rows = rows[((table.use[at] & unfit) == 0) & ((table.nvme[at] != NONE) == clean)]
        keys = self._keys(rows, clean)
        if len(rows) > n:
            chosen = np.argpartition(keys, n - 1)[:n]
            rows, keys = rows[chosen], keys[chosen]
        victims: Rows = rows[np.argsort(keys, kind="stable")]
        return victims

    def last_on_nvme(self, pool: Pool, rows: Rows, n: int) -> Rows:
        """`n` blocks to drop from NVMe because of `rows`, which are CACHED and only there.

        Branches go in the order of their last use, each from its end, wherever that lies."""
        chosen = rows[np.argsort(self._keys(rows, clean=True), kind="stable")[:n]]
        nodes = self.world.table.node[chosen]
        drop: Rows = chosen[nodes == NONE]
        for index, count in zip(*np.unique(nodes[nodes != NONE], return_counts=True), strict=True):
            ends = self._ends(pool, self.world.nodes[int(index)])
            drop = np.concatenate([drop, ends[~np.isin(ends, drop)][:count]])
        return drop

    def _ends(self, pool: Pool, node: Node) -> Rows:
        """CACHED blocks of a node and below it that are on NVMe only, the last ones first."""
        table, part = self.world.table, node.session.part_of(pool)
        rows = np.concatenate([each.runs[part].rows[::-1] for each in reversed(subtree(node))])
        rows = rows[rows != NONE]
        fit = (table.use[rows] & (_UNFIT | U_KEPT)) == 0
        fit &= (table.dram[rows] == NONE) & (table.nvme[rows] != NONE)
        ends: Rows = rows[fit]
        return ends

    def _keys(self, rows: Rows, clean: bool) -> NDArray[np.uint64]:
        """Sort keys: class and priority, branch length, last use, place from the end."""
        table, at = self.world.table, span(rows)
        use, nodes = table.use[at], table.node[at]
        if clean:
            group = np.where(use & U_KEPT, _HELD_CLEAN, _CACHED_CLEAN).astype(np.uint64)
        else:
            priority = (use >> np.uint64(8)) & np.uint64(0xFF)
            group = np.where(use & U_KEPT, priority + np.uint64(_HELD), np.uint64(_CACHED))
        tail = np.uint64(0xFFFF) - np.minimum(table.page[at], 0xFFFF)
        keys: NDArray[np.uint64] = (group << np.uint64(53)) | tail
        keys |= self._last_use(table.touch[at], nodes).astype(np.uint64) << np.uint64(16)
        if not clean:
            length = np.minimum(np.log2(self.world.node_table.tokens + 1.0), 31).astype(np.uint64)
            keys |= np.where(use & U_KEPT, length[nodes] << np.uint64(48), np.uint64(0))
        return keys

    def _last_use(self, touch: NDArray[np.uint32], nodes: NDArray[np.int32]) -> NDArray[np.uint32]:
        """When blocks were last of use: a session's page is as long as any page of a node at or
        below its own, so that nobody is left with tails whose heads are gone."""
        world = self.world
        latest = np.zeros(len(world.node_table.node), np.uint32)
        np.maximum.at(latest, nodes, touch)  # of keyed blocks in the last place, for nobody
        for index in np.flatnonzero(latest[:-1]).tolist():
            node, use = world.nodes[index].parent, latest[index]
            while node is not None and latest[node.index] < use:
                latest[node.index] = use
                node = node.parent
        return np.where(nodes == NONE, touch, latest[nodes])


def rows_at(slabs: Slabs, slots: Slots) -> Rows:
    """The rows whose copies are in `slots` of a tier."""
    found = slabs.row_of[span(slots)]
    rows: Rows = found[found > 0].astype(np.int64) - 1
    return rows
