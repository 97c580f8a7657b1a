"""What a run is judged by: per policy the figures of the result table."""

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from time import perf_counter
from typing import Final, TypeVar

import msgspec
import numpy as np

GAPS_MAX: Final = 65_536
"""Of so many tokens, the last ones, is known how long they took."""
TICK_S: Final = 1e-9
"""Stands for no time at all where something is divided by it."""

Figures = TypeVar("Figures", bound=msgspec.Struct)


class SwapFigures(msgspec.Struct, frozen=True):
    """What went to the daemon and came back. Units: bytes, blocks, seconds."""

    swap_outs: int = 0
    swap_ins: int = 0
    out_blocks: int = 0
    in_blocks: int = 0
    out_bytes: int = 0
    in_bytes: int = 0
    out_s: float = 0.0
    in_s: float = 0.0
    refused: int = 0
    lost: int = 0
    hashes_checked: int = 0
    hashes_wrong: int = 0
    kept_steps: int = 0
    brought_steps: int = 0


class FoldFigures(msgspec.Struct, frozen=True):
    """What was folded and unfolded. Units: tokens, entries, seconds.

    `repeated` folds are those of KV that had been lost and was computed again; `unkept` steps are
    not with the daemon; `misses` are unfolds of what the daemon had no more, `crowded` those for
    which the pool had no room. `seconds` is all folding took, of which `operator_s` the operator
    and `archive_s` the copy to the daemon; `unfold_s` comes on top.
    """

    folds: int = 0
    folded_tokens: int = 0
    summary_entries: int = 0
    repeated: int = 0
    unkept: int = 0
    unfolds: int = 0
    unfolded_tokens: int = 0
    misses: int = 0
    crowded: int = 0
    refolds: int = 0
    seconds: float = 0.0
    operator_s: float = 0.0
    archive_s: float = 0.0
    unfold_s: float = 0.0
    measured: int = 0
    error_sum: float = 0.0

    @property
    def mean_error(self) -> float:
        """The mean relative error of attention over what was measured; 0 without any."""
        return self.error_sum / self.measured if self.measured else 0.0


class BudgetFigures(msgspec.Struct, frozen=True):
    """Where the governor stepped in. Units: tokens.

    The first six are thoughts that were brought to land, by cause. `landings` are control sequences
    that were injected, of `forced_tokens` tokens in all, and `control_failures` those that were not
    to be had. `hard_stops` are answers that were cut off, `probe_failures` requests whose probe
    failed, and `tightened` is how often the pool's pressure tightened all budgets.
    """

    token_budget: int = 0
    kv_bytes: int = 0
    loop_ngram: int = 0
    loop_entropy: int = 0
    probe: int = 0
    pressure: int = 0
    landings: int = 0
    forced_tokens: int = 0
    hard_stops: int = 0
    probe_failures: int = 0
    control_failures: int = 0
    tightened: int = 0


def plus(figures: Figures, more: Mapping[str, float]) -> Figures:
    """The figures with more added to some of them, by name."""
    sums = {name: getattr(figures, name) + count for name, count in more.items()}
    return msgspec.structs.replace(figures, **sums)


class RunFigures(msgspec.Struct, frozen=True):
    """One policy's run. `tpot_*` is the time between two tokens of one session, waits included; of
    a long run, that of its last `GAPS_MAX` tokens.

    `mean_running` is how many sessions computed at a time: the average over the time in which
    others waited for room, so that a queue that runs dry does not lower it (or over all the time,
    if nobody ever waited).
    """

    policy: str
    sessions: int
    generated_tokens: int
    wall_s: float
    tokens_per_s: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    peak_running: int
    mean_running: float
    preemptions: int
    recomputed_tokens: int
    pool_bytes: int
    peak_pool_bytes: int
    peak_request_bytes: int
    swap: SwapFigures
    folding: FoldFigures = FoldFigures()
    budgets: BudgetFigures = BudgetFigures()


class Clock:
    """Notes how long tokens take."""

    def __init__(self) -> None:
        self.started_s = perf_counter()
        self.tokens = 0
        self._gaps_s: deque[float] = deque(maxlen=GAPS_MAX)
        self._running_s = {True: 0.0, False: 0.0}
        self._steps_s = {True: 0.0, False: 0.0}

    def step(self, began_s: float, running: int, queued: bool) -> None:
        """A step has ended in which so many sessions computed, and others waited or did not."""
        step_s = perf_counter() - began_s
        self._steps_s[queued] += step_s
        self._running_s[queued] += running * step_s

    @property
    def mean_running(self) -> float:
        """Sessions that computed at a time while others waited; if none ever did, at any time."""
        queued = self._steps_s[True] > 0
        return self._running_s[queued] / max(self._steps_s[queued], TICK_S)

    def token(self, last_s: float | None) -> float:
        """A sequence got a token now, and the one before, if any, at `last_s`; returns the time."""
        now_s = perf_counter()
        if last_s is not None:
            self._gaps_s.append(now_s - last_s)
        self.tokens += 1
        return now_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clock was made."""
        return perf_counter() - self.started_s

    def tpot_ms(self, percentiles: Seq[float]) -> list[float]:
        """Percentiles of the time between two tokens, of the last; zeros when there were none."""
        gaps_ms = np.array(self._gaps_s or [0.0]) * 1e3
        return [float(value) for value in np.percentile(gaps_ms, percentiles)]
