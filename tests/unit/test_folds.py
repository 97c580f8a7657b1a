"""Folded pages: HELD for their grace period whatever happens, and a miss at worst after it."""

import math

import pytest

from kvtier_client import errors, wire
from kvtier_client.wire import CACHED, HELD
from kvtierd.core.blocks import F_HELD
from tests.model.harness import Refused, layout, refused
from tests.unit.core_host import FULL, TOKEN, Fixture, pack, u32


def fold(
    core: Fixture, first: int, pages: int, grace_s: float, *, node: int = 0, **more: int
) -> int:
    done = core.client.do(wire.Fold, core.session, node, first, pages, grace_s, **more)
    return int(done.count)


def unfold(core: Fixture, first: int, pages: int, node: int = 0) -> tuple[list[int], int]:
    """Pages that are gone, and blocks on their way to DRAM."""
    reply = core.client.do(wire.Unfold, core.session, node, first, pages)
    assert isinstance(reply, wire.Unfolded)
    return u32(reply.gone), reply.loading


def held(core: Fixture) -> int:
    """Blocks of the pool that may not be dropped."""
    return core.host.tenant().pools[core.print].held


def folds(core: Fixture, node: int = 0) -> list[tuple[int, int, int, float]]:
    reply = core.client.do(wire.Describe, core.session)
    [info] = [info for info in reply.nodes if info.node == node]
    return [(x.first, x.pages, x.kept, round(x.grace_left_s, 3)) for x in info.folds]


def press(core: Fixture) -> None:
    """Another session takes all the room that it can get: what is CACHED goes for it."""
    rival = core.open(b"another session!")
    for page in range(100):
        try:
            lease = core.client.do(wire.Reserve, core.client.counter(), core.print, 1, wait_s=5.0)
        except Refused as refusal:
            if refusal.code not in (errors.ArenaFull.code, errors.SpillFull.code):
                raise
            return
        names = (pack(0), pack(page), pack(FULL))
        core.client.do(wire.Commit, lease.lease, rival, 0, *names)
    raise AssertionError("there is room without end")


def restart(core: Fixture) -> None:
    """Kill the daemon and start it; the client comes back."""
    core.host.crash()
    core.host.recover()
    core.host.check()
    core.client.hello([])
    core.client.do(wire.ResumeSession, TOKEN)


def counter(core: Fixture, name: str) -> int:
    return core.host.world.counters[name]


# ---------------------------------------------------------------- the promise


def test_a_fold_keeps_its_pages_while_its_grace_period_runs(core: Fixture) -> None:
    values = core.store(list(range(10)))
    assert fold(core, 2, 6, 1000.0) == 6
    press(core)
    assert unfold(core, 2, 6)[0] == []
    assert core.read(0, 10) == values


def test_after_it_they_may_be_dropped_and_an_unfold_says_which(core: Fixture) -> None:
    values = core.store(list(range(10)))
    fold(core, 2, 6, 10.0)
    core.host.tick(9.9)
    assert (held(core), counter(core, "grace_released_blocks")) == (10, 0)
    core.host.tick(0.2)
    assert (held(core), counter(core, "grace_released_blocks")) == (4, 6)
    press(core)
    gone, _ = unfold(core, 2, 6)
    assert gone
    assert gone == list(range(gone[0], 8)), "tails go before heads"
    assert core.read(0, gone[0]) == values[: gone[0]]
    assert core.read(8, 2) == values[8:]
    with refused(errors.InvalidArgument):
        core.acquire(gone[0], 1)
    assert [counter(core, name) for name in ("folds", "unfolds", "unfold_misses")] == [1, 1, 1]


def test_what_an_unfold_has_found_is_kept_from_then_on(core: Fixture) -> None:
    values = core.store(list(range(6)))
    fold(core, 0, 6, 10.0)
    core.host.tick(11.0)
    assert unfold(core, 0, 6)[0] == []
    assert held(core) == 6
    press(core)
    core.host.tick(1000.0)
    assert core.read(0, 6) == values
    assert unfold(core, 0, 6)[0] == []


def test_an_unfold_in_time_ends_the_grace_period(core: Fixture) -> None:
    core.store(list(range(6)))
    fold(core, 0, 6, 10.0)
    core.host.tick(9.0)
    assert unfold(core, 0, 6)[0] == []
    core.host.tick(100.0)
    assert (held(core), folds(core)) == (6, [])
    assert counter(core, "grace_released_blocks") == 0


def test_no_grace_is_cached_at_once_and_one_without_end_stays(core: Fixture) -> None:
    core.store(list(range(6)))
    fold(core, 0, 3, 0.0)
    fold(core, 3, 3, math.inf, kept=4)
    assert held(core) == 3
    core.host.tick(1e9)
    assert held(core) == 3
    assert folds(core) == [(0, 3, 0, 0.0), (3, 3, 4, math.inf)]


def test_room_that_a_fold_makes_goes_to_who_waits_for_it(core: Fixture) -> None:
    core.store(list(range(6)))
    press(core)
    waiting = core.client.send(wire.Reserve, core.client.counter(), core.print, 2, wait_s=60.0)
    assert core.client.answer(waiting) is None
    fold(core, 0, 6, 0.0)
    core.host.settle()
    assert core.client.answer(waiting).lease


def test_the_end_of_a_grace_period_makes_room_for_who_waits(core: Fixture) -> None:
    core.store(list(range(6)))
    fold(core, 0, 6, 1000.0)
    press(core)
    waiting = core.client.send(wire.Reserve, core.client.counter(), core.print, 2, wait_s=200.0)
    core.host.tick(150.0)
    assert core.client.answer(waiting) is None
    core.host.tick(900.0)
    waiting = core.client.send(wire.Reserve, core.client.counter(), core.print, 2, wait_s=60.0)
    core.host.settle()
    assert core.client.answer(waiting).lease


def test_blocks_on_nvme_are_on_their_way_when_they_are_unfolded(core: Fixture) -> None:
    values = core.store(list(range(6)))
    fold(core, 0, 6, 100.0)
    core.evict(6)
    assert set(core.tiers().values()) == {wire.TIER_NVME}
    assert unfold(core, 0, 6) == ([], 6)
    core.host.settle(1)
    assert set(core.tiers().values()) == {wire.TIER_DRAM}
    assert unfold(core, 0, 6) == ([], 0)
    assert core.read(0, 6) == values


def test_a_fold_speaks_of_what_was_stored_when_it_came(core: Fixture) -> None:
    core.store([0, 1, 2])
    fold(core, 0, 6, 10.0)
    core.store([3, 4])
    core.host.tick(11.0)
    assert held(core) == 2
    assert unfold(core, 0, 6)[0] == [5]


def test_all_parts_of_a_session_are_folded_and_found_together(core: Fixture) -> None:
    first, second = core.print, core.register(layout(1, group=1))
    core.session = core.open(b"2" * 16, [first, second])
    core.store([0, 1, 2])
    core.print = second
    core.store([0, 1])
    assert fold(core, 0, 3, 10.0) == 5
    assert unfold(core, 0, 3)[0] == [2], "a page is there when all its parts are"
    core.print = first


# ------------------------------------------------------------------- repeats


def test_the_same_fold_again_keeps_the_time_of_the_first(core: Fixture) -> None:
    core.store(list(range(6)))
    fold(core, 0, 6, 10.0, kept=4)
    core.host.tick(6.0)
    assert fold(core, 0, 6, 10.0, kept=4) == 6
    assert (folds(core), counter(core, "folds")) == ([(0, 6, 4, 4.0)], 1)
    core.host.tick(5.0)
    assert held(core) == 0


def test_another_fold_of_the_same_pages_is_a_new_one(core: Fixture) -> None:
    core.store(list(range(6)))
    fold(core, 0, 6, 10.0)
    core.host.tick(6.0)
    fold(core, 0, 6, 20.0)
    core.host.tick(6.0)
    assert (held(core), folds(core)) == (6, [(0, 6, 0, 14.0)])
    fold(core, 0, 6, 0.0)
    assert held(core) == 0
    fold(core, 0, 6, 0.0)
    assert (held(core), folds(core)) == (0, [(0, 6, 0, 0.0)])
    fold(core, 0, 6, 20.0)
    assert held(core) == 6
    core.host.tick(21.0)
    assert held(core) == 0


def test_a_repeat_takes_in_what_was_stored_since(core: Fixture) -> None:
    core.store([0, 1])
    fold(core, 0, 4, 10.0)
    core.store([2, 3])
    assert fold(core, 0, 4, 10.0) == 4
    core.host.tick(11.0)
    assert held(core) == 0


def test_an_unfold_may_be_repeated_and_of_what_was_never_folded_changes_nothing(
    core: Fixture,
) -> None:
    core.store(list(range(4)))
    assert unfold(core, 0, 4)[0] == []
    assert (counter(core, "unfolds"), core.host.tenant().sessions[core.session].folds) == (0, 0)
    fold(core, 0, 4, 10.0)
    assert [unfold(core, 0, 5)[0] if i > 1 else unfold(core, 0, 4)[0] for i in range(2)] == [[], []]
    assert counter(core, "unfolds") == 1


def test_cached_blocks_that_were_never_folded_can_be_kept_by_an_unfold(core: Fixture) -> None:
    core.store(list(range(4)), retention=CACHED)
    assert unfold(core, 0, 4)[0] == []
    assert held(core) == 4
    restart(core)
    assert held(core) == 4


# ------------------------------------------------------------------ restarts


def test_grace_periods_go_on_over_restarts_and_count_running_time_only(core: Fixture) -> None:
    core.store(list(range(6)))
    fold(core, 0, 6, 10.0, kept=3)
    core.host.tick(6.0)
    core.host.crash()
    core.host.clock.advance(500.0)
    core.host.recover()
    core.client.hello([])
    core.client.do(wire.ResumeSession, TOKEN)
    assert (held(core), folds(core)) == (6, [(0, 6, 3, 4.0)])
    core.host.tick(3.9)
    assert held(core) == 6
    core.host.tick(0.2)
    assert held(core) == 0


def test_running_time_that_a_crash_forgets_makes_the_period_longer(core: Fixture) -> None:
    core.store(list(range(6)))
    core.host.tick(0.1)
    fold(core, 0, 6, 10.0)
    core.host.lose_ops = True
    core.host.tick(8.0)
    core.host.lose_ops = False
    restart(core)
    assert folds(core) == [(0, 6, 0, 10.0)]


@pytest.mark.parametrize("grace_s", [0.0, 10.0])
def test_what_was_let_go_stays_so_over_a_restart(core: Fixture, grace_s: float) -> None:
    core.store(list(range(6)))
    fold(core, 0, 4, grace_s)
    core.evict(3)
    core.host.tick(11.0)
    restart(core)
    assert (held(core), folds(core)) == (2, [(0, 4, 0, 0.0)])
    assert unfold(core, 0, 4)[0] == []
    restart(core)
    assert (held(core), folds(core)) == (6, [])


def test_cached_blocks_that_a_fold_keeps_are_kept_over_a_restart(core: Fixture) -> None:
    core.store(list(range(4)), retention=CACHED)
    fold(core, 0, 4, 100.0)
    assert held(core) == 4
    restart(core)
    assert held(core) == 4
    press(core)
    assert unfold(core, 0, 4)[0] == []


def test_a_later_commit_has_its_own_retention_over_a_restart(core: Fixture) -> None:
    core.store([0, 1])
    fold(core, 0, 4, 5.0)
    core.store([2, 3])
    core.host.tick(6.0)
    restart(core)
    flags = core.host.world.table.flags
    run = core.host.tenant().sessions[core.session].nodes[0].runs[0]
    assert ((flags[run.rows] & F_HELD) != 0).tolist() == [False, False, True, True]


def test_a_repeat_after_a_restart_is_still_a_repeat(core: Fixture) -> None:
    core.store(list(range(6)))
    fold(core, 0, 6, 10.0)
    core.host.tick(6.0)
    restart(core)
    assert fold(core, 0, 6, 10.0) == 6
    assert folds(core) == [(0, 6, 0, 4.0)]


def test_pruned_and_closed_folds_do_not_come_back(core: Fixture) -> None:
    core.client.do(wire.Fork, core.session, 1, 0, 0)
    core.store(list(range(4)), node=1)
    fold(core, 0, 2, 10.0, node=1)
    fold(core, 2, 2, 0.0, node=1)
    core.client.do(wire.Prune, core.session, 1)
    assert core.host.tenant().sessions[core.session].folds == 0
    core.store([0])
    fold(core, 0, 1, 10.0)
    core.host.tick(20.0)
    core.client.do(wire.CloseSession, core.session)
    core.host.crash()
    core.host.recover()
    assert core.host.catalog is not None
    assert core.host.catalog.check() == []
    assert [folded for x in core.host.catalog.load().sessions for folded in x.folds] == []


# --------------------------------------------------------------- the tree


def test_a_branch_may_fold_what_it_shares_but_not_beyond_its_fork(core: Fixture) -> None:
    core.store(list(range(6)))
    core.client.do(wire.Fork, core.session, 1, 0, 4 * FULL)
    core.client.do(wire.Fork, core.session, 2, 1, 5 * FULL + 1)
    assert fold(core, 1, 3, 10.0, node=2) == 3
    assert folds(core) == [(1, 3, 0, 10.0)]
    for first, pages in ((2, 3), (3, 2), (3, 3)):
        with refused(errors.InvalidArgument):
            fold(core, first, pages, 10.0, node=2)
    assert unfold(core, 1, 3, node=1)[0] == []
    assert folds(core) == []


def test_setting_the_retention_of_a_node_ends_its_folds(core: Fixture) -> None:
    core.store(list(range(4)))
    fold(core, 0, 4, 10.0)
    core.client.do(wire.SetRetention, core.session, 0, HELD)
    core.host.tick(11.0)
    assert (held(core), folds(core)) == (4, [])
    restart(core)
    assert (held(core), folds(core)) == (4, [])
    fold(core, 0, 4, 10.0)
    core.client.do(wire.SetRetention, core.session, wire.NO_NODE, CACHED)
    assert unfold(core, 0, 4)[0] == []
    assert held(core) == 4


def test_an_ended_node_is_folded_and_unfolded_like_any_other(core: Fixture) -> None:
    values = core.store(list(range(4)))
    core.client.do(wire.Fork, core.session, 1, 0, 4 * FULL)
    core.client.do(wire.Prune, core.session, 0, False)
    fold(core, 0, 4, 5.0)
    core.host.tick(6.0)
    assert held(core) == 0
    assert unfold(core, 0, 4)[0] == []
    assert core.read(0, 4, node=1) == values
