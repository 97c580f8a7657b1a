"""What the shipped model is and how it is trained: every number of it, and the sizes to draw."""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvtier_worker.cot.lesson import POSITIONS, Fold
from kvtier_worker.cot.task import ROW_TOKENS, SESSION_4K, Size
from kvtier_worker.cot.vocabulary import NOTE_ROW, STEPS_MAX, VOCABULARY
from kvtier_worker.model import ModelConfig

ROPE_THETA: Final = 1e9
"""High, so that most of a head's dimensions hardly turn within a session: what is looked up by
number is found at any distance."""

SHORTEST_STEP: Final = Size(1, NOTE_ROW)

SHIPPED: Final = ModelConfig(
    name="cot",
    vocab=VOCABULARY,
    hidden=128,
    intermediate=352,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=32,
    rms_eps=1e-5,
    rope_theta=ROPE_THETA,
    max_positions=POSITIONS,
    fold_trained_keep=Fold.LAST_2.value,
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """One run of training. `steps` steps of about `batch_tokens` tokens each; Muon for the
    matrices, AdamW for embedding and norms; warm-up, then decay as (1 - share done)^`decay`.

    Problems are up to `short_tokens` long until `grow_from` of the run, up to `long_tokens` from
    `grow_to` on, with lengths even in their logarithm; `edge_share` of them are of the longest.
    More of them (`note_share`) ask for a note than later, as such questions are of many kinds.
    """

    seed: int = 0
    steps: int = 3600
    batch_tokens: int = 4096
    muon_rate: float = 0.02
    adam_rate: float = 3e-3
    warmup_steps: int = 50
    decay: float = 1.2
    clip: float = 1.0
    embedding_spread: float = 0.04
    shortest_tokens: int = 100
    short_tokens: int = 400
    long_tokens: int = SESSION_4K.tokens
    grow_from: float = 0.15
    grow_to: float = 0.6
    note_share: float = 0.75
    edge_share: float = 0.08

    def rate(self, step: int) -> float:
        """The learning rate at a step, as a share of its peak."""
        left = 1 - step / self.steps
        return float(min(1.0, (step + 1) / self.warmup_steps) * left**self.decay)

    def draw_size(self, random: np.random.Generator, step: int) -> Size:
        """The size of all problems of a step's batch."""
        done = step / self.steps
        grown = min(1.0, max(0.0, (done - self.grow_from) / (self.grow_to - self.grow_from)))
        longest = self.short_tokens * (self.long_tokens / self.short_tokens) ** grown
        if grown == 1.0 and random.random() < self.edge_share:
            return SESSION_4K
        tokens = _even_logarithm(random, self.shortest_tokens, longest)
        # Between as many steps as there may be and two, as far as the shortest step allows it.
        longest_step = SESSION_4K.step_tokens
        lowest = min(max(SHORTEST_STEP.step_tokens, tokens / STEPS_MAX), longest_step)
        highest = min(max(lowest, tokens / 2), longest_step)
        step_tokens = _even_logarithm(random, lowest, highest)
        rows = min(max(int(step_tokens / ROW_TOKENS) - 2, NOTE_ROW), SESSION_4K.rows)
        steps = round(tokens / Size(1, rows).step_tokens)
        return Size(min(max(steps, 1), STEPS_MAX), rows)


def _even_logarithm(random: np.random.Generator, low: float, high: float) -> float:
    return math.exp(random.uniform(math.log(low), math.log(high)))
