"""docs/PROTOCOL.md against the code: messages, layouts, limits and errors are as it says."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from kvtier_client import admin_wire, errors, wire
from kvtier_client.layout import Layout

PAGE = (Path(__file__).parents[2] / "docs" / "PROTOCOL.md").read_text()
PACKED = {"bin", "u32*", "u64*", "key*"}
KINDS = {
    "int": {"int"}, "str": {"str"}, "bool": {"bool"}, "float": {"float"}, "bytes": PACKED,
    "Layout": {"layout"}, "Limits": {"limits"}, "dict": {"map"}, "list": {"[bin]", "[int]",
    "[held]", "[node]"},
}  # fmt: skip
DEFAULTS = {"true": True, '""': "", "[]": [], "0": 0, "1": 1, "-1": -1}


def rows(heading: str) -> Iterable[list[str]]:
    """The cells of the first table below a heading, without its head."""
    section = PAGE.partition(f"\n{heading}\n")[2]
    assert section, heading
    table = re.search(r"^\|[^\n]*\n\|[-|]+\n((?:\|.*\n)+)", section, re.MULTILINE)
    assert table, heading
    for line in table[1].splitlines():
        yield re.split(r"\s*\|\s*", line.strip())[1:-1]


def said(fields: str) -> list[tuple[str, str, Any]]:
    """Name, type and default of each field that a table's cell lists."""
    found = []
    for field in filter(None, fields.split(", ")):
        text, _, default = field.partition(" = ")
        name, _, kind = text.rpartition(" ")
        found.append((name or kind, kind, DEFAULTS[default] if default else msgspec.NODEFAULT))
    return found


def check(heading: str, union: Any, base: int) -> None:
    page = {tag: fields for tag, fields, *_ in rows(heading)}
    structs = {kind.__struct_config__.tag: kind for kind in get_args(union)}
    assert page.keys() == structs.keys()
    for tag, struct in structs.items():
        fields = msgspec.structs.fields(struct)[base:]
        listed = said(page[tag])
        assert [name for name, _, _ in listed] == [field.name for field in fields], tag
        for (name, kind, default), field in zip(listed, fields, strict=True):
            assert kind in KINDS[getattr(field.type, "__name__", str(field.type))], (tag, name)
            real = field.default
            if field.default_factory is not msgspec.NODEFAULT:
                real = field.default_factory()
            if real == b"":
                real = ""
            assert default == real, (tag, name)


@pytest.mark.parametrize(
    ("heading", "union", "base"),
    [
        ("## Requests", wire.ClientRequest, 1),
        ("## Replies", wire.AnyReply, 3),
        ("## Pushes", wire.Push, 3),
        ("## The admin socket", admin_wire.AdminRequest, 1),
    ],
)
def test_messages_are_as_the_page_says(heading: str, union: Any, base: int) -> None:
    check(heading, union, base)


def test_layouts_are_as_the_page_says() -> None:
    table = list(rows("## Layouts, sessions, nodes, pages"))
    fields = msgspec.structs.fields(Layout)
    assert [cells[1] for cells in table] == [field.name for field in fields]
    for cells, field in zip(table, fields, strict=True):
        default = field.default
        text = "" if default is msgspec.NODEFAULT else repr(default).lower().replace("'", '"')
        assert cells[3] == text


@pytest.mark.parametrize(
    ("kind", "struct"),
    [("limits", wire.Limits), ("node", wire.NodeInfo), ("held", wire.HeldLease)],
)
def test_inner_arrays_are_as_the_page_says(kind: str, struct: Any) -> None:
    listed = re.search(rf"`{kind}` is `\[([^`]*)\]`", PAGE)
    assert listed
    names = [part.split()[0] for part in re.split(r",\s+", listed[1])]
    assert names == [field.name for field in msgspec.structs.fields(struct)]


def test_errors_are_as_the_page_says() -> None:
    listed = [tuple(cells) for cells in rows("## Errors")]
    assert listed == [
        (str(code), kind.__name__, str(kind.exit_code), "yes" if kind.retryable else "no")
        for code, kind in sorted(errors.BY_CODE.items())
        if code
    ]
