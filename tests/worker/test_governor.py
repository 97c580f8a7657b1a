"""Thoughts with a budget are brought to land: when, why, with which tokens, and how long then."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cache

import pytest

from kvtier_worker.budget import EFFORTS, Budget, Cause, Course
from kvtier_worker.engine import Engine
from kvtier_worker.errors import BadBudget, BadControl, PoolTooSmall, TooLong
from kvtier_worker.folding import FoldPolicy
from kvtier_worker.governor import GovernPolicy, Landing, Pressure, Probe
from kvtier_worker.loops import LoopRules
from kvtier_worker.metrics import BudgetFigures
from kvtier_worker.sampler import Sampling
from kvtier_worker.sequence import Sequence, State
from kvtier_worker.steps import StepRules
from kvtier_worker.thoughts import Form
from tests.worker.naive import DELIMITERS
from tests.worker.tiny import BLOCK_TOKENS, lively, tiny_engine, tiny_model

MODEL = tiny_model()
PROMPT = [5, 9, 200]
CONTROL = (250, 251, 253)
ANSWER = 4
LANDING = Landing(CONTROL, ANSWER)
POLICY = GovernPolicy(LANDING)
STEPS = FoldPolicy(StepRules(delimiters=tuple((token,) for token in sorted(DELIMITERS))), keep=3)
ENTRY_BYTES = tiny_engine(MODEL, 1).pool.page_bytes // BLOCK_TOKENS


@dataclass(frozen=True)
class Told:
    """A control sequence that depends on the sequence; `tell` may do anything."""

    tell: Callable[[Sequence], Seq[int]]
    longest_tokens: int = 3

    def __call__(self, sequence: Sequence) -> Seq[int]:
        return self.tell(sequence)


def governed(
    policy: GovernPolicy = POLICY,
    budget: Budget | None = Budget(tokens=10),  # noqa: B008
    new_tokens: int = 60,
    folding: FoldPolicy | None = None,
    sampling: Sampling = lively(0),  # noqa: B008
    stop_token: int | None = None,
) -> tuple[Engine, Sequence]:
    """An engine, and a sequence that it has run to its end."""
    engine = tiny_engine(MODEL, 200, folding=folding, governing=policy)
    sequence = engine.submit(PROMPT, new_tokens, sampling, stop_token, budget)
    engine.run()
    assert sequence.state is State.FINISHED and sequence.failure is None
    assert engine.pool.free_pages == engine.pool.pages
    return engine, sequence


def course_of(sequence: Sequence) -> Course:
    assert sequence.course is not None
    return sequence.course


def thought(sequence: Sequence) -> list[int]:
    """What was generated before the landing."""
    landed_at = course_of(sequence).landed_at
    assert landed_at is not None
    return sequence.tokens[sequence.prompt_tokens : landed_at]


@cache
def free_thought(new_tokens: int, sampling: Sampling = lively(0)) -> list[int]:  # noqa: B008
    """What is generated without a governor."""
    return governed(budget=None, new_tokens=new_tokens, sampling=sampling)[1].generated


# ------------------------------------------------------------------------------ the landing


def test_a_used_up_budget_injects_the_control_sequence_and_stops_after_the_answer() -> None:
    engine, sequence = governed()
    course = course_of(sequence)
    assert course.cause is Cause.TOKENS and course.landed_at == len(PROMPT) + 10
    assert thought(sequence) == free_thought(10)
    assert sequence.generated[10:13] == list(CONTROL)
    assert len(sequence.generated) == 10 + 3 + ANSWER and course.stopped
    assert engine.figures("x").budgets == BudgetFigures(
        token_budget=1, landings=1, forced_tokens=3, hard_stops=1
    )
    assert engine.figures("x").generated_tokens == 10 + ANSWER  # forced ones were not generated


def test_forced_tokens_are_computed_as_if_they_had_been_in_the_prompt() -> None:
    _, sequence = governed()
    engine = tiny_engine(MODEL, 20)
    written = engine.submit(sequence.tokens[:-ANSWER], ANSWER, lively(0))
    engine.run()
    assert written.generated == sequence.generated[-ANSWER:]


def test_an_answer_that_ends_by_itself_is_not_cut_off() -> None:
    _, cut = governed()
    answer = cut.generated[-ANSWER:]
    engine, sequence = governed(stop_token=answer[1])
    assert sequence.generated == cut.generated[: 2 - ANSWER]
    assert course_of(sequence).cause is Cause.TOKENS and not course_of(sequence).stopped
    assert engine.figures("x").budgets.hard_stops == 0


def test_a_thought_that_ends_within_its_budget_is_left_alone() -> None:
    free = free_thought(30)
    engine, sequence = governed(budget=Budget(tokens=20), stop_token=free[9])
    assert sequence.generated == free[: free.index(free[9]) + 1]
    assert course_of(sequence).cause is None and course_of(sequence).landed_at is None
    assert engine.figures("x").budgets == BudgetFigures()


def test_the_landing_waits_for_the_end_of_a_step() -> None:
    free = governed(budget=None, folding=STEPS, new_tokens=90)[1].generated
    ends = [i for i, token in enumerate(free, 1) if token in DELIMITERS]
    first = next(end for end in ends if end > 11)
    policy = GovernPolicy(replace(LANDING, boundary_tokens=60))
    _, sequence = governed(policy, Budget(tokens=11), new_tokens=90, folding=STEPS)
    course = course_of(sequence)
    assert (course.begun_at, course.landed_at) == (len(PROMPT) + 11, len(PROMPT) + first)
    assert thought(sequence) == free[:first]
    assert sequence.generated[first : first + 3] == list(CONTROL)
    assert len(sequence.generated) == first + 3 + ANSWER


def test_at_the_end_of_a_step_it_waits_no_longer() -> None:
    free = governed(budget=None, folding=STEPS, new_tokens=90)[1].generated
    first = next(i for i, token in enumerate(free, 1) if token in DELIMITERS)
    policy = GovernPolicy(replace(LANDING, boundary_tokens=60))
    _, sequence = governed(policy, Budget(tokens=first), new_tokens=90, folding=STEPS)
    assert course_of(sequence).landed_at == course_of(sequence).begun_at == len(PROMPT) + first


def test_without_a_step_s_end_in_reach_it_lands_at_once_then() -> None:
    no_steps = FoldPolicy(StepRules(delimiters=((7, 7, 7, 7),)))
    policy = GovernPolicy(replace(LANDING, boundary_tokens=6))
    _, sequence = governed(policy, folding=no_steps)
    assert course_of(sequence).begun_at == len(PROMPT) + 10
    assert course_of(sequence).landed_at == len(PROMPT) + 16


def test_looking_for_a_step_s_end_leaves_room_for_the_landing() -> None:
    policy = GovernPolicy(replace(LANDING, boundary_tokens=30))
    _, sequence = governed(policy, Budget(tokens=10), new_tokens=20)
    assert len(thought(sequence)) == 20 - 3 - ANSWER
    assert len(sequence.generated) == 20


def test_control_tokens_may_depend_on_the_sequence() -> None:
    told = Told(lambda s: [s.tokens[0], len(s.generated)], longest_tokens=2)
    _, sequence = governed(GovernPolicy(Landing(told, ANSWER)))
    assert sequence.generated[10:12] == [PROMPT[0], 10]


def fail(_: Sequence) -> list[int]:
    raise RuntimeError("out of order")


@pytest.mark.parametrize(
    ("tell", "problem"),
    [
        (fail, "out of order"),
        (lambda _: [], "empty"),
        (lambda _: [256], "has tokens that the model has not"),
        (lambda _: [-1], "has tokens that the model has not"),
        (lambda _: [1, 2, 3, 4], "3 were announced"),
        (lambda _: [1, 66], "the stop token 66"),
        (lambda _: None, "TypeError"),
    ],
)
def test_without_a_usable_control_sequence_the_thought_is_stopped_all_the_same(
    tell: Callable[[Sequence], Seq[int]], problem: str
) -> None:
    engine, sequence = governed(GovernPolicy(Landing(Told(tell), ANSWER)), stop_token=66)
    assert problem in (course_of(sequence).problem or "")
    assert sequence.generated == free_thought(10 + ANSWER)
    assert course_of(sequence).stopped
    assert engine.figures("x").budgets == BudgetFigures(
        token_budget=1, control_failures=1, hard_stops=1
    )


# ---------------------------------------------------------------------------------- budgets


@pytest.mark.parametrize("effort", EFFORTS)
def test_effort_takes_a_share_of_the_budget(effort: str) -> None:
    _, sequence = governed(budget=Budget(tokens=40, effort=effort))
    assert len(thought(sequence)) == 40 * EFFORTS[effort]


@pytest.mark.parametrize("effort", EFFORTS)
def test_a_budget_without_tokens_is_what_the_request_leaves(effort: str) -> None:
    policy = GovernPolicy(replace(LANDING, boundary_tokens=13))
    _, sequence = governed(policy, Budget(effort=effort), new_tokens=60)
    assert course_of(sequence).tokens == 40 * EFFORTS[effort]


def test_a_budget_beyond_the_request_lands_so_that_the_answer_still_fits() -> None:
    _, sequence = governed(budget=Budget(tokens=1000))
    assert len(thought(sequence)) == 60 - 3 - ANSWER
    assert len(sequence.generated) == 60


def test_a_budget_of_kv_bytes_lands_when_that_much_kv_is_reached() -> None:
    limit = (len(PROMPT) + 12) * ENTRY_BYTES
    engine, sequence = governed(budget=Budget(kv_bytes=limit + ENTRY_BYTES // 2))
    assert course_of(sequence).cause is Cause.KV
    assert len(thought(sequence)) == 12
    assert engine.figures("x").budgets.kv_bytes == 1


def test_what_is_folded_away_does_not_count_as_kv() -> None:
    budget = Budget(kv_bytes=(len(PROMPT) + 12) * ENTRY_BYTES)
    _, sequence = governed(budget=budget, folding=STEPS, new_tokens=90)
    folded = [step for step in sequence.thoughts.steps if step.form is Form.FOLDED]
    landed_at = course_of(sequence).landed_at
    assert folded and landed_at is not None
    away = sum(step.tokens - step.kept for step in folded if step.end < landed_at)
    assert landed_at - away == len(PROMPT) + 12


def test_a_budget_lets_a_request_in_that_would_be_too_large_without() -> None:
    engine = tiny_engine(MODEL, 3, governing=POLICY)
    with pytest.raises(PoolTooSmall):
        engine.submit(PROMPT, 1000, lively(0))
    with pytest.raises(TooLong):
        engine.submit(PROMPT, 10_000, lively(0))
    sequence = engine.submit(PROMPT, 10_000, lively(0), budget=Budget(tokens=20))
    engine.run()
    assert len(sequence.generated) == 20 + 3 + ANSWER


def test_requests_without_a_budget_are_not_governed() -> None:
    loops = LoopRules(window_tokens=8, ngram_tokens=1, repeated_share=0.1)
    policy = replace(POLICY, loops=loops, probe=Probe(lambda _: 1.0, every_tokens=1))
    engine, sequence = governed(policy, budget=None)
    assert sequence.course is None
    alone = tiny_engine(MODEL, 200)
    free = alone.submit(PROMPT, 60, lively(0))
    alone.run()
    assert sequence.generated == free.generated
    assert engine.figures("x").budgets == BudgetFigures()


# ----------------------------------------------------------------------------------- causes


def test_a_repeated_run_lands() -> None:
    greedy = Sampling()  # of which the random model ends in a short loop
    loops = LoopRules(window_tokens=24, ngram_tokens=3, entropy_bits=0)
    budget = Budget(tokens=100)
    engine, sequence = governed(replace(POLICY, loops=loops), budget, 120, sampling=greedy)
    assert course_of(sequence).cause is Cause.REPEATS
    assert 24 <= len(thought(sequence)) < 100
    assert thought(sequence) == free_thought(len(thought(sequence)), greedy)
    assert engine.figures("x").budgets.loop_ngram == 1


def test_a_monotonous_thought_lands() -> None:
    loops = LoopRules(window_tokens=24, ngram_tokens=3, repeated_share=1, entropy_bits=4)
    policy = replace(POLICY, loops=loops)
    engine, sequence = governed(policy, Budget(tokens=100), 120, sampling=Sampling())
    assert course_of(sequence).cause is Cause.MONOTONY
    assert engine.figures("x").budgets.loop_entropy == 1


def test_a_lively_thought_is_no_loop() -> None:
    _, sequence = governed(replace(POLICY, loops=LoopRules(64)), Budget(tokens=100), 120)
    assert course_of(sequence).cause is Cause.TOKENS


def test_a_probe_that_is_sure_lands_early() -> None:
    asked: list[int] = []

    def ask(sequence: Sequence) -> float:
        asked.append(len(sequence.generated))
        return len(sequence.generated) / 20

    engine, sequence = governed(replace(POLICY, probe=Probe(ask, sure=0.7, every_tokens=5)))
    assert course_of(sequence).cause is Cause.TOKENS and asked == [5]
    policy = replace(POLICY, probe=Probe(ask, sure=0.7, every_tokens=5))
    engine, sequence = governed(policy, Budget(tokens=40))
    assert course_of(sequence).cause is Cause.SURE
    assert asked == [5, 5, 10, 15] and len(thought(sequence)) == 15
    assert engine.figures("x").budgets.probe == 1


def raise_it(_: Sequence) -> float:
    raise ZeroDivisionError("no probe")


@pytest.mark.parametrize("answer", [raise_it, lambda _: float("nan"), lambda _: 2, lambda _: None])
def test_a_probe_that_fails_is_switched_off_and_the_session_goes_on(
    answer: Callable[[Sequence], float],
) -> None:
    calls: list[int] = []

    def ask(sequence: Sequence) -> float:
        calls.append(sequence.id)
        return answer(sequence)

    policy = replace(POLICY, probe=Probe(ask, every_tokens=2))
    engine = tiny_engine(MODEL, 200, governing=policy)
    sequences = [engine.submit(PROMPT, 60, lively(0), budget=Budget(tokens=10)) for _ in range(2)]
    engine.run()
    assert sorted(calls) == [1, 2]
    figures = engine.figures("x").budgets
    assert figures.probe_failures == 2 and figures.probe == 0
    for sequence in sequences:
        assert course_of(sequence).probe_failed and "probe: " in (course_of(sequence).problem or "")
        assert sequence.generated == governed()[1].generated


# --------------------------------------------------------------------------------- pressure


def test_pressure_tightens_budgets_and_relaxes_them_with_hysteresis() -> None:
    policy = replace(POLICY, pressure=Pressure(high=0.8, low=0.5))
    engine = tiny_engine(MODEL, 10, governing=policy)
    governor, pool = engine.governor, engine.pool
    assert governor is not None
    seen = []
    taken: list[int] = []
    for used in (8, 9, 8, 6, 8, 5, 6, 8, 9, 0):
        pool.give_back(taken)
        taken = pool.take(used)
        governor.feel()
        seen.append((used, governor.tight))
    tight = [False, True, True, True, True, False, False, False, True, False]
    assert [each for _, each in seen] == tight
    assert governor.figures.tightened == 2


def test_under_pressure_thoughts_get_a_part_of_their_budgets() -> None:
    policy = replace(POLICY, pressure=Pressure(high=0.5, low=0.2, tight=0.5))
    engine = tiny_engine(MODEL, 16, governing=policy)
    long, kept, small = (
        engine.submit(PROMPT, 60, lively(0), budget=budget)
        for budget in (Budget(tokens=40), Budget(1000, (len(PROMPT) + 42) * ENTRY_BYTES), None)
    )
    taken = engine.pool.take(10)
    while len(long.generated) < 15:
        engine.step()
    engine.run()
    engine.pool.give_back(taken)
    assert course_of(long).cause is course_of(kept).cause is Cause.PRESSURE
    assert len(thought(long)) == 20 and len(thought(kept)) == 21
    assert small.generated == free_thought(60)
    assert engine.figures("x").budgets.pressure == 2


def test_when_pressure_is_gone_budgets_are_whole_again() -> None:
    policy = replace(POLICY, pressure=Pressure(high=0.5, low=0.2, tight=0.5))
    engine = tiny_engine(MODEL, 40, governing=policy)
    sequence = engine.submit(PROMPT, 60, lively(0), budget=Budget(tokens=40))
    taken = engine.pool.take(30)
    while len(sequence.generated) < 15:
        engine.step()
    assert engine.governor is not None and engine.governor.tight
    engine.pool.give_back(taken)
    engine.run()
    assert course_of(sequence).cause is Cause.TOKENS and len(thought(sequence)) == 40


# ---------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"tokens": 0}, "budget of 0 tokens"),
        ({"tokens": -5}, "budget of -5 tokens"),
        ({"kv_bytes": 0}, "budget of 0 bytes of KV"),
        ({"kv_bytes": -1}, "budget of -1 bytes of KV"),
        ({"effort": "extreme"}, "'extreme' is unknown; it is one of low, medium, high"),
    ],
)
def test_budgets_that_are_none_are_refused(asked: dict[str, int], told: str) -> None:
    with pytest.raises(BadBudget, match=told):
        Budget(**asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("control", "told"),
    [((), "empty"), ((1, 256), "0 to 255"), ((-1,), "0 to 255")],
)
def test_a_control_sequence_that_no_model_could_go_on_with_is_refused(
    control: tuple[int, ...], told: str
) -> None:
    with pytest.raises(BadControl, match=told):
        tiny_engine(MODEL, 4, governing=GovernPolicy(Landing(control, ANSWER)))


def test_a_refused_request_changes_nothing() -> None:
    engine = tiny_engine(MODEL, 20, governing=POLICY)
    with pytest.raises(BadControl, match="stop token 251"):
        engine.submit(PROMPT, 60, lively(0), 251, Budget(tokens=10))
    with pytest.raises(BadBudget, match="the landing alone takes 7"):
        engine.submit(PROMPT, 7, lively(0), budget=Budget(tokens=10))
    with pytest.raises(BadBudget, match="the prompt takes"):
        engine.submit(PROMPT, 60, lively(0), budget=Budget(kv_bytes=3 * ENTRY_BYTES))
    with pytest.raises(BadBudget, match="the prompt takes"):
        engine.submit(PROMPT, 60, lively(0), budget=Budget(None, 12 * ENTRY_BYTES, "low"))
    assert not engine.scheduler.waiting and not engine.step()
    assert engine.submit(PROMPT, 8, lively(0), budget=Budget(tokens=10)).course


def test_a_budget_needs_an_engine_that_governs() -> None:
    engine = tiny_engine(MODEL, 20)
    with pytest.raises(BadBudget, match="governing"):
        engine.submit(PROMPT, 60, lively(0), budget=Budget(tokens=10))
    assert not engine.scheduler.waiting


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Landing(CONTROL, 0), "0 tokens for the answer"),
        (lambda: Landing(CONTROL, 1, -1), "-1 to look"),
        (lambda: Probe(lambda _: 1.0, sure=0), "sure from 0"),
        (lambda: Probe(lambda _: 1.0, every_tokens=0), "every 0"),
        (lambda: Pressure(high=0.5, low=0.6), "low may not exceed high"),
        (lambda: Pressure(high=1.5), "1.5"),
        (lambda: Pressure(tight=1), "tight lies between"),
    ],
)
def test_rules_that_make_no_sense_are_refused(make: Callable[[], object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()
