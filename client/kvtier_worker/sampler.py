"""Choosing the next token: greedy, or drawn with a seed.

A draw depends on the seed and the token's position only (a counter-based generator), so the
sampler has no state beyond its settings and a resumed session draws what it would have drawn.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray


class Sampling(msgspec.Struct, frozen=True):
    """How a session chooses its tokens; `temperature` 0 is greedy."""

    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf") or not 0 <= self.seed < 2**64:
            raise ValueError(
                f"temperature {self.temperature}, seed {self.seed}: the temperature must be finite"
                " and not negative, the seed an unsigned 64-bit number"
            )


def choose(logits: NDArray[np.float32], sampling: Sampling, position: int) -> int:
    """Choose the token that stands at `position`. Shapes: `logits` [vocab]."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    scaled = logits.astype(np.float64) / sampling.temperature
    cumulative = np.exp(scaled - scaled.max()).cumsum()
    bits = np.random.Philox(key=sampling.seed, counter=position)
    draw = np.random.Generator(bits).random() * cumulative[-1]
    return min(int(cumulative.searchsorted(draw, side="right")), len(logits) - 1)
