"""What one request may spend on its thought, and how far it is on the way to its end."""

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from kvtier_worker.errors import BadBudget
from kvtier_worker.loops import LoopWindow

EFFORTS: Final = {"low": 0.25, "medium": 0.5, "high": 1.0}
"""How much of a request's budget each effort is."""


class Cause(Enum):
    """Why a thought was brought to its end; each has a figure of this name."""

    TOKENS = "token_budget"
    KV = "kv_bytes"
    REPEATS = "loop_ngram"
    MONOTONY = "loop_entropy"
    SURE = "probe"
    PRESSURE = "pressure"


@dataclass(frozen=True, slots=True)
class Budget:
    """What a request's thought may take before it is brought to land; the landing comes on top.

    `tokens` are generated ones; None is as many as the request leaves when the longest landing
    still fits behind them. `kv_bytes` is the KV of its prompt and thought, less what is folded
    away, whether it is in the pool or out of it; None is no limit. `effort` takes a share of both
    (`EFFORTS`). Errors: BadBudget.
    """

    tokens: int | None = None
    kv_bytes: int | None = None
    effort: str = "high"

    def __post_init__(self) -> None:
        for what, limit in (("tokens", self.tokens), ("bytes of KV", self.kv_bytes)):
            if limit is not None and limit < 1:
                raise BadBudget(
                    f"a budget of {limit} {what}: nothing could be thought with it; give 1 at"
                    " least, or None for no limit of its own"
                )
        if self.effort not in EFFORTS:
            raise BadBudget(f"effort {self.effort!r} is unknown; it is one of {', '.join(EFFORTS)}")

    @property
    def share(self) -> float:
        """How much of the budget the effort is."""
        return EFFORTS[self.effort]


@dataclass(slots=True)
class Course:
    """A governed sequence's budget, and how far it is on the way to its end.

    It may generate `tokens` and have `kv_entries` entries. Then, for `cause`, it is brought to
    land: since it has `begun_at` tokens it looks for the end of a step, and from `landed_at` on
    come control tokens, of which `forced` are still to come, and the answer. `stopped` says that
    the answer was cut off; `problem` what a probe or control did wrong. `window` is made when it
    is needed. The last two are not saved.
    """

    tokens: int
    kv_entries: int | None
    cause: Cause | None = None
    begun_at: int = 0
    landed_at: int | None = None
    forced: list[int] = field(default_factory=list)
    stopped: bool = False
    probe_failed: bool = False
    problem: str | None = None
    window: LoopWindow | None = None

    def fork(self) -> "Course":
        """The same course for another branch, which goes its own way from here on."""
        window = None if self.window is None else self.window.fork()
        return replace(self, forced=list(self.forced), window=window)
