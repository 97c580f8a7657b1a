"""What the demos show: progress while they run, then a table, a file of figures and a chart."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

from kvtier_worker.chart import draw_thoughts, draw_tiers
from kvtier_worker.cot.demo import ThoughtPlan, ThoughtReport, run_thoughts
from kvtier_worker.demo import Demo, DemoPlan, DemoReport, Progress
from kvtier_worker.load import LoadedModel
from kvtier_worker.table import result_table, thought_table

if TYPE_CHECKING:
    from rich.progress import TaskID


def show_thoughts(loaded: LoadedModel, plan: ThoughtPlan, out: str) -> list[str]:
    """The reasoning model under four policies. Returns what was not as it should be."""
    console = Console()
    with _progress_bar(console, plan.tokens) as progress:
        report = run_thoughts(loaded.model, plan, progress)
    return _present(console, report, thought_table(report), out, lambda p: draw_thoughts(report, p))


def show_swap(loaded: LoadedModel, plan: DemoPlan, out: str) -> list[str]:
    """Any model with and without swap. Returns what was not as it should be."""
    console = Console()
    with _progress_bar(console, len(plan.prompts) * plan.new_tokens) as progress:
        report = Demo(loaded, plan, progress).run()
    return _present(
        console, report, result_table(report), out, lambda png: draw_tiers(report.samples, png)
    )


def _present(
    console: Console,
    report: ThoughtReport | DemoReport,
    table: Table,
    out: str,
    draw: Callable[[str], None],
) -> list[str]:
    console.print(table)
    png = os.path.splitext(out)[0] + ".png"
    with open(out, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(report)))
    draw(png)
    console.print(f"figures: {out}, chart: {png}")
    return report.failures


@contextmanager
def _progress_bar(console: Console, total_tokens: int) -> Iterator[Progress]:
    """A bar per policy, in tokens; in a log, a line per tenth."""
    if not console.is_terminal:
        yield _progress_lines(console, total_tokens)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description:>14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def show(policy: str, tokens: int) -> None:
            if policy not in tasks:
                tasks[policy] = bars.add_task(policy, total=total_tokens)
            bars.update(tasks[policy], completed=tokens)

        yield show


def _progress_lines(console: Console, total_tokens: int) -> Progress:
    tenths: dict[str, int] = {}

    def show(policy: str, tokens: int) -> None:
        tenth = 10 * tokens // total_tokens
        if tenth > tenths.get(policy, 0):
            tenths[policy] = tenth
            console.print(f"{policy}: {tokens} of {total_tokens} tokens")

    return show
