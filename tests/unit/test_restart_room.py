"""What a restart finds is counted: its room is not given again, and no capacity is exceeded."""

from collections.abc import Iterator

import pytest

from kvtier_client import errors, wire
from kvtier_client.wire import HELD
from tests.model.harness import LIMITS
from tests.model.limits import with_limits
from tests.unit.core_host import FULL, TOKEN, Fixture, Host, pack


@pytest.fixture
def core() -> Iterator[Fixture]:
    core = Fixture(Host())
    yield core
    core.host.settle()
    core.host.check()
    core.host.close()


@pytest.mark.parametrize("memory_is_gone", [False, True])
def test_what_a_restart_finds_is_counted_and_its_room_is_not_given_again(
    core: Fixture, memory_is_gone: bool
) -> None:
    values = core.store(list(range(12)))
    core.evict()
    before = core.host.tenant().pools[core.print]
    if memory_is_gone:
        core.host.reboot()
        core.host.recover()
        core.client = core.host.spawn()
    else:
        core.host.crash()
        core.host.recover()
        core.client.hello([])
    core.client.do(wire.ResumeSession, TOKEN)
    pool = core.host.tenant().pools[core.print]
    assert (pool.nvme.used, pool.nvme.total, pool.held) == (12, before.nvme.total, 12)
    other = core.open(b"2" * 16)
    for page in range(0, 200, 4):
        asked = core.client.send(wire.Reserve, page + 100, core.print, 4, 0, 0, 3.0)
        core.host.settle(4)
        lease = core.client.answer(asked)
        if isinstance(lease, wire.Error):
            break
        core.client.do(
            wire.Commit, lease.lease, other, 0, pack(0, 1, 2, 3), pack(*range(page, page + 4)),
            pack(*[FULL] * 4), HELD,
        )  # fmt: skip
    assert lease.code == errors.SpillFull.code, "the declared capacity is exceeded"
    assert core.read(0, 12) == values


def test_under_power_no_room_is_made_of_the_only_durable_copy() -> None:
    core = Fixture(Host(limits=with_limits(LIMITS, power=True)))
    values = core.store(list(range(8)))
    core.evict()
    core.acquire(0, 8)  # each has a copy in DRAM again, and stays there
    other = core.open(b"2" * 16)
    for start in range(0, 32, 4):
        core.store(list(range(start, start + 4)), 500, session=other)
        core.evict()
    pool = core.host.tenant().pools[core.print]
    assert pool.nvme_available == 0
    core.host.reboot()
    core.host.recover()
    core.client = core.host.spawn()
    core.client.do(wire.ResumeSession, TOKEN)
    assert core.read(0, 8) == values
    core.host.check()
    core.host.close()
