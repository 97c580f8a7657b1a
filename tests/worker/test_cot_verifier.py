"""The task's verifier tells right steps from wrong ones by what is written alone."""

import numpy as np
import pytest

from kvtier_worker.cot.task import SESSION_1K, Problem, Size, sample_problem
from kvtier_worker.cot.verifier import answer_of, share_of_right_steps
from kvtier_worker.cot.vocabulary import DELIMITER, NAMES, NOTE_ROW, STOP_TOKEN, VOCABULARY

SMALL = Size(steps=6, rows=9)


def drawn(count: int, size: Size = SMALL, note_share: float = 0.5) -> list[Problem]:
    random = np.random.default_rng(7)
    return [sample_problem(random, size, note_share) for _ in range(count)]


def share(problem: Problem, generated: list[int] | tuple[int, ...]) -> float:
    return share_of_right_steps(problem.prompt, generated)


@pytest.mark.parametrize("size", [Size(1, NOTE_ROW), SMALL, SESSION_1K])
def test_a_right_solution_is_right_from_its_first_step_to_its_end(size: Size) -> None:
    for problem in drawn(10, size):
        for steps in range(1, size.steps + 1):
            assert share(problem, problem.solution[: steps * size.step_tokens]) == 1.0
        assert share(problem, problem.solution) == 1.0
        assert answer_of(problem.prompt, problem.solution) == problem.answer


def test_any_wrong_token_makes_its_step_wrong_and_all_that_build_on_it() -> None:
    random = np.random.default_rng(1)
    for problem in drawn(5):
        for at in range(len(problem.solution) - 1):
            wrong = list(problem.solution)
            while wrong[at] in (problem.solution[at], DELIMITER, STOP_TOKEN):
                wrong[at] = int(random.integers(VOCABULARY))
            if problem.solution[at] == DELIMITER:
                continue  # then two steps are one
            right = min(at // SMALL.step_tokens, SMALL.steps)
            assert share(problem, wrong) == right / (SMALL.steps + 1)


def test_a_missing_delimiter_leaves_too_few_steps() -> None:
    (problem,) = drawn(1)
    one = SMALL.step_tokens
    joined = [*problem.solution[: one - 1], *problem.solution[one:]]
    assert share(problem, joined) == 0.0


def test_unfinished_solutions_are_judged_by_what_is_begun() -> None:
    (problem,) = drawn(1)
    one = SMALL.step_tokens
    assert share(problem, []) == 0.0
    assert share(problem, problem.solution[: one + 3]) == 1 / 2
    early = [*problem.solution[:one], STOP_TOKEN]
    assert share(problem, early) == 1 / (SMALL.steps + 1)
    longer = [*problem.solution, DELIMITER, *problem.solution]
    assert share(problem, longer) < 1.0


def test_a_wrong_answer_after_right_steps_costs_one_step() -> None:
    for problem in drawn(10):
        for digit in range(10):
            answered = list(problem.solution)
            answered[-2] = next(
                id for id, name in enumerate(NAMES) if name[0].name == "DIGIT" and name[1] == digit
            )
            steps = SMALL.steps
            right = steps + (digit == problem.answer)
            assert share(problem, answered) == right / (steps + 1)
            assert answer_of(problem.prompt, answered) == digit


def test_only_a_digit_and_the_end_are_an_answer() -> None:
    (problem,) = drawn(1)
    assert answer_of(problem.prompt, problem.solution[:-1]) is None
    assert answer_of(problem.prompt, [DELIMITER, STOP_TOKEN]) is None
    assert answer_of(problem.prompt, []) is None


def test_what_is_no_problem_cannot_be_judged() -> None:
    (problem,) = drawn(1)
    for prompt in ([], [STOP_TOKEN], problem.prompt[:2], [VOCABULARY - 1]):
        with pytest.raises(ValueError, match="states no problem"):
            share_of_right_steps(prompt, problem.solution)
