"""The training shows each token what the worker will show it, learns, and repeats itself."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier_worker.cot.grade import grade
from kvtier_worker.cot.lesson import Fold, Lesson, build_lesson
from kvtier_worker.cot.muon import orthogonal
from kvtier_worker.cot.recipe import SHIPPED, Recipe
from kvtier_worker.cot.task import SESSION_4K, Problem, Size, sample_problem
from kvtier_worker.cot.train import Trainer
from kvtier_worker.cot.vocabulary import DELIMITER, FIRST, IDS, STEPS_MAX, STOP_TOKEN, Kind, text_of
from kvtier_worker.load import load_model
from tests.worker.test_model import logits_of
from tests.worker.tiny import CPU

SMALL = replace(SHIPPED, hidden=32, intermediate=64, layers=2, heads=2, kv_heads=1, head_dim=16)
SHORT = Recipe(steps=60, batch_tokens=256, warmup_steps=5, short_tokens=120, long_tokens=120)
SIZE = Size(3, 8)


def one_problem(note_share: float = 1.0) -> Problem:
    return sample_problem(np.random.default_rng(3), SIZE, note_share)


def lesson_of(problem: Problem, fold: Fold, extra: int = 0, unfold: bool = True) -> Lesson:
    random = np.random.default_rng(0)
    return build_lesson([problem], [fold], random, extra_endings=extra, moved=False, unfold=unfold)


def seen_by(lesson: Lesson, row: int) -> set[int]:
    return set(lesson.seen[0, row].nonzero().flatten().tolist())


def step_span(problem: Problem, step: int) -> range:
    begin = len(problem.prompt) + step * SIZE.step_tokens
    return range(begin, begin + SIZE.step_tokens)


def test_with_full_kv_every_token_sees_all_before_it() -> None:
    lesson = lesson_of(one_problem(), Fold.FULL)
    assert torch.equal(lesson.seen[0], torch.ones_like(lesson.seen[0]).tril())


@pytest.mark.parametrize("fold", [Fold.LAST_4, Fold.LAST_2])
def test_a_finished_step_is_seen_by_its_last_tokens_alone(fold: Fold) -> None:
    problem = one_problem()
    lesson = lesson_of(problem, fold)
    statement = set(range(len(problem.prompt)))
    first, second = step_span(problem, 0), step_span(problem, 1)
    assert seen_by(lesson, first[-1]) == statement | set(first)
    kept = set(first[-fold.value :])
    assert seen_by(lesson, second[0]) == statement | kept | {second[0]}
    assert seen_by(lesson, second[-1]) == statement | kept | set(second)


def test_from_its_question_on_the_asked_step_is_seen_whole() -> None:
    problem = one_problem()
    assert problem.asked is not None
    question = SIZE.tokens - 3
    asked = set(step_span(problem, problem.asked))
    folded = lesson_of(problem, Fold.LAST_2)
    assert not asked <= seen_by(folded, question - 1)
    assert asked <= seen_by(folded, question)
    blind = lesson_of(problem, Fold.LAST_2, unfold=False)
    assert not asked <= seen_by(blind, question)


def test_further_endings_stand_where_the_real_one_does_and_see_no_ending() -> None:
    problem = one_problem(note_share=0.0)
    lesson = lesson_of(problem, Fold.LAST_4, extra=4)
    ending = set(range(SIZE.tokens - 5, lesson.tokens.shape[1]))
    for pair in range(4):
        question = SIZE.tokens + 2 * pair
        assert lesson.positions[0, question] == SIZE.tokens - 3
        step = int(lesson.tokens[0, question]) - IDS[(Kind.NOTE_OF, FIRST)]
        assert set(step_span(problem, step)) <= seen_by(lesson, question)
        assert seen_by(lesson, question + 1) & ending == {question, question + 1}
        note = IDS[(Kind.DIGIT, problem.notes[step])]
        assert lesson.tokens[0, question + 1] == note
        assert lesson.weights[0, question : question + 2].tolist() == [0, 4]
    assert lesson.weights[0, : len(problem.prompt)].eq(0).all()


def test_positions_move_but_never_run_backwards_or_out_of_range() -> None:
    random = np.random.default_rng(0)
    problems = [sample_problem(random, SIZE) for _ in range(50)]
    lesson = build_lesson(problems, [Fold.FULL] * 50, random, extra_endings=0, moved=True)
    steps = lesson.positions.diff(dim=1)
    assert steps.min() == 1 and steps.max() > 100
    assert lesson.positions.min() >= 0 and lesson.positions.max() < SHIPPED.max_positions
    inside = step_span(problems[0], 1)
    assert steps[:, inside[0] : inside[-1]].max() == 1


def test_sizes_stay_within_the_vocabulary_and_reach_the_longest() -> None:
    recipe, random = Recipe(), np.random.default_rng(0)
    sizes = [recipe.draw_size(random, step) for step in range(recipe.steps)]
    assert max(size.tokens for size in sizes[: recipe.steps // 10]) < 500
    assert sizes.count(SESSION_4K) > recipe.steps * recipe.edge_share / 4
    assert {size.steps for size in sizes} >= set(range(2, STEPS_MAX + 1, 5))


def test_orthogonal_makes_singular_values_alike() -> None:
    for shape in ((48, 16), (16, 48)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert 0.5 < values.min() and values.max() < 1.5


def test_a_few_steps_lower_the_loss() -> None:
    trainer = Trainer(SHORT, SMALL)
    for _ in range(SHORT.steps):
        trainer.advance()
    first, last = trainer.curve[0], trainer.curve[-1]
    assert last.row_loss < 0.9 * first.row_loss and last.lookup_loss < 0.9 * first.lookup_loss


def test_the_same_seed_trains_the_same_weights() -> None:
    def weights_after(seed: int) -> torch.Tensor:
        trainer = Trainer(replace(SHORT, seed=seed), SMALL)
        for _ in range(3):
            trainer.advance()
        return torch.cat([p.detach().flatten() for p in trainer.network.parameters()])

    assert torch.equal(weights_after(1), weights_after(1))
    assert not torch.equal(weights_after(1), weights_after(2))


def test_what_is_saved_is_a_model_of_the_worker(tmp_path: Path) -> None:
    trainer = Trainer(SHORT, SMALL)
    trainer.advance()
    trainer.save(str(tmp_path), {})
    loaded = load_model(str(tmp_path), CPU)
    problem = one_problem()
    tokens = [*problem.prompt, *problem.solution]
    lesson = lesson_of(problem, Fold.FULL)
    with torch.inference_mode():
        expected = trainer.network(
            lesson.tokens, lesson.positions, lesson.seen, torch.ones_like(lesson.tokens) > 0
        )
    torch.testing.assert_close(logits_of(loaded.model, tokens), expected, rtol=1e-4, atol=1e-4)
    text = problem.text()
    assert loaded.tokenizer.encode_prompt(text) == tokens
    assert loaded.tokenizer.decode(tokens) == text
    assert loaded.tokenizer.end_token == STOP_TOKEN
    assert loaded.tokenizer.encode_prompt(text_of(DELIMITER)) == [DELIMITER]


def test_grades_count_both_questions() -> None:
    found = grade(Trainer(SHORT, SMALL).network, SIZE, Fold.LAST_4, 20, seed=1)
    assert found.conclusions + found.notes == found.problems == 20
    assert found.exact == 0 and found.wrong_tokens > 20
