"""A benchmark's figures: how they are summed up, judged, printed and kept in build/bench.json."""

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

BUILD: Final = Path(__file__).parents[2] / "build"
RESULTS: Final = BUILD / "bench.json"

Better = Literal["higher", "lower"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number and, where the project has set one, its budget."""

    name: str
    value: float
    budget: float | None = None
    better: Better = "higher"
    note: str = ""
    rounds: Sequence[float] = field(default_factory=tuple)

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
) -> Figure:
    """The median of a benchmark's rounds as a figure."""
    return Figure(name, statistics.median(rounds), budget, better, note, tuple(rounds))


def merge(figures: Sequence[Figure]) -> None:
    """Add figures to build/bench.json; those of other benchmarks stay."""
    BUILD.mkdir(exist_ok=True)
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known |= {figure.name: round(figure.value, 6) for figure in figures}
    RESULTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def table(figures: Sequence[Figure]) -> str:
    """Figures for people: value, budget, whether it holds, and the quartiles of the rounds."""
    lines = [f"{'figure':32} {'value':>9} {'budget':>9}  {'holds':5}  {'quartiles':>17}  note"]
    words = {True: "yes", False: "NO", None: ""}
    for one in figures:
        sign = "≥" if one.better == "higher" else "≤"
        budget = "" if one.budget is None else f"{sign} {one.budget:g}"
        spread = ""
        if len(one.rounds) > 3:
            low, _, high = statistics.quantiles(one.rounds, n=4)
            spread = f"{low:.3f} .. {high:.3f}"
        lines.append(
            f"{one.name:32} {one.value:9.3f} {budget:>9}  {words[one.holds]:5}  {spread:>17}  "
            f"{one.note}".rstrip()
        )
    return "\n".join(lines)


def load() -> str:
    """How busy the machine is: a ratio taken on a busy one says less."""
    one, five, _ = os.getloadavg()
    return f"{os.cpu_count()} cores, load {one:.2f} (1 min) {five:.2f} (5 min)"
