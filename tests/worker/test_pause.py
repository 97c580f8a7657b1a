"""A paused branch rests in the pool, and in nobody's way."""

import pytest

from kvtier_worker.engine import Engine
from kvtier_worker.scheduler import Limits
from kvtier_worker.sequence import State
from tests.worker.test_fold import MODEL
from tests.worker.test_scheduler import DictStore
from tests.worker.tiny import lively, tiny_engine, tiny_pool

PROMPT = list(range(3, 53))
NEW_TOKENS = 20


def alone(seed: int) -> list[int]:
    engine = tiny_engine(MODEL, 60)
    sequence = engine.submit(PROMPT, NEW_TOKENS, lively(seed))
    engine.run()
    return sequence.generated


def test_a_paused_sequence_computes_all_but_its_newest_token_and_rests() -> None:
    engine = tiny_engine(MODEL, 60)
    sequence = engine.submit(PROMPT, NEW_TOKENS, lively(1))
    engine.pause(sequence)
    engine.run()
    assert sequence.state is State.RUNNING
    assert (sequence.computed_tokens, sequence.generated) == (len(PROMPT) - 1, [])
    engine.wake(sequence)
    engine.run()
    assert sequence.generated == alone(1)
    assert engine.scheduler.counters.computed_tokens == len(PROMPT) + NEW_TOKENS - 1


def test_forks_of_a_paused_sequence_go_on_from_there_each_with_its_own_draws() -> None:
    engine = tiny_engine(MODEL, 60)
    trunk = engine.submit(PROMPT, NEW_TOKENS, lively(1))
    engine.pause(trunk)
    engine.run()
    forks = [engine.fork(trunk, lively(seed)) for seed in (2, 3)]
    engine.run()
    assert [fork.generated for fork in forks] == [alone(2), alone(3)]
    assert trunk.state is State.RUNNING and trunk.generated == []
    engine.prune(trunk)
    assert engine.pool.free_pages == engine.pool.pages


def test_a_decoding_sequence_pauses_before_its_next_token() -> None:
    engine = tiny_engine(MODEL, 60)
    sequence = engine.submit(PROMPT, NEW_TOKENS, lively(1))
    while len(sequence.generated) < 7:
        engine.step()
    engine.pause(sequence)
    engine.run()
    assert len(sequence.generated) == 7
    engine.wake(sequence)
    engine.run()
    assert sequence.generated == alone(1)


@pytest.mark.parametrize("pages", [5, 6, 9])
def test_who_rests_makes_room_before_anybody_waits_or_is_preempted(pages: int) -> None:
    pool = tiny_pool(MODEL, pages)
    engine = Engine(MODEL, pool, DictStore(pool), Limits(running=2))
    resting = engine.submit(PROMPT, NEW_TOKENS, lively(1))
    engine.pause(resting)
    engine.run()
    others = [engine.submit(PROMPT[:9], NEW_TOKENS, lively(seed)) for seed in (2, 3)]
    engine.run()
    assert [other.state for other in others] == [State.FINISHED] * 2
    assert resting.state is State.PARKED
    assert engine.scheduler.counters.preemptions == 0
    engine.wake(resting)
    engine.run()
    assert resting.generated == alone(1)
    assert engine.scheduler.counters.recomputed_tokens == 0


def test_what_has_ended_cannot_be_paused() -> None:
    engine = tiny_engine(MODEL, 60)
    sequence = engine.submit(PROMPT, 1, lively(1))
    engine.run()
    engine.pause(sequence)
    assert sequence.state is State.FINISHED and not sequence.paused
