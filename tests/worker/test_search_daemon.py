"""Searches whose branches go to a real daemon and come back, and of which nothing stays there."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

import kvtier_client as kv
from kvtier_client.admin import AdminClient
from kvtier_worker.daemon import OwnDaemon, sizes_for
from kvtier_worker.engine import Engine
from kvtier_worker.errors import SearchFailed
from kvtier_worker.folding import FoldPolicy
from kvtier_worker.scheduler import Limits
from kvtier_worker.search import Mcts, Outcome
from kvtier_worker.sequence import Sequence
from kvtier_worker.swap import DaemonStore
from kvtier_worker.tiers import TierWatch
from tests.support.daemon import DaemonProcess
from tests.support.wait import until
from tests.worker.searching import (
    LONG,
    MODEL,
    NAMES,
    QUESTION,
    RULES,
    Failing,
    evenness,
    nothing_left,
    strategies,
    undisturbed,
)
from tests.worker.tiny import ROOMY, SHAPE, WAIT_S, tiny_engine, tiny_pool

FOLDING = FoldPolicy(RULES, keep=3)
PAGES = 60


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnDaemon]:
    """Its arena has room for a few blocks only: most of what is parked goes to NVMe."""
    sizes = sizes_for(SHAPE.block_bytes, 0, 64 << 20)
    with OwnDaemon(str(tmp_path_factory.mktemp("daemon")), sizes) as daemon:
        yield daemon


class Unparked(Engine):
    """Keeps in its pool what others park."""

    def park(self, sequence: Sequence) -> None:
        self.pause(sequence)


def engine_on(
    client: kv.Client,
    kind: type[Engine] = Engine,
    pages: int = PAGES,
    folding: FoldPolicy | None = None,
    running: int = 8,
) -> Engine:
    pool = tiny_pool(MODEL, pages)
    store = DaemonStore(client, pool, MODEL.config.name, WAIT_S)
    return kind(MODEL, pool, store, Limits(running=running), folding)


@cache
def folded(name: str) -> Outcome:
    """What a strategy finds with folded steps and all the room that it wants."""
    return strategies()[name].search(tiny_engine(MODEL, 200, folding=FOLDING), QUESTION)


def kept(daemon: OwnDaemon) -> tuple[int, int]:
    """Sessions and HELD blocks."""
    with AdminClient(daemon.admin_path) as admin:
        tenant = admin.call("stats")["tenants"]["worker"]
    return tenant["sessions"], tenant["held_blocks"]


@pytest.mark.parametrize("folding", [None, FOLDING], ids=["whole", "folded"])
def test_a_tree_search_parks_and_wakes_its_branches_and_finds_the_very_same(
    daemon: OwnDaemon, client: kv.Client, folding: FoldPolicy | None
) -> None:
    search = Mcts(evenness, RULES, width=2, visits=8, rollouts=2)
    engine = engine_on(client, folding=folding)
    with AdminClient(daemon.admin_path) as admin:
        watch = TierWatch(admin)
        outcome = search.search(engine, LONG)
        tiers = watch.figures()
    unparked = engine_on(client, Unparked, folding=folding, running=32)
    expected = search.search(unparked, LONG)
    assert outcome.branches == expected.branches and outcome.winner == expected.winner
    assert outcome.figures.parked > 4 and outcome.figures.woken > 4
    figures = engine.figures("search")
    assert figures.swap.swap_ins == outcome.figures.woken
    assert figures.swap.hashes_checked > 0
    assert figures.swap.hashes_wrong == figures.swap.lost == figures.recomputed_tokens == 0
    assert (figures.folding.folds > 0) == (folding is not None)
    assert tiers.spilled_bytes > 0 and tiers.restored_bytes > 0
    assert nothing_left(engine)
    assert kept(daemon) == (0, 0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("folding", [None, FOLDING], ids=["whole", "folded"])
def test_a_small_pool_finds_what_a_large_one_does(
    daemon: OwnDaemon, client: kv.Client, name: str, folding: FoldPolicy | None
) -> None:
    large = strategies()[name].search(engine_on(client, folding=folding), QUESTION)
    small = engine_on(client, pages=5, folding=folding, running=3)
    outcome = strategies()[name].search(small, QUESTION)
    assert outcome.branches == large.branches
    if folding is None:
        assert outcome.branches == undisturbed(name).branches
    assert small.figures("small").swap.swap_ins > 0
    assert small.scheduler.counters.recomputed_tokens == 0
    assert nothing_left(small)
    assert kept(daemon) == (0, 0)


def interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", NAMES)
def test_a_search_that_fails_leaves_nothing_with_the_daemon(
    daemon: OwnDaemon, client: kv.Client, name: str
) -> None:
    for end, verifier in (
        (SearchFailed, Failing(lambda call: True)),
        (KeyboardInterrupt, Failing(lambda call: call == 3, KeyboardInterrupt())),
    ):
        engine = engine_on(client, pages=5, folding=FOLDING, running=3)
        with pytest.raises(end):
            strategies(verifier)[name].search(engine, QUESTION)
        assert nothing_left(engine)
        assert kept(daemon) == (0, 0)


class Interrupted(DaemonStore):
    """Somebody loses patience at the n-th call of `save` or `load`."""

    at = ("save", 1)

    def save(self, sequence: Sequence) -> int:
        self._count_down("save")
        return super().save(sequence)

    def load(self, sequence: Sequence) -> int:
        self._count_down("load")
        return super().load(sequence)

    def _count_down(self, call: str) -> None:
        name, left = self.at
        if call == name:
            self.at = (name, left - 1)
            if left == 1:
                raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["beam", "mcts"])
@pytest.mark.parametrize("call", ["save", "load"])
@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupt_while_a_branch_moves_leaves_nothing_either(
    daemon: OwnDaemon, client: kv.Client, name: str, call: str, at: int
) -> None:
    pool = tiny_pool(MODEL, 5)
    store = Interrupted(client, pool, MODEL.config.name, WAIT_S)
    store.at = (call, at)
    engine = Engine(MODEL, pool, store, Limits(running=3), FOLDING)
    with pytest.raises(KeyboardInterrupt):
        strategies()[name].search(engine, QUESTION)
    assert nothing_left(engine)
    assert kept(daemon) == (0, 0)


@pytest.mark.parametrize("at", [1, 4, 9])
def test_an_interrupt_while_it_computes_leaves_nothing_either(
    daemon: OwnDaemon, client: kv.Client, at: int
) -> None:
    engine = engine_on(client, folding=FOLDING)
    compute: Callable[..., object] = engine.model.forward
    calls = iter(range(1, 100))

    def forward(*arguments: object) -> object:
        return interrupt() if next(calls) == at else compute(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.model, "forward", forward)
        with pytest.raises(KeyboardInterrupt):
            strategies()["mcts"].search(engine, QUESTION)
    assert nothing_left(engine)
    assert kept(daemon) == (0, 0)


def test_what_the_daemon_loses_is_computed_again_and_the_search_finds_the_same(
    tmp_path: Path,
) -> None:
    with OwnDaemon(str(tmp_path), ROOMY) as daemon:
        client = kv.Client(daemon.socket_path, name="test", deadline_s=WAIT_S)
        pool = tiny_pool(MODEL, PAGES)
        engine = Engine(MODEL, pool, DaemonStore(client, pool, MODEL.config.name, wait_s=0.1))

        def killing(call: int) -> bool:
            if call == 2:
                client._core.deadline_s = 0.2
                daemon.kill()
            return False

        outcome = strategies(Failing(killing))["mcts"].search(engine, QUESTION)
        client.close()
    assert [r.generated for r in outcome.branches] == [
        r.generated for r in undisturbed("mcts").branches
    ]
    assert engine.figures("search").recomputed_tokens > 0
    assert nothing_left(engine)


@pytest.mark.parametrize("name", ["beam", "mcts"])
def test_a_search_that_ends_while_the_daemon_is_away_leaves_nothing_with_it_when_it_is_back(
    tmp_path: Path, name: str
) -> None:
    with OwnDaemon(str(tmp_path), ROOMY, memory="holder") as daemon:
        client = kv.Client(daemon.socket_path, name="test", deadline_s=WAIT_S)
        pool = tiny_pool(MODEL, 5)
        store = DaemonStore(client, pool, MODEL.config.name, wait_s=0.1)
        engine = Engine(MODEL, pool, store, Limits(running=3), FOLDING)

        sessions: list[int] = []

        def killing(call: int) -> bool:
            if call == 1:
                sessions.append(kept(daemon)[0])
                client._core.deadline_s = 0.1
                daemon.kill()
            return False

        strategies(Failing(killing))[name].search(engine, QUESTION)
        assert nothing_left(engine) and sessions == [1]
        daemon.start()
        until(lambda: kept(daemon) == (0, 0), "the session that it could not end has ended")
        client.close()


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_more_branches_than_a_session_may_have_nodes_find_the_very_same(
    tmp_path: Path, nodes: int
) -> None:
    daemon = DaemonProcess(tmp_path, limits={"nodes_per_session": nodes})
    try:
        daemon.start()
        with kv.Client(daemon.client_path, name="test", deadline_s=WAIT_S) as client:
            for name, strategy in strategies().items():
                engine = engine_on(client, pages=5, folding=FOLDING, running=3)
                outcome = strategy.search(engine, QUESTION)
                assert outcome.branches == folded(name).branches
                assert engine.figures("narrow").swap.refused > 0
                assert nothing_left(engine)
                tenant = daemon.tenant()
                assert (tenant["sessions"], tenant["held_blocks"]) == (0, 0)
    finally:
        daemon.end()
