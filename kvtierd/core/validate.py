"""Recounts every table against every other; for tests and simulations, after any step."""

import numpy as np

from kvtierd.core.blocks import (
    F_DOOMED,
    F_FILLING,
    F_HELD,
    F_MOVING,
    F_VERIFYING,
    NONE,
    Rows,
)
from kvtierd.core.leases import Kind
from kvtierd.core.slabs import QUARANTINED, READY, WRITING, SlabPool, Slabs
from kvtierd.core.tenant import Pool, Tenant
from kvtierd.core.world import World


def homeless(world: World) -> bool:
    """Whether a layout's blocks have no place, or no way to DRAM."""
    return any(x.demand and (x.surplus < 0 or not x.dram.capacity) for x in world.pools)


def validate(world: World, *, may_be_homeless: bool = False) -> None:
    """Recount everything; AssertionError when the books do not balance.

    `may_be_homeless`: a start may have found blocks whose end a crash came before, and other
    layouts in the slabs that had been theirs; they can be read as soon as one of those is free.
    """
    world.keys.check()
    used = np.flatnonzero(world.table.used_mask())
    _check_names(world, used)
    _check_batches(world, used)
    for tenant in world.tenants.values():
        _check_waiting(tenant)
        assert tenant.nvme_quota.have == sum(len(x.nvme.free) for x in tenant.pools.values())
    assert may_be_homeless or not homeless(world), "what was promised has no place"
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
    assert pool.nvme.counts[READY] == int((table.nvme[rows] != NONE).sum())


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


def _check_names(world: World, used: Rows) -> None:
    """Every row has one name, in the node or the KeyIndex that its columns say, or is doomed."""
    table = world.table
    doomed = (table.flags[used] & F_DOOMED) != 0
    assert world.doomed == int(doomed.sum()), (world.doomed, int(doomed.sum()))
    named = [world.keys.rows().astype(np.int64)]
    for index, node in world.nodes.items():
        assert node.index == index
        assert node.session.nodes[node.id] is node
        for pool, run in zip(node.session.pools, node.runs, strict=True):
            places = np.flatnonzero(run.rows != NONE)
            rows = run.rows[places]
            assert (table.page[rows] == places + run.start).all()
            assert (table.node[rows] == index).all()
            assert (table.pool[rows] == pool.number).all()
            named.append(rows)
    rows = np.sort(np.concatenate(named))
    assert np.array_equal(rows, used[~doomed]), "a row has no name, or two"


def _check_batches(world: World, used: Rows) -> None:
    """Rows are moving or filling exactly if a batch in flight has them."""
    table = world.table
    moving = [batch.rows for batch in world.batches.values()]
    rows = np.sort(np.concatenate([np.empty(0, np.int64), *moving]))
    busy = used[(table.flags[used] & (F_MOVING | F_FILLING)) != 0]
    assert np.array_equal(rows, busy), "a batch and the flags of its rows differ"
    verifying = np.empty(0, np.int64) if world.verifying is None else world.verifying.rows
    flagged = used[(table.flags[used] & F_VERIFYING) != 0]
    assert np.array_equal(np.sort(verifying), flagged), "the scrub and the flags differ"
    for pool in world.pools:
        mine = busy[table.pool[busy] == pool.number]
        assert pool.moving == int(np.count_nonzero(table.flags[mine] & F_MOVING))


def _check_waiting(tenant: Tenant) -> None:
    """Whoever waits can still be answered."""
    for ticket in (*tenant.waiting, *tenant.loading):
        assert ticket.peer.open
        assert ticket.peer in ticket.peer.group.peers
    assert not any(ticket.loading for ticket in tenant.waiting)
    assert all(ticket.loading for ticket in tenant.loading)
    for lease in tenant.leases.values():
        assert lease.group.leases[lease.id] is lease
        assert tenant.groups[lease.group.id] is lease.group
