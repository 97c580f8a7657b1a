"""A benchmark's figures: how they are summed up, judged, printed and kept in a file."""

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from kvtier_client.errors import InvalidArgument

Better = Literal["higher", "lower"]


class Cell(NamedTuple):
    """A figure's place in a grid: many figures of one kind, by row and column."""

    grid: str
    row: str
    column: str


@dataclass(frozen=True, slots=True)
class Figure:
    """One number and, where the project has set one, its budget."""

    name: str
    value: float
    budget: float | None = None
    better: Better = "higher"
    note: str = ""
    rounds: Sequence[float] = field(default_factory=tuple)
    cell: Cell | None = None

    @property
    def holds(self) -> bool | None:
        """Whether the budget is kept; None without one."""
        if self.budget is None:
            return None
        return self.value >= self.budget if self.better == "higher" else self.value <= self.budget


def middle(
    name: str,
    rounds: Sequence[float],
    budget: float | None = None,
    better: Better = "higher",
    note: str = "",
    cell: Cell | None = None,
) -> Figure:
    """The median of a benchmark's rounds as a figure."""
    return Figure(name, statistics.median(rounds), budget, better, note, tuple(rounds), cell)


def known(path: Path) -> dict[str, float]:
    """The figures in a file; none when there is no such file. Errors: InvalidArgument."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as problem:
        raise InvalidArgument(
            f"cannot add figures to {path}: {problem}; name another file or remove this one"
        ) from None
    if not isinstance(found, dict):
        raise InvalidArgument(
            f"cannot add figures to {path}: it is no map from name to number; name another file"
        )
    return found


def merge(path: Path, figures: Sequence[Figure]) -> None:
    """Add figures to a JSON file, a flat map; those of other benchmarks stay.

    Errors: InvalidArgument when the file is something else, or cannot be written.
    """
    kept = known(path) | {figure.name: round(figure.value, 6) for figure in figures}
    try:
        path.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    except OSError as problem:
        raise InvalidArgument(
            f"cannot write figures to {path}: {problem.strerror}; name another file"
        ) from None


def table(figures: Sequence[Figure]) -> str:
    """Figures for people: grids of those that have a cell, and one line for each other one."""
    grids: dict[str, list[Figure]] = {}
    for one in figures:
        grids.setdefault("" if one.cell is None else one.cell.grid, []).append(one)
    plain = grids.pop("", [])
    parts = [_grid(title, found) for title, found in grids.items()]
    return "\n\n".join([*parts, _lines(plain)] if plain else parts)


def _lines(figures: Sequence[Figure]) -> str:
    """One line each: value, budget, whether it holds, and the quartiles of the rounds."""
    width = max(len(one.name) for one in figures)
    lines = [f"{'figure':{width}} {'value':>9} {'budget':>9}  holds  {'quartiles':>17}  note"]
    words = {True: "yes", False: "NO", None: ""}
    for one in figures:
        sign = "≥" if one.better == "higher" else "≤"
        budget = "" if one.budget is None else f"{sign} {one.budget:g}"
        spread = ""
        if len(one.rounds) > 3:
            low, _, high = statistics.quantiles(one.rounds, n=4)
            spread = f"{low:.3f} .. {high:.3f}"
        lines.append(
            f"{one.name:{width}} {one.value:9.3f} {budget:>9}  {words[one.holds]:5}  {spread:>17}  "
            f"{one.note}".rstrip()
        )
    return "\n".join(lines)


def _grid(title: str, figures: Sequence[Figure]) -> str:
    """Rows and columns in the order in which they first appear."""
    cells = {(one.cell.row, one.cell.column): one.value for one in figures if one.cell}
    rows, columns = ([*dict.fromkeys(names)] for names in zip(*cells, strict=True))
    side = max(len(title), *map(len, rows))
    widths = [max(len(column), 8) for column in columns]
    heads = (f"{name:>{width}}" for name, width in zip(columns, widths, strict=True))
    lines = [f"{title:{side}}  {'  '.join(heads)}"]
    for row in rows:
        values = (
            f"{_short(cells.get((row, column))):>{width}}"
            for column, width in zip(columns, widths, strict=True)
        )
        lines.append(f"{row:{side}}  {'  '.join(values)}".rstrip())
    return "\n".join(lines)


def _short(value: float | None) -> str:
    """A number with three digits that say something."""
    if value is None:
        return ""
    return (
        f"{value:.0f}"
        if abs(value) >= 100
        else f"{value:.1f}"
        if abs(value) >= 10
        else f"{value:.2f}"
    )


def load() -> str:
    """How busy the machine is: a ratio taken on a busy one says less."""
    one, five, _ = os.getloadavg()
    return f"{os.cpu_count()} cores, load {one:.2f} (1 min) {five:.2f} (5 min)"
