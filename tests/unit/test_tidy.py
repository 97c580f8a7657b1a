"""The style that the project asks of its sources, asked of every file."""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
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


def assert_nothing(look: Callable[[str], Iterable[str]], paths: list[Path]) -> None:
    """Looks into every file; a test for each of them would take far longer than looking."""
    assert paths
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    found = [f"{path.relative_to(ROOT)}: {what}" for path in texts for what in look(texts[path])]
    assert not found, "\n".join(found)


def in_code(text: str) -> Iterator[str]:
    lines = len(text.splitlines())
    if lines > FILE_LINES_MAX:
        yield f"{lines} lines"


def in_module(text: str) -> Iterator[str]:
    tree = ast.parse(text)
    if not ast.get_docstring(tree):
        yield "no module docstring"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield f"{node.name}: {lines} lines"
        elif isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            yield f"from {node.module} import *"


def in_text(text: str) -> list[str]:
    return LEFTOVER.findall(text) + MACHINE_PATH.findall(text)


def test_files_have_one_reason_to_exist_and_room_for_it() -> None:
    assert_nothing(in_code, CODE)


def test_modules_say_why_they_exist_name_what_they_import_and_fit_on_a_screen() -> None:
    assert_nothing(in_module, MODULES)


def test_nothing_is_left_for_later_and_no_machine_is_named() -> None:
    assert_nothing(in_text, TEXTS)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_between_pages_lead_somewhere(path: Path) -> None:
    links = LINK.findall(path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []
