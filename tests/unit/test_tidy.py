"""The style that the project asks of its sources, asked of every file."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ["kvtierd", "client", "kernels", "configs", "systemd", "tests", "docs", ".ci"]
ROOT_FILES = ["pyproject.toml", "constraints.txt", "Makefile"]
GENERATED = {"__pycache__", "build"}
BINARY = {".png", ".safetensors"}
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 500
LEFTOVER = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")
MACHINE_PATH = re.compile(r"/(?:root|home|Users|mnt|work|workspace|tmp)/")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def text_files() -> Iterator[Path]:
    yield from (ROOT / name for name in ROOT_FILES)
    yield from ROOT.glob("*.md")
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            relative = path.relative_to(ROOT)
            if path.is_file() and path.suffix not in BINARY and not GENERATED & set(relative.parts):
                yield path


TEXTS = sorted(text_files())
CODE = [path for path in TEXTS if path.suffix in {".py", ".cu", ".cpp", ".h"}]
MODULES = [path for path in CODE if path.suffix == ".py"]
PAGES = [path for path in TEXTS if path.suffix == ".md"]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", CODE, ids=name)
def test_file_has_one_reason_to_exist_and_room_for_it(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= FILE_LINES_MAX


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_module_says_why_it_exists(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), "no module docstring"


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_functions_fit_on_a_screen(path: Path) -> None:
    long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > FUNCTION_LINES_MAX
    ]
    assert long == []


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_imports_name_what_they_take(path: Path) -> None:
    starred = [
        f"from {node.module} import *"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
    ]
    assert starred == []


@pytest.mark.parametrize("path", TEXTS, ids=name)
def test_nothing_is_left_for_later_and_no_machine_is_named(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert LEFTOVER.findall(text) == []
    assert MACHINE_PATH.findall(text) == []


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_between_pages_lead_somewhere(path: Path) -> None:
    links = LINK.findall(path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []
