"""The table of mutants, one TOML file per area of faults, read and checked as a whole.

[[mutant]]
name = "what-is-taken-away"        # unique
faults = [1, 2]                    # numbers of the faults in docs/RELIABILITY.md
file = "kvtierd/..."               # the only file that is changed
old = "..."                        # occurs there exactly once
new = "..."
tests = ["tests/unit/test_x.py::test_y"]   # every one of them must fail
"""

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Final, Literal

import msgspec

ROOT: Final = Path(__file__).parents[2]
FAULTS: Final = range(1, 35)
_TEST: Final = re.compile(r"^ *(?:async )?def (test_\w+)\(", re.MULTILINE)


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One change of the product that must not go unnoticed."""

    name: str
    faults: tuple[int, ...]
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    hangs: bool = False
    """Whether a test that does not come to its end has noticed it too."""

    def apply(self, text: str) -> str:
        """The changed source. Errors: ValueError when the place is not found once."""
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"{self.name}: its old text occurs {found} times in {self.file}")
        return text.replace(self.old, self.new)


def load() -> tuple[Mutant, ...]:
    """All mutants, in the order of their areas. Errors: msgspec.ValidationError names the key."""
    areas = sorted(Path(__file__).parent.glob("area_*.toml"))
    kind = dict[Literal["mutant"], tuple[Mutant, ...]]
    read = [msgspec.convert(tomllib.loads(area.read_text()), kind) for area in areas]
    return tuple(mutant for area in read for mutant in area["mutant"])


@cache
def tests_in(file: str) -> frozenset[str]:
    """The names of the tests of a file below the root."""
    return frozenset(_TEST.findall((ROOT / file).read_text()))


def exists(test: str) -> bool:
    """Whether a test, written as file::name or file::name[case], is there."""
    file, _, name = test.partition("::")
    return (ROOT / file).is_file() and name.partition("[")[0] in tests_in(file)
