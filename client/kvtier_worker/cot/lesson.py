"""One batch of training: problems, and who sees what when steps are folded.

A token sees the statement, its own step up to itself, and of every earlier step what was kept of
it: everything, its last 4 or 2 tokens, or (some) for each step one of the two. From a question
about a note on, the asked step is seen whole. Beside its real ending a training problem gets more
endings that ask for other notes; they stand at the positions of the real one and see neither it
nor each other, so that one long solution teaches many answers.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtier_worker.cot.task import ENDING_TOKENS, OPENING_TOKENS, Problem
from kvtier_worker.cot.vocabulary import IDS, PAD, Kind

POSITIONS: Final = 5120
"""Positions that the model is trained for."""
JUMPS_SHARE: Final = 0.5
"""The share of problems with jumps in the positions between steps: short ones act as long ones."""
LOOKUP_WEIGHT: Final = 4.0
"""What a token that is looked up far away weighs; a token that goes on with its row weighs 1."""
QUESTION_WEIGHT: Final = 16.0
"""What the question weighs, which a problem has only one of."""
IN_STATEMENT: Final = 0
EVERYTHING: Final = 1 << 20


class Fold(Enum):
    """What of a finished step later tokens see: its last tokens, or for SOME steps all."""

    FULL = EVERYTHING
    LAST_4 = 4
    LAST_2 = 2
    SOME = 0


CYCLE: Final = (Fold.FULL, Fold.LAST_4, Fold.FULL, Fold.LAST_2, Fold.SOME)
"""The folds of successive problems."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """Shapes: `tokens`, `positions` and `weights` (of a token as a target; 0 = not one)
    [batch, tokens]; `seen` [batch, tokens, tokens]; `answers` [batch], where each answer stands.
    """

    tokens: Tensor
    positions: Tensor
    weights: Tensor
    seen: Tensor
    answers: Tensor


@dataclass(slots=True)
class _Layout:
    """A problem's tokens, and for each of them its part (0 the statement, then the steps, then
    the endings), how many tokens of the part are left (1 = its last), its position, its weight,
    and the part that it unfolds (-1 for none)."""

    tokens: NDArray[np.int64]
    part: NDArray[np.int64]
    left: NDArray[np.int64]
    position: NDArray[np.int64]
    weight: NDArray[np.float32]
    unfolds: NDArray[np.int64]
    steps: int


def build_lesson(
    problems: Seq[Problem],
    folds: Seq[Fold],
    random: np.random.Generator,
    *,
    extra_endings: int,
    moved: bool,
    unfold: bool = True,
) -> Lesson:
    """Lay problems out as a batch; `moved` gives them random positions, not 0, 1, 2."""
    layouts = [_lay_out(problem, extra_endings, random) for problem in problems]
    length = max(len(layout.tokens) for layout in layouts)
    shape = (len(problems), length)
    tokens, positions = np.full(shape, PAD), np.zeros(shape, np.int64)
    part, unfolds = np.full(shape, -1), np.full(shape, -2)
    weights, kept = np.zeros(shape, np.float32), np.zeros(shape, np.bool_)
    for i, (layout, fold) in enumerate(zip(layouts, folds, strict=True)):
        n = len(layout.tokens)
        tokens[i, :n], part[i, :n], weights[i, :n] = layout.tokens, layout.part, layout.weight
        positions[i, :n] = _moved(layout, random) if moved else layout.position
        kept[i, :n] = _kept(layout, fold, random)
        if unfold:
            unfolds[i, :n] = layout.unfolds
    seen = part[:, None, :] == part[:, :, None]
    seen |= kept[:, None, :]
    seen |= part[:, None, :] == unfolds[:, :, None]
    seen &= np.tri(length, dtype=np.bool_)
    answers = np.array([len(p.prompt) + len(p.solution) - 2 for p in problems])
    return Lesson(*map(torch.from_numpy, (tokens, positions, weights, seen, answers)))


def _lay_out(problem: Problem, extra_endings: int, random: np.random.Generator) -> _Layout:
    size = problem.size
    real = len(problem.prompt) + len(problem.solution)
    ending = real - ENDING_TOKENS
    part = np.full(real, IN_STATEMENT)
    left = np.ones(real, np.int64)
    steps = slice(len(problem.prompt), ending)
    part[steps] = np.repeat(np.arange(1, size.steps + 1), size.step_tokens)
    left[steps] = np.tile(np.arange(size.step_tokens, 0, -1), size.steps)
    part[ending:] = size.steps + 1
    weight = np.ones(real, np.float32)
    weight[: len(problem.prompt)] = 0
    starts = np.arange(len(problem.prompt), ending, size.step_tokens)
    for offset in range(OPENING_TOKENS + 2):
        weight[starts + offset] = LOOKUP_WEIGHT
    weight[ending:] = LOOKUP_WEIGHT
    unfolds = np.full(real, -2)
    question = real - 3
    weight[question] = QUESTION_WEIGHT
    if problem.asked is not None:
        unfolds[question:] = problem.asked + 1

    asked = random.integers(size.steps, size=extra_endings)
    extra = np.array(
        [
            token
            for step in asked.tolist()
            for token in (
                IDS[(Kind.NOTE_OF, problem.first + step)],
                IDS[(Kind.DIGIT, problem.notes[step])],
            )
        ],
        np.int64,
    )
    pair = np.arange(extra_endings)
    return _Layout(
        tokens=np.concatenate([problem.prompt, problem.solution, extra]),
        part=np.concatenate([part, np.repeat(size.steps + 2 + pair, 2)]),
        left=np.concatenate([left, np.ones(len(extra), np.int64)]),
        position=np.concatenate(
            [np.arange(real), np.tile([question, question + 1], extra_endings)]
        ),
        weight=np.concatenate(
            [weight, np.tile(np.array([0, LOOKUP_WEIGHT], np.float32), extra_endings)]
        ),
        unfolds=np.concatenate([unfolds, np.repeat(asked + 1, 2)]),
        steps=size.steps,
    )


def _kept(layout: _Layout, fold: Fold, random: np.random.Generator) -> NDArray[np.bool_]:
    kept: NDArray[np.bool_]
    if fold is Fold.SOME:
        whole = random.random(layout.part.max() + 1) < 0.5
        kept = whole[layout.part] | (layout.left <= Fold.LAST_4.value)
    else:
        kept = layout.left <= fold.value
    kept &= layout.part <= layout.steps
    kept |= layout.part == IN_STATEMENT
    return kept


def _moved(layout: _Layout, random: np.random.Generator) -> NDArray[np.int64]:
    """Positions that begin anywhere and, in some problems, jump before some steps."""
    room = POSITIONS - 1 - int(layout.position.max())
    begin = int(random.integers(room + 1))
    if random.random() >= JUMPS_SHARE:
        return layout.position + begin
    share = random.exponential(size=layout.steps + 1) * (random.random(layout.steps + 1) < 0.5)
    jumps = np.cumsum(share) / max(share.sum(), 1e-9) * (random.random() * (room - begin))
    jumps = np.concatenate([[0.0], jumps]).astype(np.int64)
    result: NDArray[np.int64] = jumps[np.minimum(layout.part, layout.steps + 1)]
    return result + layout.position + begin
