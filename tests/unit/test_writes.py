"""reserve and commit: all or nothing, once, and never under a wrong name."""

import pytest

from kvtier_client import errors, wire
from kvtier_client.wire import CACHED, HELD
from kvtierd.core.blocks import F_HELD
from tests.model.harness import layout, refused
from tests.unit.core_host import FULL, Fixture, Host, pack, u32, u64


def commit(core: Fixture, lease: wire.Granted, **changed: object) -> wire.Done:
    fields: dict[str, object] = {
        "session": core.session, "node": 0, "index": pack(0, 1), "pages": pack(0, 1),
        "valid": pack(4, 4), "retention": HELD,
    }  # fmt: skip
    return core.client.do(wire.Commit, lease.lease, **(fields | changed))  # type: ignore[no-any-return]


def test_nothing_is_visible_before_its_commit(core: Fixture) -> None:
    core.reserve(2)
    assert core.tiers() == {}
    with refused(errors.InvalidArgument):
        core.acquire(0, 1)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"node": 7}, errors.UnknownBranch),
        ({"session": 99}, errors.UnknownSession),
        ({"retention": 3}, errors.InvalidArgument),
        ({"index": pack(0, 0)}, errors.InvalidArgument),
        ({"index": pack(0, 2)}, errors.InvalidArgument),
        ({"index": pack(0)}, errors.InvalidArgument),
        ({"index": b"", "pages": b"", "valid": b""}, errors.InvalidArgument),
        ({"pages": pack(1, 0)}, errors.InvalidArgument),
        ({"pages": pack(1, 1)}, errors.InvalidArgument),
        ({"valid": pack(4, 0)}, errors.InvalidArgument),
        ({"valid": pack(4, 5)}, errors.InvalidArgument),
        ({"checksums": bytes(16)}, errors.InvalidArgument),
        ({"index": b"abc"}, errors.InvalidArgument),
    ],
)
def test_a_commit_that_makes_no_sense_changes_nothing(
    core: Fixture, changed: dict[str, object], error: type[errors.KvtierError]
) -> None:
    lease = core.reserve(2)
    before = core.counts()
    with refused(error):
        commit(core, lease, **changed)
    assert core.counts() == before
    assert commit(core, lease).count == 2


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"blocks": 0}, errors.InvalidArgument),
        ({"blocks": 65}, errors.InvalidArgument),
        ({"blocks": -1}, errors.InvalidArgument),
        ({"blocks": 1, "ahead": -1}, errors.InvalidArgument),
        ({"blocks": 1, "wait_s": 301.0}, errors.InvalidArgument),
        ({"blocks": 1, "ttl_s": 601.0}, errors.InvalidArgument),
        ({"blocks": 1, "ttl_s": float("nan")}, errors.InvalidArgument),
        ({"blocks": 1, "layout": bytes(16)}, errors.LayoutMismatch),
        ({"blocks": 1, "draw": 12345}, errors.LeaseExpired),
        ({"blocks": 1, "lease": 0}, errors.InvalidArgument),
        ({"blocks": 1, "lease": 2**32}, errors.InvalidArgument),
        ({"blocks": 25}, errors.ArenaFull),
        ({"blocks": 1, "ahead": 1000}, errors.SpillFull),
    ],
)
def test_a_reservation_that_makes_no_sense_changes_nothing(
    core: Fixture, fields: dict[str, object], error: type[errors.KvtierError]
) -> None:
    before = core.counts()
    with refused(error):
        core.client.do(wire.Reserve, **({"lease": 9, "layout": core.print} | fields))
    assert core.counts() == before


def test_a_layout_of_another_session_is_refused(core: Fixture) -> None:
    other = core.register(layout(2, group=1))
    lease = core.client.do(wire.Reserve, 9, other, 2)
    with refused(errors.LayoutMismatch):
        commit(core, lease)


def test_a_repeated_commit_gets_its_first_result(core: Fixture) -> None:
    lease = core.reserve(3)
    assert [commit(core, lease).count for _ in range(2)] == [2, 2]  # the lease goes on
    last = {"index": pack(2), "pages": pack(2), "valid": pack(1)}
    assert [commit(core, lease, **last).count for _ in range(2)] == [1, 1]  # it has ended
    assert core.host.world.counters["committed_blocks"] == 3


def test_a_slot_has_one_name(core: Fixture) -> None:
    lease = core.reserve(3)
    commit(core, lease)
    with refused(errors.InvalidArgument):
        commit(core, lease, pages=pack(5, 6))
    assert set(core.tiers()) == {0, 1}


def test_a_longer_tail_replaces_a_shorter_one(core: Fixture) -> None:
    core.store([0, 1], 100, last=2)
    core.store([1], 200, last=3)
    assert core.read(0, 2) == [100, 201]
    assert u32(core.acquire(1, 1).valid) == [3]


def test_a_shorter_or_equal_copy_changes_nothing_and_costs_nothing(core: Fixture) -> None:
    core.store([0, 1], 100, last=3)
    used = core.host.tenant().used_bytes()
    core.store([1], 200, last=3)
    core.store([1], 300, last=2)
    assert core.read(0, 2) == [100, 101]
    assert core.host.tenant().used_bytes() == used


def test_a_held_copy_replaces_a_cached_one(core: Fixture) -> None:
    core.store([0], 100, retention=CACHED)
    core.store([0], 200, retention=HELD)
    row = int(core.host.tenant().sessions[core.session].nodes[0].runs[0].rows[0])
    assert core.host.world.table.flags[row] & F_HELD
    core.store([1], 300, retention=HELD, last=1)
    core.store([1], 400, retention=CACHED, last=2)
    row = int(core.host.tenant().sessions[core.session].nodes[0].runs[0].rows[1])
    assert core.host.world.table.flags[row] & F_HELD, "HELD is not undone by a commit"


def test_a_batch_is_reserved_as_a_whole_or_not_at_all(core: Fixture) -> None:
    core.reserve(20)
    before = core.counts()
    with refused(errors.ArenaFull):
        core.reserve(3)
    assert core.counts() == before


def test_a_waiting_reservation_is_granted_when_room_comes(core: Fixture) -> None:
    first = core.reserve(20)
    asked = core.client.send(wire.Reserve, 50, core.print, 10, 0, 0, 30.0)
    assert core.client.answer(asked) is None
    core.client.do(wire.Abort, first.lease)
    assert len(u64(core.client.answer(asked).offsets)) == 10


def test_a_waiting_reservation_is_refused_at_its_deadline(core: Fixture) -> None:
    core.reserve(20)
    before = core.counts()
    asked = core.client.send(wire.Reserve, 50, core.print, 10, 0, 0, 5.0)
    core.host.tick(5.1)
    assert core.client.answer(asked).code == errors.ArenaFull.code
    assert core.counts() == before


def test_what_was_promised_can_be_drawn_when_all_else_is_full() -> None:
    core = Fixture(Host(spill_slabs=2))
    promise = core.client.do(wire.Reserve, core.client.counter(), core.print, 0, 10, ttl_s=600.0)
    page = 0
    while True:
        reply = core.client.send(wire.Reserve, core.client.counter(), core.print, 2, 0, 0, 3.0)
        core.host.settle(5)
        lease = core.client.answer(reply)
        if isinstance(lease, wire.Error):
            break
        core.client.do(
            wire.Commit, lease.lease, core.session, 0, pack(0, 1), pack(page, page + 1),
            pack(FULL, FULL), HELD,
        )  # fmt: skip
        page += 2
    for _ in range(5):
        lease = core.client.do(
            wire.Reserve, core.client.counter(), core.print, 2, 0, promise.lease, 30.0
        )
        core.client.do(
            wire.Commit, lease.lease, core.session, 0, pack(0, 1), pack(page, page + 1),
            pack(FULL, FULL), HELD,
        )  # fmt: skip
        page += 2
    assert core.host.tenant().pools[core.print].promised == 0
    core.host.check()
    core.host.close()


def test_two_layouts_cannot_be_promised_the_same_slab() -> None:
    core = Fixture(Host({"a": (1, 1)}, spill_slabs=1))
    core.store(list(range(6)), 100)
    core.evict()  # now the arena's slab is empty and the spill file's is in use
    core.client.do(wire.CloseSession, core.session)
    core.host.settle()  # and now both are empty, but still with the first layout
    large = core.register(layout(2, group=1))
    core.client.do(wire.Reserve, core.client.counter(), large, 0, 3)
    with refused(errors.SpillFull):
        core.client.do(wire.Reserve, core.client.counter(), core.print, 0, 12)
    core.host.check()
    core.host.close()


def test_layouts_without_blocks_take_no_room() -> None:
    core = Fixture(Host({"a": (2, 1)}, spill_slabs=1))
    for number in range(6):
        core.register(layout(1, name=f"idle {number}"))
    core.store(list(range(12)), 100)
    assert core.read(0, 12) == [100 + page for page in range(12)]
    core.host.close()


def test_a_one_way_commit_is_acknowledged_and_its_failure_pushed(core: Fixture) -> None:
    lease = core.reserve(2)
    args = (lease.lease, core.session, 0, pack(0), pack(0), pack(4), HELD)
    assert core.client.ask(wire.Commit, *args, oneway=1) is None
    assert core.client.do(wire.Describe, core.session).acked == 1
    bad = core.client.send(wire.Commit, 99, core.session, 0, pack(0), pack(9), pack(4), HELD, 2)
    [push] = core.client.pushes(wire.Failed)
    assert (push.id, push.code) == (bad, errors.LeaseExpired.code)
    assert core.client.do(wire.Describe, core.session).acked == 2


def test_bytes_that_change_after_an_end_to_end_commit_are_never_served() -> None:
    from tests.model.harness import LIMITS
    from tests.model.limits import with_limits

    core = Fixture(Host(limits=with_limits(LIMITS, end_to_end=True)))
    lease = core.reserve(2)
    sums = (100).to_bytes(8, "little") + (101).to_bytes(8, "little")
    for value, offset in zip((100, 101), u64(lease.offsets), strict=True):
        core.client.write(offset, 1, value)
    commit(core, lease, checksums=sums)
    core.client.write(u64(lease.offsets)[1], 1, 666)
    core.evict()
    assert core.read(0, 1) == [100]
    with refused(errors.BlockLost):
        core.acquire(1, 1)
    assert core.host.world.counters["checksum_mismatches"] == 1
    core.host.check()
    core.host.close()
