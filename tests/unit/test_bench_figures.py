"""Figures are judged by their budgets, kept beside older ones, and shown as people expect."""

import json
import os
import sys
from pathlib import Path

import pytest

from kvtier_client.errors import InvalidArgument, RequestError
from kvtierd.bench import dram_sizes, nvme, plot
from kvtierd.bench.figures import Cell, Figure, merge, middle, table

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("value", "better", "holds"),
    [(0.95, "higher", True), (0.94, "higher", False), (0.95, "lower", True), (1, "lower", False)],
)
def test_a_budget_is_a_least_or_a_most(value: float, better: str, holds: bool) -> None:
    assert Figure("f", value, 0.95, better).holds is holds  # type: ignore[arg-type]


def test_a_figure_without_a_budget_is_not_judged() -> None:
    assert Figure("f", 1.0).holds is None


def test_one_slow_round_does_not_move_a_figure() -> None:
    assert middle("f", [1.0, 1.1, 1.2, 1.3, 90.0]).value == 1.2


def test_figures_of_benchmarks_that_did_not_run_stay(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    merge(path, [Figure("a", 1.0), Figure("b", 2.0)])
    merge(path, [Figure("b", 3.1415926535)])
    assert json.loads(path.read_text()) == {"a": 1.0, "b": 3.141593}


@pytest.mark.parametrize("content", ["no JSON", "[1, 2]"])
def test_a_file_that_holds_something_else_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(InvalidArgument, match=r"notes\.txt.*another file"):
        merge(path, [Figure("a", 1.0)])
    assert path.read_text() == content


def test_figures_that_cannot_be_written_say_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"No such file.*another file"):
        merge(tmp_path / "nowhere" / "bench.json", [Figure("a", 1.0)])


def test_the_table_says_what_misses_its_budget_and_how_much_the_rounds_differ() -> None:
    rounds = [0.7, 0.8, 0.9, 1.0, 1.1]
    lines = table(
        [middle("slow", rounds, 0.95, note="why"), middle("quick", [2.0], 3.0, "lower")]
    ).splitlines()
    assert lines[1].split() == ["slow", "0.900", "≥", "0.95", "NO", "0.750", "..", "1.050", "why"]
    assert lines[2].split() == ["quick", "2.000", "≤", "3", "yes"]


def test_figures_of_one_kind_form_a_grid() -> None:
    figures = [
        Figure("a.x", 1234.5, cell=Cell("speed", "row a", "x")),
        Figure("a.y", 12.34, cell=Cell("speed", "row a", "y")),
        Figure("b.y", 1.234, cell=Cell("speed", "row b", "y")),
    ]
    assert [line.split() for line in table(figures).splitlines()] == [
        ["speed", "x", "y"],
        ["row", "a", "1234", "12.3"],
        ["row", "b", "1.23"],
    ]
    x, y = (table(figures).splitlines()[0].index(column) for column in "xy")
    last = table(figures).splitlines()[2]
    assert last[x].isspace()
    assert last[y] == "3"


# -------------------------------------------------------------------- plot


def dram(row: str, column: str, value: float) -> Figure:
    return Figure("f", value, cell=Cell(dram_sizes.GRID, row, column))


def disk(row: str, column: str, value: float) -> Figure:
    return Figure("f", value, cell=Cell(nvme.GRID, row, column))


FIGURES = [
    dram("64 KiB x 1", dram_sizes.OUT, 1.0),
    dram("64 KiB x 64", dram_sizes.OUT, 2.0),
    dram("1 MiB x 64", dram_sizes.OUT, 4.0),
    dram("1 MiB x 64", dram_sizes.MEMCPY, 5.0),
    dram("1 MiB x 64", dram_sizes.RATIO, 0.8),
    disk("1 MiB", "spill", 1.5),
    disk("1 MiB, power", "spill", 0.5),
    Figure("f", 9.0, cell=Cell("clients (GB/s)", "8", "memcpy")),
    Figure("f", 9.0),
]


def test_a_line_has_the_largest_batch_of_each_size() -> None:
    assert plot.series(FIGURES) == {
        dram_sizes.OUT: {65536: 2.0, 1 << 20: 4.0},
        dram_sizes.MEMCPY: {1 << 20: 5.0},
        "spill": {1 << 20: 1.5},
    }


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    plot.require(tmp_path / "bench.png")
    plot.draw(FIGURES, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(PNG)


def test_without_throughput_there_is_nothing_to_plot(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"dram\.sweep"):
        plot.draw([Figure("f", 1.0)], tmp_path / "bench.png")
    assert os.listdir(tmp_path) == []


def test_a_plot_without_matplotlib_is_refused_with_the_way_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RequestError, match=r"kvtierd\[bench\]"):
        plot.require(tmp_path / "bench.png")


def test_a_plot_in_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="directory that exists"):
        plot.require(tmp_path / "nowhere" / "bench.png")
