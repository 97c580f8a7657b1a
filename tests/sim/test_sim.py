"""Histories of the whole daemon and its clients under faults; `make sim` runs many more.

After every event of the core its sums are right, and at every few of them all tables are recounted.
No reader sees what was not committed under that name, no acknowledged HELD block is lost unless its
medium lost it, every request has one reply or a closed connection, what needs DRAM only never waits
for the disk, and at the end all that was taken comes back.
"""

import os
import subprocess
import sys
from collections import Counter
from contextlib import closing

import pytest

from tests.sim.many import complaint, outcomes
from tests.sim.run import STEPS, History, length_of

SHORT_STEPS = 200
HISTORIES = ((0, 2000, SHORT_STEPS), (1_000_000, 40, STEPS))
"""First seed, how many of them, and steps of the longest one."""

REACHED = {
    "requests while fate strikes": 20_000, "blocks verified at the end": 5_000,
    "kills between events": 300, "kills inside a call": 90, "reboots": 180, "graceful stops": 140,
    "starts": 1_400, "starts refused": 20, "older catalogs": 5, "start found: sessions": 1_000,
    "other sizes": 130, "other sizes refused": 25,
    "start found: blocks": 1_600, "unsynced sectors lost": 190,
    "clients killed": 350, "SIGSTOP": 500, "connections cut": 300, "clock jumps": 120,
    "disk stuck": 190, "probes while the disk was stuck": 100, "page corrupted": 300,
    "write ENOSPC": 20, "header ENOSPC": 15, "catalog ENOSPC": 150, "write EIO": 10, "read EIO": 3,
    "header EIO": 40, "short write": 25,
    "daemon: committed_blocks": 9_000, "daemon: spilled_blocks": 2_500,
    "daemon: restored_blocks": 1_200, "daemon: evicted_clean_blocks": 500,
    "daemon: dropped_cached_blocks": 150, "daemon: scrubbed_blocks": 900,
    "daemon: scrub_bad_blocks": 10, "daemon: lost_blocks": 14, "daemon: checksum_mismatches": 16,
    "daemon: io_errors": 150, "daemon: expired_leases": 80, "daemon: refused_reserves": 80,
    "daemon: folds": 14, "daemon: pruned_blocks": 8, "recounts with slots in quarantine": 40,
    "reply SpillFull": 120, "reply ArenaFull": 50, "reply BlockLost": 8, "reply LeaseExpired": 60,
}  # fmt: skip
"""What all of them together must have met at least: about a third of what they meet, so that a
change of the product leaves room, and one that starves the simulation fails."""


@pytest.mark.timeout(1800)
def test_nothing_is_lost_and_nothing_is_foreign_in_thousands_of_histories() -> None:
    total: Counter[str] = Counter()
    for first, count, length in HISTORIES:
        with closing(outcomes(first, count, length, os.cpu_count() or 1)) as runs:
            for outcome in runs:
                assert not outcome.problem, complaint(outcome, length)
                total += outcome.counts
    assert total["seeds"] == sum(count for _, count, _ in HISTORIES)
    missed = {kind: total[kind] for kind, least in REACHED.items() if total[kind] < least}
    assert not missed, f"these were reached too seldom: {missed}"


def test_a_seed_replays_exactly_in_another_process() -> None:
    """Also when others have run before it, and strings have other hashes."""
    for seed, longest in ((97, SHORT_STEPS), (98, STEPS), (99, STEPS)):
        history = History(seed, length_of(seed, longest))
        history.run()
        command = [sys.executable, "-m", "tests.sim", str(seed), "--length", str(longest)]
        replay = subprocess.run(
            command, capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
        )  # fmt: skip
        assert f"{history.sim.digest:x}  digest" in replay.stdout
        for kind, count in history.counts.items():
            assert not count or f"{count:,}  {kind}\n" in replay.stdout
