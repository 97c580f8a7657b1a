"""What `kvtierctl bench` does: measure this host with daemons of its own."""

from collections.abc import Sequence
from pathlib import Path

import click

from kvtierd.bench import plot, suite
from kvtierd.bench.figures import Figure, load, merge, table
from kvtierd.bench.plan import Plan


def run_benchmarks(
    names: Sequence[str],
    directory: Path,
    quick: bool,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Run benchmarks and print their tables, of those that ended also after an error.

    Errors: KvtierError; what can be refused is refused before anything runs.
    """
    benchmarks = suite.chosen(names, suite.BENCHMARKS)
    if plot_path is not None:
        plot.require(plot_path)
    if json_path is not None:
        merge(json_path, [])
    found: list[Figure] = []
    say(load())
    try:
        for _, figures in suite.run(benchmarks, Plan(directory, quick), say):
            found += figures
            if json_path is not None:
                merge(json_path, figures)
    finally:
        if found:
            click.echo(table(found))
    if plot_path is not None:
        plot.draw(found, plot_path)


def say(line: str) -> None:
    """What goes on, beside the tables."""
    click.echo(line, err=True)
