"""What one client may ask for has bounds, on every way to it, and nothing counts past its end."""

from collections.abc import Iterator

import numpy as np
import pytest

from kvtier_client import errors, wire
from kvtier_client.wire import HELD
from kvtierd.catalog.rows import SaveLayout
from kvtierd.core.blocks import READERS_END
from kvtierd.core.tree import PAGE_GAP_MAX, PARTS_MAX
from tests.model.harness import LIMITS, refused
from tests.model.limits import with_limits
from tests.unit.core_host import TOKEN, Fixture, Host, pack, u64

KEY = b"k" * 16


@pytest.fixture
def narrow() -> Iterator[Fixture]:
    """Few leases, and few blocks in a request."""
    limits = with_limits(LIMITS, leases_per_group=4, blocks_per_request=4)
    core = Fixture(Host(limits=limits))
    yield core
    core.host.check()
    core.host.close()


def test_a_request_for_too_many_blocks_is_refused_also_where_there_is_room(
    narrow: Fixture,
) -> None:
    narrow.reserve(1)
    with refused(errors.InvalidArgument):
        narrow.reserve(5)
    assert len(u64(narrow.reserve(4).offsets)) == 4


def test_requests_that_wait_for_room_get_no_more_leases_than_a_group_may_have(
    narrow: Fixture,
) -> None:
    full = [narrow.reserve(4) for _ in range(4)]
    other = narrow.host.spawn()
    for counter, blocks in ((1, 4), (2, 2)):  # now there is no room
        other.do(wire.Reserve, counter, narrow.print, blocks)
    waiting = [other.send(wire.Reserve, 3 + n, narrow.print, 4, 0, 0, 100.0) for n in range(4)]
    assert len(narrow.host.tenant().waiting) == 4
    for lease in full:
        narrow.client.do(wire.Abort, lease.lease)
    answers = [other.answer(request) for request in waiting]
    assert [isinstance(one, wire.Granted) for one in answers] == [True] * 2 + [False] * 2
    assert {one.code for one in answers[2:]} == {errors.QuotaExceeded.code}


def test_requests_that_wait_for_nvme_get_no_more_leases_than_a_group_may_have(
    narrow: Fixture,
) -> None:
    narrow.store([0])
    narrow.evict()
    client = narrow.client
    waiting = [
        client.send(
            wire.Acquire, client.counter(), narrow.session, 0, narrow.print, 0, 1, wait_s=100.0
        )
        for _ in range(6)
    ]
    narrow.host.settle()
    answers = [client.answer(request) for request in waiting]
    assert [isinstance(one, wire.Granted) for one in answers] == [True] * 4 + [False] * 2
    assert {one.code for one in answers[4:]} == {errors.QuotaExceeded.code}
    narrow.host.check()
    for one in answers[:4]:
        client.do(wire.Release, one.lease)
    assert not narrow.host.world.table.readers.any()


def test_a_block_that_very_many_sessions_hold_is_kept(core: Fixture) -> None:
    client, table = core.client, core.host.world.table
    lease = client.do(wire.ReserveKeys, client.counter(), core.print, KEY)
    client.do(wire.CommitKeys, lease.lease, pack(0), KEY, pack(0), pack(4))
    client.do(wire.Hold, core.session, core.print, KEY)
    [row] = np.flatnonzero(table.pins)
    table.pins[row] += 0xFFFF - 1  # as many other sessions hold it
    another = core.open(b"another session!")
    client.do(wire.Hold, another, core.print, KEY)
    assert client.do(wire.Remove, core.print, KEY).count == 0
    client.do(wire.Unhold, another, core.print, KEY)
    table.pins[row] -= 0xFFFF - 1
    client.do(wire.Unhold, core.session, core.print, KEY)
    assert client.do(wire.Remove, core.print, KEY).count == 1


@pytest.mark.parametrize("pages", [1, 2])
def test_a_block_that_very_many_read_takes_no_more_readers(core: Fixture, pages: int) -> None:
    core.store([0, 1])
    table = core.host.world.table
    rows = np.flatnonzero(table.used_mask())
    table.readers[rows] = READERS_END
    with refused(errors.QuotaExceeded):
        core.acquire(0, pages)
    assert (table.readers[rows] == READERS_END).all()
    table.readers[rows] = 0
    core.read(0, 2)


def test_a_lookup_asks_for_a_bounded_number_of_layouts(core: Fixture) -> None:
    prints = [core.print] * PARTS_MAX
    assert core.client.do(wire.Lookup, prints, KEY).hits == [0] * PARTS_MAX
    with refused(errors.InvalidArgument):
        core.client.do(wire.Lookup, [*prints, core.print], KEY)


def test_a_branch_ends_where_tokens_cannot_be_counted_any_more() -> None:
    core = Fixture(Host(), tokens=65536)
    lease = core.reserve(20)
    end = (1 << 31) // 65536
    steps = [*range(PAGE_GAP_MAX - 1, end, PAGE_GAP_MAX - 1), end - 1]

    def commit(slots: list[int], pages: list[int]) -> None:
        core.client.do(
            wire.Commit, lease.lease, core.session, 0, pack(*slots), pack(*pages),
            pack(*[65536] * len(pages)), HELD,
        )  # fmt: skip

    for slot, page in enumerate(steps):
        commit([slot], [page])
    before = core.counts()
    for slots, pages in (([18], [end]), ([18, 19], [end, end + 1])):
        with refused(errors.InvalidArgument):
            commit(slots, pages)
    assert core.counts() == before
    core.host.check()
    core.host.crash()
    core.host.recover()
    core.host.check()
    core.host.close()


def test_a_session_that_only_its_headers_know_has_each_layout_once(core: Fixture) -> None:
    values = core.store([0, 1, 2])
    host = core.host
    host.ops = [op for op in host.ops if isinstance(op, SaveLayout)]  # an older catalog
    host.crash()
    host.recover()
    core.client = host.spawn()
    with refused(errors.InvalidArgument):
        core.client.do(wire.OpenSession, TOKEN, [core.print, core.print])
    host.check()
    core.client.do(wire.OpenSession, TOKEN, [core.print])
    assert core.read(0, 3) == values
    core.client.do(wire.CloseSession, core.session)


def test_a_request_with_a_number_below_one_is_answered(core: Fixture) -> None:
    lease = core.reserve(1)
    done = core.client.ask(
        wire.Commit, lease.lease, core.session, 0, pack(0), pack(0), pack(4), HELD, -5
    )
    assert (done.count, done.acked) == (1, 0)
