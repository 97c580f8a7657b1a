"""Leases: nobody gets a slot that somebody else may still write or read."""

import numpy as np
import pytest

from kvtier_client import errors, wire
from kvtierd.core.slabs import QUARANTINED, WRITING
from tests.model.harness import refused
from tests.unit.core_host import FULL, Fixture, layout, pack, u64


def states(core: Fixture) -> tuple[int, int]:
    counts = core.host.tenant().pools[core.print].dram.counts
    return counts[WRITING], counts[QUARANTINED]


def test_an_expired_writer_publishes_nothing_and_keeps_its_slots(core: Fixture) -> None:
    lease = core.reserve(3)
    core.host.tick(61.0)
    assert [push.lease for push in core.client.pushes(wire.Revoke)] == [lease.lease]
    assert states(core) == (0, 3)
    with refused(errors.LeaseExpired):
        core.client.do(
            wire.Commit, lease.lease, core.session, 0, pack(0), pack(0), pack(4), wire.HELD
        )
    assert core.tiers() == {}
    core.client.do(wire.Abort, lease.lease)
    assert states(core) == (0, 0)


def test_a_late_writer_never_writes_into_somebody_elses_slot(core: Fixture) -> None:
    late = core.reserve(4)
    core.host.tick(61.0)
    values = core.store(list(range(12)), 700)
    for offset in u64(late.offsets):
        core.client.write(offset, 1, 666)
    assert core.read(0, 12) == values


def test_a_renewed_lease_lives_on(core: Fixture) -> None:
    lease = core.reserve(1)
    for _ in range(3):
        core.host.tick(50.0)
        core.client.do(wire.Renew, lease.lease, 60.0)
    assert states(core) == (1, 0)
    core.host.tick(61.0)
    with refused(errors.LeaseExpired):
        core.client.do(wire.Renew, lease.lease, 60.0)


def test_a_reader_over_time_is_reminded_and_keeps_its_blocks(core: Fixture) -> None:
    values = core.store([0, 1])
    lease = core.acquire(0, 2)
    core.host.tick(61.0)
    assert core.client.pushes(wire.Revoke)
    core.evict()
    core.store(list(range(2, 20)), 900)
    assert [core.client.read(offset, 1) for offset in u64(lease.offsets)] == values
    core.client.do(wire.Release, lease.lease)


def test_a_late_commit_of_what_is_stored_already_gives_its_slots_back(core: Fixture) -> None:
    """It is answered as a repeat, so that its owner never speaks of the lease again."""
    core.store([0, 1])
    lease = core.reserve(3)
    core.host.tick(61.0)
    assert states(core) == (0, 3)
    again = (lease.lease, core.session, 0, pack(0, 1), pack(0, 1), pack(FULL, FULL))
    assert core.client.do(wire.Commit, *again).count == 2
    assert states(core) == (0, 1)
    assert core.client.do(wire.Commit, *again).count == 2
    core.client.do(wire.Abort, lease.lease)
    assert states(core) == (0, 0)


def test_quarantine_is_capped(core: Fixture) -> None:
    for _ in range(2):
        core.reserve(8)
    core.host.tick(61.0)
    before = core.counts()
    with refused(errors.QuotaExceeded):
        core.reserve(1)
    assert core.counts() == before


def test_leases_end_when_the_last_process_of_their_group_is_dead(core: Fixture) -> None:
    second = core.host.spawn(group=core.client.group)
    lease = core.reserve(2)
    core.store([0])
    reading = core.acquire(0, 1)
    core.host.kill(core.client)
    assert states(core) == (2, 0)
    reply = second.do(wire.Release, reading.lease)
    assert reply.count == 1
    core.host.kill(second)
    assert states(core) == (0, 0)
    assert lease.lease not in core.host.tenant().leases


def test_a_dead_process_is_given_nothing_that_it_asked_for_before(core: Fixture) -> None:
    """Its last requests may be read after the news of its death."""
    host, dead = core.host, core.host.spawn()
    most = core.reserve(22)
    waits = dead.send(wire.Reserve, dead.counter(), core.print, 5, wait_s=30.0)
    assert dead.peer is not None
    host.state.process_died(dead.peer.member, host.clock.now_s)
    core.client.do(wire.Abort, most.lease)
    assert dead.answer(waits) is None
    with refused(errors.ConnectionLost):
        dead.do(wire.Reserve, dead.counter(), core.print, 1)
    assert host.tenant().leases == {}
    assert states(core) == (0, 0)


def test_a_closed_connection_keeps_its_leases(core: Fixture) -> None:
    lease = core.reserve(2)
    core.client.disconnect()
    assert states(core) == (2, 0)
    held = [wire.HeldLease(lease.lease, True, lease.offsets)]
    assert core.client.hello(held) == []
    core.client.do(wire.Abort, lease.lease)


def test_a_client_that_says_goodbye_is_granted_nothing_more_and_keeps_what_it_names(
    core: Fixture,
) -> None:
    values = core.store([0, 1])
    write, kept = core.reserve(3), core.reserve(2)
    core.acquire(0, 2)
    other = core.host.spawn(group=core.client.group)
    others = other.do(wire.Reserve, other.counter(), core.print, 1)
    core.reserve(14)
    waits = core.client.send(wire.Reserve, core.client.counter(), core.print, 8, wait_s=30.0)
    assert core.client.do(wire.Goodbye, np.array([kept.lease], "<u8").tobytes()).count == 3
    core.host.settle()
    answer = core.client.answer(waits)
    assert isinstance(answer, wire.Error) and answer.code == errors.ConnectionLost.code
    assert set(core.host.tenant().leases) == {kept.lease, others.lease}
    assert states(core) == (2 + 1, 0)
    with refused(errors.LeaseExpired):
        core.client.do(
            wire.Commit, write.lease, core.session, 0, pack(0), pack(5), pack(4), wire.HELD
        )
    with refused(errors.InvalidArgument):
        core.client.do(wire.Goodbye, b"1234")
    assert core.read(0, 2) == values
    core.client.do(wire.Goodbye)
    assert states(core) == (1, 0)


def test_another_groups_lease_is_not_ones_own(core: Fixture) -> None:
    lease = core.reserve(1)
    core.store([0])
    reading = core.acquire(0, 1)
    thief = core.host.spawn()
    before = core.counts()
    for verb, lease_id in (
        (wire.Abort, lease.lease), (wire.Release, reading.lease), (wire.Abort, reading.lease)
    ):  # fmt: skip
        with refused(errors.NotOwner):
            thief.do(verb, lease_id)
    with refused(errors.NotOwner):
        thief.do(wire.Renew, lease.lease, 1.0)
    assert core.counts() == before


def test_a_group_needs_its_secret(core: Fixture) -> None:
    thief = core.host.spawn()
    thief.disconnect()
    thief.group, thief.member = core.client.group, -1
    with pytest.raises(errors.NotOwner):
        thief.hello([])
    thief.group, thief.secret, thief.member = core.client.group, core.client.secret, 0
    thief.hello([])
    assert thief.member not in (0, core.client.member), "with the secret, a member of its own"


def test_repeats_of_reserve_abort_and_release_get_their_first_result(core: Fixture) -> None:
    counter = core.client.counter()
    first = core.client.do(wire.Reserve, counter, core.print, 3)
    again = core.client.do(wire.Reserve, counter, core.print, 3)
    assert (first.lease, first.offsets) == (again.lease, again.offsets)
    assert states(core) == (3, 0)
    assert [core.client.do(wire.Abort, first.lease).count for _ in range(2)] == [3, 3]
    core.store([0, 1])
    lease = core.acquire(0, 2)
    assert [core.client.do(wire.Release, lease.lease).count for _ in range(2)] == [2, 2]


def test_a_counter_in_use_is_not_taken_for_another_lease(core: Fixture) -> None:
    core.store([0])
    lease = core.acquire(0, 1)
    counter = lease.lease & 0xFFFFFFFF
    before = core.counts()
    with refused(errors.InvalidArgument):
        core.client.do(wire.Reserve, counter, core.print, 1)
    writing = core.client.do(wire.Reserve, 99, core.print, 1)
    with refused(errors.InvalidArgument):
        core.client.do(wire.Acquire, 99, core.session, 0, core.print, 0, 1)
    core.client.do(wire.Abort, writing.lease)
    assert core.counts() == before


def test_the_wrong_verb_ends_no_lease(core: Fixture) -> None:
    core.store([0])
    reading, writing = core.acquire(0, 1), core.reserve(1)
    before = core.counts()
    with refused(errors.InvalidArgument):
        core.client.do(wire.Abort, reading.lease)
    with refused(errors.InvalidArgument):
        core.client.do(wire.Release, writing.lease)
    assert core.counts() == before


def test_two_requests_with_one_counter_that_wait_make_one_lease(core: Fixture) -> None:
    blocker = core.reserve(21)
    asked = [core.client.send(wire.Reserve, 70, core.print, 4, 0, 0, 30.0) for _ in range(2)]
    core.client.do(wire.Abort, blocker.lease)
    first, second = [core.client.answer(request) for request in asked]
    assert (first.lease, first.offsets) == (second.lease, second.offsets)
    assert states(core) == (4, 0)


def test_a_group_that_is_gone_is_forgotten_and_comes_back_new(core: Fixture) -> None:
    core.client.disconnect()
    core.host.tick(31.0)
    assert core.client.group not in core.host.tenant().groups
    core.client.hello([])
    with refused(errors.UnknownSession):
        core.client.do(wire.Describe, core.session)
    core.client.do(wire.ResumeSession, b"a session's toke")


def test_a_member_is_one_process(core: Fixture) -> None:
    """Group and secret do not make a process another one, whose leases it could end."""
    lease = core.reserve(2)
    second = core.host.spawn(group=core.client.group)
    core.host.crash()
    core.host.recover()
    second.member = core.client.member
    second.hello([])
    assert second.member != core.client.member
    assert states(core) == (2, 0), "the first one has not spoken yet"
    assert core.client.hello([wire.HeldLease(lease.lease, True, lease.offsets)]) == []
    core.client.do(wire.Abort, lease.lease)


@pytest.mark.parametrize("retention", [wire.HELD, wire.CACHED])
def test_a_longer_copy_of_a_held_page_is_not_acknowledged_after_its_lease(
    core: Fixture, retention: int
) -> None:
    """It would have been HELD, too, and so it cannot have been dropped since."""
    lease = core.reserve(1)
    core.client.do(wire.Commit, lease.lease, core.session, 0, pack(0), pack(0), pack(2), wire.HELD)
    longer = core.reserve(1)
    core.host.tick(61.0)
    core.client.do(wire.Abort, longer.lease)
    with refused(errors.LeaseExpired):
        core.client.do(
            wire.Commit, longer.lease, core.session, 0, pack(0), pack(0), pack(4), retention
        )


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_page_of_another_part_is_not_what_a_late_commit_wrote(
    core: Fixture, forgotten: bool
) -> None:
    other = core.register(layout(2))
    session = core.open(b"of two parts 123"[:16], [core.print, other])
    core.store([0, 1], session=session)
    lease = core.client.do(wire.Reserve, core.client.counter(), other, 1)
    core.host.tick(61.0)
    if forgotten:
        core.client.do(wire.Abort, lease.lease)
    with refused(errors.LeaseExpired):
        core.client.do(wire.Commit, lease.lease, session, 0, pack(0), pack(1), pack(4), wire.HELD)
