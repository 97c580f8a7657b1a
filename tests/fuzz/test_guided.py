"""The fuzzers themselves: a short run of each with a fixed seed, and faults that they must find.

Long runs: `python -m tests.fuzz.run`, see there.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kvtierd.core.leases import Peer
from kvtierd.core.sessions import Sessions
from kvtierd.core.state import State
from kvtierd.core.writes import Writes
from tests.fuzz.line import Finding
from tests.fuzz.run import CI_UNITS, REGRESSIONS, saved
from tests.fuzz.targets import TARGETS, without_coverage

SEED = 20


@pytest.mark.parametrize("name", sorted(TARGETS.keys() - {"protocol"}))
def test_nothing_is_found(name: str) -> None:
    target = TARGETS[name]()
    without_coverage(target, SEED, CI_UNITS[name])
    assert target.counts[target.unit] >= CI_UNITS[name]


def test_nothing_is_found_in_deep_states() -> None:
    """Grants, reads, restores, restarts and refusals of all kinds happen in a short run."""
    target = TARGETS["protocol"]()
    without_coverage(target, SEED + 1, CI_UNITS["protocol"])
    assert target.counts["frames"] >= CI_UNITS["protocol"]
    seen = {name.removeprefix("reply ") for name, count in target.counts.items() if count}
    assert {"welcome", "layout_registered", "session", "granted", "done", "report", "hits", "blob",
            "pressure", "revoke", "restarts", "103", "201", "202", "203", "204", "205", "206",
            "207", "301"} <= seen  # fmt: skip


@pytest.mark.parametrize("path", sorted(REGRESSIONS.glob("*/*")), ids=lambda path: path.name)
def test_what_was_found_once_is_not_found_again(path: Path) -> None:
    target = TARGETS[path.parent.name]()
    with target.set_up():
        target.take(saved(path))


def test_the_guided_fuzzer_counts_and_ends_well(tmp_path: Path) -> None:
    """libFuzzer drives the target, sees the daemon's code, and stops at the count."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.run", "--target", "protocol", "--frames", "4000",
         "--corpus", str(tmp_path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    words = done.stdout.replace(",", "").split()
    assert int(words[1]) >= 4000
    assert int(words[words.index("edges") - 1]) > 500


# --------------------------------------------------------- faults that must be found


FOUND = (Finding, AssertionError, KeyError)
"""A recount that does not come out ends in one of these."""


def broken(self: Any, *args: Any) -> Any:
    raise ZeroDivisionError


def silent(self: Any, *args: Any) -> Any:
    return None


def of_anybody(peer: Peer, session: int) -> Any:
    """A session by its id alone, whosever it is."""
    tenants = {member.group.tenant for member in peer.group.members}
    for tenant in [*tenants, *_WORLDS[-1].tenants.values()]:
        if session in tenant.sessions:
            return tenant.sessions[session]
    return None


_WORLDS: list[Any] = []


def remember(init: Callable[..., None]) -> Callable[..., None]:
    def made(self: Any, world: Any) -> None:
        _WORLDS.append(world)
        init(self, world)

    return made


FAULTS = [
    ("a handler that raises", Sessions, "describe", broken),
    ("a request without a reply", Sessions, "describe", silent),
    ("slots that are never given back", Writes, "free_write_lease", silent),
]


@pytest.mark.parametrize(
    ("what", "owner", "method", "fault"), FAULTS, ids=[each[0] for each in FAULTS]
)
def test_a_planted_fault_is_found(what: str, owner: Any, method: str, fault: Any) -> None:
    with mock.patch.object(owner, method, fault), pytest.raises(FOUND):
        without_coverage(TARGETS["protocol"](), SEED, CI_UNITS["protocol"])


def test_a_hole_between_tenants_is_found() -> None:
    with (
        mock.patch.object(State, "__init__", remember(State.__init__)),
        mock.patch("kvtierd.core.state.session_of", of_anybody),
        mock.patch("kvtierd.core.sessions.session_of", of_anybody),
        pytest.raises(FOUND),
    ):
        without_coverage(TARGETS["protocol"](), SEED, CI_UNITS["protocol"])
