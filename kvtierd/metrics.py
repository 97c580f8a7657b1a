"""The daemon's `stats` report as Prometheus metrics; the tables below are all there is to it."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

Stats = Mapping[str, Any]

_Table = tuple[tuple[str, str, str], ...]
"""Dotted path in the report, metric name, help."""

DAEMON: Final[_Table] = (
    ("daemon.uptime_s", "kvtierd_uptime_seconds", "Time since the daemon started."),
    (
        "daemon.longest_stall_s",
        "kvtierd_longest_stall_seconds",
        "The longest time by which a tick of the event loop came too late.",
    ),
    ("daemon.generation", "kvtierd_generation", "Starts that have succeeded on this data."),
    ("health.ok", "kvtierd_healthy", "1 when nothing is wrong, 0 when health has reasons."),
    ("nvme.total_bytes", "kvtierd_nvme_total_bytes", "Size of all spill files."),
    ("nvme.used_bytes", "kvtierd_nvme_used_bytes", "Bytes of spill slots in use."),
    ("nvme.free_bytes", "kvtierd_nvme_free_bytes", "Bytes of spill slots not in use."),
    ("scrub.running", "kvtierd_scrub_running", "1 while a pass over the spill files runs."),
    ("scrub.progress", "kvtierd_scrub_progress_ratio", "How far the pass has come; else 1."),
    (
        "scrub.since_pass_s",
        "kvtierd_scrub_last_pass_age_seconds",
        "Time since every block in the spill files had been verified.",
    ),
)

TENANT: Final[_Table] = (
    ("dram.total_bytes", "kvtierd_dram_total_bytes", "Size of the tenant's arena."),
    ("dram.used_bytes", "kvtierd_dram_used_bytes", "Arena bytes of slots with blocks."),
    ("dram.free_bytes", "kvtierd_dram_free_bytes", "Arena bytes that are free."),
    ("dram.writing_bytes", "kvtierd_dram_writing_bytes", "Arena bytes leased for writing."),
    (
        "dram.quarantined_bytes",
        "kvtierd_dram_quarantined_bytes",
        "Arena bytes that a vanished writer or reader may still touch.",
    ),
    ("dram.blocks", "kvtierd_dram_blocks", "Blocks in DRAM."),
    ("dram.high_watermark", "kvtierd_dram_high_watermark_ratio", "Fill at which eviction starts."),
    ("dram.low_watermark", "kvtierd_dram_low_watermark_ratio", "Fill at which eviction stops."),
    ("nvme.quota_bytes", "kvtierd_nvme_quota_bytes", "Spill bytes that the tenant may use."),
    ("nvme.used_bytes", "kvtierd_nvme_tenant_used_bytes", "Spill bytes that the tenant uses."),
    ("nvme.blocks", "kvtierd_nvme_blocks", "Blocks with a copy in the spill files."),
    ("sessions", "kvtierd_sessions", "Sessions, orphans included."),
    ("orphans", "kvtierd_orphan_sessions", "Sessions that no client has open."),
    ("keyed_blocks", "kvtierd_keyed_blocks", "Blocks named by a content key."),
    ("held_blocks", "kvtierd_held_blocks", "Blocks that may not be dropped."),
    ("clients", "kvtierd_clients", "Connected clients."),
    ("leases", "kvtierd_leases", "Leases that clients hold."),
    ("promised_blocks", "kvtierd_promised_blocks", "Blocks promised ahead by reservations."),
    ("waiting", "kvtierd_waiting_requests", "Requests that wait for room or for a copy."),
    ("served.requests", "kvtierd_served_requests", "Requests answered at once since the start."),
    ("served.busy_s", "kvtierd_served_busy_seconds", "Time of the daemon spent on them."),
    ("served.p50_s", "kvtierd_request_p50_seconds", "Half of them were answered within this time."),
    ("served.p99_s", "kvtierd_request_p99_seconds", "99 % of them were answered within this time."),
    ("served.longest_s", "kvtierd_request_longest_seconds", "All of them were, within this time."),
)

SPILL_PATH: Final[_Table] = (
    ("total_bytes", "kvtierd_nvme_path_total_bytes", "Size of the spill file in a directory."),
    ("used_bytes", "kvtierd_nvme_path_used_bytes", "Bytes of its slots in use."),
    ("direct_io", "kvtierd_nvme_path_direct_io", "1 when it is written past the page cache."),
)

GAUGE_ENDINGS: Final = ("_in_flight", "_queued")
"""Names among the report's counters that go down as well as up."""


class StatsCollector(Collector):
    """Yields the metrics of one report; what a report lacks is left out."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """The metrics, each once with all of its labels."""
        daemon = self._stats.get("daemon", {})
        info = GaugeMetricFamily(
            "kvtierd_info",
            "Always 1; the labels say what runs.",
            labels=["version", "instance", "integrity", "durability"],
        )
        names = ("version", "instance", "integrity", "durability")
        info.add_metric([str(daemon.get(name, "")) for name in names], 1)
        yield info
        yield from _gauges(DAEMON, {(): self._stats}, [])
        tenants = self._stats.get("tenants", {})
        yield from _gauges(TENANT, {(name,): each for name, each in tenants.items()}, ["tenant"])
        paths = self._stats.get("nvme", {}).get("paths", [])
        yield from _gauges(SPILL_PATH, {(each["path"],): each for each in paths}, ["path"])
        for name, value in sorted(self._stats.get("counters", {}).items()):
            words = name.replace("_", " ").capitalize()
            if name.endswith(GAUGE_ENDINGS):
                yield GaugeMetricFamily(f"kvtierd_{name}", f"{words}, now.", value=value)
            else:
                text = f"{words}, since the daemon started."
                yield CounterMetricFamily(f"kvtierd_{name}", text, value=value)


def _gauges(
    table: _Table, sources: Mapping[tuple[str, ...], Stats], labels: list[str]
) -> Iterator[Metric]:
    for path, name, description in table:
        family = GaugeMetricFamily(name, description, labels=labels)
        for key, stats in sources.items():
            value = _follow(stats, path)
            if value is not None:
                family.add_metric(key, float(value))
        if family.samples:
            yield family


def _follow(stats: Stats, path: str) -> Any:
    value: Any = stats
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def samples(stats: Stats) -> list[dict[str, Any]]:
    """A `stats` report as plain values: name, labels, value."""
    return [
        {"name": sample.name, "labels": sample.labels, "value": sample.value}
        for family in StatsCollector(stats).collect()
        for sample in family.samples
    ]


def render(stats: Stats) -> bytes:
    """A `stats` report in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(StatsCollector(stats))
    return generate_latest(registry)
