"""Histories of the whole daemon and its clients under faults; `make sim` runs many more.

After every event of the core its sums are right, and at every few of them all tables are recounted.
No reader sees what was not committed under that name, no acknowledged HELD block is lost unless its
medium lost it, every request has one reply or a closed connection, what needs DRAM only never waits
for the disk, and at the end all that was taken comes back.
"""

import os
import subprocess
import sys

import pytest

from tests.sim.run import History

SHORT = 800
LONG = 30


def run(*options: str) -> None:
    """Run histories in processes of their own; what they say is shown if one fails."""
    jobs = str(os.cpu_count() or 1)
    command = [sys.executable, "-m", "tests.sim", *options, "--jobs", jobs]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(600)
def test_nothing_is_lost_and_nothing_is_foreign_in_hundreds_of_short_histories() -> None:
    run("0", "--seeds", str(SHORT), "--length", "150")


@pytest.mark.timeout(600)
def test_nothing_is_lost_and_nothing_is_foreign_in_long_histories() -> None:
    run("1000000", "--seeds", str(LONG), "--length", "3000")


def test_a_seed_replays_exactly() -> None:
    runs = [History(99, 800), History(99, 800)]
    for each in runs:
        each.run()
    assert runs[0].sim.digest == runs[1].sim.digest
    assert runs[0].counts == runs[1].counts
