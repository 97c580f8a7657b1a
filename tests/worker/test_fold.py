"""A folded thought decodes as if its steps had been lists of which a few entries stayed."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_worker.engine import Engine
from kvtier_worker.errors import CannotUnfold, PoolTooSmall, UnsupportedModel
from kvtier_worker.folding import KEEP_MAX, FoldPolicy
from kvtier_worker.folds import AttentionMatching, Tail
from kvtier_worker.sampler import Sampling
from kvtier_worker.scheduler import Limits
from kvtier_worker.sequence import Sequence, State
from kvtier_worker.steps import StepRules
from kvtier_worker.thoughts import Form
from tests.worker.naive import DELIMITERS, decode_folding
from tests.worker.test_scheduler import DictStore, check_books
from tests.worker.tiny import lively, random_prompts, tiny_engine, tiny_model, tiny_pool

MODEL = tiny_model()
KEEP = 3
RULES = StepRules(delimiters=tuple((token,) for token in sorted(DELIMITERS)))
FOLDING = FoldPolicy(RULES, keep=KEEP)
NEW_TOKENS = 90


def submit_all(engine: Engine, count: int = 4) -> list[Sequence]:
    prompts = random_prompts(count)
    return [engine.submit(p, NEW_TOKENS, lively(i)) for i, p in enumerate(prompts)]


def finish(engine: Engine, count: int = 4) -> list[list[int]]:
    sequences = submit_all(engine, count)
    engine.run(on_step=check_books)
    assert all(s.state is State.FINISHED and s.failure is None for s in sequences)
    assert engine.pool.free_pages == engine.pool.pages
    return [s.generated for s in sequences]


@pytest.fixture(scope="module")
def unpressured() -> list[list[int]]:
    return finish(tiny_engine(MODEL, 200, folding=FOLDING))


def test_tokens_steps_and_entries_are_those_of_the_naive_reference() -> None:
    runs = [
        decode_folding(MODEL, prompt, NEW_TOKENS, lively(i), KEEP, Tail())
        for i, prompt in enumerate(random_prompts(4))
    ]
    engine = tiny_engine(MODEL, 200, folding=FOLDING)
    sequences = submit_all(engine)
    compared = 0

    def compare(engine: Engine) -> None:
        nonlocal compared
        for sequence, run in zip(sequences, runs, strict=True):
            settled = engine.folder.due(sequence) is None
            if (
                settled
                and sequence.state is State.RUNNING
                and sequence.computed_tokens in run.entries
            ):
                kv = engine.pool.read_entries(sequence.kv.slots)
                assert torch.equal(kv, run.entries[sequence.computed_tokens])
                compared += 1

    while engine.step():
        compare(engine)
    assert compared > 200
    for sequence, run in zip(sequences, runs, strict=True):
        assert sequence.generated == run.generated
        steps = sequence.thoughts.steps
        assert [(step.first, step.end) for step in steps] == run.steps[: len(steps)]
        assert sum(step.form is Form.FOLDED for step in steps) >= 2


def test_a_fold_frees_the_pages_between_what_stays() -> None:
    engine = tiny_engine(MODEL, 200, folding=FOLDING)
    sequences = submit_all(engine)
    whole = tiny_engine(MODEL, 200)
    submit_all(whole)
    engine.run()
    whole.run()
    assert engine.peak_pool_bytes < whole.peak_pool_bytes
    figures = engine.figures("fold").folding
    assert figures.folds > 4 * len(sequences) / 2
    assert figures.summary_entries == KEEP * figures.folds < figures.folded_tokens
    assert figures.unkept == figures.folds  # there is no daemon to keep them


@settings(max_examples=6, deadline=None)
@given(pages=st.integers(11, 22), step_rows=st.integers(4, 24))
def test_recomputation_folds_again_at_the_same_tokens(
    unpressured: list[list[int]], pages: int, step_rows: int
) -> None:
    limits = Limits(step_rows=step_rows, running=4)
    engine = tiny_engine(MODEL, pages, limits=limits, folding=FOLDING)
    assert finish(engine) == unpressured


def test_pressure_recomputes_and_repeats_folds() -> None:
    engine = tiny_engine(MODEL, 14, folding=FOLDING)
    assert finish(engine, 8) == finish(tiny_engine(MODEL, 200, folding=FOLDING), 8)
    assert engine.scheduler.counters.preemptions > 2
    assert engine.figures("fold").folding.repeated > 0


@pytest.mark.parametrize("unreliable", [None, random.Random(3), random.Random(4)])
def test_saved_folds_come_back_and_lost_ones_are_repeated(
    unpressured: list[list[int]], unreliable: random.Random | None
) -> None:
    pool = tiny_pool(MODEL, 12)
    engine = Engine(MODEL, pool, DictStore(pool, unreliable), folding=FOLDING)
    assert finish(engine) == unpressured
    if unreliable is None:
        assert engine.scheduler.counters.recomputed_tokens == 0


def test_a_prompt_s_steps_are_folded_on_the_way_if_that_is_asked_for() -> None:
    prompt = [1, 2, 3, 12, *range(13, 23), 24, 25, 26]
    kept = FoldPolicy(RULES, keep=KEEP, fold_prompt=True)
    one = tiny_engine(MODEL, 30, folding=kept)
    at_once = one.submit(prompt, 20, Sampling())
    one.step()
    assert [(s.first, s.end) for s in at_once.thoughts.steps] == [(0, 4), (4, 15)]
    assert at_once.computed_tokens == 4  # not past the end of a step that has to fold first
    one.run()
    bits = tiny_engine(MODEL, 30, limits=Limits(step_rows=3, running=1), folding=kept)
    in_chunks = bits.submit(prompt, 20, Sampling())
    bits.run()
    assert at_once.generated == in_chunks.generated
    plain = tiny_engine(MODEL, 30, folding=FOLDING)
    assert not plain.submit(prompt, 20, Sampling()).thoughts.steps


def test_a_step_no_longer_than_its_summary_stays_whole() -> None:
    engine = tiny_engine(MODEL, 30, folding=FoldPolicy(RULES, keep=80))
    submit_all(engine, 2)
    engine.run()
    assert engine.figures("fold").folding.folds == 0


def test_without_a_daemon_an_unfold_is_refused_and_the_sequence_goes_on() -> None:
    engine = tiny_engine(MODEL, 200, folding=FOLDING)
    sequence = submit_all(engine, 1)[0]
    while not any(step.form is Form.FOLDED for step in sequence.thoughts.steps):
        engine.step()
    with pytest.raises(CannotUnfold, match="--daemon"):
        engine.unfold(sequence, 0)
    for number in (-1, 99):
        with pytest.raises(CannotUnfold, match="does not exist"):
            engine.unfold(sequence, number)
        with pytest.raises(CannotUnfold, match="does not exist"):
            engine.refold(sequence, number)
    engine.run()
    with pytest.raises(CannotUnfold, match="finished"):
        engine.unfold(sequence, 0)


def test_a_request_larger_than_the_pool_is_taken_for_as_long_as_its_folds_leave_it() -> None:
    folding = FoldPolicy(RULES, keep=KEEP, longest_step_tokens=40)
    engine = tiny_engine(MODEL, 5, folding=folding)
    sequence = engine.submit(random_prompts(1)[0][:10], 200, lively(0))
    engine.run(on_step=check_books)
    assert sequence.failure is None or isinstance(sequence.failure, PoolTooSmall)
    assert sequence.state is State.FINISHED and engine.figures("fold").sessions == 1
    assert engine.pool.free_pages == engine.pool.pages


def test_a_step_longer_than_was_promised_ends_its_request_with_an_error() -> None:
    rules = StepRules(delimiters=((1, 2, 3, 4, 5),))
    folding = FoldPolicy(rules, keep=KEEP, longest_step_tokens=16)
    engine = tiny_engine(MODEL, 4, folding=folding)
    sequence = engine.submit([1, 2, 3], 200, Sampling())
    engine.run()
    assert isinstance(sequence.failure, PoolTooSmall)
    assert sequence.state is State.FINISHED
    assert engine.pool.free_pages == engine.pool.pages


def test_an_operator_with_biases_needs_a_pool_with_biases() -> None:
    with pytest.raises(UnsupportedModel, match="biased=True"):
        tiny_engine(MODEL, 5, folding=FoldPolicy(RULES, operator=AttentionMatching()))


@pytest.mark.parametrize("keep", [0, KEEP_MAX + 1])
def test_keeping_nothing_of_a_step_or_more_than_a_launch_moves_is_refused(keep: int) -> None:
    with pytest.raises(ValueError, match=f"may have {KEEP_MAX}"):
        FoldPolicy(RULES, keep=keep)
    assert FoldPolicy(RULES, keep=KEEP_MAX).keep == KEEP_MAX
