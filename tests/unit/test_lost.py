"""What a medium has lost is told until its session lets go of it, in later lives too."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvtier_client import errors, wire
from kvtier_client.wire import CACHED, NO_NODE, TIER_LOST
from kvtierd.core.blocks import NONE
from kvtierd.core.slabs import FREE
from tests.model.harness import LIMITS, refused
from tests.model.limits import with_limits
from tests.unit.core_host import FULL, TOKEN, Fixture, Host, pack, u64

KEYS = [bytes([number]) * 16 for number in range(3)]


@pytest.fixture
def core() -> Iterator[Fixture]:
    core = Fixture(Host())
    yield core
    core.host.settle()
    core.host.check()
    core.host.close()


def restart(core: Fixture) -> None:
    """Kill the daemon while the disk does what it was told, and start it."""
    core.host.settle()
    core.host.check()
    core.host.crash()
    core.host.recover()
    core.host.check()
    core.client.hello([])
    core.client.do(wire.ResumeSession, TOKEN)


def spoil(core: Fixture, page: int, node: int = 0) -> None:
    """The medium changes a block that is only on NVMe."""
    run = core.host.tenant().sessions[core.session].nodes[node].runs[0]
    slot = int(core.host.world.table.nvme[run.rows[page - run.start]])
    core.host.disk.pages[core.host.disk.place(slot)[0]] ^= 0xBAD


def found_by_a_reader(core: Fixture) -> None:
    with refused(errors.BlockLost):
        core.acquire(1, 1)


def found_by_the_scrub(core: Fixture) -> None:
    assert core.host.state.scrub.start()
    core.host.perform()
    core.host.settle()
    assert core.host.state.scrub.last.lost_blocks == 1


@pytest.mark.parametrize("found", [found_by_a_reader, found_by_the_scrub])
def test_a_loss_is_told_in_every_later_life(
    core: Fixture, found: Callable[[Fixture], None]
) -> None:
    core.store([0, 1, 2])
    core.evict()
    spoil(core, 1)
    found(core)
    for _ in range(2):
        restart(core)
        assert core.read(0, 1) + core.read(2, 1) == [100, 102]
        with refused(errors.BlockLost):
            core.acquire(1, 1)
        assert core.tiers()[1] == TIER_LOST


def test_an_ancestors_shorter_copy_does_not_hide_a_loss_after_a_restart(core: Fixture) -> None:
    core.store([0, 1], last=2)
    core.client.do(wire.Fork, core.session, 1, 0, FULL + 2)
    core.store([1], 200, node=1)
    core.evict()
    spoil(core, 1, node=1)
    for _ in range(2):
        with refused(errors.BlockLost):
            core.acquire(1, 1, node=1)
        restart(core)
    assert core.read(0, 2) == [100, 101]


def test_bytes_that_were_changed_in_dram_are_lost_after_a_restart_too() -> None:
    core = Fixture(Host(limits=with_limits(LIMITS, end_to_end=True)))
    lease = core.reserve(2)
    for value, offset in zip((100, 101), u64(lease.offsets), strict=True):
        core.client.write(offset, 1, value)
    sums = np.array([100, 101], "<u8").tobytes()
    core.client.do(
        wire.Commit, lease.lease, core.session, 0, pack(0, 1), pack(0, 1), pack(4, 4),
        checksums=sums,
    )  # fmt: skip
    core.client.write(u64(lease.offsets)[1], 1, 666)
    core.host.state.evictor.evict(core.host.tenant(), 2)
    core.host.perform()
    reading = core.acquire(0, 2)
    core.host.settle()
    core.host.check()  # it is lost, and its reader keeps its slot
    core.client.do(wire.Release, reading.lease)
    core.host.check()
    for _ in range(2):
        assert core.read(0, 1) == [100]
        with refused(errors.BlockLost):
            core.acquire(1, 1)
        restart(core)
    core.host.close()


def test_a_payload_that_is_missing_is_missed_in_the_second_life_too(core: Fixture) -> None:
    core.store([0, 1, 2])
    core.evict()
    core.host.disk.lost_payload = True
    core.host.disk.pages[:] = 0
    restart(core)
    core.host.disk.lost_payload = False  # the file has its size again, and zeros
    for _ in range(2):
        with refused(errors.BlockLost):
            core.acquire(1, 1)
        restart(core)


# ---------------------------------------------------------------------- let go


def lose_page_1(core: Fixture) -> None:
    core.client.do(wire.Fork, core.session, 1, 0, 0)
    core.store([0, 1, 2], node=1)
    core.evict()
    spoil(core, 1, node=1)
    with refused(errors.BlockLost):
        core.acquire(1, 1, node=1)


def prune(core: Fixture) -> None:
    core.client.do(wire.Prune, core.session, 1)


def close(core: Fixture) -> None:
    core.client.do(wire.CloseSession, core.session)


def let_go(core: Fixture) -> None:
    core.client.do(wire.SetRetention, core.session, NO_NODE, CACHED)
    core.client.do(wire.CloseSession, core.session)


@pytest.mark.parametrize("ended", [prune, close, let_go])
def test_a_lost_blocks_slot_is_free_when_nobody_holds_it(
    core: Fixture, ended: Callable[[Fixture], None]
) -> None:
    lose_page_1(core)
    ended(core)
    core.host.settle()
    assert core.host.world.table.used == 0
    pool = core.host.tenant().pools[core.print]
    assert pool.nvme.counts[FREE] == pool.nvme.total
    assert pool.held == 0


def test_a_lost_page_that_is_cached_is_a_miss(core: Fixture) -> None:
    lose_page_1(core)
    core.client.do(wire.SetRetention, core.session, 1, CACHED)
    for _ in range(2):
        with refused(errors.InvalidArgument):
            core.acquire(1, 1, node=1)
        restart(core)


@pytest.mark.parametrize("when", ["at once", "in the next life"])
def test_a_lost_page_that_is_stored_again_is_there(core: Fixture, when: str) -> None:
    lose_page_1(core)
    if when == "in the next life":
        restart(core)
        with refused(errors.BlockLost):
            core.acquire(1, 1, node=1)
    core.store([1], 300, node=1)
    for _ in range(2):
        assert core.read(0, 3, node=1) == [100, 301, 102]
        restart(core)
    core.evict()
    assert core.read(0, 3, node=1) == [100, 301, 102]


def test_a_lost_block_of_a_key_that_is_held_is_a_miss_until_it_is_stored_again(
    core: Fixture,
) -> None:
    client = core.client

    def put(value: int) -> None:
        lease = client.do(wire.ReserveKeys, client.counter(), core.print, KEYS[0])
        client.write(u64(lease.offsets)[0], 1, value)
        client.do(wire.CommitKeys, lease.lease, pack(0), KEYS[0], pack(0), pack(4))

    def get() -> list[int]:
        lease = client.do(wire.AcquireKeys, client.counter(), core.print, KEYS[0], wait_s=30.0)
        values = [client.read(offset, 1) for offset in u64(lease.offsets)]
        if values:
            client.do(wire.Release, lease.lease)
        return values

    put(7)
    client.do(wire.Hold, core.session, core.print, KEYS[0])
    core.evict()
    table = core.host.world.table
    [row] = np.flatnonzero(table.used_mask() & (table.nvme != NONE)).tolist()
    core.host.disk.pages[core.host.disk.place(int(table.nvme[row]))[0]] ^= 0xBAD
    for _ in range(2):
        assert get() == []
        restart(core)
    assert get() == []
    put(8)
    core.host.check()
    for _ in range(2):
        assert get() == [8]
        restart(core)
    assert client.do(wire.Remove, core.print, KEYS[0]).count == 0  # it is held as before
