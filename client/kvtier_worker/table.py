"""The demo's result table."""

from collections.abc import Callable

from rich.table import Table

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
