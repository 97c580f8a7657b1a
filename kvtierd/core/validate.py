"""Recounts every table against every other; for tests and simulations, after any step."""

import numpy as np

from kvtierd.core.blocks import F_HELD, NONE, Rows
from kvtierd.core.leases import Kind
from kvtierd.core.slabs import QUARANTINED, WRITING, SlabPool, Slabs
from kvtierd.core.tenant import Pool
from kvtierd.core.world import World


def validate(world: World) -> None:
    """Recount everything; AssertionError when the books do not balance."""
    world.keys.check()
    used = np.flatnonzero(world.table.used_mask())
    for pool in world.pools:
        rows = used[world.table.pool[used] == pool.number]
        _check_tier(pool.tenant.arena, pool.dram, world.table.dram, rows)
        _check_tier(world.nvme, pool.nvme, world.table.nvme, rows)
        _check_counts(world, pool, rows)
        _check_leases(world, pool, rows)


def _check_tier(slabs: Slabs, part: SlabPool, column: Rows, rows: Rows) -> None:
    """Words, counters and rows of one pool in one tier agree."""
    assert slabs.recount(part) == part.counts, (part.number, part.counts)
    assert sum(part.counts) == part.total
    assert sum(part.free.values()) == part.counts[0]
    mine = rows[column[rows] != NONE]
    assert (slabs.row_of[column[mine]] == mine + 1).all()
    assert len(np.unique(column[mine])) == len(mine)


def _check_counts(world: World, pool: Pool, rows: Rows) -> None:
    table = world.table
    kept = ((table.flags[rows] & F_HELD) != 0) | (table.pins[rows] > 0)
    assert pool.held == int(kept.sum()), (pool.held, int(kept.sum()))
    both = (table.dram[rows] != NONE) & (table.nvme[rows] != NONE)
    assert pool.clean == int(both.sum()), (pool.clean, int(both.sum()))


def _check_leases(world: World, pool: Pool, rows: Rows) -> None:
    """Readers, writers and promises are those of the leases and tickets."""
    leases = [lease for lease in pool.tenant.leases.values() if lease.pool is pool]
    assert pool.promised == sum(lease.promise for lease in leases)
    readers = np.zeros(world.table.capacity, np.int64)
    for lease in leases:
        if lease.kind is Kind.READ:
            readers[lease.rows] += 1
    for ticket in pool.tenant.loading:
        if ticket.pool is pool and not ticket.prefetch:
            readers[ticket.rows] += 1
    assert (readers[rows] == world.table.readers[rows]).all()
    writing = sum(int((x.slots >= 0).sum()) for x in leases if x.kind is Kind.WRITE)
    assert writing == pool.dram.counts[WRITING] + pool.dram.counts[QUARANTINED]
