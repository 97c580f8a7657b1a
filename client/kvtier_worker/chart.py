"""Draws a run over its time as a PNG: the KV in each tier, and how many sessions ran."""

from collections.abc import Sequence as Seq

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvtier_worker.cot.contest import Policy
from kvtier_worker.cot.demo import ThoughtReport
from kvtier_worker.tiers import TierSample

MIB = 1 << 20
POLICY_COLORS = {
    Policy.FULL: "#8a8f98",
    Policy.SWAP: "#dd8a2e",
    Policy.FOLD: "#7fb2e5",
    Policy.UNFOLD: "#2b6cb0",
}


def draw_tiers(samples: Seq[TierSample], path: str) -> None:
    """Stack the bytes of pool, DRAM and NVMe over the seconds of one run."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    _stack_tiers(figure.subplots(), samples, "KV in each tier while swapping")
    figure.savefig(path, dpi=120)


def draw_thoughts(report: ThoughtReport, path: str) -> None:
    """How many sessions ran under each policy, and below it where the KV was while folding."""
    figure = Figure(figsize=(9, 8), layout="constrained")
    above, below = figure.subplots(2)
    for policy, run in report.runs.items():
        above.step(
            [s.at_s for s in run.samples],
            [s.running for s in run.samples],
            where="post",
            color=POLICY_COLORS[policy],
            label=f"{policy}: {run.figures.wall_s:.0f} s",
        )
    above.set(
        xlabel="seconds",
        ylabel="sessions that run",
        title="The same sessions and the same bytes of KV in the pool",
    )
    above.set_ylim(bottom=0)
    above.margins(x=0)
    above.legend(loc="upper right")
    _stack_tiers(below, report.runs[Policy.UNFOLD].samples, f"KV in each tier: {Policy.UNFOLD}")
    figure.savefig(path, dpi=120)


def _stack_tiers(axes: Axes, samples: Seq[TierSample], title: str) -> None:
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
    axes.set(xlabel="seconds", ylabel="MiB of KV", title=title)
    axes.margins(x=0)
    axes.legend(loc="upper left")
