"""Two ways to answer the same problems, compared: the difference, its interval, enough problems.

The difference of two paired shares rests on the problems that only one of the two ways got right
(McNemar's discordant pairs). The interval is Wald's with one problem added to each of the two
counts, which holds its level with few or no discordant pairs, too.
Source: Bonett and Price, "Adjusted Wald confidence interval for a difference of binomial
proportions based on paired data", J. Educ. Behav. Stat. 37 (2012).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

Z_95: Final = 1.959964
POINTS: Final = 100


@dataclass(frozen=True, slots=True)
class Paired:
    """Of `pairs` problems, how many each way got right, and how many only it got right."""

    pairs: int
    both: int
    only_first: int
    only_second: int

    @classmethod
    def of(cls, outcomes: Iterable[tuple[bool, bool]]) -> "Paired":
        """Count problems: whether the first way was right, and whether the second was."""
        counts = {(a, b): 0 for a in (False, True) for b in (False, True)}
        for pair in outcomes:
            counts[pair] += 1
        return cls(sum(counts.values()), counts[True, True], counts[True, False],
                   counts[False, True])  # fmt: skip

    @property
    def first_share(self) -> float:
        """The share of problems that the first way got right."""
        return (self.both + self.only_first) / self.pairs if self.pairs else 0.0

    @property
    def second_share(self) -> float:
        """The share of problems that the second way got right."""
        return (self.both + self.only_second) / self.pairs if self.pairs else 0.0

    @property
    def delta_points(self) -> float:
        """By how many points of a hundred the second way is better."""
        return POINTS * (self.second_share - self.first_share)

    @property
    def interval_points(self) -> tuple[float, float]:
        """The 95 % interval of `delta_points`, between -100 and 100."""
        middle = POINTS * (self.only_second - self.only_first) / (self.pairs + 2)
        half = self.half_width_points
        return (max(-POINTS, middle - half), min(POINTS, middle + half))

    @property
    def half_width_points(self) -> float:
        """Half the width of the interval."""
        return POINTS * Z_95 * math.sqrt(self._variance / (self.pairs + 2))

    def pairs_for(self, half_width_points: float) -> int:
        """How many problems make the interval so narrow, if the discordance stays what it is."""
        return max(0, math.ceil(self._variance * (POINTS * Z_95 / half_width_points) ** 2) - 2)

    @property
    def _variance(self) -> float:
        """Of one pair's difference, with the added problems."""
        first, second = ((n + 1) / (self.pairs + 2) for n in (self.only_first, self.only_second))
        return first + second - (first - second) ** 2
