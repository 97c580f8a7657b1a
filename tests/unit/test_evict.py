"""Who leaves DRAM, and that room is made whenever it can be."""

from collections.abc import Iterator

import pytest

from kvtier_client import errors, wire
from kvtier_client.wire import CACHED, HELD, TIER_DRAM, TIER_NVME
from kvtierd.core import evict, victims
from tests.model.harness import LIMITS, layout, refused
from tests.unit.core_host import FULL, Fixture, Host, pack, u32, u64


@pytest.fixture(params=[victims.SCAN_ROWS, 0], ids=["searched anew", "search kept"])
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fixture]:
    monkeypatch.setattr(victims, "SCAN_ROWS", request.param)
    core = Fixture(Host())
    yield core
    core.host.check()
    core.host.close()


def session(core: Fixture, letter: str, **more: int) -> int:
    return core.open(letter.encode() * 16, **more)


def in_dram(core: Fixture, which: int) -> list[int]:
    """Pages of a session's root that are in DRAM."""
    reply = core.client.do(wire.Describe, which)
    info = reply.nodes[0]
    pages = [
        int.from_bytes(info.pages[0][i : i + 4], "little") for i in range(0, len(info.pages[0]), 4)
    ]
    return [page for page, tier in zip(pages, info.tiers[0], strict=True) if tier == TIER_DRAM]


def fill_with_held(core: Fixture) -> tuple[int, wire.Error]:
    """Store HELD pages until one is refused; how many there are, and the refusal."""
    page = 0
    while True:
        counter = core.client.counter()
        asked = core.client.send(wire.Reserve, counter, core.print, 1, 0, 0, 5.0)
        core.host.settle(6)
        reply = core.client.answer(asked)
        if isinstance(reply, wire.Error):
            return page, reply
        core.client.write(u64(reply.offsets)[0], 1, 100 + page)
        core.client.do(
            wire.Commit, reply.lease, core.session, 0, pack(0), pack(page), pack(FULL), HELD
        )
        page += 1


def large_block_on_nvme(core: Fixture, retention: int) -> tuple[bytes, int]:
    """A block of another layout that is on NVMe only; the layout and its session."""
    large = core.register(layout(2, group=1))
    session = core.open(b"l" * 16, [large])
    lease = core.client.do(wire.Reserve, core.client.counter(), large, 1)
    core.client.write(u64(lease.offsets)[0], 2, 777)
    core.client.do(wire.Commit, lease.lease, session, 0, pack(0), pack(0), pack(FULL), retention)
    core.evict()
    return large, session


def test_cached_blocks_leave_before_held_ones(core: Fixture) -> None:
    cached = session(core, "c")
    core.store([0, 1, 2], 100)
    core.store([0, 1, 2], 200, session=cached, retention=CACHED)
    core.evict(3)
    assert in_dram(core, cached) == []
    assert in_dram(core, core.session) == [0, 1, 2]


def test_no_branch_is_so_long_that_it_counts_as_short(core: Fixture) -> None:
    longest, other = session(core, "l"), session(core, "o")
    core.store([0, 1], 100, session=longest)
    core.store([0, 1], 200, session=other)
    nodes = {node.session.sid: node for node in core.host.world.nodes.values()}
    core.host.world.node_table.tokens[nodes[longest].index] = 0xFFFFFFFF
    core.evict(2)
    assert in_dram(core, longest) == [0, 1]
    assert in_dram(core, other) == []


def test_what_is_kept_since_the_last_search_stays(core: Fixture) -> None:
    kept, other = session(core, "k"), session(core, "o")
    core.store([0, 1, 2, 3], 100, session=kept, retention=CACHED)
    core.evict(1)
    core.client.do(wire.SetRetention, kept, 0, HELD)
    core.store([0, 1, 2], 200, session=other, retention=CACHED)
    core.evict(3)
    assert len(in_dram(core, kept)) == 3
    assert in_dram(core, other) == []


def test_blocks_that_are_gone_since_the_last_search_are_not_evicted(core: Fixture) -> None:
    gone = session(core, "g")
    core.store([0, 1, 2, 3], 100, session=gone)
    core.evict(1)
    core.client.do(wire.CloseSession, gone)
    values = core.store([0, 1], 200)
    core.evict(4)
    assert in_dram(core, core.session) == []
    assert core.read(0, 2) == values


def test_cached_blocks_with_a_clean_copy_leave_first(core: Fixture) -> None:
    clean, dirty = session(core, "c"), session(core, "d")
    core.store([0, 1], 100, session=clean, retention=CACHED)
    core.evict(2)
    core.store([0, 1], 200, session=dirty, retention=CACHED)
    assert core.read(0, 2, session=clean) == [100, 101]
    spilled = core.host.world.counters["spilled_blocks"]
    core.evict(2)
    assert (in_dram(core, clean), in_dram(core, dirty)) == ([], [0, 1])
    assert core.host.world.counters["spilled_blocks"] == spilled


@pytest.mark.parametrize("highest", [2, 200, 255])
def test_low_priority_leaves_before_high(core: Fixture, highest: int) -> None:
    low, high = session(core, "l", priority=1), session(core, "h", priority=highest)
    core.store([0, 1], 100, session=high)
    core.store([0, 1], 200, session=low)
    core.evict(2)
    assert (in_dram(core, low), in_dram(core, high)) == ([], [0, 1])
    core.client.do(wire.SetPriority, low, 255)


def test_long_decodes_are_protected(core: Fixture) -> None:
    short = session(core, "s")
    core.store(list(range(12)), 100)
    core.host.tick(5.0)
    core.store([0, 1], 300, session=short)
    core.evict(2)
    assert in_dram(core, short) == []
    assert len(in_dram(core, core.session)) == 12


def test_tails_leave_before_heads(core: Fixture) -> None:
    core.store(list(range(6)), 100)
    core.evict(4)
    assert in_dram(core, core.session) == [0, 1]


def test_tails_leave_before_heads_also_when_heads_are_older(core: Fixture) -> None:
    for page in range(6):
        core.store([page], 100, retention=CACHED)
        core.host.tick(10.0)
    core.evict(4)
    assert in_dram(core, core.session) == [0, 1]


def test_a_parents_pages_stay_longer_than_its_childrens(core: Fixture) -> None:
    core.store([0, 1], 100, retention=CACHED)
    core.client.do(wire.Fork, core.session, 1, 0, 8)
    core.host.tick(10.0)
    core.store([2, 3], 200, node=1, retention=CACHED)
    core.evict(2)
    assert in_dram(core, core.session) == [0, 1]


def stored(core: Fixture, which: int, node: int = 0) -> list[int]:
    """Pages of a node, wherever they are."""
    reply = core.client.do(wire.Describe, which)
    [info] = [info for info in reply.nodes if info.node == node]
    return u32(info.pages[0])


def fill_nvme(core: Fixture, pages: int) -> Iterator[None]:
    """Take the room of NVMe step by step with HELD blocks, until all CACHED ones are gone."""
    for start in range(0, pages, 2):
        core.store([start, start + 1], 900)
        core.evict()
        yield


@pytest.mark.parametrize("slabs", [evict.NVME_SCAN_SLABS, 1])
def test_tails_leave_nvme_before_heads(
    core: Fixture, monkeypatch: pytest.MonkeyPatch, slabs: int
) -> None:
    monkeypatch.setattr(evict, "NVME_SCAN_SLABS", slabs)
    cached = session(core, "c")
    for start in range(0, 20, 5):  # in pieces, so that slots do not have the order of pages
        core.store(list(range(start, start + 5)), 500, session=cached, retention=CACHED)
        core.evict()
    sizes = set()
    for _ in fill_nvme(core, 40):
        pages = stored(core, cached)
        assert pages == list(range(len(pages))), "a tail is there whose head is gone"
        sizes.add(len(pages))
    assert len(sizes) > 4
    assert 0 in sizes


@pytest.mark.parametrize("slabs", [evict.NVME_SCAN_SLABS, 1])
def test_a_forks_pages_leave_nvme_before_those_it_stands_on(
    core: Fixture, monkeypatch: pytest.MonkeyPatch, slabs: int
) -> None:
    monkeypatch.setattr(evict, "NVME_SCAN_SLABS", slabs)
    cached = session(core, "c")
    core.client.do(wire.Fork, cached, 1, 0, 24)
    for node, first in ((0, 0), (1, 6)):
        pages = list(range(first, first + 6))
        core.store(pages, 500, session=cached, node=node, retention=CACHED)
        core.evict()
    for _ in fill_nvme(core, 40):
        parents, childs = stored(core, cached), stored(core, cached, node=1)
        assert childs == list(range(6, 6 + len(childs)))
        assert not childs or parents == list(range(6))
        assert parents == list(range(len(parents)))
    assert parents == []


def test_heads_of_keyed_prefixes_stay_longest_on_nvme(core: Fixture) -> None:
    keys = [bytes([number]) * 16 for number in range(1, 21)]
    for start in range(0, 20, 5):
        some, places = keys[start : start + 5], pack(*range(5))
        lease = core.client.do(
            wire.ReserveKeys, core.client.counter(), core.print, b"".join(some), 30.0
        )
        core.client.do(
            wire.CommitKeys, lease.lease, places, b"".join(some), pack(*range(start, start + 5)),
            pack(*[FULL] * 5),
        )  # fmt: skip
        core.evict()
    for _ in fill_nvme(core, 40):
        hits = [core.client.do(wire.Lookup, [core.print], key).hits[0] for key in keys]
        assert hits == sorted(hits, reverse=True), "a tail is there whose head is gone"
    assert not any(hits)


def test_of_two_prefixes_on_nvme_the_longer_unused_one_goes(core: Fixture) -> None:
    old, new = session(core, "o"), session(core, "n")
    for which in (new, old):
        core.store(list(range(8)), 500, session=which, retention=CACHED)
        core.evict()
    core.host.tick(10.0)
    core.read(7, 1, session=new)
    core.evict()
    fill = fill_nvme(core, 40)
    while len(stored(core, old)) + len(stored(core, new)) == 16:
        next(fill)
    assert len(stored(core, old)) < 8
    assert len(stored(core, new)) == 8


def test_watermarks_move_blocks_in_the_background(core: Fixture) -> None:
    core.store(list(range(20)))
    core.store([20, 21], 100)
    [push] = core.client.pushes(wire.Pressure)[:1]
    assert push.level == 1
    core.host.settle()
    tenant = core.host.tenant()
    assert tenant.used_bytes() <= LIMITS.low_watermark * tenant.arena_bytes()
    assert core.client.pushes(wire.Pressure)[-1].level == 0
    assert core.read(0, 22) == [100 + page for page in range(22)]


def test_a_burst_gets_the_whole_arena_at_once_when_all_of_it_can_go(core: Fixture) -> None:
    for start in range(0, 64, 16):
        core.store(list(range(start, start + 16)), 100, retention=CACHED)
    core.host.settle()
    for _ in range(8):  # with demotions under way, and none of them ending
        lease = core.client.ask(wire.Reserve, core.client.counter(), core.print, 16)
        assert isinstance(lease, wire.Granted), lease
        pages = [200 + core.host.world.seq % 100 + i for i in range(16)]
        core.client.ask(
            wire.Commit, lease.lease, core.session, 0, pack(*range(16)), pack(*pages),
            pack(*[FULL] * 16), CACHED,
        )  # fmt: skip


def test_a_load_makes_room_below_the_watermark(core: Fixture) -> None:
    core.store([0, 1], 100)
    core.evict()
    core.store(list(range(2, 18)), 100)
    core.host.settle()
    lease = core.reserve(6)
    assert not core.host.tenant().pressure
    assert core.read(0, 2) == [100, 101]
    core.client.do(wire.Abort, lease.lease)


def test_a_load_gets_a_slab_from_another_layout_far_below_the_watermark(core: Fixture) -> None:
    small = core.print
    large, other = large_block_on_nvme(core, CACHED)
    sessions = [session(core, chr(65 + number)) for number in range(20)]
    for which in sessions:
        core.store([0], 500, session=which)
    for number, which in enumerate(sessions):
        if number % 8:  # one block stays in each slab
            core.client.do(wire.CloseSession, which)
    core.host.settle(1)
    tenant = core.host.tenant()
    assert tenant.arena.available(tenant.pools[large].dram) == 0
    assert tenant.used_bytes() < 0.2 * tenant.arena_bytes()
    lease = core.client.do(wire.Acquire, 9, other, 0, large, 0, 1, 30.0)
    assert core.client.read(u64(lease.offsets)[0], 2) == 777
    assert small != large
    assert [core.read(0, 1, session=sessions[number]) for number in (0, 8, 16)] == [[500]] * 3


def test_something_can_be_promoted_when_both_tiers_are_full_of_held_blocks(core: Fixture) -> None:
    page, refusal = fill_with_held(core)
    assert refusal.code == errors.SpillFull.code
    total = core.host.tenant().arena.slabs * 8 + core.host.disk.geometry.slabs * 8
    assert page >= total * 0.9
    assert core.read(0, page) == [100 + each for each in range(page)]


def test_held_blocks_of_other_layouts_never_bar_the_way_to_dram(core: Fixture) -> None:
    large, other = large_block_on_nvme(core, HELD)
    page, _ = fill_with_held(core)
    assert page > 2 * 8
    counter = core.client.counter()
    granted = core.client.do(wire.Acquire, counter, other, 0, large, 0, 1)  # and without a wait
    assert core.client.read(u64(granted.offsets)[0], 2) == 777
    core.client.do(wire.Release, granted.lease)
    assert core.read(0, page) == [100 + each for each in range(page)]


def test_what_has_no_way_to_dram_cannot_be_made_held(core: Fixture) -> None:
    _, other = large_block_on_nvme(core, CACHED)
    core.store(list(range(20)), 100)
    with refused(errors.SpillFull):
        core.client.do(wire.SetRetention, other, 0, HELD)
    core.client.do(wire.CloseSession, core.session)
    core.host.settle(1)
    core.client.do(wire.SetRetention, other, 0, HELD)


def test_a_sparse_slab_is_evacuated_for_another_layout(core: Fixture) -> None:
    core.store(list(range(20)), 100)
    large = core.register(layout(2, group=1))
    core.client.do(wire.Reserve, core.client.counter(), large, 3, wait_s=30.0)
    assert core.read(0, 20) == [100 + page for page in range(20)]


def test_another_layouts_cached_blocks_go_at_once_for_one_that_cannot_wait(core: Fixture) -> None:
    core.store(list(range(21)), 100, retention=CACHED)
    large = core.register(layout(2, group=1))
    for _ in range(2):
        core.client.do(wire.Reserve, core.client.counter(), large, 3)


def test_nvme_full_of_cached_blocks_takes_held_ones(core: Fixture) -> None:
    for start in range(0, 60, 12):
        core.store(list(range(start, start + 12)), 100, retention=CACHED)
        core.host.settle(2)
    other = session(core, "h")
    for start in range(0, 36, 12):
        core.store(list(range(start, start + 12)), 500, session=other)
        core.host.settle(2)
    assert core.read(0, 36, session=other) == [500 + page for page in range(36)]


def test_a_failing_disk_loses_nothing_and_the_next_try_works(core: Fixture) -> None:
    from kvtierd.tiers.spill_io import Status

    values = core.store(list(range(6)))
    core.host.state.evictor.evict(core.host.tenant(), 6)
    core.host.perform()
    core.host.finish(0, Status.FULL)
    assert set(core.tiers().values()) == {TIER_DRAM}
    assert core.host.tenant().spill_retry_s > core.host.clock.now_s
    assert core.host.tenant().spill_fails
    core.host.settle(2)
    core.evict()
    assert set(core.tiers().values()) == {TIER_NVME}
    assert not core.host.tenant().spill_fails
    assert core.read(0, 6) == values


def test_a_tenants_quota_bounds_its_share_of_nvme() -> None:
    core = Fixture(Host({"a": (2, 1)}, spill_slabs=4))
    core.store(list(range(14)), 100)
    core.evict()
    with refused(errors.SpillFull):
        core.reserve(12, wait_s=2.0)
    assert core.host.tenant().pools[core.print].nvme.total == 8
    core.host.check()
    core.host.close()
