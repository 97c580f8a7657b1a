"""A picture of throughput by block size, with memcpy and fio as the lines to reach."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kvtier_client.errors import InvalidArgument, RequestError
from kvtierd.bench import dram_sizes, nvme
from kvtierd.bench.figures import Figure
from kvtierd.bench.plan import GIB, KIB, MIB, label

COLOURS: Final = {
    dram_sizes.MEMCPY: "black", dram_sizes.OUT: "tab:blue", dram_sizes.IN: "tab:cyan",
    "fio write": "dimgray", "fio read": "darkgray", "spill": "tab:red", "restore": "tab:orange",
}  # fmt: skip
GRIDS: Final = (dram_sizes.GRID, nvme.GRID)
REFERENCES: Final = (dram_sizes.MEMCPY, "fio write", "fio read")
UNITS: Final = {"KiB": KIB, "MiB": MIB, "GiB": GIB}
SIZE_INCHES: Final = (8.0, 5.0)
DPI: Final = 120

Series = dict[str, dict[int, float]]
"""Name of a line -> block size -> GB/s."""


def require(path: Path) -> None:
    """Errors: RequestError without matplotlib; InvalidArgument for an impossible file."""
    if find_spec("matplotlib") is None:
        raise RequestError(
            "cannot plot: matplotlib is not installed; pip install 'kvtierd[bench]', or leave "
            "--plot out"
        )
    if not path.parent.is_dir() or path.is_dir():
        raise InvalidArgument(f"cannot plot to {path}: name a file in a directory that exists")


def series(figures: Sequence[Figure]) -> Series:
    """The lines that these figures give: of DRAM the largest batches, of NVMe `process`."""
    lines: Series = {}
    for one in figures:
        cell = one.cell
        if cell is None or cell.grid not in GRIDS or cell.column not in COLOURS:
            continue
        number, unit, *rest = cell.row.split(maxsplit=2)
        if unit in UNITS and (not rest or cell.grid == dram_sizes.GRID):
            # The batches of a size come in rising order: the last one stays.
            lines.setdefault(cell.column, {})[int(number) * UNITS[unit]] = one.value
    return lines


def draw(figures: Sequence[Figure], path: Path) -> None:
    """Write a PNG. Errors: InvalidArgument when there is nothing to show, or no such place."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Picture

    lines = series(figures)
    if not lines:
        raise InvalidArgument("nothing to plot: run dram.sweep, nvme or nvme.sizes too")
    picture = Picture(figsize=SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.add_subplot(
        xscale="log", yscale="log", xlabel="block size", ylabel="GB/s",
        title="Throughput by block size: DRAM in the largest batches, and NVMe",
    )  # fmt: skip
    for name, colour in COLOURS.items():
        if name in lines:
            sizes = sorted(lines[name])
            style = "--" if name in REFERENCES else "-"
            values = [lines[name][size] for size in sizes]
            axes.plot(sizes, values, style, color=colour, marker="o", label=name)
    ticks = sorted({size for line in lines.values() for size in line})
    axes.set_xticks(ticks, [label(size) for size in ticks], minor=False)
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(visible=True, which="both", alpha=0.3)
    picture.legend(loc="outside right upper")
    try:
        picture.savefig(path, format="png", dpi=DPI)
    except OSError as problem:
        raise InvalidArgument(
            f"cannot plot to {path}: {problem.strerror}; name another file"
        ) from None
