"""The mover between the core and a spill tier whose queue is bounded."""

from kvtierd.core.slabs import READY
from tests.model.harness import Host
from tests.unit.core_host import Fixture


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
