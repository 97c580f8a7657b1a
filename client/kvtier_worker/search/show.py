"""What people see of searches: a table of strategies, and the tree of one search."""

from collections.abc import Callable, Mapping
from typing import Final

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from kvtier_worker.search.outcome import BranchReport, Fate, Outcome
from kvtier_worker.search.trial import StrategyRun

SHOWN_BRANCHES_MAX: Final = 200
MIB: Final = 1 << 20
_STYLES: Final = {Fate.FINISHED: "", Fate.PRUNED: "dim", Fate.FAILED: "red"}

_ROWS: Final[dict[str, Callable[[StrategyRun], str]]] = {
    "right": lambda r: f"{r.right} of {r.problems} ({r.right / r.problems:.1%})",
    "without any answer": lambda r: str(r.failed),
    "branches made / pruned": lambda r: f"{r.figures.branches} / {r.figures.pruned}",
    "parked / woken": lambda r: f"{r.figures.parked} / {r.figures.woken}",
    "tokens generated": lambda r: str(r.figures.generated_tokens),
    "tokens that sharing saved": lambda r: str(r.figures.shared_tokens),
    "tokens computed": lambda r: str(r.computed_tokens),
    "tokens recomputed": lambda r: str(r.recomputed_tokens),
    "verifier's calls / failures": lambda r: (
        f"{r.figures.verifier_calls} / {r.figures.verifier_failures}"
    ),
    "to the daemon / back, MiB": lambda r: (
        f"{r.swap.out_bytes / MIB:.1f} / {r.swap.in_bytes / MIB:.1f}"
    ),
    "down to NVMe / up again, MiB": lambda r: (
        f"{r.tiers.spilled_bytes / MIB:.1f} / {r.tiers.restored_bytes / MIB:.1f}"
    ),
    "blocks that it pruned": lambda r: str(r.tiers.pruned_blocks),
    "wall time, s": lambda r: f"{r.wall_s:.1f}",
}


def trial_table(title: str, runs: Mapping[str, StrategyRun]) -> Table:
    """One column per strategy."""
    table = Table(title=title)
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")
    for label, value in _ROWS.items():
        table.add_row(label, *(value(run) for run in runs.values()))
    return table


def outcome_tree(title: str, outcome: Outcome) -> Tree:
    """Every branch below the one that it was forked from, the first `SHOWN_BRANCHES_MAX`."""
    top = Tree(title)
    nodes: dict[int | None, Tree] = {None: top}
    for report in outcome.branches[:SHOWN_BRANCHES_MAX]:
        nodes[report.number] = nodes[report.parent].add(_label(report, report == outcome.winner))
    left_out = len(outcome.branches) - SHOWN_BRANCHES_MAX
    if left_out > 0:
        top.add(f"and {left_out} branches more")
    return top


def _label(report: BranchReport, wins: bool) -> Text:
    words = [f"branch {report.number}: {len(report.generated) - report.forked_at} tokens"]
    if report.parent is None:
        words = [f"branch {report.number}: the prompt"]
    if report.score is not None:
        words.append(f"score {report.score:.2f}")
    words.append("the winner" if wins else report.fate.value)
    if report.failure is not None:
        words.append(report.failure)
    return Text(", ".join(words), "bold green" if wins else _STYLES[report.fate])
