"""The mover between the core and a spill tier whose queue is bounded."""

from kvtier_client import wire
from kvtierd.core.slabs import READY
from kvtierd.tiers.spill_io import ReadJob
from tests.model.disk import PAGE
from tests.model.harness import LIMITS, Host
from tests.unit.core_host import Fixture, u64


def test_a_move_larger_than_the_whole_queue_goes_alone() -> None:
    core = Fixture(Host())
    host, tenant = core.host, core.host.tenant()
    host.disk.room_bytes = lambda priority: 4096  # type: ignore[method-assign]
    core.store(list(range(8)))
    host.state.evictor.evict(tenant, 8)
    host.perform()
    host.settle()
    assert tenant.pools[core.print].nvme.counts[READY] == 8
    assert host.mover.idle.is_set()
    host.check()
    host.close()


def test_a_large_read_is_not_passed_by_what_is_less_urgent() -> None:
    core = Fixture(Host(limits=LIMITS))
    host, tenant, disk = core.host, core.host.tenant(), core.host.disk
    values = core.store(list(range(6)))
    core.evict()
    core.store(list(range(6, 12)), 100)
    disk.room_bytes = lambda priority: max(0, 2 - len(disk.pending)) * PAGE  # type: ignore[method-assign]
    host.state.evictor.evict(tenant, 1)
    host.perform()
    wanted = core.client.send(
        wire.Acquire, core.client.counter(), core.session, 0, core.print, 0, 6, 30.0
    )
    before = len(disk.pending)
    for _ in range(3):
        host.state.evictor.evict(tenant, 1)  # small, and there is room for it
        host.perform()
    assert len(disk.pending) == before, "what came later waits behind it"
    for _ in range(before):
        host.finish()
    assert isinstance(disk.pending[0].job, ReadJob)
    host.settle()
    granted = core.client.answer(wanted)
    assert [core.client.read(offset, 1) for offset in u64(granted.offsets)] == values
    host.check()
    host.close()
