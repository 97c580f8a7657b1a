"""Whatever becomes of a governed thought on the way, it lands as it would have landed alone."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtier_client as kv
from kvtier_worker.budget import Budget, Cause, Course
from kvtier_worker.daemon import OwnDaemon
from kvtier_worker.engine import Engine
from kvtier_worker.errors import CannotSuspend
from kvtier_worker.folding import FoldPolicy
from kvtier_worker.governor import GovernPolicy, Landing, Probe
from kvtier_worker.loops import LoopRules
from kvtier_worker.sampler import Sampling
from kvtier_worker.saved import FORMAT
from kvtier_worker.scheduler import Limits
from kvtier_worker.sequence import Sequence, State
from kvtier_worker.store import KvStore
from kvtier_worker.swap import DaemonStore
from kvtier_worker.thoughts import Form
from tests.worker.test_fold import FOLDING, MODEL
from tests.worker.test_scheduler import DictStore, check_books
from tests.worker.test_swap import step_until
from tests.worker.tiny import (
    BLOCK_TOKENS,
    ROOMY,
    WAIT_S,
    lively,
    random_prompts,
    tiny_engine,
    tiny_pool,
)

CONTROL = (250, 12, 251, 24, 253)  # two of them end a step
QUESTION = 253
NEW_TOKENS = 70
PROMPTS = random_prompts(5)
POLICY = GovernPolicy(
    Landing(CONTROL, answer_tokens=9, boundary_tokens=20),
    loops=LoopRules(window_tokens=24, ngram_tokens=3),
    probe=Probe(lambda s: s.tokens[0] == PROMPTS[2][0] and len(s.generated) / 12, every_tokens=4),
)
ENTRY_BYTES = tiny_pool(MODEL, 1).page_bytes // BLOCK_TOKENS
BUDGETS = [
    Budget(tokens=35),
    Budget(kv_bytes=(len(PROMPTS[1]) + 20) * ENTRY_BYTES),
    Budget(effort="medium"),
    None,
    Budget(),
]
NEVER = replace(FOLDING, trigger=lambda _token, _steps: None)
"""With a trigger, even one that never asks, control tokens come one by one."""
UNFOLDED = 1
ASKING = replace(FOLDING, trigger=lambda token, _steps: UNFOLDED if token == QUESTION else None)


def submit_all(engine: Engine) -> list[Sequence]:
    samplings = [lively(0), lively(1), lively(2), lively(3), Sampling()]
    return [
        engine.submit(prompt, NEW_TOKENS, sampling, budget=budget)
        for prompt, sampling, budget in zip(PROMPTS, samplings, BUDGETS, strict=True)
    ]


def ends(sequences: list[Sequence]) -> list[tuple[list[int], Course | None]]:
    """What they generated, and how they came to their end."""
    assert all(s.state is State.FINISHED and s.failure is None for s in sequences)
    return [(s.generated, s.course and replace(s.course, window=None)) for s in sequences]


def finish(engine: Engine) -> list[tuple[list[int], Course | None]]:
    sequences = submit_all(engine)
    engine.run(on_step=check_books)
    assert engine.pool.free_pages == engine.pool.pages
    return ends(sequences)


def engine_of(
    pages: int = 200,
    store: KvStore | None = None,
    limits: Limits | None = None,
    folding: FoldPolicy = FOLDING,
) -> Engine:
    return tiny_engine(MODEL, pages, store, limits, folding, POLICY)


@pytest.fixture(scope="module")
def alone() -> list[tuple[list[int], Course | None]]:
    """How each of them ends with all the room it wants."""
    all_of_them = finish(engine_of())
    causes = {course.cause for _, course in all_of_them if course}
    assert causes == {Cause.TOKENS, Cause.KV, Cause.SURE, Cause.REPEATS}
    return all_of_them


# -------------------------------------------------------------------------------- preemption


@settings(max_examples=3, deadline=None)
@given(pages=st.integers(10, 18), step_rows=st.integers(4, 24))
def test_recomputed_thoughts_land_at_the_same_tokens(
    alone: list[tuple[list[int], Course | None]], pages: int, step_rows: int
) -> None:
    engine = engine_of(pages, limits=Limits(step_rows=step_rows, running=4))
    assert finish(engine) == alone


@pytest.mark.parametrize("unreliable", [None, random.Random(5)])
def test_swapped_thoughts_land_at_the_same_tokens(
    alone: list[tuple[list[int], Course | None]], unreliable: random.Random | None
) -> None:
    pool = tiny_pool(MODEL, 10)
    store = DictStore(pool, unreliable)
    engine = Engine(MODEL, pool, store, folding=FOLDING, governing=POLICY)
    assert finish(engine) == alone
    assert engine.scheduler.counters.preemptions > 0


def test_one_by_one_or_at_once_control_tokens_come_to_the_same(
    alone: list[tuple[list[int], Course | None]],
) -> None:
    assert finish(engine_of(10, folding=NEVER)) == alone


# --------------------------------------------------------------------------------- branches


def is_thinking(course: Course) -> bool:
    return course.cause is None


def is_looking(course: Course) -> bool:
    return course.cause is not None and course.landed_at is None


def is_told(course: Course) -> bool:
    return 0 < len(course.forced) < len(CONTROL)


def is_answering(course: Course) -> bool:
    return course.landed_at is not None and not course.forced


STAGES = [is_thinking, is_looking, is_told, is_answering]


def step_to(engine: Engine, sequence: Sequence, stage: Callable[[Course], bool]) -> None:
    """Step until a sequence has generated something and is at that stage."""
    course = sequence.course
    assert course is not None
    step_until(engine, lambda: len(sequence.generated) > 8 and stage(course))


@pytest.mark.parametrize("stage", STAGES)
def test_a_fork_inherits_the_course_and_both_land(
    alone: list[tuple[list[int], Course | None]], stage: Callable[[Course], bool]
) -> None:
    engine = engine_of(folding=NEVER)
    sequence = submit_all(engine)[0]
    step_to(engine, sequence, stage)
    child = engine.fork(sequence)
    other = engine.fork(sequence, lively(99))
    engine.run()
    assert ends([sequence, child]) == [alone[0], alone[0]]
    begun = sequence.tokens[: len(PROMPTS[0]) + 8]
    assert other.tokens[: len(begun)] == begun
    assert other.tokens != sequence.tokens
    assert other.course is not None and other.course.landed_at is not None
    told = other.tokens[other.course.landed_at :][: len(CONTROL)]
    assert told == list(CONTROL)


def test_pruned_and_parked_thoughts_keep_the_rest_as_it_is(
    alone: list[tuple[list[int], Course | None]],
) -> None:
    engine = engine_of()
    sequences = submit_all(engine)
    step_to(engine, sequences[0], is_looking)
    engine.park(sequences[0])
    engine.prune(sequences[1])
    engine.run()
    engine.wake(sequences[0])
    engine.run()
    assert ends([sequences[0], *sequences[2:]]) == [alone[0], *alone[2:]]


# ------------------------------------------------------------------------ suspend and resume


def daemon_engine(
    client: kv.Client, folding: FoldPolicy = NEVER, governing: GovernPolicy | None = POLICY
) -> Engine:
    pool = tiny_pool(MODEL, 100)
    store = DaemonStore(client, pool, MODEL.config.name, WAIT_S)
    return Engine(MODEL, pool, store, folding=folding, governing=governing)


@pytest.mark.parametrize("stage", STAGES)
def test_a_suspended_thought_lands_in_another_worker_as_in_the_first(
    client: kv.Client, alone: list[tuple[list[int], Course | None]], stage: Callable[[Course], bool]
) -> None:
    engine = daemon_engine(client)
    sequences = submit_all(engine)
    step_to(engine, sequences[0], stage)
    left = [i for i, s in enumerate(sequences) if s.state is not State.FINISHED]
    tokens = [engine.suspend(sequences[i]) for i in left]
    other = daemon_engine(client)
    resumed = [other.resume(token) for token in tokens]
    other.run(on_step=check_books)
    assert ends(resumed) == [alone[i] for i in left]
    assert other.figures("x").recomputed_tokens == 0
    both = [each.figures("x").budgets for each in (engine, other)]
    assert sum(figures.landings for figures in both) == 4


def test_a_thought_outlives_a_restart_of_worker_and_daemon(
    tmp_path: Path, alone: list[tuple[list[int], Course | None]]
) -> None:
    with OwnDaemon(str(tmp_path), ROOMY, memory="holder") as daemon:
        with kv.Client(daemon.socket_path, name="first") as client:
            engine = daemon_engine(client)
            sequence = submit_all(engine)[0]
            step_to(engine, sequence, is_told)
            token = engine.suspend(sequence)
        daemon.stop()
        daemon.start()
        with kv.Client(daemon.socket_path, name="second") as client:
            other = daemon_engine(client)
            resumed = other.resume(token)
            other.run()
            assert ends([resumed]) == [alone[0]]


def test_without_a_governor_a_resumed_thought_ends_where_its_budget_did(
    client: kv.Client, alone: list[tuple[list[int], Course | None]]
) -> None:
    engine = daemon_engine(client)
    sequences = submit_all(engine)
    thinking, told = sequences[2], sequences[0]
    tokens = []
    for sequence, stage in ((thinking, is_thinking), (told, is_told)):
        step_to(engine, sequence, stage)
        tokens.append(engine.suspend(sequence))
    other = daemon_engine(client, governing=None)
    resumed = [other.resume(token) for token in tokens]
    other.run()
    assert resumed[1].generated == alone[0][0]  # what was begun is ended
    free = tiny_engine(MODEL, 100, folding=FOLDING)
    alike = free.submit(PROMPTS[2], NEW_TOKENS, lively(2))
    free.run()
    assert resumed[0].generated == alike.generated[: thinking.end_tokens - len(PROMPTS[2])]


def test_a_longer_control_sequence_than_a_resumed_request_leaves_is_none(
    client: kv.Client,
) -> None:
    engine = daemon_engine(client)
    sequence = submit_all(engine)[0]
    step_to(engine, sequence, is_looking)
    token = engine.suspend(sequence)
    longer = GovernPolicy(Landing(tuple(range(100, 180)), answer_tokens=1))
    other = daemon_engine(client, governing=longer)
    resumed = other.resume(token)
    other.run()
    assert resumed.course is not None and "has room for" in (resumed.course.problem or "")
    assert resumed.course.stopped and resumed.course.cause is Cause.TOKENS
    assert other.figures("x").budgets.control_failures == 1


def test_a_failed_probe_stays_switched_off(client: kv.Client) -> None:
    def fail(_: Sequence) -> float:
        raise OSError("no probe")

    policy = replace(POLICY, probe=Probe(fail, every_tokens=1))
    engine = daemon_engine(client, governing=policy)
    sequence = submit_all(engine)[0]
    step_to(engine, sequence, is_thinking)
    other = daemon_engine(client, governing=policy)
    other.resume(engine.suspend(sequence))
    other.run()
    assert engine.figures("x").budgets.probe_failures == 4
    assert other.figures("x").budgets.probe_failures == 0


def change_blob(client: kv.Client, token: str, **changes: int) -> None:
    """Rewrite a suspended session's blob as one of an earlier version."""
    session = client.resume_session(bytes.fromhex(token))
    version, data = session.get_blob()
    blob = msgspec.msgpack.decode(data)
    del blob["course"]
    blob |= changes
    session.put_blob(msgspec.msgpack.encode(blob), version=version + 1)


def test_sessions_that_were_suspended_before_there_were_budgets_are_resumed(
    client: kv.Client, alone: list[tuple[list[int], Course | None]]
) -> None:
    engine = daemon_engine(client)
    sequence = submit_all(engine)[3]
    step_until(engine, lambda: len(sequence.generated) > 20)
    token = engine.suspend(sequence)
    change_blob(client, token, format=2)
    other = daemon_engine(client)
    resumed = other.resume(token)
    other.run()
    assert ends([resumed]) == [alone[3]]


@pytest.mark.parametrize("format_", [1, FORMAT + 1])
def test_blobs_of_other_formats_are_refused(client: kv.Client, format_: int) -> None:
    engine = daemon_engine(client)
    sequence = submit_all(engine)[3]
    engine.step()
    token = engine.suspend(sequence)
    change_blob(client, token, format=format_)
    with pytest.raises(CannotSuspend, match=f"format {format_}"):
        engine.resume(token)


# ------------------------------------------------------------------ control tokens that unfold


def test_a_control_token_that_asks_for_a_step_has_it_before_it_is_computed(
    client: kv.Client,
) -> None:
    engine = daemon_engine(client, ASKING)
    sequence = submit_all(engine)[0]
    seen = []

    def look(engine: Engine) -> None:
        if sequence.course and sequence.course.landed_at is not None:
            step = sequence.thoughts.steps[UNFOLDED]
            seen.append((sequence.computed_tokens, step.form))

    engine.run(on_step=look)
    assert sequence.course is not None and sequence.course.landed_at is not None
    question_at = sequence.course.landed_at + CONTROL.index(QUESTION)
    notes = [note for note in engine.folder.notes if note.sequence == sequence.id]
    assert [(note.step, note.at, note.restored) for note in notes] == [
        (UNFOLDED, question_at, True)
    ]
    assert (question_at, Form.FOLDED) in seen and (question_at + 1, Form.UNFOLDED) in seen
