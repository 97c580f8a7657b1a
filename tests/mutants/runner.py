"""Runs mutants: one copy of the tree, one change at a time, and the tests that must fail.

The tests run unchanged first and must pass. A mutant is *caught* when its tests then fail by what
they assert or by an exception of the product; a file that cannot be imported, a test that is not
there or a run without an end are no proof.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from tests.mutants.table import ROOT, Mutant

LEFT_OUT: Final = shutil.ignore_patterns(".*", "build", "*.egg-info")
TEST_TIMEOUT_S: Final = 150
"""Longer than the longest wait of a test that waits in vain."""
RUN_TIMEOUT_S: Final = 300
BASELINE_TIMEOUT_S: Final = 900
PASSED, FAILED = 0, 1  # pytest's exit codes
_BROKEN: Final = re.compile(
    r"^E +(?:ImportError|ModuleNotFoundError|SyntaxError|IndentationError|NameError)\b", re.M
)
_NOTICED: Final = re.compile(r"(?:FAILED|ERROR) ")
_HUNG: Final = re.compile(r"from pytest-timeout|\+ Timeout \+")


class Verdict(msgspec.Struct, frozen=True):
    """What became of one mutant."""

    mutant: Mutant
    outcome: str
    """`caught`, or what happened instead."""
    seconds: float
    output: str

    @property
    def caught(self) -> bool:
        """Whether every one of its tests has noticed."""
        return self.outcome == "caught"


class Bench:
    """A copy of the tree in which mutants are tried one after the other."""

    def __init__(self, place: str) -> None:
        self.root = Path(place) / "tree"
        shutil.copytree(ROOT, self.root, ignore=LEFT_OUT, symlinks=True)

    def check(self, mutants: Sequence[Mutant]) -> str:
        """Run the tests of some mutants on the unchanged tree; what they said if they failed."""
        tests = sorted({test for mutant in mutants for test in mutant.tests})
        code, output = self._pytest(tests, BASELINE_TIMEOUT_S, cached=True)
        return "" if code == PASSED else output

    def attempt(self, mutant: Mutant) -> Verdict:
        """Apply a mutant, run its tests, and take it back."""
        began_s = time.monotonic()
        path = self.root / mutant.file
        original, status = path.read_text(), path.stat()
        path.write_text(mutant.apply(original))
        os.utime(path, (0, 0))  # no compiled file of another version is taken for this one's
        try:
            outcome, output = self._outcome(mutant)
        finally:
            path.write_text(original)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            _unmount_below(self.root.parent)
        return Verdict(mutant, outcome, time.monotonic() - began_s, output)

    def _outcome(self, mutant: Mutant) -> tuple[str, str]:
        code, output = self._pytest(mutant.tests, RUN_TIMEOUT_S, cached=False)
        if code is None or _HUNG.search(output):
            return ("caught" if mutant.hangs else "hangs"), output
        if code not in (PASSED, FAILED) or _BROKEN.search(output):
            return "breaks the run", output
        failed = [line.split(" ", 1)[1] for line in output.splitlines() if _NOTICED.match(line)]
        for test in mutant.tests:
            if not any(f"{line} ".startswith((f"{test} ", f"{test}[")) for line in failed):
                return f"survives {test}", output
        return "caught", output

    def _pytest(
        self, tests: Sequence[str], timeout_s: float, cached: bool
    ) -> tuple[int | None, str]:
        """Exit code (None: it did not end) and output of a run in the copy."""
        paths = [self.root, self.root / "client", self.root / "kernels"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
        if not cached:
            environment["PYTHONDONTWRITEBYTECODE"] = "1"
        command = [
            sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short",
            "-o", f"timeout={TEST_TIMEOUT_S}", f"--basetemp={self.root.parent / 'tmp'}", *tests,
        ]  # fmt: skip
        run = subprocess.Popen(
            command, cwd=self.root, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = run.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            output, _ = run.communicate()
            return None, output
        return run.returncode, output


@contextlib.contextmanager
def bench() -> Iterator[Bench]:
    """A `Bench` in a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="kvtierd-mutants-") as place:
        yield Bench(place)


def _unmount_below(place: Path) -> None:
    """A test that failed may have left a file system behind."""
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        where = line.split()[1]
        if where.startswith(f"{place}/"):
            subprocess.run(["umount", where], check=True)
