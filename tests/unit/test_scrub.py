"""The background scrub: all on NVMe is verified, what is bad is never served, at its own pace."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvtier_client import errors, wire
from kvtier_client.wire import CACHED, HELD, TIER_DRAM, TIER_NVME
from kvtierd.core import scrub
from kvtierd.core.actions import SaveScrub
from kvtierd.core.blocks import NONE
from kvtierd.core.slabs import CLEARING, READY
from kvtierd.oplog import op_of
from kvtierd.tiers.spill_io import ReadJob, Status
from tests.model.disk import PAGE
from tests.model.harness import LIMITS, refused
from tests.unit.core_host import Fixture, Host

BLOCKS = 6
BAD = 0xBAD


@pytest.fixture
def core() -> Iterator[Fixture]:
    core = Fixture(Host())
    yield core
    core.host.settle()
    core.host.check()
    core.host.close()


def store_on_nvme(core: Fixture, retention: int = HELD) -> list[int]:
    values = core.store(list(range(BLOCKS)), 100, retention=retention)
    core.evict()
    assert set(core.tiers().values()) == {TIER_NVME}
    return values


def rows(core: Fixture) -> np.ndarray:
    (node,) = core.host.world.nodes.values()
    return node.runs[0].rows[: node.runs[0].length]


def spoil(core: Fixture, page: int) -> None:
    """The medium changes a block on NVMe."""
    first, _ = core.host.disk.place(int(core.host.world.table.nvme[rows(core)[page]]))
    core.host.disk.pages[first] ^= BAD


def nvme_counts(core: Fixture, state: int) -> int:
    return int(core.host.tenant().pools[core.print].nvme.counts[state])


def begin(core: Fixture) -> None:
    """Start a pass; its first job waits for the disk."""
    assert core.host.state.scrub.start()
    core.host.perform()
    core.host.check()


def run(core: Fixture, status: Status = Status.OK, only: int | None = None) -> scrub.Pass:
    """A whole pass, whose reads end like that."""
    begin(core)
    while core.host.state.scrub.running:
        while core.host.disk.pending:
            core.host.finish(0, status, only)
        core.host.tick(1.0)
    core.host.settle()
    core.host.check()
    return core.host.state.scrub.last


# ------------------------------------------------------------ what a pass finds


def test_a_pass_verifies_every_block_on_nvme_once_and_changes_nothing(core: Fixture) -> None:
    values = store_on_nvme(core)
    other = core.open(b"another session!")
    core.store([0, 1], 200, session=other)  # in DRAM only
    before = core.counts()
    found = run(core)
    assert (found.checked_blocks, found.checked_bytes) == (BLOCKS, BLOCKS * PAGE)
    assert (found.bad_blocks, found.unreadable_blocks, found.lost_blocks) == (0, 0, 0)
    assert core.counts() == before
    assert core.read(0, BLOCKS) == values


def test_a_held_block_that_is_bad_is_lost_and_reported_and_the_others_are_not(
    core: Fixture,
) -> None:
    values = store_on_nvme(core)
    spoil(core, 2)
    found = run(core)
    assert (found.bad_blocks, found.lost_blocks) == (1, 1)
    assert [note.kind for note in core.host.notes] == ["scrub"]
    with refused(errors.BlockLost):
        core.acquire(2, 1)
    assert core.read(0, 2) == values[:2] and core.read(3, 3) == values[3:]
    assert nvme_counts(core, READY) == BLOCKS  # the bad slot says that it is lost
    assert core.host.world.counters["lost_blocks"] == 1
    core.store([2], 300)  # a lost page can be stored again
    core.host.settle()
    assert nvme_counts(core, READY) == BLOCKS - 1
    assert core.read(2, 1) == [302]


def test_a_cached_block_that_is_bad_is_a_miss(core: Fixture) -> None:
    values = store_on_nvme(core, CACHED)
    spoil(core, 4)
    found = run(core)
    assert (found.bad_blocks, found.lost_blocks) == (1, 0)
    with refused(errors.InvalidArgument):
        core.acquire(4, 1)
    assert core.read(0, 4) == values[:4]


@pytest.mark.parametrize("status", [Status.OK, Status.LOST])
def test_a_bad_copy_of_a_block_in_dram_is_dropped_and_written_again_later(
    core: Fixture, status: Status
) -> None:
    values = store_on_nvme(core)
    core.read(0, BLOCKS)  # now in both tiers
    if status is Status.OK:
        spoil(core, 1)
    found = run(core, status, only=1)
    assert found.bad_blocks + found.unreadable_blocks == 1 and found.lost_blocks == 0
    assert core.host.world.table.nvme[rows(core)].tolist().count(NONE) == 1
    assert core.read(0, BLOCKS) == values
    core.evict()
    assert set(core.tiers().values()) == {TIER_NVME}
    assert run(core).bad_blocks == 0
    assert core.read(0, BLOCKS) == values


def test_what_the_medium_could_not_read_is_reported_and_tried_again(core: Fixture) -> None:
    values = store_on_nvme(core)
    found = run(core, Status.LOST, only=3)
    assert (found.bad_blocks, found.unreadable_blocks, found.lost_blocks) == (0, 1, 0)
    assert run(core).unreadable_blocks == 0
    assert core.read(0, BLOCKS) == values


# ------------------------------------------------------------ what happens meanwhile


def test_slots_under_verification_are_neither_freed_nor_given_out(core: Fixture) -> None:
    store_on_nvme(core)
    begin(core)
    core.client.do(wire.CloseSession, core.session)
    core.host.check()
    assert nvme_counts(core, READY) == BLOCKS and nvme_counts(core, CLEARING) == 0
    core.host.finish()  # the verification; only now the slots are cleared
    core.host.check()
    assert nvme_counts(core, CLEARING) == BLOCKS
    core.host.settle()
    assert nvme_counts(core, READY) == nvme_counts(core, CLEARING) == 0
    assert core.host.world.table.used == 0


def test_blocks_dropped_during_their_verification_are_not_reported_lost(core: Fixture) -> None:
    store_on_nvme(core)
    spoil(core, 0)
    begin(core)
    core.client.do(wire.CloseSession, core.session)
    core.host.settle()
    assert core.host.world.counters["lost_blocks"] == 0


def test_a_promotion_during_the_verification_serves_the_block_and_judges_it(
    core: Fixture,
) -> None:
    values = store_on_nvme(core)
    spoil(core, 5)
    begin(core)
    request = core.client.send(
        wire.Acquire, core.client.counter(), core.session, 0, core.print, 0, BLOCKS, wait_s=30.0
    )
    core.host.check()
    core.host.finish(1)  # the promotion ends first, and finds block 5 changed
    core.host.check()
    granted = core.client.answer(request)
    assert granted is not None and len(granted.offsets) == 8 * (BLOCKS - 1)
    core.host.finish(0)
    core.host.check()
    core.client.do(wire.Release, granted.lease)
    assert core.host.world.counters["lost_blocks"] == 1
    assert core.read(0, BLOCKS - 1) == values[:-1]


def test_a_verification_that_ends_during_a_promotion_leaves_the_judgement_to_it(
    core: Fixture,
) -> None:
    store_on_nvme(core)
    begin(core)
    request = core.client.send(
        wire.Acquire, core.client.counter(), core.session, 0, core.print, 0, BLOCKS, wait_s=30.0
    )
    core.host.finish(0, Status.MISMATCH)  # as if memory had been bad for a moment
    core.host.check()
    core.host.finish(0)
    granted = core.client.answer(request)
    assert granted is not None and len(granted.offsets) == 8 * BLOCKS
    core.client.do(wire.Release, granted.lease)


def test_a_block_may_leave_dram_while_its_clean_copy_is_verified(core: Fixture) -> None:
    values = store_on_nvme(core)
    core.read(0, BLOCKS)
    begin(core)
    assert core.host.state.evictor.evict(core.host.tenant(), BLOCKS) == BLOCKS
    core.host.check()
    assert set(core.tiers().values()) == {TIER_NVME}
    core.host.settle()
    assert core.read(0, BLOCKS) == values


def test_a_kill_during_a_pass_loses_nothing(core: Fixture) -> None:
    values = store_on_nvme(core)
    begin(core)
    core.host.crash()
    core.host.recover()
    core.host.check()
    core.client.hello([])
    core.client.do(wire.ResumeSession, b"a session's token"[:16])
    assert core.read(0, BLOCKS) == values


# ------------------------------------------------------------ rate and time


def test_the_rate_is_kept_by_the_clock_of_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "BATCH_BYTES", 2 * PAGE)
    host = Host(limits=replace(LIMITS, scrub_rate_bytes=PAGE))
    core = Fixture(host)
    store_on_nvme(core)
    began_s = host.clock.now_s
    begin(core)
    ends = []
    while host.state.scrub.running:
        while host.disk.pending:
            job = host.disk.pending[0].job
            assert isinstance(job, ReadJob) and len(job.slots) <= 2
            host.finish()
            ends.append(host.clock.now_s - began_s)
        host.tick(0.25)
    assert ends == [0.0, 2.0, 4.0]
    host.close()


def test_one_batch_is_under_way_at_a_time_however_slow_the_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scrub, "BATCH_BYTES", PAGE)
    core = Fixture(Host(limits=replace(LIMITS, scrub_rate_bytes=1 << 40)))
    store_on_nvme(core)
    begin(core)
    for _ in range(10):
        core.host.tick(100.0)
        assert len(core.host.disk.pending) == 1
    core.host.settle(BLOCKS + 1)
    assert core.host.state.scrub.last.checked_blocks == BLOCKS
    core.host.close()


def test_a_pass_begins_by_itself_once_per_interval() -> None:
    host = Host(limits=replace(LIMITS, scrub_interval_s=1000.0))
    core = Fixture(host)
    host.settle()
    assert host.state.scrub.last.number == 1  # nothing says that there ever was one
    for number in (1, 2, 3):
        host.tick(900.0)
        host.settle()
        assert host.state.scrub.last.number == number
        host.tick(100.0)
        host.settle()
    assert sum(type(op) is type(op_of(SaveScrub())) for op in host.ops) == 4
    core.host.close()


def test_never_means_only_when_asked(core: Fixture) -> None:
    store_on_nvme(core)
    for _ in range(5):
        core.host.tick(1e7)
    assert core.host.state.scrub.last.number == 0
    assert run(core).number == 1
    assert core.host.state.scrub.report()["since_pass_s"] is not None


def test_a_pass_that_runs_is_not_begun_again(core: Fixture) -> None:
    store_on_nvme(core)
    begin(core)
    assert not core.host.state.scrub.start()
    core.host.settle()
    assert core.host.state.scrub.last.checked_blocks == BLOCKS


def test_the_bytes_go_to_memory_of_no_tenant(core: Fixture) -> None:
    store_on_nvme(core)
    begin(core)
    job = core.host.disk.pending[0].job
    assert isinstance(job, ReadJob)
    arena = core.host.arenas["a"].payload
    assert not np.shares_memory(job.arena, arena)
    assert set(core.tiers().values()) == {TIER_NVME} != {TIER_DRAM}
    core.host.settle()
