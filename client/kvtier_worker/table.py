"""The result tables of the demos and of the evaluation."""

from collections.abc import Callable

from rich.table import Table

from kvtier_worker.cot.demo import ThoughtReport, ThoughtRun
from kvtier_worker.cot.evaluate import Results
from kvtier_worker.demo import DemoReport
from kvtier_worker.metrics import RunFigures

MIB = 1 << 20
_NONE = "–"

_ROWS: dict[str, Callable[[RunFigures], str]] = {
    "sessions": lambda f: str(f.sessions),
    "generated tokens": lambda f: str(f.generated_tokens),
    "KV pool, MiB": lambda f: f"{f.pool_bytes / MIB:.1f}",
    "peak KV in pool, MiB": lambda f: f"{f.peak_pool_bytes / MIB:.1f}",
    "peak KV per request, MiB": lambda f: f"{f.peak_request_bytes / MIB:.1f}",
    "peak concurrency": lambda f: str(f.peak_running),
    "preemptions": lambda f: str(f.preemptions),
    "recomputed tokens": lambda f: str(f.recomputed_tokens),
    "tokens/s": lambda f: f"{f.tokens_per_s:.1f}",
    "TPOT p50, ms": lambda f: f"{f.tpot_p50_ms:.0f}",
    "TPOT p99, ms": lambda f: f"{f.tpot_p99_ms:.0f}",
    "wall time, s": lambda f: f"{f.wall_s:.1f}",
}

_SWAP_ROWS: dict[str, Callable[[DemoReport], str]] = {
    "swapped out / in, MiB": lambda r: (
        f"{_swap(r).swap.out_bytes / MIB:.1f} / {_swap(r).swap.in_bytes / MIB:.1f}"
    ),
    "time to swap out / in, s": lambda r: f"{_swap(r).swap.out_s:.2f} / {_swap(r).swap.in_s:.2f}",
    "peak in dram / nvme, MiB": lambda r: (
        f"{r.tiers.dram_peak_bytes / MIB:.1f} / {r.tiers.nvme_peak_bytes / MIB:.1f}"
    ),
    "spilled to / back from nvme, MiB": lambda r: (
        f"{r.tiers.spilled_bytes / MIB:.1f} / {r.tiers.restored_bytes / MIB:.1f}"
    ),
    "share of swapped bytes that reached nvme": lambda r: f"{r.spilled_share:.0%}",
    "swap-outs refused": lambda r: str(_swap(r).swap.refused),
    "block hashes compared / wrong": lambda r: (
        f"{_swap(r).swap.hashes_checked} / {_swap(r).swap.hashes_wrong}"
    ),
}


_THOUGHT_ROWS: dict[str, Callable[[ThoughtRun], str]] = {
    "sessions running, mean": lambda r: f"{r.figures.mean_running:.2f}",
    "sessions running, peak": lambda r: str(r.figures.peak_running),
    "tokens/s": lambda r: f"{r.figures.tokens_per_s:.0f}",
    "wall time, s": lambda r: f"{r.figures.wall_s:.1f}",
    "TPOT p50 / p99, ms": lambda r: f"{r.figures.tpot_p50_ms:.0f} / {r.figures.tpot_p99_ms:.0f}",
    "answers right": lambda r: f"{r.score.right} of {r.score.problems}",
    "… about a step's inside": lambda r: f"{r.score.internals_right} of {r.score.internals}",
    "preemptions": lambda r: str(r.figures.preemptions),
    "recomputed tokens": lambda r: str(r.figures.recomputed_tokens),
    "folds / unfolds": lambda r: f"{r.figures.folding.folds} / {r.figures.folding.unfolds}",
    "time spent on folding": lambda r: f"{r.figures.folding.seconds / r.figures.wall_s:.1%}",
    "peak KV in pool, MiB": lambda r: f"{r.figures.peak_pool_bytes / MIB:.1f}",
    "… of one session, MiB": lambda r: f"{r.figures.peak_request_bytes / MIB:.2f}",
    "… in dram / nvme, MiB": lambda r: (
        f"{r.tiers.dram_peak_bytes / MIB:.1f} / {r.tiers.nvme_peak_bytes / MIB:.1f}"
    ),
    "to daemon / back, MiB": lambda r: (
        f"{r.figures.swap.out_bytes / MIB:.1f} / {r.figures.swap.in_bytes / MIB:.1f}"
    ),
    "to nvme / back, MiB": lambda r: (
        f"{r.tiers.spilled_bytes / MIB:.1f} / {r.tiers.restored_bytes / MIB:.1f}"
    ),
    "hashes compared / wrong": lambda r: (
        f"{r.figures.swap.hashes_checked} / {r.figures.swap.hashes_wrong}"
    ),
}


def thought_table(report: ThoughtReport) -> Table:
    """One column per policy."""
    some = next(iter(report.runs.values()))
    table = Table(
        title=f"{some.figures.sessions} sessions of {report.session_tokens} tokens in"
        f" {some.figures.pool_bytes / MIB:.1f} MiB of KV",
        caption="The mean counts sessions that compute, over the time in which others wait."
        f" Folded, at most {report.bound_x:.1f} times as many have room.",
    )
    table.add_column("", no_wrap=True)
    for policy in report.runs:
        table.add_column(policy, justify="right")
    for name, value in _THOUGHT_ROWS.items():
        table.add_row(name, *(value(run) for run in report.runs.values()))
    return table


def verdict_table(results: Results) -> Table:
    """One row per comparison of folded steps with full KV."""
    verdict, about = results.verdict, results.about
    assert verdict is not None
    trigger = verdict.attention
    table = Table(
        title=f"{about.model}: steps folded to {about.keep} entries against full KV, sessions of"
        f" {about.size.tokens} tokens, seed {about.seed}",
        caption=f"Every token right: full KV {verdict.full_traces:.1f} %, folded"
        f" {verdict.folded_traces:.1f} %."
        + (
            f" Unfolded by attention ({trigger.problems} problems): precision"
            f" {trigger.precision:.1f} %, recall {trigger.recall:.1f} %, questions about a step's"
            f" inside {trigger.internals:.1f} % right."
            if trigger is not None
            else ""
        ),
    )
    heads = ("pairs", "full KV, %", "folded, %", "only full", "only folded", "points", "95 %")
    table.add_column("")
    for head in heads:
        table.add_column(head, justify="right")
    for name, one in {
        "all, asked step unfolded": verdict.answers,
        "not about a step's inside, nothing unfolded": verdict.conclusions,
        "about a step's inside, step unfolded": verdict.internals_unfold,
        "about a step's inside, nothing unfolded": verdict.internals_fold_only,
    }.items():
        table.add_row(
            name,
            str(one.pairs),
            f"{one.first:.2f}",
            f"{one.second:.2f}",
            str(one.only_first),
            str(one.only_second),
            f"{one.delta_points:+.2f}",
            f"{one.low_points:+.2f} .. {one.high_points:+.2f}",
        )
    return table


def result_table(report: DemoReport) -> Table:
    """One column per policy; what only swap has is empty for the others."""
    table = Table(title=f"{report.model}: KV under pressure")
    table.add_column("")
    for policy in report.policies:
        table.add_column(policy, justify="right")
    for name, value in _ROWS.items():
        table.add_row(name, *(value(figures) for figures in report.policies.values()))
    for label, of_report in _SWAP_ROWS.items():
        others = [_NONE] * (len(report.policies) - 1)
        table.add_row(label, *others, of_report(report))
    table.add_row(
        "outputs equal to unpressured",
        *("yes" if report.outputs_equal[policy] else "NO" for policy in report.policies),
    )
    return table


def _swap(report: DemoReport) -> RunFigures:
    return report.policies["swap"]
