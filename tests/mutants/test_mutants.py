"""The table of mutants holds what it says, and so does the page that promises by it."""

import ast
import random
import re
from pathlib import Path

import pytest

from tests.mutants.runner import bench
from tests.mutants.table import FAULTS, ROOT, Mutant, exists, load

MUTANTS = load()
SLOW = ("tests/unit/test_daemon.py", "tests/unit/test_handshakes.py", "tests/unit/test_spill.py")
"""Tests that notice by waiting in vain for an answer."""
SAMPLE = 2
PAGE = (ROOT / "docs" / "RELIABILITY.md").read_text()
FAULT = re.compile(r"^\*\*F(\d+)\. (.*?)(?=^\*\*F|^##)", re.MULTILINE | re.DOTALL)
TEST = re.compile(r"`(tests/[\w/]+\.py::\w+)`")
FILE = re.compile(r"`((?:kvtierd|client|kernels|systemd)/[\w./]+)`")


def name(mutant: Mutant) -> str:
    return mutant.name


def is_quick(mutant: Mutant) -> bool:
    return all(
        test.startswith("tests/unit/") and not test.startswith(SLOW) for test in mutant.tests
    )


@pytest.mark.parametrize("mutant", MUTANTS, ids=name)
def test_a_mutant_has_one_place_and_tests_that_exist(mutant: Mutant) -> None:
    changed = mutant.apply((ROOT / mutant.file).read_text())
    ast.parse(changed)
    assert mutant.new != mutant.old
    assert mutant.tests
    assert [test for test in mutant.tests if not exists(test)] == []
    assert mutant.faults
    assert set(mutant.faults) <= set(FAULTS)


def test_names_of_mutants_differ() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)


def test_every_fault_has_a_mutant() -> None:
    assert {fault for mutant in MUTANTS for fault in mutant.faults} == set(FAULTS)


def test_the_page_names_every_fault_with_tests_and_files_that_exist() -> None:
    listed = FAULT.findall(PAGE)
    assert [int(number) for number, _ in listed] == list(FAULTS)
    for number, text in listed:
        tests, files = TEST.findall(text), FILE.findall(text)
        assert tests, f"F{number} names no test"
        assert files, f"F{number} names no file of its mechanism"
        assert [test for test in tests if not exists(test)] == []
        assert [file for file in files if not Path(ROOT / file).exists()] == []


@pytest.mark.timeout(600)
def test_a_few_mutants_are_caught() -> None:
    """`make mutants` tries all of them; these are others whenever the table has changed."""
    quick = [mutant for mutant in MUTANTS if is_quick(mutant)]
    chosen = random.Random(len(quick)).sample(quick, SAMPLE)
    with bench() as tree:
        assert tree.check(chosen) == "", "the tests fail without any mutant"
        verdicts = [tree.attempt(mutant) for mutant in chosen]
    survived = {v.mutant.name: (v.outcome, v.output) for v in verdicts if not v.caught}
    assert survived == {}
