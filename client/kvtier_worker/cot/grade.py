"""A quick look at a network: is every token of the solution the most likely one, given the rest?

This is the teacher-forced check used along the training; whether the model answers right when it
writes itself, through the worker, is measured apart.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from kvtier_worker.cot.lesson import Fold, build_lesson
from kvtier_worker.cot.network import Network
from kvtier_worker.cot.task import Size, sample_problem

BATCH_TOKENS: Final = 8192


@dataclass(frozen=True, slots=True)
class Grade:
    """Of `problems`: how many had every token right, and how many of each question's answers."""

    problems: int
    exact: int
    conclusions: int
    conclusions_right: int
    notes: int
    notes_right: int
    wrong_tokens: int


@torch.inference_mode()
def grade(
    network: Network, size: Size, fold: Fold, problems: int, seed: int, *, unfold: bool = True
) -> Grade:
    """Grade a network on problems drawn from a seed."""
    random = np.random.default_rng(seed)
    per_batch = max(1, BATCH_TOKENS // size.tokens)
    exact, wrong_tokens, asked, right = 0, 0, [0, 0], [0, 0]
    for start in range(0, problems, per_batch):
        count = min(per_batch, problems - start)
        drawn = [sample_problem(random, size) for _ in range(count)]
        lesson = build_lesson(
            drawn, [fold] * count, random, extra_endings=0, moved=False, unfold=unfold
        )
        wanted = lesson.weights[:, 1:] > 0
        logits = network(
            lesson.tokens[:, :-1], lesson.positions[:, :-1], lesson.seen[:, :-1, :-1], wanted
        )
        wrong = torch.zeros(wanted.shape, dtype=torch.bool)
        wrong[wanted] = logits.argmax(-1) != lesson.tokens[:, 1:][wanted]
        exact += int((~wrong.any(1)).sum())
        wrong_tokens += int(wrong.sum())
        for row, problem in enumerate(drawn):
            note = int(problem.asked is not None)
            asked[note] += 1
            right[note] += int(not wrong[row, lesson.answers[row] - 1])
    return Grade(problems, exact, asked[0], right[0], asked[1], right[1], wrong_tokens)
