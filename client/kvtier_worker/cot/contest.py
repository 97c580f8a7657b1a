"""The same problems, weights and bytes of KV under several policies: who gets further with them?"""

from dataclasses import dataclass
from enum import StrEnum
from time import perf_counter
from typing import Final

import msgspec

import kvtier_client as kv
from kvtier_worker.cot.answers import BLOCK_TOKENS, Outcome, open_engine, outcome, submit
from kvtier_worker.cot.policy import by_token
from kvtier_worker.cot.task import Problem, Size
from kvtier_worker.engine import Engine, block_shape
from kvtier_worker.model import Llama
from kvtier_worker.pool import BlockShape, PagedPool
from kvtier_worker.scheduler import Limits
from kvtier_worker.sequence import Sequence

LIMITS: Final = Limits(step_rows=64, running=64)


class Policy(StrEnum):
    """What stays of a session's KV in the pool, and where the rest goes."""

    FULL = "full KV"
    SWAP = "full KV + swap"
    FOLD = "fold"
    UNFOLD = "fold + unfold"

    @property
    def folds(self) -> bool:
        """Whether finished steps are folded."""
        return self in (Policy.FOLD, Policy.UNFOLD)

    @property
    def keeps(self) -> bool:
        """Whether what leaves the pool goes to a daemon, and not away."""
        return self in (Policy.SWAP, Policy.UNFOLD)


class Score(msgspec.Struct, frozen=True):
    """How many of the problems were answered right; `internals` ask about a step's inside."""

    problems: int
    right: int
    internals: int
    internals_right: int


@dataclass(frozen=True, slots=True)
class Contest:
    """Problems of one size, and a pool that holds `budget_tokens` of KV."""

    model: Llama
    problems: tuple[Problem, ...]
    budget_tokens: int

    @property
    def shape(self) -> BlockShape:
        """The shape of the model's blocks."""
        return block_shape(self.model, BLOCK_TOKENS)

    @property
    def budget_bytes(self) -> int:
        """The pool's bytes, its scratch page included."""
        return (self.shape.blocks(self.budget_tokens) + 1) * self.shape.block_bytes

    @property
    def session_bytes(self) -> int:
        """The KV of one whole session."""
        return self.shape.blocks(self.problems[0].size.tokens) * self.shape.block_bytes

    def enter(self, policy: Policy, client: kv.Client | None) -> "Entrant":
        """An engine with all problems in its queue. A policy that keeps KV needs a client."""
        pool = PagedPool(self.shape, self.budget_bytes, self.model.device)
        assert client is not None or not policy.keeps
        step_tokens = self.problems[0].size.step_tokens
        folding = by_token(step_tokens) if policy.folds else None
        keeper = client if policy.keeps else None
        engine = open_engine(self.model, pool, keeper, LIMITS, folding)
        return Entrant(engine, self.problems, [submit(engine, p) for p in self.problems])


@dataclass(slots=True)
class Entrant:
    """One policy's engine; `busy_s` is the time that it was given."""

    engine: Engine
    problems: tuple[Problem, ...]
    sequences: list[Sequence]
    busy_s: float = 0.0

    def advance(self, share: float) -> None:
        """Go on until such a share of all tokens has been generated; with 1, to the end."""
        began_s = perf_counter()
        tokens = share * sum(s.end_tokens - s.prompt_tokens for s in self.sequences)
        while (share >= 1 or self.engine.clock.tokens < tokens) and self.engine.step():
            pass
        self.busy_s += perf_counter() - began_s

    def score(self) -> Score:
        """How many were right."""
        right = [
            (problem.asked is not None, outcome(problem, sequence.generated) > Outcome.WRONG)
            for problem, sequence in zip(self.problems, self.sequences, strict=True)
        ]
        return Score(
            problems=len(right),
            right=sum(is_right for _, is_right in right),
            internals=sum(asks for asks, _ in right),
            internals_right=sum(asks and is_right for asks, is_right in right),
        )


def bound(size: Size, keep: int) -> float:
    """How many times more sessions fit at a time folded than whole, averaged over their length.

    On its way a session has half its tokens on average; folded, half its steps' summaries and
    half of the open step, which cannot be folded.
    """
    whole = size.prompt_tokens + size.steps * size.step_tokens / 2
    folded = size.prompt_tokens + size.steps * keep / 2 + size.step_tokens / 2
    return whole / folded
