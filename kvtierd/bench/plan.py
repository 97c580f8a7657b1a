"""What every benchmark of a run is told: where its files go, and whether to be quick."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
QUICK_ROUNDS: Final = 2
QUICK_CASES: Final = slice(0, 3, 2)
QUICK_PART: Final = 16
"""By how much the loads of a quick run are smaller."""
QUICK_DIVISOR: Final = 4
"""By how much they are shorter."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plan:
    """Files go below `directory`, which should be on the disk that the spill files will have.

    A quick run shows that everything works, and the order of magnitude; its figures are too noisy
    to be judged.
    """

    directory: Path
    quick: bool = False

    def rounds(self, usual: int) -> int:
        """How many rounds a benchmark takes that usually takes `usual`."""
        return min(usual, QUICK_ROUNDS) if self.quick else usual

    def part(self, usual: int, least: int = 1) -> int:
        """How large a load is that usually is `usual`."""
        return max(usual // QUICK_PART, least) if self.quick else usual

    def duration_s(self, usual_s: float) -> float:
        """How long a load lasts that usually lasts `usual_s`."""
        return usual_s / QUICK_DIVISOR if self.quick else usual_s

    def some(self, usual: Sequence[T]) -> Sequence[T]:
        """Which of several cases are run."""
        return usual[QUICK_CASES] if self.quick else usual

    @contextmanager
    def empty_directory(self) -> Iterator[Path]:
        """A directory of one benchmark, gone afterwards."""
        with tempfile.TemporaryDirectory(prefix="kvtierd-bench-", dir=self.directory) as name:
            yield Path(name)


def label(size_bytes: int) -> str:
    """A size for people, such as "64 KiB"."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if size_bytes % unit == 0:
            return f"{size_bytes // unit} {name}"
    return f"{size_bytes // KIB} KiB"


def short(size_bytes: int) -> str:
    """A size in the name of a figure, such as "64k"."""
    number, unit = label(size_bytes).split()
    return number + unit[0].lower()
