"""Whoever is let in finds room: predictions, turns, and how many more run when steps fold.

Nothing is computed here: the scheduler is driven by token counts alone.
"""

from collections.abc import Iterator
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_worker.engine import Engine
from kvtier_worker.folding import FoldPolicy
from kvtier_worker.lengths import LENGTHS_MAX, StepLengths
from kvtier_worker.sampler import Sampling
from kvtier_worker.scheduler import Limits
from kvtier_worker.sequence import Sequence, State
from kvtier_worker.steps import StepRules
from tests.worker.test_scheduler import DictStore
from tests.worker.tiny import tiny_model, tiny_pool

MODEL = tiny_model()
END = 255
PLAIN = 1
PROMPT_TOKENS = 12
LIMITS = Limits(step_rows=64, running=64)


def engine_of(pages: int, longest_step_tokens: int | None = None, fold: bool = True) -> Engine:
    rules = StepRules(delimiters=((END,),))
    folding = FoldPolicy(rules, longest_step_tokens=longest_step_tokens) if fold else None
    pool = tiny_pool(MODEL, pages)
    return Engine(MODEL, pool, DictStore(pool), LIMITS, folding)


def submit(engine: Engine, new_tokens: int) -> Sequence:
    return engine.submit([PLAIN] * PROMPT_TOKENS, new_tokens, Sampling())


def drive(engine: Engine, step_tokens: Iterator[int]) -> Iterator[int]:
    """Run to the end on tokens that end a step after as many as are drawn for it.

    Yields after each step how many sequences got a token in it.
    """
    scheduler = engine.scheduler
    ends: dict[int, int] = {}
    while scheduler.running or scheduler.waiting:
        chunks = scheduler.plan()
        assert chunks, "a step in which nobody gets on"
        grown = 0
        for chunk in chunks:
            sequence = chunk.sequence
            if not chunk.samples:
                scheduler.complete(chunk, None)
                continue
            at = len(sequence.tokens)
            end = ends.setdefault(sequence.id, at + next(step_tokens) - 1)
            if at == end:
                ends[sequence.id] = end + next(step_tokens)
            scheduler.complete(chunk, END if at == end else PLAIN)
            grown += 1
        yield grown


def taken_pages(engine: Engine) -> int:
    return sum(len(sequence.pages) for sequence in engine.scheduler.running)


def always(tokens: int) -> Iterator[int]:
    while True:
        yield tokens


def drawn(seed: int, low: int, high: int) -> Iterator[int]:
    random = Random(seed)
    while True:
        yield random.randint(low, high)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 999), pages=st.integers(14, 40), fold=st.booleans())
def test_somebody_always_gets_on_and_everybody_to_the_end(
    seed: int, pages: int, fold: bool
) -> None:
    engine = engine_of(pages, 40 if fold else None, fold)
    random = Random(seed)
    sequences = [submit(engine, random.randint(5, 120)) for _ in range(12)]
    for _ in drive(engine, drawn(seed, 3, 40)):
        assert engine.pool.free_pages + taken_pages(engine) == engine.pool.pages
    assert all(s.state is State.FINISHED and s.failure is None for s in sequences)
    assert engine.pool.free_pages == engine.pool.pages


def test_nobody_starves_while_others_keep_coming() -> None:
    engine = engine_of(12, fold=False)
    early = [submit(engine, 150) for _ in range(6)]
    steps = drive(engine, always(10))
    for step in range(1500):
        if step % 4 == 0:
            submit(engine, 60)
        next(steps)
    assert all(sequence.state is State.FINISHED for sequence in early)
    assert engine.scheduler.waiting


def test_what_a_sequence_has_generated_counts_like_an_earlier_arrival() -> None:
    engine = engine_of(40, fold=False)
    steps = drive(engine, always(10))
    old = submit(engine, 100)
    for _ in range(30):
        next(steps)
    late, resumed = submit(engine, 100), submit(engine, 100)
    resumed.tokens += [PLAIN] * 70
    assert sorted([late, old, resumed], key=Sequence.rank) == [resumed, old, late]


def running_on_average(fold: bool, pages: int, sessions: int, new_tokens: int) -> float:
    """Sequences that got a token per step, while others waited."""
    engine = engine_of(pages, 64 if fold else None, fold)
    for _ in range(sessions):
        submit(engine, new_tokens)
    counts = [grown for grown in drive(engine, always(64)) if engine.scheduler.waiting]
    return sum(counts) / len(counts)


def test_folding_lets_several_times_as_many_run_in_the_same_pool() -> None:
    pages, new_tokens = 130, 1024
    whole = running_on_average(False, pages, 8, new_tokens)
    folded = running_on_average(True, pages, 48, new_tokens)
    assert folded >= 7 * whole


def test_the_predicted_peak_is_seldom_passed_and_little_is_left_unused() -> None:
    engine = engine_of(130, longest_step_tokens=96)
    sequences = [submit(engine, 512) for _ in range(50)]
    shares = [
        1 - engine.pool.free_pages / engine.pool.pages
        for _ in drive(engine, drawn(7, 32, 96))
        if engine.scheduler.waiting
    ]
    settled = shares[2 * 96 :]  # they enter over the length of a step
    assert sum(settled) / len(settled) > 0.8
    assert engine.scheduler.counters.preemptions < len(sequences)


def test_sequences_enter_one_after_the_other_so_that_they_do_not_fold_together() -> None:
    engine = engine_of(130, 64)
    for _ in range(60):
        submit(engine, 1024)
    steps = drive(engine, always(64))
    entered = [len(engine.scheduler.running) for _ in range(32) if next(steps) >= 0]
    assert entered == sorted(entered)
    assert entered[0] <= 4 < entered[-1]
    assert max(later - earlier for earlier, later in pairwise(entered)) <= 4


def test_without_folds_and_pressure_everybody_enters_at_once() -> None:
    engine = engine_of(400, fold=False)
    for _ in range(20):
        submit(engine, 50)
    engine.scheduler.plan()
    assert len(engine.scheduler.running) == 20


def test_what_is_open_at_some_moment_is_what_the_lengths_say() -> None:
    lengths = StepLengths(None)
    assert not lengths.known
    for tokens in (10, 30) * LENGTHS_MAX:
        lengths.add(tokens)
    assert lengths.mean_tokens == 20
    assert lengths.longest_tokens == 30
    # A step of 30 is open three times as often as one of 10: (10 * 5 + 30 * 15) / 40.
    assert lengths.open_tokens(100, 0.0) == pytest.approx(100 * 12.5)
    assert lengths.open_tokens(1, 9.0) == 30
