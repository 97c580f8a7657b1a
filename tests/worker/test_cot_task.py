"""The reasoning task is what it says: solvable step by step, and foldable but for its notes."""

from collections import Counter

import numpy as np
import pytest

from kvtier_worker.cot.task import (
    NOTE_SHARE,
    SESSION_1K,
    SESSION_4K,
    Problem,
    Size,
    sample_problem,
)
from kvtier_worker.cot.vocabulary import (
    ASKED_STEP,
    DELIMITER,
    FIRST,
    IDS,
    MODULUS,
    NAMES,
    NOTE_ROW,
    STEPS_MAX,
    STOP_TOKEN,
    VOCABULARY,
    Kind,
    first_embedding,
    text_of,
)


def drawn(count: int, size: Size, note_share: float = NOTE_SHARE, seed: int = 0) -> list[Problem]:
    random = np.random.default_rng(seed)
    return [sample_problem(random, size, note_share) for _ in range(count)]


def steps_of(problem: Problem) -> list[tuple[int, ...]]:
    size = problem.size
    starts = range(0, size.steps * size.step_tokens, size.step_tokens)
    return [problem.solution[start : start + size.step_tokens] for start in starts]


def solve(prompt: tuple[int, ...]) -> int:
    """A second solver, which reads nothing but the statement and writes no steps."""
    rows, plan, known, asked, last = 0, {}, {}, None, 0
    for token in prompt:
        match NAMES[token]:
            case (Kind.ROWS, rows):
                pass
            case (Kind.DO, k, j):
                plan[k] = j
            case (Kind.NOTE_OF, asked):
                pass
            case (Kind.CONCLUSION, i, digit):
                known[i] = digit
            case (Kind.STOP, stop):
                last = stop - 1
    notes = {}
    for k, j in plan.items():
        terms = [known[j], known[k - 1]]
        for _ in range(rows):
            terms.append(sum(terms[-2:]) % MODULUS)
        known[k], notes[k] = terms[-1], terms[-NOTE_ROW]
    return known[last] if asked is None else notes[asked]


@pytest.mark.parametrize("size", [Size(1, NOTE_ROW), Size(5, 9), SESSION_1K, SESSION_4K])
def test_a_second_solver_agrees(size: Size) -> None:
    for problem in drawn(20, size):
        assert solve(problem.prompt) == problem.answer
        assert problem.is_right(problem.solution)


def test_a_wrong_or_unfinished_answer_is_not_right() -> None:
    (problem,) = drawn(1, Size(2, 8))
    wrong = IDS[(Kind.DIGIT, (problem.answer + 1) % MODULUS)]
    assert not problem.is_right([*problem.solution[:-2], wrong, STOP_TOKEN])
    assert not problem.is_right(problem.solution[:-1])
    assert not problem.is_right([])


def test_a_problem_is_as_long_as_its_size_says() -> None:
    for size in (Size(1, NOTE_ROW), Size(7, 20), SESSION_1K, SESSION_4K):
        for problem in drawn(3, size):
            assert len(problem.prompt) == size.prompt_tokens
            assert len(problem.prompt) + len(problem.solution) == size.tokens
    assert 1000 <= SESSION_1K.tokens <= 1100
    assert 4000 <= SESSION_4K.tokens <= 4100


def test_each_step_ends_in_the_delimiter_and_has_no_other() -> None:
    for problem in drawn(10, Size(6, 11)):
        for step in steps_of(problem):
            assert [i for i, t in enumerate(step) if t == DELIMITER] == [len(step) - 1]


def test_steps_start_from_conclusions_of_earlier_steps() -> None:
    far = 0
    for problem in drawn(50, SESSION_1K):
        for k, step in enumerate(steps_of(problem), FIRST):
            kind, operand = NAMES[step[1]]
            assert kind is Kind.USE and 1 <= operand < k - 1
            far += operand >= FIRST
    assert far > 50 * SESSION_1K.steps / 2


def test_the_last_tokens_of_a_step_hold_its_conclusion_alone() -> None:
    for problem in drawn(20, Size(6, 11)):
        for k, (step, digit) in enumerate(
            zip(steps_of(problem), problem.conclusions, strict=True), FIRST
        ):
            assert [NAMES[token] for token in step[-4:]] == [
                (Kind.VALUE, k, digit),
                (Kind.EQUALS,),
                (Kind.CONCLUSION, k, digit),
                (Kind.END_OF_STEP,),
            ]


def test_a_conclusion_says_nothing_about_its_steps_note() -> None:
    """Over all pairs that a step may start from, each conclusion goes with each note as often."""
    for rows in range(NOTE_ROW, 65):
        pairs: Counter[tuple[int, int]] = Counter()
        for start in np.ndindex(MODULUS, MODULUS):
            terms = list(start)
            for _ in range(rows):
                terms.append(sum(terms[-2:]) % MODULUS)
            pairs[terms[-1], terms[-NOTE_ROW]] += 1
        assert set(pairs.values()) == {1} and len(pairs) == MODULUS**2


def test_a_note_stands_nowhere_but_inside_its_step() -> None:
    for problem in drawn(20, Size(6, 11), note_share=1.0):
        noted = [i for i, t in enumerate(problem.solution) if NAMES[t][0] is Kind.NOTED]
        size = problem.size
        inside = [i % size.step_tokens for i in noted]
        assert len(noted) == size.steps and len(set(inside)) == 1
        assert 4 <= inside[0] < size.step_tokens - 4
        assert not any(NAMES[t][0] is Kind.NOTED for t in problem.prompt)
        for k, (at, note) in enumerate(zip(noted, problem.notes, strict=True), FIRST):
            assert NAMES[problem.solution[at]] == (Kind.NOTED, k, note)


def test_enough_problems_ask_for_a_note_and_name_the_step_to_unfold() -> None:
    problems = drawn(2000, Size(4, 8))
    asking = [problem for problem in problems if problem.asked is not None]
    assert len(asking) >= 0.2 * len(problems)
    for problem in asking:
        question = problem.solution[-3]
        assert question in problem.prompt
        assert problem.asked is not None and ASKED_STEP[question] == FIRST + problem.asked
    for problem in problems:
        written = [t for t in problem.solution if t in ASKED_STEP]
        assert len(written) == (problem.asked is not None)


def test_the_same_seed_draws_the_same_problems() -> None:
    assert drawn(3, SESSION_1K, seed=5) == drawn(3, SESSION_1K, seed=5)
    assert drawn(3, SESSION_1K, seed=5) != drawn(3, SESSION_1K, seed=6)


@pytest.mark.parametrize("numbers", [(0, 8), (STEPS_MAX + 1, 8), (1, NOTE_ROW - 1), (1, 65)])
def test_sizes_without_tokens_are_refused(numbers: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="steps are 1"):
        Size(*numbers)


def test_step_numbers_beyond_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="not within"):
        sample_problem(np.random.default_rng(0), Size(2, 8), first=FIRST + STEPS_MAX - 1)


def test_words_are_the_tokens_own() -> None:
    words = [text_of(token) for token in range(len(NAMES))]
    assert len(set(words)) == len(words)
    assert not any(set(word) & set(" \n\t") or not word for word in words)


def test_equal_numbers_look_alike_before_training() -> None:
    table = first_embedding(64, 1.0, seed=0)
    assert table.shape == (VOCABULARY, 64)
    same = table[IDS[(Kind.DO, 9, 3)]] @ table[IDS[(Kind.VALUE, 9, 3)]]
    other = table[IDS[(Kind.DO, 9, 3)]] @ table[IDS[(Kind.VALUE, 8, 3)]]
    assert same > other + 20
