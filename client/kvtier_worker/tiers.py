"""How many bytes of KV lie in each tier over the time of a run, asked of the admin socket."""

from time import perf_counter
from typing import Any, Final

import msgspec

from kvtier_client.admin import AdminClient
from kvtier_worker.engine import Engine

SAMPLE_EVERY_S: Final = 0.25


class TierSample(msgspec.Struct, frozen=True):
    """Bytes of KV in each tier at one moment, and how many sessions ran; `hbm` is the worker's
    pool."""

    at_s: float
    running: int
    hbm_bytes: int
    dram_bytes: int
    nvme_bytes: int


class TierFigures(msgspec.Struct, frozen=True):
    """Peaks of the daemon's tiers, what it moved between them, and the blocks of pruned nodes."""

    dram_peak_bytes: int = 0
    nvme_peak_bytes: int = 0
    spilled_bytes: int = 0
    restored_bytes: int = 0
    pruned_blocks: int = 0


class _Report(msgspec.Struct, frozen=True):
    dram_bytes: int
    nvme_bytes: int
    spilled_bytes: int
    restored_bytes: int
    pruned_blocks: int


class TierWatch:
    """Samples the tiers while an engine runs; counts what the daemon did since it was made."""

    def __init__(self, admin: AdminClient) -> None:
        self._admin = admin
        self._first = self._ask()
        self._started_s = perf_counter()
        self.samples: list[TierSample] = []

    def on_step(self, engine: Engine) -> None:
        """Take a sample if the last one is old enough."""
        at_s = perf_counter() - self._started_s
        if not self.samples or at_s - self.samples[-1].at_s >= SAMPLE_EVERY_S:
            now = self._ask()
            running, hbm_bytes = len(engine.scheduler.running), engine.pool.used_bytes
            self.samples.append(
                TierSample(at_s, running, hbm_bytes, now.dram_bytes, now.nvme_bytes)
            )

    def figures(self) -> TierFigures:
        """The run's figures so far."""
        now = self._ask()
        return TierFigures(
            dram_peak_bytes=max((s.dram_bytes for s in self.samples), default=0),
            nvme_peak_bytes=max((s.nvme_bytes for s in self.samples), default=0),
            spilled_bytes=now.spilled_bytes - self._first.spilled_bytes,
            restored_bytes=now.restored_bytes - self._first.restored_bytes,
            pruned_blocks=now.pruned_blocks - self._first.pruned_blocks,
        )

    def _ask(self) -> _Report:
        stats: dict[str, Any] = self._admin.call("stats")
        return _Report(
            dram_bytes=sum(t["dram"]["used_bytes"] for t in stats["tenants"].values()),
            nvme_bytes=stats["nvme"]["used_bytes"],
            spilled_bytes=stats["counters"]["spilled_bytes"],
            restored_bytes=stats["counters"]["restored_bytes"],
            pruned_blocks=stats["counters"]["pruned_blocks"],
        )
