"""Preemption costs time, never tokens: every session ends as it would have ended alone."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtier_worker.engine import Engine
from kvtier_worker.errors import BadPrompt, CannotSuspend, PoolTooSmall, QueueFull, TooLong
from kvtier_worker.model import Llama
from kvtier_worker.pool import PagedPool
from kvtier_worker.sampler import Sampling
from kvtier_worker.scheduler import Limits
from kvtier_worker.sequence import Sequence, State
from kvtier_worker.store import RecomputeStore
from tests.worker.tiny import random_prompts, sampling_of, tiny_engine, tiny_model, tiny_pool

MODEL = tiny_model()


class DictStore(RecomputeStore):
    """Keeps KV in a dict; refuses and loses at random when it is told to be unreliable."""

    def __init__(self, pool: PagedPool, unreliable: random.Random | None = None) -> None:
        self.pool = pool
        self.unreliable = unreliable
        self.records: dict[int, Tensor] = {}

    def save(self, sequence: Sequence) -> int:
        if self.unreliable and self.unreliable.random() < 0.3:
            return 0
        self.records[sequence.id] = self.pool.read_entries(sequence.kv.slots)
        return len(sequence.kv)

    def load(self, sequence: Sequence) -> int:
        entries = self.records.pop(sequence.id)
        kept = entries.shape[2]
        if self.unreliable and self.unreliable.random() < 0.3:
            kept = self.unreliable.randrange(kept + 1)
        self.pool.write_entries(sequence.kv.slots[:kept], entries[:, :, :kept])
        return kept


def decode_all(engine: Engine, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Submit everything at once, check the books at every step, and return the outputs."""
    sequences = [
        engine.submit(prompt, new_tokens, sampling_of(i)) for i, prompt in enumerate(prompts)
    ]
    engine.run(on_step=check_books)
    assert all(s.state is State.FINISHED for s in sequences)
    assert engine.pool.free_pages == engine.pool.pages
    return [s.generated for s in sequences]


def check_books(engine: Engine) -> None:
    """Every page is free or has one owner, and every running sequence has what it computed."""
    scheduler, pool = engine.scheduler, engine.pool
    owned = [page for s in scheduler.running for page in s.pages]
    assert len(owned) == len(set(owned)) == pool.pages - pool.free_pages
    for s in scheduler.running:
        assert len(s.kv) == s.computed_tokens - s.thoughts.folded_away()
        assert pool.shape.blocks(len(s.kv)) <= len(s.pages)
        assert {slot // pool.shape.block_tokens for slot in s.kv.slots.tolist()} <= set(s.pages)
    assert not any(s.pages or s.computed_tokens for s in scheduler.waiting)
    assert scheduler.waiting == sorted(scheduler.waiting, key=Sequence.rank)


def unpressured(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    engine = tiny_engine(MODEL, 1000)
    outputs = decode_all(engine, prompts, new_tokens)
    assert engine.scheduler.counters.preemptions == 0
    return outputs


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 999), st.integers(6, 16), st.integers(4, 24))
def test_outputs_under_recompute_are_those_without_pressure(
    seed: int, pages: int, step_rows: int
) -> None:
    prompts = random_prompts(6, seed)
    engine = tiny_engine(MODEL, pages, limits=Limits(step_rows=step_rows, running=4))
    assert decode_all(engine, prompts, 20) == unpressured(prompts, 20)


def test_recompute_counts_every_token_that_is_computed_again() -> None:
    engine = tiny_engine(MODEL, 14)
    decode_all(engine, random_prompts(8), 60)
    counters = engine.scheduler.counters
    assert counters.preemptions > 4
    assert counters.recomputed_tokens >= counters.preemptions


def test_a_store_that_keeps_kv_leaves_nothing_to_recompute() -> None:
    prompts = random_prompts(8)
    pool = tiny_pool(MODEL, 14)
    engine = Engine(MODEL, pool, DictStore(pool))
    assert decode_all(engine, prompts, 60) == unpressured(prompts, 60)
    assert engine.scheduler.counters.preemptions > 4
    assert engine.scheduler.counters.recomputed_tokens == 0


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 999))
def test_a_store_that_refuses_and_loses_costs_recomputation_only(seed: int) -> None:
    prompts = random_prompts(8, seed)
    pool = tiny_pool(MODEL, 14)
    engine = Engine(MODEL, pool, DictStore(pool, random.Random(seed)))
    assert decode_all(engine, prompts, 40) == unpressured(prompts, 40)


def test_the_first_in_rank_is_never_preempted() -> None:
    engine = tiny_engine(MODEL, 14)
    first = engine.submit(list(range(40)), 80, Sampling())
    for prompt in random_prompts(6):
        engine.submit(prompt, 60, Sampling())
    engine.step()
    while first.state is not State.FINISHED:
        assert first.state is State.RUNNING
        engine.step()
    assert engine.scheduler.counters.preemptions > 0


def test_nobody_is_admitted_into_a_stall() -> None:
    engine = tiny_engine(MODEL, 20)
    for prompt in random_prompts(12):
        engine.submit(prompt, 50, Sampling())
    scheduler = engine.scheduler
    while scheduler.running or scheduler.waiting:
        before = set(scheduler.running)
        chunks = scheduler.plan()
        assert chunks, "a step without progress"
        if set(scheduler.running) - before and len(scheduler.running) > 1:
            assert engine.pool.free_pages >= 1
        for chunk in chunks:
            scheduler.complete(chunk, 1 if chunk.samples else None)


def test_later_arrivals_make_room_first() -> None:
    engine = tiny_engine(MODEL, 12)
    early = [engine.submit(prompt, 50, Sampling()) for prompt in random_prompts(2)]
    engine.step()
    late = engine.submit([1, 2, 3], 100, Sampling())
    preempted: list[Sequence] = []

    def note(_: Engine) -> None:
        preempted.extend(s for s in engine.scheduler.waiting if s.reached_tokens)

    engine.run(on_step=note)
    assert preempted
    assert preempted[0] is late
    assert all(s.state is State.FINISHED for s in (*early, late))


def test_a_stop_token_ends_a_sequence() -> None:
    prompt = random_prompts(1)[0]
    free = tiny_engine(MODEL, 20)
    output = decode_all(free, [prompt], 40)[0]
    stop = output[9]
    engine = tiny_engine(MODEL, 20)
    sequence = engine.submit(prompt, 40, sampling_of(0), stop_token=stop)
    engine.run()
    assert sequence.generated == output[: output.index(stop) + 1]


def test_what_could_never_finish_is_refused_at_once(tiny: Llama) -> None:
    engine = tiny_engine(tiny, 4)
    with pytest.raises(PoolTooSmall, match="takes 5 pages and the pool has 4"):
        engine.submit([1] * 10, 55, Sampling())
    with pytest.raises(TooLong, match="2048 positions"):
        engine.submit([1] * 10, 2039, Sampling())


@pytest.mark.parametrize("prompt", [[], [3, 256], [-1]])
def test_a_prompt_that_the_model_cannot_read_is_refused_at_once(
    tiny: Llama, prompt: list[int]
) -> None:
    engine = tiny_engine(tiny, 4)
    with pytest.raises(BadPrompt, match=r"\(0 to 255\)"):
        engine.submit(prompt, 5, sampling_of(0))
    assert not engine.step()


def test_the_queue_has_a_limit(tiny: Llama) -> None:
    engine = tiny_engine(tiny, 4, limits=Limits(waiting=2))
    engine.submit([1], 2, Sampling())
    engine.submit([1], 2, Sampling())
    with pytest.raises(QueueFull):
        engine.submit([1], 2, Sampling())


def test_limits_under_which_somebody_starves_are_refused() -> None:
    with pytest.raises(ValueError, match="running"):
        Limits(step_rows=4, running=5)


def test_without_a_daemon_nothing_can_be_suspended(tiny: Llama) -> None:
    engine = tiny_engine(tiny, 4)
    sequence = engine.submit([1], 2, Sampling())
    with pytest.raises(CannotSuspend, match="--daemon"):
        engine.suspend(sequence)
    with pytest.raises(CannotSuspend, match="--daemon"):
        engine.resume("00" * 16)
