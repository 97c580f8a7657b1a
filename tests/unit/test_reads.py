"""acquire, prefetch, release: readers see what was committed, and every wait ends."""

import numpy as np
import pytest

from kvtier_client import errors, wire
from kvtier_client.wire import CACHED, TIER_LOST, TIER_NVME
from kvtierd.tiers.spill_io import Status
from tests.model.harness import refused
from tests.unit.core_host import TOKEN, Fixture, Host, pack, u32, u64


def on_nvme(core: Fixture, pages: list[int], value: int = 100, **more: int) -> list[int]:
    values = core.store(pages, value, **more)
    core.evict()
    return values


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"node": 5}, errors.UnknownBranch),
        ({"session": 5}, errors.UnknownSession),
        ({"layout": bytes(16)}, errors.LayoutMismatch),
        ({"first": 3}, errors.InvalidArgument),
        ({"pages": 0}, errors.InvalidArgument),
        ({"pages": 65}, errors.InvalidArgument),
        ({"first": -1}, errors.InvalidArgument),
        ({"wait_s": -1.0}, errors.InvalidArgument),
        ({"ttl_s": 1e9}, errors.InvalidArgument),
        ({"lease": 0}, errors.InvalidArgument),
    ],
)
def test_a_request_that_makes_no_sense_changes_nothing(
    core: Fixture, changed: dict[str, object], error: type[errors.KvtierError]
) -> None:
    core.store([0, 1, 2])
    before = core.counts()
    fields = {
        "lease": 9, "session": core.session, "node": 0, "layout": core.print, "first": 0,
        "pages": 1,
    }  # fmt: skip
    with refused(error):
        core.client.do(wire.Acquire, **(fields | changed))
    assert core.counts() == before


def test_a_window_ends_before_a_hole(core: Fixture) -> None:
    core.store([0, 1, 3])
    assert len(u64(core.acquire(0, 4).offsets)) == 2


def test_blocks_come_back_from_nvme_with_their_bytes(core: Fixture) -> None:
    values = on_nvme(core, list(range(10)))
    assert set(core.tiers().values()) == {TIER_NVME}
    lease = core.acquire(0, 10)
    assert lease.restored == 10
    assert [core.client.read(offset, 1) for offset in u64(lease.offsets)] == values


def test_a_session_larger_than_the_arena_is_read_in_windows(core: Fixture) -> None:
    for start in range(0, 48, 12):
        on_nvme(core, list(range(start, start + 12)))
    assert core.read(0, 48) == [100 + page for page in range(48)]


def test_who_reads_in_order_finds_the_next_pages_on_their_way(core: Fixture) -> None:
    values = on_nvme(core, list(range(12)))
    assert core.read(3, 1) == values[3:4]
    assert {page for page, tier in core.tiers().items() if tier != TIER_NVME} == {3}
    assert core.read(4, 1) == values[4:5]
    core.host.settle()
    assert {page for page, tier in core.tiers().items() if tier != TIER_NVME} == {3, 4, 5, 6}
    assert core.host.world.counters["read_ahead_blocks"] == 2
    assert core.acquire(5, 1).restored == 0


def test_nothing_is_read_ahead_under_pressure(core: Fixture) -> None:
    on_nvme(core, list(range(12)))
    (pool,) = core.host.tenant().pools.values()
    core.reserve(pool.write_room - 1)
    core.read(0, 1)
    core.read(1, 1)
    core.host.settle()
    assert pool.tenant.pressure
    assert core.host.world.counters["read_ahead_blocks"] == 0


def test_a_block_that_came_back_costs_nothing_to_evict_again(core: Fixture) -> None:
    on_nvme(core, [0, 1])
    core.read(0, 2)
    spilled = core.host.world.counters["spilled_blocks"]
    core.evict()
    assert core.host.world.counters["spilled_blocks"] == spilled
    assert core.read(0, 2) == [100, 101]


def test_two_readers_of_half_the_arena_each_both_end(core: Fixture) -> None:
    other = core.open(b"o" * 16)
    on_nvme(core, list(range(20)), 100)
    on_nvme(core, list(range(20)), 200, session=other)
    second = core.host.spawn()
    second.do(wire.ResumeSession, b"o" * 16)
    done: dict[int, list[int]] = {core.session: [], other: []}
    asked: dict[int, int] = {}
    for _ in range(200):
        for client, session in ((core.client, core.session), (second, other)):
            if len(done[session]) == 20:
                continue
            if session not in asked:
                first = len(done[session])
                asked[session] = client.send(
                    wire.Acquire, client.counter(), session, 0, core.print, first, 20 - first, 30.0
                )
            lease = client.answer(asked[session])
            if lease is not None:
                assert isinstance(lease, wire.Granted), lease
                done[session] += [client.read(offset, 1) for offset in u64(lease.offsets)]
                client.do(wire.Release, lease.lease)
                del asked[session]
        if core.host.disk.pending:
            core.host.finish()
        else:
            core.host.tick(0.1)
    assert done == {core.session: [*range(100, 120)], other: [*range(200, 220)]}


def test_a_reader_does_not_wait_behind_a_writer(core: Fixture) -> None:
    on_nvme(core, [0, 1])
    core.reserve(20)
    core.client.send(wire.Reserve, 50, core.print, 20, 0, 0, 60.0)
    lease = core.client.do(wire.Acquire, 51, core.session, 0, core.print, 0, 1, 20.0)
    assert core.client.read(u64(lease.offsets)[0], 1) == 100


def test_a_reader_that_waits_goes_before_a_writer_for_whom_there_is_no_room_yet(
    core: Fixture,
) -> None:
    values = on_nvme(core, [0, 1, 2])
    core.reserve(22)
    reading = core.acquire(0, 2)  # now every slot is written to or read
    writer = core.client.send(wire.Reserve, 50, core.print, 5, 0, 0, 60.0)
    reader = core.client.send(wire.Acquire, 51, core.session, 0, core.print, 2, 1, 60.0)
    assert core.client.answer(reader) is None
    core.client.do(wire.Release, reading.lease)
    core.host.settle(1)
    lease = core.client.answer(reader)
    assert core.client.read(u64(lease.offsets)[0], 1) == values[2]
    assert core.client.answer(writer) is None


def test_changed_bytes_are_never_served(core: Fixture) -> None:
    on_nvme(core, [0, 1, 2])
    row = core.host.tenant().sessions[core.session].nodes[0].runs[0].rows[1]
    first, _ = core.host.disk.place(int(core.host.world.table.nvme[row]))
    core.host.disk.pages[first] ^= np.uint64(1)
    assert len(u64(core.acquire(0, 3).offsets)) == 1
    assert core.tiers()[1] == TIER_LOST
    before = core.counts()
    with refused(errors.BlockLost):
        core.acquire(1, 1)
    assert core.counts() == before
    core.store([1], 500)
    assert core.read(0, 3) == [100, 501, 102]


def test_a_cached_block_whose_bytes_changed_is_a_miss(core: Fixture) -> None:
    on_nvme(core, [0], retention=CACHED)
    core.host.disk.pages[:] ^= np.uint64(1)
    with refused(errors.BlockLost):
        core.acquire(0, 1)
    with refused(errors.InvalidArgument):
        core.acquire(0, 1)
    assert core.host.world.table.used == 0


def test_an_unreadable_disk_is_told_and_asked_again_later(core: Fixture) -> None:
    on_nvme(core, [0])
    asked = core.client.send(wire.Acquire, 9, core.session, 0, core.print, 0, 1, 30.0)
    core.host.finish(0, Status.FAILED)
    assert core.client.answer(asked).code == errors.BlockLost.code
    assert core.read(0, 1) == [100]


def test_a_waiting_reader_learns_that_its_branch_was_pruned(core: Fixture) -> None:
    core.client.do(wire.Fork, core.session, 1, 0, 0)
    on_nvme(core, [0, 1, 2], 200, node=1)
    core.store(list(range(22)), 100)
    leases = [core.acquire(0, 22), core.acquire(0, 2, node=1)]  # all of the arena is read
    asked = core.client.send(wire.Acquire, 50, core.session, 1, core.print, 2, 1, 30.0)
    assert core.client.answer(asked) is None
    core.client.do(wire.Prune, core.session, 1)
    assert core.client.answer(asked).code == errors.UnknownBranch.code
    for lease in leases:
        core.client.do(wire.Release, lease.lease)


def test_a_load_that_nobody_waits_for_any_more_leaves_no_reader(core: Fixture) -> None:
    on_nvme(core, [0, 1])
    core.client.send(wire.Acquire, 9, core.session, 0, core.print, 0, 2, 30.0)
    core.client.disconnect()
    core.host.check()
    core.host.settle()
    assert not core.host.world.table.readers.any()
    core.client.hello([])


def test_a_process_that_dies_while_its_blocks_load_leaves_nothing(core: Fixture) -> None:
    on_nvme(core, [0, 1])
    core.client.send(wire.Acquire, 9, core.session, 0, core.print, 0, 2, 30.0)
    core.host.kill(core.client)
    core.host.settle()
    assert not core.host.world.table.readers.any()
    core.host.check()


def test_a_load_is_given_up_at_its_deadline(core: Fixture) -> None:
    on_nvme(core, [0])
    asked = core.client.send(wire.Acquire, 9, core.session, 0, core.print, 0, 1, 5.0)
    core.host.tick(5.1)
    assert core.client.answer(asked).code == errors.Timeout.code
    core.host.settle()
    assert core.read(0, 1) == [100]


def test_none_of_a_window_is_dropped_to_make_room_for_another_of_it(core: Fixture) -> None:
    on_nvme(core, list(range(6)), retention=CACHED)
    core.store(list(range(6, 28)), retention=CACHED)
    assert len(u64(core.client.ask(wire.Acquire, 59, core.session, 0, core.print, 6, 1).offsets))
    reply = core.client.ask(wire.Acquire, 60, core.session, 0, core.print, 0, 28)
    core.host.settle(1)
    lease = reply or next(m for m in core.client.inbox if isinstance(m, wire.Granted))
    values = [core.client.read(offset, 1) for offset in u64(lease.offsets)]
    assert values == [100 + page for page in range(len(values))]


def test_a_lease_is_not_changed_by_what_becomes_of_its_names(core: Fixture) -> None:
    core.store([0, 1, 2], retention=CACHED)
    lease = core.acquire(0, 3)
    core.client.do(wire.CloseSession, core.session)
    core.client.do(wire.Release, lease.lease)
    assert core.host.world.table.used == 0
    core.session = core.open(TOKEN)


# --------------------------------------------------------------------- prefetch


def prefetch(core: Fixture, ticket: int, count: int, **more: object) -> wire.Done:
    return core.client.do(  # type: ignore[no-any-return]
        wire.Prefetch, ticket, core.session, 0, core.print, 0, count, **more
    )


def test_a_prefetch_brings_blocks_and_says_so(core: Fixture) -> None:
    on_nvme(core, [0, 1, 2])
    assert prefetch(core, 1, 3).count == 3
    core.host.settle(1)
    [push] = core.client.pushes(wire.Ready)
    assert (push.ticket, push.loaded, push.failed) == (1, 3, 0)
    assert core.acquire(0, 3).restored == 0


def test_a_prefetch_takes_no_room_from_demand(core: Fixture) -> None:
    on_nvme(core, list(range(12)))
    lease = core.reserve(20)
    prefetch(core, 1, 12)
    core.host.settle(1)
    assert core.acquire(0, 1).restored == 1
    core.client.do(wire.Abort, lease.lease)


def test_a_prefetch_ends_when_its_branch_is_pruned(core: Fixture) -> None:
    core.client.do(wire.Fork, core.session, 1, 0, 0)
    on_nvme(core, [0, 1], node=1)
    core.client.do(wire.Prefetch, 1, core.session, 1, core.print, 0, 2)
    core.client.do(wire.Prune, core.session, 1)
    [push] = core.client.pushes(wire.Ready)
    assert (push.loaded, push.failed) == (0, 2)
    core.host.settle()
    assert core.host.world.table.used == 0


def test_a_prefetch_that_fails_says_so(core: Fixture) -> None:
    on_nvme(core, [0, 1])
    prefetch(core, 1, 2)
    core.host.finish(0, Status.FAILED)
    [push] = core.client.pushes(wire.Ready)
    assert (push.loaded, push.failed) == (0, 2)


def test_cancel_and_repeat_of_a_prefetch(core: Fixture) -> None:
    on_nvme(core, [0, 1])
    assert [prefetch(core, 1, 2).count for _ in range(2)] == [2, 2]
    assert [core.client.do(wire.Cancel, 1).count for _ in range(2)] == [2, 0]
    core.host.settle()
    assert core.client.pushes(wire.Ready) == []


# ------------------------------------------------------------------------ keyed


def keys(*letters: str) -> bytes:
    return b"".join(letter.encode() * 16 for letter in letters)


def put_keys(core: Fixture, names: bytes, value: int = 700) -> None:
    lease = core.client.do(wire.ReserveKeys, core.client.counter(), core.print, names, 30.0)
    index = u32(lease.index)
    for place, offset in enumerate(u64(lease.offsets)):
        core.client.write(offset, 1, value + index[place])
    chosen = b"".join(names[16 * i : 16 * i + 16] for i in index)
    core.client.do(
        wire.CommitKeys, lease.lease, pack(*range(len(index))), chosen, pack(*index),
        pack(*[4] * len(index)),
    )  # fmt: skip


def get_keys(core: Fixture, names: bytes) -> list[int]:
    lease = core.client.do(wire.AcquireKeys, core.client.counter(), core.print, names, 30.0)
    values = [core.client.read(offset, 1) for offset in u64(lease.offsets)]
    if lease.lease:
        core.client.do(wire.Release, lease.lease)
    return values


def test_only_missing_keys_get_slots_and_the_first_block_stays(core: Fixture) -> None:
    put_keys(core, keys("a", "b"))
    lease = core.client.do(wire.ReserveKeys, 50, core.print, keys("a", "b", "c"))
    assert u32(lease.index) == [2]
    rival = core.client.do(wire.Reserve, 51, core.print, 1)
    core.client.do(wire.CommitKeys, rival.lease, pack(0), keys("a"), pack(0), pack(4))
    assert get_keys(core, keys("a", "b", "c")) == [700, 701]


def test_keys_of_another_tenant_or_layout_are_other_keys() -> None:
    core = Fixture(Host({"a": (2, 2), "b": (2, 2)}, spill_slabs=4))
    put_keys(core, keys("a"))
    stranger = core.host.spawn("b")
    stranger.do(wire.RegisterLayout, core.layout)
    assert stranger.do(wire.Lookup, [core.print], keys("a")).hits == [0]
    assert stranger.do(wire.Remove, core.print, keys("a")).count == 0
    with refused(errors.UnknownSession):
        stranger.do(wire.ResumeSession, TOKEN)
    stranger.do(wire.OpenSession, TOKEN, [core.print])
    with refused(errors.InvalidArgument):
        stranger.do(wire.Acquire, 5, core.session, 0, core.print, 0, 1)
    assert get_keys(core, keys("a")) == [700]
    core.host.close()


def test_looked_up_blocks_stay_while_the_lease_lives_and_no_longer(core: Fixture) -> None:
    put_keys(core, keys("a", "b"))
    pin = core.client.do(wire.Lookup, [core.print], keys("a", "b", "c"), 60)
    assert pin.hits == [2]
    assert core.client.do(wire.Remove, core.print, keys("a", "b")).count == 0
    core.host.tick(61.0)
    assert core.client.do(wire.Remove, core.print, keys("a", "b")).count == 2


def test_lookups_pin_no_more_than_fits_beside_promises() -> None:
    core = Fixture(Host({"a": (1, 1)}, spill_slabs=1))
    names = keys("a", "b", "c", "d", "e", "f")
    put_keys(core, names)
    core.client.do(wire.Reserve, core.client.counter(), core.print, 0, 12)
    pin = core.client.do(wire.Lookup, [core.print], names, 60)
    assert pin.hits[0] <= 3
    core.host.check()
    core.host.close()


def test_held_keys_outlive_pressure_and_go_with_their_session(core: Fixture) -> None:
    put_keys(core, keys("a", "b"))
    assert core.client.do(wire.Hold, core.session, core.print, keys("a", "b")).count == 2
    for start in range(0, 80, 16):
        core.store(list(range(start, start + 16)), retention=CACHED)
        core.host.settle(2)
    assert get_keys(core, keys("a", "b")) == [700, 701]
    assert core.client.do(wire.Remove, core.print, keys("a")).count == 0
    core.client.do(wire.CloseSession, core.session)
    assert core.client.do(wire.Remove, core.print, keys("a", "b")).count == 2


def test_a_held_key_that_is_lost_can_be_stored_again(core: Fixture) -> None:
    put_keys(core, keys("a"))
    core.client.do(wire.Hold, core.session, core.print, keys("a"))
    core.evict()
    core.host.disk.pages[:] ^= np.uint64(1)
    assert get_keys(core, keys("a")) == []
    put_keys(core, keys("a"), 800)
    assert get_keys(core, keys("a")) == [800]
    assert core.client.do(wire.Unhold, core.session, core.print, keys("a")).count == 1


def test_a_key_that_comes_twice_in_a_request_is_refused_where_it_would_be_leased(
    core: Fixture,
) -> None:
    put_keys(core, keys("a"))
    core.evict()
    before = core.counts()
    for verb, fields in (
        (wire.AcquireKeys, {"lease": 70, "layout": core.print}),
        (wire.ReserveKeys, {"lease": 70, "layout": core.print}),
        (wire.Lookup, {"lease": 70, "layouts": [core.print]}),
    ):
        with refused(errors.InvalidArgument):
            core.client.do(verb, keys=keys("a", "a"), **fields)
    assert core.counts() == before
