"""Tables and trees for people: rich on a terminal, plain text elsewhere."""

import sys
from collections.abc import Sequence

import click

Row = Sequence[str]

GUIDE_WIDTH = 4
"""Columns by which each level of a tree is set in."""
WIDTH_MAX = 10_000
"""Wider than any table."""


def size(count_bytes: int) -> str:
    """Bytes in the unit that suits them, such as "1.5 GiB"."""
    value, units = float(count_bytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def duration(seconds: float) -> str:
    """Seconds as their two largest units, such as "3h 12m"."""
    whole = int(seconds)
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "m")]
    parts.append((whole % 60, "s"))
    while len(parts) > 1 and not parts[0][0]:
        parts.pop(0)
    return " ".join(f"{count}{unit}" for count, unit in parts[:2])


def printable(text: str) -> str:
    """The text with control characters spelt out: clients choose the names of their sessions."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def show_table(columns: Row, rows: Sequence[Row], title: str = "") -> None:
    """Print a table; cells that read as numbers are set right.

    What is wider than the terminal is plain text too, so that nothing is cut off.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty() and _show_rich(columns, rows, title):
        return
    if title:
        click.echo(title)
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    right = [_is_numeric(cells) for cells in zip(*rows, strict=True)] or [False] * len(columns)
    for row in (columns, *rows):
        cells = [
            cell.rjust(width) if numeric else cell.ljust(width)
            for cell, width, numeric in zip(row, widths, right, strict=True)
        ]
        click.echo("  ".join(cells).rstrip())


def _show_rich(columns: Row, rows: Sequence[Row], title: str) -> bool:
    """Print the table if the terminal is wide enough for it."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, box=SIMPLE_HEAD, title_justify="left")
    right = [_is_numeric(cells) for cells in zip(*rows, strict=True)] or [False] * len(columns)
    for column, numeric in zip(columns, right, strict=True):
        table.add_column(column, justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console()
    wide = console.options.update_width(WIDTH_MAX)
    fits = console.measure(table, options=wide).maximum <= console.width
    if fits:
        console.print(table)
    return fits


def show_text_tree(title: str, lines: Sequence[tuple[int, str]]) -> None:
    """Print a tree; each line hangs on the last one before it that is less deep."""
    from rich.console import Console
    from rich.text import Text
    from rich.tree import Tree

    title, lines = printable(title), [(depth, printable(line)) for depth, line in lines]
    path = [Tree(Text(title))]
    for depth, line in lines:
        del path[depth + 1 :]
        path.append(path[-1].add(Text(line)))
    deepest = max((depth for depth, _ in lines), default=0)
    longest = max(len(line) for line in (title, *(line for _, line in lines)))
    width = None if sys.stdout.isatty() else longest + GUIDE_WIDTH * (deepest + 1)
    Console(width=width).print(path[0])


def _is_numeric(cells: Sequence[str]) -> bool:
    return all(cell[:1].isdigit() or cell == "-" for cell in cells)
