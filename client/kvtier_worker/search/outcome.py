"""What comes of a search: the winner, every branch that was made, and what it all took."""

from enum import Enum

import msgspec


class Fate(Enum):
    """How a branch ended."""

    FINISHED = "finished"
    PRUNED = "pruned"
    FAILED = "failed"


class BranchReport(msgspec.Struct, frozen=True):
    """One branch. `forked_at` is how many tokens were generated when it left its `parent`.

    `steps` have ended in it and before the fork, as far as the search had to know; `failure` says
    why it has no score.
    """

    number: int
    parent: int | None
    forked_at: int
    generated: tuple[int, ...]
    steps: int
    fate: Fate
    score: float | None = None
    failure: str | None = None


class SearchFigures(msgspec.Struct, frozen=True):
    """What a search took. Units: branches, tokens, calls.

    `branches` counts the first, too, which holds the prompt. `parked` branches left the pool for
    the daemon; `woken` are those that went on from there. `shared_tokens` are those that branches
    had from the one they were forked from, and did not have to compute.
    """

    branches: int
    pruned: int
    parked: int
    woken: int
    generated_tokens: int
    shared_tokens: int
    verifier_calls: int
    verifier_failures: int


class Outcome(msgspec.Struct, frozen=True):
    """The winner is one of the branches, which are in the order in which they were made."""

    winner: BranchReport
    branches: tuple[BranchReport, ...]
    figures: SearchFigures
