"""A commit that is cut off anywhere: what is published is whole, and the rest is its writer's."""

from typing import Any

import pytest

from kvtier_client import wire
from kvtier_client.wire import HELD, HeldLease
from kvtierd.core.slabs import WRITING
from tests.unit.core_host import FULL, TOKEN, Fixture, pack, u64


class Killed(BaseException):
    """The daemon ends here."""


class LastWords:
    """A publisher during whose work the daemon is killed."""

    def __init__(self, publisher: Any, *, bodies_written: bool) -> None:
        self._publisher, self._bodies_written = publisher, bodies_written

    def __getattr__(self, name: str) -> Any:
        def publish(*args: Any) -> None:
            if self._bodies_written:
                getattr(self._publisher, name)(*args)
            raise Killed

        return publish


def kill_in(core: Fixture, bodies_written: bool, kind: type[wire.Request], *fields: Any) -> None:
    """Send a request in the middle of which the daemon is killed, and start another life."""
    world = core.host.world
    world.publisher = LastWords(world.publisher, bodies_written=bodies_written)  # type: ignore[assignment]
    with pytest.raises(Killed):
        core.client.send(kind, *fields)
    core.host.crash()
    core.host.recover()
    core.host.check()


@pytest.mark.parametrize("bodies_written", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("blocks", [1, 5])
def test_a_daemon_killed_at_any_step_of_a_commit_has_published_all_or_nothing(
    core: Fixture, blocks: int, bodies_written: bool
) -> None:
    core.store(list(range(10)), 900)  # so that slots have bodies of earlier blocks
    core.client.do(wire.CloseSession, core.session)
    core.session = core.open()
    lease = core.reserve(blocks)
    for value, offset in enumerate(u64(lease.offsets), 100):
        core.client.write(offset, 1, value)
    every = pack(*range(blocks))
    commit = (lease.lease, core.session, 0, every, every, pack(*[FULL] * blocks), HELD)
    kill_in(core, bodies_written, wire.Commit, *commit)
    pool = core.host.tenant().pools[core.print]
    assert pool.dram.counts[WRITING] == blocks, "its writer may still be writing"
    assert core.client.hello([HeldLease(lease.lease, True, lease.offsets)]) == []
    core.client.do(wire.ResumeSession, TOKEN)
    assert core.tiers() == {}
    assert core.client.do(wire.Commit, *commit).count == blocks
    assert core.read(0, blocks) == list(range(100, 100 + blocks))


@pytest.mark.parametrize("bodies_written", [False, True], ids=["before", "after"])
def test_a_daemon_killed_while_a_tail_grows_has_the_shorter_or_the_longer_one(
    core: Fixture, bodies_written: bool
) -> None:
    core.store([0, 1], 100, last=2)
    lease = core.reserve(1)
    core.client.write(u64(lease.offsets)[0], 1, 201)
    commit = (lease.lease, core.session, 0, pack(0), pack(1), pack(3), HELD)
    kill_in(core, bodies_written, wire.Commit, *commit)
    assert core.client.hello([HeldLease(lease.lease, True, lease.offsets)]) == []
    core.client.do(wire.ResumeSession, TOKEN)
    assert core.read(0, 2) == [100, 101]
    core.client.do(wire.Commit, *commit)
    assert core.read(0, 2) == [100, 201]


@pytest.mark.parametrize("bodies_written", [False, True], ids=["before", "after"])
def test_a_daemon_killed_while_a_block_comes_back_from_nvme_still_has_it_there(
    core: Fixture, bodies_written: bool
) -> None:
    values = core.store([0, 1, 2])
    core.evict()
    core.client.send(wire.Acquire, 50, core.session, 0, core.print, 0, 3, 30.0)
    world = core.host.world
    world.publisher = LastWords(world.publisher, bodies_written=bodies_written)  # type: ignore[assignment]
    with pytest.raises(Killed):
        core.host.finish()
    core.host.crash()
    core.host.recover()
    core.host.check()
    core.client.hello([])
    core.client.do(wire.ResumeSession, TOKEN)
    assert core.read(0, 3) == values
