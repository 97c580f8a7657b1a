"""A prune frees all that nobody names any more, wherever it lies, and leaves nothing behind."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from kvtier_client import wire
from kvtier_client.wire import TIER_DRAM, TIER_NVME
from kvtierd.core.slabs import CLEARING, READY
from tests.unit.core_host import CACHED, Fixture


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def fork(core: Fixture, node: int, parent: int, tokens: int) -> None:
    core.client.do(wire.Fork, core.session, node, parent, tokens)


def prune(core: Fixture, node: int, subtree: bool = True) -> int:
    return core.client.do(wire.Prune, core.session, node, subtree).count  # type: ignore[no-any-return]


def spread(core: Fixture) -> None:
    """A subtree of two nodes with a gap between its pages: some are only on NVMe, some in both
    tiers, some only in DRAM, and some CACHED."""
    fork(core, 1, 0, 0)
    core.store([0, 1, 2], 100, node=1)
    core.evict()
    core.read(2, 1, node=1)
    fork(core, 2, 1, 12)
    core.store([5], 200, node=2)
    core.store([7], 200, node=2, retention=CACHED)
    assert core.tiers(1) == {0: TIER_NVME, 1: TIER_NVME, 2: TIER_DRAM}
    assert core.tiers(2) == {5: TIER_DRAM, 7: TIER_DRAM}


def test_blocks_go_from_every_tier_at_once(core: Fixture) -> None:
    spread(core)
    [pool] = core.host.tenant().pools.values()
    assert prune(core, 1) == 5
    assert pool.dram.counts[READY] == pool.nvme.counts[READY] == pool.held == pool.clean == 0
    assert core.host.world.table.used == 0
    core.host.settle(1)
    assert pool.nvme.counts[CLEARING] == 0


def test_a_close_and_the_end_of_a_continuation_free_as_much(core: Fixture) -> None:
    spread(core)
    fork(core, 3, 1, 4)
    assert prune(core, 2) == 2
    assert prune(core, 1, subtree=False) == 2
    assert core.tiers(1) == {0: TIER_NVME}
    assert core.client.do(wire.CloseSession, core.session).count == 1
    assert core.host.world.table.used == 0


@pytest.mark.usefixtures("no_collections")
def test_the_memory_of_a_pruned_subtrees_rows_waits_for_no_collection(core: Fixture) -> None:
    fork(core, 1, 0, 0)
    fork(core, 2, 1, 8)
    core.store([0, 1], 100, node=1)
    core.store([2, 3], 200, node=2)
    nodes = core.host.tenant().sessions[core.session].nodes
    runs = [weakref.ref(nodes[node].runs[0].rows.base) for node in (1, 2)]
    assert prune(core, 1) == 4
    assert all(run() is None for run in runs)
