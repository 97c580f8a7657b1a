"""What a search is asked, by whom its branches are judged, and what every strategy looks like."""

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import inf
from typing import Final, Protocol

import numpy as np

from kvtier_worker.engine import Engine
from kvtier_worker.errors import BadSearch
from kvtier_worker.sampler import Sampling
from kvtier_worker.search.outcome import Outcome

BRANCHES_MAX: Final = 4096
"""How many branches one search may make, the first included."""


class Verifier(Protocol):
    """Says how good a solution is, or what there is of one.

    It is called between two steps of the engine, with tokens alone. Should it raise, or give no
    finite number, the branch has failed, and the search goes on with the others.
    """

    def __call__(self, prompt: Seq[int], generated: Seq[int]) -> float:
        """A score from 0 to 1, the higher the better."""


class AnswerOf(Protocol):
    """Reads the answer out of a solution, so that equal answers can be counted."""

    def __call__(self, prompt: Seq[int], generated: Seq[int]) -> Hashable | None:
        """The answer; None when there is none."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and how branches draw what follows it: each with a seed of its own.

    Errors: BadSearch.
    """

    prompt: tuple[int, ...]
    new_tokens: int
    stop_token: int | None = None
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.prompt:
            raise BadSearch("the prompt is empty: give one token at least")
        if self.new_tokens < 1:
            raise BadSearch(f"new_tokens is {self.new_tokens}: a branch needs one at least")
        if not 0 < self.temperature < inf:
            raise BadSearch(
                f"temperature is {self.temperature}: without chance all branches are the same;"
                " give one above 0"
            )
        if not 0 <= self.seed < 2**64:
            raise BadSearch(f"seed is {self.seed}; give an unsigned 64-bit number")

    def sampling(self, branch: int) -> Sampling:
        """How the branch of this number draws."""
        seeds = np.random.SeedSequence(self.seed, spawn_key=(branch,))
        return Sampling(self.temperature, int(seeds.generate_state(1, np.uint64)[0]))


class Strategy(Protocol):
    """A way to search. It may be used again and again, on any engine."""

    def search(self, engine: Engine, question: Question) -> Outcome:
        """Search for the best way in which the prompt goes on.

        What else the engine has to do goes on meanwhile. The winner has ended; of all branches
        nothing is left in the pool or with the daemon, also when this raises.
        Errors: BadSearch; BadStepRules; SearchFailed; those of the engine.
        """


def check_count(name: str, count: int, most: int = BRANCHES_MAX - 1) -> None:
    """Errors: BadSearch when there are none of something, or too many."""
    if not 1 <= count <= most:
        raise BadSearch(f"{name} is {count}; give one from 1 to {most}")
