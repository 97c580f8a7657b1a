"""The connector's counters: what they are called and mean, and how they add up."""

from typing import Final

COUNTERS: Final = {
    "preemptions": "Requests that were preempted.",
    "lost_tokens": "Tokens whose KV preemptions took from the engine's pool.",
    "restored_tokens": "Tokens of preempted requests whose KV came back from the daemon.",
    "recomputed_tokens": "Tokens of preempted requests whose KV was computed again.",
    "recompute_avoided_tokens": "Tokens of preempted requests that were not computed again.",
    "prefix_hit_tokens": "Tokens of new requests whose KV came from the daemon.",
    "lookups": "New requests that the daemon was asked about.",
    "misses": "New requests of which the daemon had nothing.",
    "late_answers": "Requests that went on without the daemon's answer at the deadline.",
    "saved_blocks": "Blocks that were stored, counted on every rank.",
    "saved_bytes": "Bytes that were stored, in the daemon's DRAM.",
    "save_us": "Microseconds that ranks spent on storing.",
    "save_failures": "Saves that some rank could not store.",
    "loaded_blocks": "Blocks that were loaded, counted on every rank.",
    "loaded_dram_bytes": "Bytes that were loaded from the daemon's DRAM.",
    "loaded_nvme_bytes": "Bytes that were loaded and had to come back from NVMe first.",
    "load_us": "Microseconds that ranks spent on loading.",
    "load_failures": "Requests of which some block could not be loaded; it was recomputed.",
}


class Tally:
    """Counters since they were last taken."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}

    def add(self, name: str, count: float) -> None:
        """Count; zeros leave no trace."""
        assert name in COUNTERS, name
        if count:
            self._counts[name] = self._counts.get(name, 0) + count

    def take(self) -> dict[str, float]:
        """All that was counted, and begin anew."""
        counts, self._counts = self._counts, {}
        return counts


def add_up(counts: dict[str, float], more: dict[str, float]) -> None:
    """Add `more` to `counts`."""
    for name, count in more.items():
        counts[name] = counts.get(name, 0) + count
