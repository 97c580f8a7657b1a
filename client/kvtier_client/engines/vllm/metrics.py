"""The connector's counters in vLLM: its own statistics, its log lines and Prometheus."""

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvtier_client.engines.vllm.stats import COUNTERS, add_up

PREFIX = "vllm:kvtier_"


@dataclass
class KvtierStats(KVConnectorStats):
    """Counters of one interval; `data` has those that are not zero."""

    def reset(self) -> None:
        """Begin anew."""
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> "KvtierStats":
        """Add another process's or interval's counters."""
        add_up(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """As it is logged."""
        return {name: round(count, 4) for name, count in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class KvtierProm(KVConnectorPromMetrics):
    """One Prometheus counter for each of ours and each engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        kind = metric_types[Counter]
        self._counters: dict[int, dict[str, Any]] = {
            engine: {} for engine in per_engine_labelvalues
        }
        for name, meaning in COUNTERS.items():
            counter = kind(name=PREFIX + name, documentation=meaning, labelnames=labelnames)
            for engine, values in per_engine_labelvalues.items():
                self._counters[engine][name] = counter.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's counters."""
        for name, count in transfer_stats_data.items():
            self._counters[engine_idx][name].inc(count)
