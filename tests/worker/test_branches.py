"""Branches of a thought: shared pages and blocks, and each as if it were alone."""

import random

import pytest
import torch

import kvtier_client as kv
from kvtier_client.admin import AdminClient
from kvtier_worker.daemon import OwnDaemon
from kvtier_worker.engine import Engine
from kvtier_worker.errors import CannotFork
from kvtier_worker.folds import Tail
from kvtier_worker.sampler import Sampling
from kvtier_worker.scheduler import Limits
from kvtier_worker.sequence import Sequence, State
from kvtier_worker.store import RecomputeStore
from kvtier_worker.swap import DaemonStore
from kvtier_worker.thoughts import Event, Form
from tests.worker.naive import Naive
from tests.worker.test_fold import FOLDING, KEEP, MODEL
from tests.worker.tiny import WAIT_S, lively, random_prompts, tiny_engine, tiny_pool

NEW_TOKENS = 50


def branch_engine(client: kv.Client, pages: int, running: int = 8) -> Engine:
    pool = tiny_pool(MODEL, pages)
    store = DaemonStore(client, pool, MODEL.config.name, WAIT_S)
    return Engine(MODEL, pool, store, Limits(running=running), FOLDING)


def held(daemon: OwnDaemon) -> tuple[int, int]:
    """Sessions and HELD blocks."""
    with AdminClient(daemon.admin_path) as admin:
        tenant = admin.call("stats")["tenants"]["worker"]
    return tenant["sessions"], tenant["held_blocks"]


def decoded_alone(sequence: Sequence) -> list[torch.Tensor]:
    """A sequence's entries, made of its tokens and its history alone."""
    naive = Naive(MODEL)
    full: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    starts = {step.number: step for step in sequence.thoughts.steps}
    events = list(sequence.thoughts.events)

    def change(event: Event) -> None:
        step = starts[event.step]
        if event.form is Form.FOLDED and event.step not in full:
            first = len(naive.entries) - (naive.tokens - step.first)
            whole = naive.fold(first, first + step.tokens, KEEP, Tail())
            full[event.step] = whole, naive.entries[first : first + KEEP]
            return
        whole, summary = full[event.step]
        old, new = (whole, summary) if event.form is Form.FOLDED else (summary, whole)
        first = next(i for i, entry in enumerate(naive.entries) if entry is old[0])
        naive.entries[first : first + len(old)] = new

    for token in sequence.tokens[: sequence.computed_tokens]:
        while events and events[0].at == naive.tokens:
            change(events.pop(0))
        naive.feed(token)
    for event in events:
        change(event)
    return naive.entries


def check_shared_books(engine: Engine, sequences: list[Sequence]) -> None:
    """Every page is free or somebody's; every slot's page is its sequence's."""
    owned = {page for s in sequences for page in s.pages}
    assert len(owned) == engine.pool.pages - engine.pool.free_pages
    for s in engine.scheduler.running:
        assert len(s.kv) == s.computed_tokens - s.thoughts.folded_away()
        assert {slot // 16 for slot in s.kv.slots.tolist()} <= set(s.pages)


class Tree:
    """Random branches of one thought."""

    def __init__(self, client: kv.Client, seed: int) -> None:
        self.choice = random.Random(seed)
        self.engine = branch_engine(client, self.choice.randrange(8, 14))
        prompt = random_prompts(1, seed)[0]
        self.branches = [self.engine.submit(prompt, NEW_TOKENS, lively(seed))]

    @property
    def alive(self) -> list[Sequence]:
        return [s for s in self.branches if s.state is not State.FINISHED]

    def grow(self) -> None:
        for _ in range(self.choice.randrange(1, 12)):
            self.engine.step()
            check_shared_books(self.engine, self.branches)
        for sequence in self.branches:
            if self.choice.random() < 0.5:
                self.engine.wake(sequence)

    def change(self, sequence: Sequence) -> None:
        steps = [s.number for s in sequence.thoughts.steps if s.form is not Form.WHOLE]
        action = self.choice.choice([self.fork, self.fork, self.prune, self.resume, "step", "park"])
        if action == "park":
            self.engine.park(sequence)
        elif action != "step":
            action(sequence)
        elif steps and self.choice.random() < 0.7:
            self.engine.unfold(sequence, self.choice.choice(steps), self.choice.random() < 0.5)
        elif steps:
            self.engine.refold(sequence, self.choice.choice(steps))
        check_shared_books(self.engine, self.branches)

    def fork(self, sequence: Sequence) -> None:
        if len(self.branches) < 7:
            self.branches.append(self.engine.fork(sequence, lively(self.choice.randrange(999))))

    def prune(self, sequence: Sequence) -> None:
        if len(self.alive) > 1 and self.choice.random() < 0.3:
            self.engine.prune(sequence)
            self.branches.remove(sequence)

    def resume(self, sequence: Sequence) -> None:
        self.branches.remove(sequence)
        self.branches.append(self.engine.resume(self.engine.suspend(sequence)))

    def check_one(self) -> None:
        engine = self.engine
        settled = [s for s in engine.scheduler.running if engine.folder.due(s) is None]
        if settled and self.choice.random() < 0.2:
            sequence = self.choice.choice(settled)
            entries = decoded_alone(sequence)
            found = engine.pool.read_entries(sequence.kv.slots)
            assert torch.equal(found, torch.stack(entries, dim=2))


@pytest.mark.parametrize("seed", range(6))
def test_random_trees_are_what_their_branches_are_alone(
    daemon: OwnDaemon, client: kv.Client, seed: int
) -> None:
    tree = Tree(client, seed)
    while tree.alive:
        tree.grow()
        if tree.alive:
            tree.change(tree.choice.choice(tree.alive))
            tree.check_one()
    assert tree.engine.pool.free_pages == tree.engine.pool.pages
    assert held(daemon) == (0, 0)
    assert tree.engine.scheduler.counters.recomputed_tokens == 0


def test_branches_share_pages_and_each_decodes_as_if_alone() -> None:
    engine = tiny_engine(MODEL, 200, folding=FOLDING)
    first = engine.submit(random_prompts(3)[2] * 2, NEW_TOKENS, lively(0))
    while len(first.generated) < 10:
        engine.step()
    used = engine.pool.used_bytes
    branches = [first, *(engine.fork(first, lively(i)) for i in range(1, 5))]
    assert engine.pool.used_bytes == used
    engine.step()
    grown = engine.pool.used_bytes - used
    assert grown <= 2 * len(branches) * engine.pool.page_bytes
    engine.run()
    for branch in branches:
        alone = tiny_engine(MODEL, 200, folding=FOLDING)
        prompt, common = first.tokens[: first.prompt_tokens], 10
        copy = alone.submit(prompt, NEW_TOKENS, first.sampling)
        while len(copy.generated) < common:
            alone.step()
        if branch is not first:
            copy = alone.fork(copy, branch.sampling)
        alone.run()
        assert copy.generated == branch.generated
    assert len({tuple(b.generated) for b in branches}) == len(branches)
    assert engine.pool.free_pages == engine.pool.pages


def test_what_branches_share_is_stored_once(daemon: OwnDaemon, client: kv.Client) -> None:
    engine = branch_engine(client, 60)
    first = engine.submit(list(range(1, 65)), NEW_TOKENS, lively(1))
    engine.step()
    engine.step()
    engine.step()
    branches = [first, *(engine.fork(first, lively(i)) for i in range(2, 6))]
    engine.step()
    for branch in branches:
        engine.park(branch)
    assert engine.pool.free_pages == engine.pool.pages
    shared, own = 64 // 16, len(branches)
    assert held(daemon) == (1, shared + own)
    for branch in branches[:3]:
        engine.prune(branch)
    assert held(daemon) == (1, shared + own - 2)  # the page in which they part stays as well
    for branch in branches[3:]:
        engine.wake(branch)
    engine.run()
    assert held(daemon) == (0, 0)
    assert engine.figures("swap").recomputed_tokens == 0


def test_a_branch_is_resumed_by_its_own_token(daemon: OwnDaemon, client: kv.Client) -> None:
    engine = branch_engine(client, 60)
    first = engine.submit(random_prompts(1)[0], NEW_TOKENS, lively(1))
    while len(first.generated) < 20:
        engine.step()
    other, third = (engine.fork(first, lively(i)) for i in (2, 3))
    tokens = [engine.suspend(other), engine.suspend(first)]
    assert all("." in token for token in tokens)
    engine.run()
    assert third.state is State.FINISHED
    second = branch_engine(client, 60)
    resumed = [second.resume(token) for token in tokens]
    second.run()
    assert held(daemon) == (0, 0)
    for sequence, branch in zip(resumed, (other, first), strict=True):
        assert sequence.tokens[: len(branch.tokens)] == branch.tokens
        assert len(sequence.generated) == NEW_TOKENS
    assert second.figures("swap").recomputed_tokens == 0


def test_a_pruned_branch_frees_its_own_pages_at_once() -> None:
    engine = tiny_engine(MODEL, 60)
    first = engine.submit(list(range(40)), NEW_TOKENS, lively(1))
    engine.step()
    engine.step()
    engine.step()
    other = engine.fork(first, lively(2))
    engine.step()
    before = engine.pool.free_pages
    own = set(other.pages) - set(first.pages)
    engine.prune(other)
    assert engine.pool.free_pages == before + len(own)
    engine.prune(first)
    assert engine.pool.free_pages == engine.pool.pages


def test_a_closed_session_has_no_forks() -> None:
    engine = tiny_engine(MODEL, 60)
    sequence = engine.submit([1, 2, 3], 2, Sampling())
    engine.run()
    with pytest.raises(CannotFork, match="finished"):
        engine.fork(sequence)
    engine.prune(sequence)  # nothing is left to prune
    assert sequence.state is State.FINISHED


def test_no_more_branches_run_than_may() -> None:
    engine = Engine(MODEL, tiny_pool(MODEL, 60), RecomputeStore(), Limits(running=2))
    sequence = engine.submit([1, 2, 3], 20, Sampling())
    engine.step()
    engine.fork(sequence)
    with pytest.raises(CannotFork, match="as many as may"):
        engine.fork(sequence)
