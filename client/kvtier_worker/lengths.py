"""How long a thought's steps are, and what that says of one that is open at some moment."""

from collections import deque
from math import sqrt
from typing import Final

LENGTHS_MAX: Final = 256
"""Older steps say nothing of the next ones any more."""


class StepLengths:
    """The lengths of the last steps of all sequences, in tokens."""

    def __init__(self, expected_tokens: int | None) -> None:
        """`expected_tokens` stands for a step until enough of them were seen."""
        self._lengths: deque[int] = deque(maxlen=LENGTHS_MAX)
        self._sums = [0, 0, 0]
        if expected_tokens is not None:
            self.add(expected_tokens)

    def add(self, tokens: int) -> None:
        """A step of so many tokens was folded."""
        if len(self._lengths) == LENGTHS_MAX:
            self._sum(self._lengths[0], -1)
        self._lengths.append(tokens)
        self._sum(tokens, 1)

    @property
    def known(self) -> bool:
        """Whether anything is known or expected of them."""
        return bool(self._lengths)

    @property
    def mean_tokens(self) -> float:
        """Their mean length."""
        return self._sums[0] / len(self._lengths)

    @property
    def longest_tokens(self) -> int:
        """The longest one's length."""
        return max(self._lengths)

    def open_tokens(self, sequences: int, spread: float) -> float:
        """What many sequences have in open steps together, each at a moment of its own.

        The mean and so many standard deviations, and never more than all of the longest length.
        At a moment a step of n tokens is open n times as likely as one of a single token, and any
        part of it may be done: hence n and n^2 have the weighted means of n / 2 and n^2 / 3.
        """
        tokens, squares, cubes = self._sums
        mean = squares / tokens / 2
        variance = max(0.0, cubes / tokens / 3 - mean * mean)
        together = sequences * mean + spread * sqrt(sequences * variance)
        return min(together, float(sequences * self.longest_tokens))

    def _sum(self, tokens: int, sign: int) -> None:
        for power in range(len(self._sums)):
            self._sums[power] += sign * tokens ** (power + 1)
