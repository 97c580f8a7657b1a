"""Draws the KV in each tier over time as a PNG."""

from collections.abc import Sequence as Seq

from matplotlib.figure import Figure

from kvtier_worker.tiers import TierSample

MIB = 1 << 20


def draw_tiers(samples: Seq[TierSample], path: str) -> None:
    """Stack the bytes of pool, DRAM and NVMe over the seconds of one run."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.stackplot(
        [s.at_s for s in samples],
        [
            [s.hbm_bytes / MIB for s in samples],
            [s.dram_bytes / MIB for s in samples],
            [s.nvme_bytes / MIB for s in samples],
        ],
        labels=["hbm (the worker's pool)", "dram (arena)", "nvme (spill files)"],
        colors=["#2b6cb0", "#dd8a2e", "#8a8f98"],
    )
    axes.set(xlabel="seconds", ylabel="MiB of KV", title="KV in each tier while swapping")
    axes.margins(x=0)
    axes.legend(loc="upper left")
    figure.savefig(path, dpi=120)
