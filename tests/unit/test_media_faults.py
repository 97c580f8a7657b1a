"""Moves between the tiers that fail: nothing is lost, stuck or used too early."""

import pytest

from kvtier_client import wire
from kvtier_client.wire import TIER_DRAM, TIER_NVME
from kvtierd.core.slabs import CLEARING, FREE
from kvtierd.tiers.spill_io import ClearJob, Status
from tests.unit.core_host import TOKEN, Fixture

TROUBLE = [status for status in Status if status not in (Status.OK, Status.MISMATCH)]


def start_demotion(core: Fixture) -> None:
    core.host.state.evictor.evict(core.host.tenant(), 100)
    core.host.perform()


@pytest.mark.parametrize("status", TROUBLE, ids=lambda status: status.name)
def test_a_demotion_that_fails_leaves_everything_where_it_was(
    core: Fixture, status: Status
) -> None:
    values = core.store(list(range(6)))
    before = core.counts()
    start_demotion(core)
    core.host.finish(0, status)
    core.host.check()
    core.host.settle(2)
    assert set(core.tiers().values()) == {TIER_DRAM}
    assert core.counts()[:6] == before[:6]
    assert core.host.tenant().pools[core.print].nvme.used == 0
    start_demotion(core)
    core.host.finish(0, status, only=2)
    core.host.settle(2)
    assert sorted(core.tiers().values()) == [TIER_DRAM, *[TIER_NVME] * 5]
    core.evict()
    assert set(core.tiers().values()) == {TIER_NVME}
    assert core.read(0, 6) == values


@pytest.mark.parametrize("status", TROUBLE, ids=lambda status: status.name)
def test_a_promotion_that_fails_leaves_everything_where_it_was(
    core: Fixture, status: Status
) -> None:
    values = core.store(list(range(6)))
    core.evict()
    before = core.counts()
    for number in (60, 61):
        request = core.client.send(wire.Acquire, number, core.session, 0, core.print, 0, 6, 30.0)
        core.host.finish(0, status)
        assert isinstance(core.client.answer(request), wire.Error)
        core.host.settle(2)
        assert core.counts() == before
    assert core.read(0, 6) == values


def test_a_slot_whose_header_may_have_been_written_is_cleared_before_it_is_used_again(
    core: Fixture,
) -> None:
    core.store([0, 1], 100)
    pool = core.host.tenant().pools[core.print]
    start_demotion(core)
    core.host.finish(0, Status.UNSURE)
    assert [type(each.job) for each in core.host.disk.pending] == [ClearJob]
    assert (pool.nvme.counts[CLEARING], pool.nvme.counts[FREE]) == (2, 6)
    core.client.do(wire.CloseSession, core.session)
    core.session = core.open()
    [value] = core.store([0], 500)
    core.host.crash()  # the headers of the earlier blocks are still there
    core.host.recover()
    core.host.check()
    core.client.hello([])
    core.client.do(wire.ResumeSession, TOKEN)
    assert core.tiers().keys() == {0}
    assert core.read(0, 1) == [value]


def test_a_clearing_that_fails_is_done_again_and_its_slot_waits(core: Fixture) -> None:
    core.store([0, 1, 2])
    core.evict()
    pool = core.host.tenant().pools[core.print]
    core.client.do(wire.CloseSession, core.session)
    for _ in range(3):
        core.host.finish(0, Status.FAILED)
        assert pool.nvme.counts[CLEARING] == 3
        assert core.host.disk.pending == [], "it is not asked again at once"
        core.host.clock.advance(1.1)
    core.host.settle()
    assert pool.nvme.used == 0
    core.session = core.open()
