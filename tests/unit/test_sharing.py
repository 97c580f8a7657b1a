"""Clients beside each other: room, disk and places are shared, and what is stuck stops nobody."""

import threading

import numpy as np
import pytest

from kvtier_client import errors, wire
from kvtier_client.wire import CACHED
from kvtierd.core.groups import GROUP_LINGER_S
from kvtierd.core.leases import MEMBERS_MAX
from kvtierd.fair import Flow
from kvtierd.tiers.pool import UPSIDE_DOWN, Priority, WorkPool
from kvtierd.tiers.spill_io import ClearJob, ReadJob
from tests.model.harness import LIMITS, SimClient
from tests.unit.core_host import Fixture, Host, u64

WAIT_S = 30.0


def ask_for(core: Fixture, client: SimClient, blocks: int = 2) -> int:
    """Ask for room and wait; the request's id."""
    return client.send(wire.Reserve, client.counter(), core.print, blocks, wait_s=200.0)


def give_way(core: Fixture, lease: int) -> None:
    core.client.do(wire.Abort, lease)


# ------------------------------------------------------------------ waiting


def test_a_group_that_asks_much_does_not_keep_another_one_waiting(core: Fixture) -> None:
    leases = [core.reserve(2, wait_s=0.0).lease for _ in range(11)]  # nothing is left
    greedy, modest = core.host.spawn(), core.host.spawn()
    for client in (greedy, modest):
        client.do(wire.RegisterLayout, core.layout)
    many = [ask_for(core, greedy) for _ in range(6)]
    one = ask_for(core, modest)
    for lease in leases[:2]:
        give_way(core, lease)
    assert isinstance(greedy.answer(many[0]), wire.Granted)
    assert isinstance(modest.answer(one), wire.Granted)
    assert not any(greedy.answer(each) for each in many[1:])


def test_some_places_to_wait_stay_free_for_those_who_have_none(core: Fixture) -> None:
    for _ in range(11):
        core.reserve(2)
    greedy, modest = core.host.spawn(), core.host.spawn()
    for client in (greedy, modest):
        client.do(wire.RegisterLayout, core.layout)
    asked = [ask_for(core, greedy) for _ in range(LIMITS.waiting_per_tenant)]
    answers = [greedy.answer(each) for each in asked]
    refusals = [each for each in answers if each is not None]
    assert len(refusals) == LIMITS.waiting_per_tenant // 2
    assert {each.code for each in refusals} == {errors.QuotaExceeded.code}
    assert modest.answer(ask_for(core, modest)) is None, "it waits"


def test_who_waits_is_tried_when_room_comes_and_else_at_every_tick(core: Fixture) -> None:
    lease = core.reserve(20)
    other = core.host.spawn()
    other.do(wire.RegisterLayout, core.layout)
    waiting = ask_for(core, other, 8)
    core.client.do(wire.Describe, core.session)
    assert other.answer(waiting) is None
    give_way(core, lease.lease)
    assert isinstance(other.answer(waiting), wire.Granted)


# --------------------------------------------------------------------- disk


def spilled(core: Fixture, pages: list[int]) -> list[int]:
    values = core.store(pages)
    core.evict()
    return values


def reads(core: Fixture) -> list[ReadJob]:
    """The reads that the disk was asked for, in their order."""
    return [each.job for each in core.host.disk.pending if isinstance(each.job, ReadJob)]


def test_a_single_read_does_not_wait_behind_anothers_hundreds() -> None:
    core = Fixture(Host(queue_jobs=1))
    host = core.host
    other = host.spawn(group=core.client.group)
    spilled(core, list(range(12)))
    flows: list[Flow] = []
    for page in range(7, -1, -1):
        core.client.send(
            wire.Acquire, core.client.counter(), core.session, 0, core.print, page, 1, 30.0
        )
    other.send(wire.Acquire, other.counter(), core.session, 0, core.print, 11, 1, 30.0)
    while host.disk.pending:
        flows += [job.flow for job in reads(core)]
        host.finish()
    clients = [client for _, client in flows]
    assert clients.index(other.pid) <= 2
    assert clients.count(core.client.pid) == 8
    host.check()
    host.close()


def test_a_block_fetched_ahead_is_urgent_once_a_request_needs_it() -> None:
    core = Fixture(Host(queue_jobs=1))
    host = core.host
    values = spilled(core, list(range(12)))
    core.client.send(wire.Acquire, core.client.counter(), core.session, 0, core.print, 0, 1, 30.0)
    for ticket, page in ((1, 4), (2, 8)):
        core.client.send(wire.Prefetch, ticket, core.session, 0, core.print, page, 2)
    wanted = core.client.send(
        wire.Acquire, core.client.counter(), core.session, 0, core.print, 8, 1, 30.0
    )
    order = []
    while host.disk.pending:
        [job] = reads(core)
        order.append((job.priority, len(job.slots)))
        host.finish()
    assert order == [(Priority.DEMAND_READ, 1), (Priority.DEMAND_READ, 2), (Priority.PREFETCH, 2)]
    granted = core.client.answer(wanted)
    assert [core.client.read(offset, 1) for offset in u64(granted.offsets)] == values[8:9]
    host.check()
    host.close()


def test_while_nvme_is_stuck_room_is_made_of_cached_blocks(core: Fixture) -> None:
    core.store(list(range(12)), retention=CACHED)
    core.host.state.evictor.evict(core.host.tenant(), 6)  # on their way to a disk without answer
    core.host.perform()
    core.host.world.nvme_stuck = True
    lease = core.client.ask(wire.Reserve, core.client.counter(), core.print, 15, wait_s=60.0)
    assert isinstance(lease, wire.Granted), "it does not wait for the disk"
    assert core.host.disk.pending
    core.host.world.nvme_stuck = False
    core.client.do(wire.Abort, lease.lease)
    core.host.settle()


def test_held_blocks_are_never_dropped_for_a_disk_that_is_stuck(core: Fixture) -> None:
    values = core.store(list(range(20)))
    core.host.state.evictor.evict(core.host.tenant(), 20)
    core.host.perform()
    core.host.world.nvme_stuck = True
    waiting = core.client.send(wire.Reserve, core.client.counter(), core.print, 10, wait_s=200.0)
    core.host.tick()
    assert core.client.answer(waiting) is None
    core.host.world.nvme_stuck = False
    core.host.settle()
    assert isinstance(core.client.answer(waiting), wire.Granted)
    assert core.read(0, 20) == values


# --------------------------------------------------------------- the threads


def test_threads_take_turns_between_clients_and_leave_nothing_behind() -> None:
    pool, begin, order = WorkPool(1, "test"), threading.Event(), list[str]()
    all_done = threading.Event()
    pool.put(Priority.DEMAND_READ, (1, 0), 1.0, [lambda: begin.wait(WAIT_S)])
    pool.put(Priority.BACKGROUND, (1, 0), 1.0, [lambda: order.append("cleared")])
    pool.put(Priority.DEMAND_READ, (1, 1), 1.0, [lambda: order.append("many")] * 100)
    pool.put(Priority.DEMAND_READ, (1, 2), 1.0, [lambda: order.append("one")])
    pool.put(Priority.BACKGROUND, (9, 9), 1.0, [all_done.set])
    begin.set()
    assert all_done.wait(WAIT_S)
    assert pool.close(WAIT_S)
    assert order.index("one") <= 2
    assert order.index("cleared") <= UPSIDE_DOWN, "the least urgent work goes on under load"
    assert order.count("many") == 100


def test_work_without_an_end_is_noticed_and_only_as_long_as_it_lasts() -> None:
    pool, stuck, end = WorkPool(2, "test"), threading.Event(), threading.Event()
    assert pool.stuck_s(1e9) == 0.0

    def hang() -> None:
        stuck.set()
        end.wait(WAIT_S)

    pool.put(Priority.DEMAND_READ, (1, 1), 1.0, [hang])
    assert stuck.wait(WAIT_S)
    now_s = pool._begun_s[0] or pool._begun_s[1]
    assert pool.stuck_s(now_s + 40.0) == pytest.approx(40.0)
    done = threading.Event()
    pool.put(Priority.DEMAND_READ, (1, 1), 1.0, [done.set])  # the other thread gets on
    assert done.wait(WAIT_S)
    end.set()
    assert pool.close(WAIT_S)
    assert pool.stuck_s(now_s + 40.0) == 0.0


# -------------------------------------------------------------------- places


def records(core: Fixture) -> int:
    return len(core.host.arenas["a"].headers.clients())


def test_a_client_that_holds_nothing_leaves_the_table_of_clients(core: Fixture) -> None:
    lease = core.reserve(1)
    core.client.disconnect()
    core.host.tick()
    assert records(core) == 1, "its lease may come back to it"
    core.client.hello([])
    core.client.do(wire.Abort, lease.lease)
    core.client.disconnect()
    core.host.tick()
    assert records(core) == 0
    core.client.hello([])
    assert records(core) == 1
    core.reserve(1)


def test_connections_that_come_and_go_do_not_fill_the_table_of_clients(core: Fixture) -> None:
    visitor = core.host.spawn()
    for _ in range(MEMBERS_MAX + 10):
        visitor.disconnect()
        visitor.member = -1
        visitor.hello([])
    lease = core.reserve(1)
    assert lease.lease >> 32 == core.client.member
    core.client.do(wire.Abort, lease.lease)
    core.host.clock.advance(2 * GROUP_LINGER_S)
    assert core.host.spawn().member >= 0


def test_a_clear_is_work_of_its_tenant(core: Fixture) -> None:
    spilled(core, [0, 1])
    core.client.send(wire.CloseSession, core.session)
    [job] = [each.job for each in core.host.disk.pending]
    assert isinstance(job, ClearJob)
    assert job.flow[0] == core.host.tenant().number
    core.host.settle()
    assert not np.count_nonzero(core.host.world.nvme.words)
