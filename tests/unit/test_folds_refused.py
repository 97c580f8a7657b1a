"""Folds that cannot be are refused and change nothing; what folds need is bounded."""

import math

import pytest

from kvtier_client import errors, wire
from kvtier_client.wire import CACHED
from kvtierd.core import retention
from tests.model.harness import LIMITS, refused
from tests.model.limits import with_limits
from tests.unit.core_host import Fixture, Host
from tests.unit.test_folds import fold, folds, held, unfold


@pytest.mark.parametrize(
    ("node", "first", "pages", "grace_s", "kept", "error"),
    [
        (0, 0, 4, -1.0, 0, errors.InvalidArgument),
        (0, 0, 4, math.nan, 0, errors.InvalidArgument),
        (0, 0, 4, -math.inf, 0, errors.InvalidArgument),
        (0, 0, 0, 1.0, 0, errors.InvalidArgument),
        (0, 0, 65, 1.0, 0, errors.InvalidArgument),
        (0, -1, 4, 1.0, 0, errors.InvalidArgument),
        (0, 1 << 32, 4, 1.0, 0, errors.InvalidArgument),
        (0, 0, 4, 1.0, -1, errors.InvalidArgument),
        (0, 0, 4, 1.0, 1 << 32, errors.InvalidArgument),
        (9, 0, 4, 1.0, 0, errors.UnknownBranch),
        (8, 0, 4, 1.0, 0, errors.UnknownBranch),
    ],
)
def test_a_fold_that_makes_no_sense_changes_nothing(
    core: Fixture, node: int, first: int, pages: int, grace_s: float, kept: int,
    error: type[errors.KvtierError],
) -> None:  # fmt: skip
    core.store(list(range(4)))
    core.client.do(wire.Fork, core.session, 8, 0, 0)
    core.client.do(wire.Prune, core.session, 8)
    before = core.counts()
    with refused(error):
        fold(core, first, pages, grace_s, node=node, kept=kept)
    if grace_s == 1.0 and not kept:
        with refused(error):
            unfold(core, first, pages, node)
    assert (core.counts(), folds(core)) == (before, [])


def test_closed_and_foreign_sessions_are_refused(core: Fixture) -> None:
    core.store([0])
    stranger = core.host.spawn()
    for client, session in ((stranger, core.session), (core.client, 12345)):
        with refused(errors.UnknownSession):
            client.do(wire.Fold, session, 0, 0, 1, 1.0)
        with refused(errors.UnknownSession):
            client.do(wire.Unfold, session, 0, 0, 1)
    core.client.do(wire.CloseSession, core.session)
    with refused(errors.UnknownSession):
        fold(core, 0, 1, 1.0)
    with refused(errors.UnknownSession):
        unfold(core, 0, 1)


@pytest.mark.parametrize("other", [(1, 4), (0, 3), (0, 5), (3, 1), (3, 4)])
def test_pages_that_were_folded_together_are_named_together(
    core: Fixture, other: tuple[int, int]
) -> None:
    core.store(list(range(8)))
    fold(core, 0, 4, 10.0)
    fold(core, 6, 2, 10.0)
    with refused(errors.InvalidArgument):
        fold(core, *other, 10.0)
    with refused(errors.InvalidArgument):
        unfold(core, *other)
    fold(core, 4, 2, 10.0)
    assert [first for first, *_ in folds(core)] == [0, 4, 6]


def test_a_grace_period_above_the_daemons_is_refused() -> None:
    core = Fixture(Host(limits=with_limits(LIMITS, fold_grace_max_s=60.0)))
    core.store([0])
    fold(core, 0, 1, 60.0)
    for grace_s in (60.1, math.inf):
        with refused(errors.InvalidArgument):
            fold(core, 0, 1, grace_s)
    core.host.close()


def test_a_session_has_no_more_folds_than_nodes() -> None:
    core = Fixture(Host(limits=with_limits(LIMITS, nodes_per_session=2)))
    core.store(list(range(4)))
    fold(core, 0, 1, 10.0)
    fold(core, 1, 1, 10.0)
    with refused(errors.QuotaExceeded):
        fold(core, 2, 1, 10.0)
    assert held(core) == 4
    unfold(core, 2, 1)
    fold(core, 0, 1, 20.0)
    unfold(core, 1, 1)
    core.host.close()


def test_more_than_fits_is_neither_folded_nor_unfolded_and_nothing_changes() -> None:
    core = Fixture(Host({"a": (1, 1)}, spill_slabs=1))
    core.store(list(range(6)), retention=CACHED)
    core.client.do(wire.Reserve, core.client.counter(), core.print, 0, 12)
    before = core.counts()
    with refused(errors.SpillFull):
        fold(core, 0, 6, 10.0)
    assert (core.counts(), folds(core)) == (before, [])
    fold(core, 0, 6, 0.0)
    with refused(errors.SpillFull):
        unfold(core, 0, 6)
    assert (core.counts(), folds(core)) == (before, [(0, 6, 0, 0.0)])
    core.host.check()
    core.host.close()


# ------------------------------------------------------------- lost blocks


def test_a_folded_block_that_its_medium_lost_is_gone(core: Fixture) -> None:
    core.store(list(range(4)))
    fold(core, 0, 4, 10.0)
    core.evict(4)
    slot = int(core.host.world.table.nvme[core.host.world.nodes[0].runs[0].rows[1]])
    core.host.disk.pages[core.host.disk.place(slot)[0]] = 0
    with refused(errors.BlockLost):
        core.read(0, 4)
    core.host.settle()
    assert unfold(core, 0, 4)[0] == [1]
    fold(core, 0, 4, 10.0)
    core.host.tick(11.0)
    assert core.host.world.table.used == 3, "a lost block that nobody holds is forgotten"
    assert unfold(core, 0, 4)[0] == [1]


# -------------------------------------------------------------------- bounds


def test_folding_and_unfolding_without_end_keeps_no_memory(core: Fixture) -> None:
    core.store([0])
    state = core.host.state.retention
    for i in range(3 * retention.DUE_SPARE):
        fold(core, 0, 1, 1e6 + i)
    assert len(state._due) <= retention.DUE_SPARE + 2
    core.host.tick(2e6)
    for _ in range(len(state._due) // retention.FOLDS_PER_TICK + 1):
        core.host.tick()
    assert (held(core), state._due) == (0, [])


def test_many_grace_periods_that_end_at_once_end_over_several_ticks() -> None:
    n = retention.FOLDS_PER_TICK + 10
    core = Fixture(Host({"a": (n // 8 + 2, 1)}, spill_slabs=1,
                        limits=with_limits(LIMITS, nodes_per_session=n)))  # fmt: skip
    for first in range(0, n, 64):
        core.store(list(range(first, min(first + 64, n))))
    for page in range(n):
        fold(core, page, 1, 10.0)
    core.host.tick(11.0)
    assert held(core) == 10
    core.host.tick(0.1)
    assert held(core) == 0
    core.host.close()
