"""A solution of the reasoning task can be ended behind any step, by its own question."""

from collections.abc import Iterator

import numpy as np
import pytest

from kvtier_worker.cot.landing import AskNow, by_question, has_asked_step
from kvtier_worker.cot.task import SESSION_1K, SESSION_4K, Problem, Size, sample_problem
from kvtier_worker.cot.vocabulary import IDS, LAST, STOP_TOKEN, Kind
from kvtier_worker.entries import Entries
from kvtier_worker.loops import LoopWindow
from kvtier_worker.sampler import Sampling
from kvtier_worker.sequence import Sequence
from tests.worker.tiny import tiny_model, tiny_pool

POOL = tiny_pool(tiny_model(), 1)
SIZE = Size(steps=6, rows=9)


def sequence_of(problem: Problem, solved_tokens: int) -> Sequence:
    """A sequence that has written so much of the solution."""
    prompt, solved = list(problem.prompt), list(problem.solution[:solved_tokens])
    end_tokens = len(prompt) + len(problem.solution)
    return Sequence(0, prompt + solved, len(prompt), end_tokens, Sampling(), Entries(POOL))


def problems(count: int, note_share: float, size: Size = SIZE) -> Iterator[Problem]:
    random = np.random.default_rng(5)
    for _ in range(count):
        yield sample_problem(random, size, note_share)


@pytest.mark.parametrize("note_share", [0, 1])
def test_behind_the_last_step_it_is_the_ending_that_the_model_was_trained_for(
    note_share: float,
) -> None:
    for problem in problems(20, note_share):
        done = SIZE.steps * SIZE.step_tokens
        control = AskNow()(sequence_of(problem, done))
        assert control == list(problem.solution[done : done + AskNow.longest_tokens])
        assert STOP_TOKEN not in control


def test_behind_an_earlier_step_it_is_the_ending_of_the_shorter_problem() -> None:
    for problem in problems(20, 0):
        for step in range(1, SIZE.steps + 1):
            control = AskNow()(sequence_of(problem, step * SIZE.step_tokens))
            number, digit = problem.first + step, problem.conclusions[step - 1]
            opening, stop = IDS[Kind.VALUE, number, digit], IDS[Kind.STOP, number]
            assert control == [opening, stop, IDS[Kind.LAST,]]


def test_within_a_step_the_steps_before_it_count() -> None:
    (problem,) = problems(1, 1)
    behind = AskNow()(sequence_of(problem, 2 * SIZE.step_tokens))
    assert AskNow()(sequence_of(problem, 3 * SIZE.step_tokens - 4)) == behind


def test_before_the_first_step_nothing_can_be_asked() -> None:
    (problem,) = problems(1, 1)
    with pytest.raises(KeyError):
        AskNow()(sequence_of(problem, 4))


def test_a_step_behind_the_last_that_there_are_tokens_for_can_still_be_refused() -> None:
    longest = Size(steps=32, rows=9)
    (problem,) = problems(1, 0, longest)
    control = AskNow()(sequence_of(problem, longest.steps * longest.step_tokens))
    assert control[1] == IDS[Kind.STOP, LAST + 1]


def test_the_probe_is_sure_from_the_end_of_the_asked_step_on_and_at_ends_only() -> None:
    for problem in problems(20, 1):
        assert problem.asked is not None
        for tokens in range(SIZE.steps * SIZE.step_tokens + 1):
            step, rest = divmod(tokens, SIZE.step_tokens)
            known = bool(step) and not rest and step > problem.asked
            assert has_asked_step(sequence_of(problem, tokens)) == known


def test_the_probe_never_knows_a_last_conclusion_early() -> None:
    (problem,) = problems(1, 0)
    for tokens in range(len(problem.solution)):
        assert has_asked_step(sequence_of(problem, tokens)) == 0


@pytest.mark.parametrize("size", [SIZE, SESSION_1K, SESSION_4K])
def test_no_right_solution_looks_like_a_loop(size: Size) -> None:
    rules = by_question(size.step_tokens).loops
    assert rules is not None
    for problem in problems(3, 0.5, size):
        window = LoopWindow(rules)
        for token in problem.solution:
            window.feed(token)
            assert not window.repeats and not window.is_monotonous


def test_the_landing_has_room_for_a_step_and_an_answer() -> None:
    policy = by_question(SIZE.step_tokens)
    assert policy.landing.most_tokens == SIZE.step_tokens + 3 + 2
    assert by_question(SIZE.step_tokens, early=False).probe is None
