"""Swap or recompute: a cost model fed by the client's own timings.

A swap of `bytes` behind `queue_depth` others like it takes `(queue_depth + 1) * (latency + bytes /
bandwidth)`; recomputing `tokens` takes `tokens / prefill rate`. Rates are exponentially weighted
means, so that the model follows a machine whose load changes. Pure: it reads no clock.
"""

import math
import threading
from collections import deque
from enum import StrEnum
from typing import Final

import msgspec

from kvtier_client.errors import InvalidArgument

HISTORY_DECISIONS: Final = 1024
EWMA_WEIGHT: Final = 0.2
"""Weight of the newest observation."""
PRIOR_BANDWIDTH: Final = {"dram": 4e9, "nvme": 0.5e9, "remote": 0.1e9}
"""Bytes per second believed of a tier until something was measured."""
PRIOR_PREFILL_TOKENS_PER_S: Final = 1000.0


class Action(StrEnum):
    """What to do with a preempted request's KV."""

    SWAP = "swap"
    RECOMPUTE = "recompute"


class Decision(msgspec.Struct, frozen=True):
    """A decision with the predictions it was made from. Units: seconds."""

    number: int
    action: Action
    tier: str
    tokens: int
    bytes: int
    queue_depth: int
    predicted_swap_s: float
    predicted_recompute_s: float

    @property
    def predicted_s(self) -> float:
        """The prediction for what was decided."""
        swap = self.action is Action.SWAP
        return self.predicted_swap_s if swap else self.predicted_recompute_s


class Outcome(msgspec.Struct, frozen=True):
    """A decision and how long what was decided really took."""

    decision: Decision
    outcome_s: float

    @property
    def error(self) -> float:
        """Relative error of the prediction: 0 is exact, +1 took twice as long as predicted."""
        return self.outcome_s / self.decision.predicted_s - 1.0


class Mean:
    """An exponentially weighted mean that starts at its first observation."""

    __slots__ = ("count", "value")

    def __init__(self, prior: float) -> None:
        self.value = prior
        self.count = 0

    def observe(self, value: float) -> None:
        """Take one observation in."""
        weight = 1.0 if self.count == 0 else EWMA_WEIGHT
        self.value += weight * (value - self.value)
        self.count += 1


class CostModel:
    """Predicts swap and recompute, decides, and remembers how right it was."""

    def __init__(self, prefill_tokens_per_s: float = PRIOR_PREFILL_TOKENS_PER_S) -> None:
        _positive("prefill_tokens_per_s", prefill_tokens_per_s)
        self._lock = threading.Lock()
        self._bandwidth: dict[str, Mean] = {t: Mean(v) for t, v in PRIOR_BANDWIDTH.items()}
        self._latency: dict[str, Mean] = {t: Mean(0.0) for t in PRIOR_BANDWIDTH}
        self._prefill = Mean(prefill_tokens_per_s)
        self._history: deque[Outcome] = deque(maxlen=HISTORY_DECISIONS)
        self._numbers = 0

    def observe_swap(self, tier: str, moved_bytes: int, took_s: float) -> None:
        """A transfer of `moved_bytes` to or from `tier` took `took_s`.

        Errors: InvalidArgument for an unknown tier. A transfer of nothing, or one too short for
        the clock, says nothing and is left out.
        """
        mean = self._of(tier)
        if moved_bytes > 0 and took_s > 0 and math.isfinite(took_s):
            with self._lock:
                mean.observe(moved_bytes / took_s)

    def observe_latency(self, tier: str, waited_s: float) -> None:
        """A transfer waited `waited_s` before its first byte moved."""
        self._of(tier)
        if waited_s >= 0 and math.isfinite(waited_s):
            with self._lock:
                self._latency[tier].observe(waited_s)

    def observe_prefill(self, tokens: int, took_s: float) -> None:
        """Computing `tokens` of KV took `took_s`."""
        if tokens > 0 and took_s > 0 and math.isfinite(took_s):
            with self._lock:
                self._prefill.observe(tokens / took_s)

    def bandwidth(self, tier: str) -> float:
        """Bytes per second of a tier. Errors: InvalidArgument for an unknown tier."""
        return self._of(tier).value

    @property
    def prefill_tokens_per_s(self) -> float:
        """Tokens per second of prefill."""
        return self._prefill.value

    def measured(self, tier: str) -> bool:
        """Whether the bandwidth of a tier was observed, or is only believed."""
        return self._of(tier).count > 0

    def decide(self, tokens: int, bytes: int, tier: str, queue_depth: int = 0) -> Decision:
        """Choose between swapping `bytes` back from `tier` and recomputing `tokens`.

        Equal predictions swap: it leaves the compute to others. Errors: InvalidArgument for
        negative sizes or an unknown tier.
        """
        if tokens < 0 or bytes < 0 or queue_depth < 0:
            raise InvalidArgument(
                f"tokens {tokens}, bytes {bytes} and queue_depth {queue_depth} must not be negative"
            )
        bandwidth = self._of(tier).value
        swap_s = (queue_depth + 1) * (self._latency[tier].value + bytes / bandwidth)
        recompute_s = tokens / self._prefill.value
        action = Action.SWAP if swap_s <= recompute_s else Action.RECOMPUTE
        with self._lock:
            self._numbers += 1
            number = self._numbers
        return Decision(number, action, tier, tokens, bytes, queue_depth, swap_s, recompute_s)

    def record(self, decision: Decision, outcome_s: float) -> None:
        """Remember how long it took, and learn from it.

        Errors: InvalidArgument when the time is negative or not a number.
        """
        if not (outcome_s >= 0 and math.isfinite(outcome_s)):
            raise InvalidArgument(f"an outcome of {outcome_s} s is no duration")
        with self._lock:
            self._history.append(Outcome(decision, outcome_s))
        if decision.action is Action.RECOMPUTE:
            self.observe_prefill(decision.tokens, outcome_s)

    def history(self) -> list[Outcome]:
        """The newest decisions with their outcomes, oldest first; at most HISTORY_DECISIONS."""
        with self._lock:
            return list(self._history)

    def mean_error(self, action: Action) -> float | None:
        """Mean relative size of the predictions' errors, or None when nothing was recorded."""
        errors = [
            abs(one.error)
            for one in self.history()
            if one.decision.action is action and one.decision.predicted_s > 0
        ]
        return sum(errors) / len(errors) if errors else None

    def _of(self, tier: str) -> Mean:
        try:
            return self._bandwidth[tier]
        except KeyError:
            known = ", ".join(self._bandwidth)
            raise InvalidArgument(f"tier {tier!r} is unknown; the tiers are {known}") from None


def _positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise InvalidArgument(f"{name} must be a positive number, not {value}")
