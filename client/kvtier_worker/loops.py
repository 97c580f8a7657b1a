"""Whether a thought goes round in circles: repeated runs of tokens, and tokens without variety.

A token costs a few dictionary look-ups, whatever the length of the window.
"""

from collections import deque
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from math import log2
from typing import Final

import numpy as np

TOKEN_BITS: Final = 32
"""Tokens are numbers below two to the power of this."""
WINDOW_TOKENS_MAX: Final = 65_536
_ONE: Final = 1 << 20
"""Sums of logarithms are kept in integer parts of this size, so that they come out the same
whichever way they came about."""


@dataclass(frozen=True, slots=True)
class LoopRules:
    """What the newest `window_tokens` generated tokens of a thought have to look like to be a loop.

    Either: of all runs of `ngram_tokens` tokens in the window, `repeated_share` or more have been
    there before in it. A loop of `p` tokens in a window of `w` comes to about 1 - p / w, so one
    half finds loops of nearly half the window; 1 finds none. Or: the entropy of how often each
    token occurs is below `entropy_bits`; 0 finds none. A window that is not full yet is no loop.
    """

    window_tokens: int = 256
    ngram_tokens: int = 8
    repeated_share: float = 0.5
    entropy_bits: float = 1.5

    def __post_init__(self) -> None:
        if not 1 <= self.ngram_tokens < self.window_tokens <= WINDOW_TOKENS_MAX:
            raise ValueError(
                f"runs of {self.ngram_tokens} tokens in a window of {self.window_tokens}: a run has"
                f" a token or more, and the window is longer, up to {WINDOW_TOKENS_MAX}"
            )
        if not (0 < self.repeated_share <= 1 and 0 <= self.entropy_bits):
            raise ValueError(
                f"a repeated share of {self.repeated_share} and {self.entropy_bits} bits: the share"
                " must be above 0 and not above 1, the entropy not negative"
            )


class LoopWindow:
    """The newest tokens of one thought, counted as they come and go.

    All that it says depends on the tokens in the window alone: who starts with the newest ones,
    after a resume, says the same as who has read them all.
    """

    def __init__(self, rules: LoopRules) -> None:
        self._rules = rules
        self._tokens: deque[int] = deque()
        self._counts: dict[int, int] = {}
        self._run = 0  # the newest `ngram_tokens` tokens, as one number
        self._run_mask = (1 << TOKEN_BITS * rules.ngram_tokens) - 1
        self._runs: deque[int] = deque()
        self._run_counts: dict[int, int] = {}
        self._sum = 0  # of count * log2(count) over the tokens, in parts
        self._steps = _steps(rules.window_tokens)

    def fork(self) -> "LoopWindow":
        """A window that has read the same, for another branch."""
        other = copy(self)
        other._tokens, other._counts = self._tokens.copy(), self._counts.copy()
        other._runs, other._run_counts = self._runs.copy(), self._run_counts.copy()
        return other

    def feed(self, token: int) -> None:
        """Read the next token."""
        counts = self._counts
        if self._is_full:
            oldest = self._tokens.popleft()
            self._sum -= self._steps[_take_out(counts, oldest)]
            _take_out(self._run_counts, self._runs.popleft())
        count = counts.get(token, 0)
        counts[token] = count + 1
        self._sum += self._steps[count]
        self._tokens.append(token)
        self._run = (self._run << TOKEN_BITS | token) & self._run_mask
        if len(self._tokens) >= self._rules.ngram_tokens:
            self._runs.append(self._run)
            self._run_counts[self._run] = self._run_counts.get(self._run, 0) + 1

    @property
    def repeated_share(self) -> float:
        """Which share of the runs in the window have been there before in it."""
        return 1 - len(self._run_counts) / len(self._runs) if self._runs else 0.0

    @property
    def entropy_bits(self) -> float:
        """The entropy of how often each token occurs in the window."""
        tokens = len(self._tokens)
        return log2(tokens) - self._sum / _ONE / tokens if tokens else 0.0

    @property
    def repeats(self) -> bool:
        """Whether the window is full of repeated runs."""
        return self._is_full and self.repeated_share >= self._rules.repeated_share

    @property
    def is_monotonous(self) -> bool:
        """Whether the window is full of few different tokens."""
        return self._is_full and self.entropy_bits < self._rules.entropy_bits

    @property
    def _is_full(self) -> bool:
        return len(self._tokens) == self._rules.window_tokens


def _take_out(counts: dict[int, int], key: int) -> int:
    """Count one less; the count that is left."""
    left = counts[key] - 1
    if left:
        counts[key] = left
    else:
        del counts[key]
    return left


@lru_cache(maxsize=8)
def _steps(window_tokens: int) -> list[int]:
    """By how much count * log2(count) grows from each count to the next, in parts."""
    counts = np.arange(1, window_tokens + 1)
    parts = np.rint(counts * np.log2(counts) * _ONE).astype(np.int64)
    steps: list[int] = np.diff(parts, prepend=0).tolist()
    return steps
