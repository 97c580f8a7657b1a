"""A full arena and a full disk: typed errors, nothing lost, and all is well when there is room."""

import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fault.checker import KNOWN, Promises
from tests.fault.test_kill_daemon import assert_books_balance
from tests.support.daemon import ARENA_BYTES, DaemonProcess
from tests.support.fixtures import MakeDaemon
from tests.support.raw import BLOCK_BYTES, RawClient
from tests.support.wait import until

BLOCKS = ARENA_BYTES // BLOCK_BYTES
Relief = Callable[[], None]


def can_mount() -> bool:
    if os.geteuid() != 0:
        return False
    return (
        subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0
    )


@pytest.fixture(params=["limit", *(["tmpfs"] if can_mount() else [])])
def full_disk(
    request: pytest.FixtureRequest, make_daemon: MakeDaemon, tmp_path: Path
) -> Iterator[tuple[DaemonProcess, Relief]]:
    """A daemon whose disk takes about 2 MiB of payload, and what makes room on it."""
    daemon = make_daemon(spill={"io_threads": 2})
    if request.param == "limit":
        daemon.start()
        assert daemon.process is not None
        pid = daemon.process.pid
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (2 << 20, resource.RLIM_INFINITY))
        limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        yield daemon, lambda: resource.prlimit(pid, resource.RLIMIT_FSIZE, limits) and None
        return
    place = tmp_path / "disk"
    place.mkdir(mode=0o700)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m,mode=0700", "none", str(place)], check=True
    )
    try:
        daemon.sections["spill"]["paths"] = [str(place)]
        daemon.start()
        yield (
            daemon,
            lambda: (
                subprocess.run(["mount", "-o", "remount,size=100m", str(place)], check=True)
                and None
            ),
        )
        daemon.end()
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_refuses_in_time_and_loses_nothing(
    full_disk: tuple[DaemonProcess, Relief],
) -> None:
    daemon, relief = full_disk
    promises = Promises()
    with daemon.client() as client:
        session = promises.open(client)
        refused = fill_until_refused(client, promises, session)
        assert refused in (301, 302)
        assert daemon.counters()["io_errors"] > 0
        assert daemon.ails()
        promises.check(client)
        relief()
        for _ in range(8):
            promises.swap_out(client, session, 8)
        promises.check(client)
        until(lambda: not daemon.ails(), "it is well again")
        assert_books_balance(daemon, promises.total())
        client.ask("close_session", session)
        assert_books_balance(daemon, 0)


def fill_both_tiers(client: RawClient, promises: Promises, session: int) -> None:
    """Swap out until nothing more can be had, however slowly room comes before that."""
    until(lambda: fill_until_refused(client, promises, session) == 302, "both tiers are full")


def fill_until_refused(client: RawClient, promises: Promises, session: int) -> int:
    """Swap out until there is no room now; returns the error's code."""
    while True:
        granted = client.call("reserve", client.lease(), KNOWN, 8, 0, 0, 1.0)
        if granted[0] == "error":
            return int(granted[4])
        client.ask("abort", granted[4])
        promises.swap_out(client, session, 8)


def test_full_tiers_refuse_and_what_is_there_comes_back(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(spill={"capacity_bytes": 4 << 20}).start()
    promises = Promises()
    with daemon.client() as client:
        session = promises.open(client)
        fill_both_tiers(client, promises, session)
        promises.check(client)
        daemon.restart()
        client.come_back()
        promises.check(client)
        fill_both_tiers(client, promises, session)
        victim = promises.open(client)
        client.ask("fork", session, 1, 0, 0)
        assert client.ask("set_retention", session, 0, 2)[4] == promises.total()  # CACHED goes
        promises.pages[session].clear()
        promises.swap_out(client, victim, 64)
        del promises.pages[session], promises.tokens[session]
        promises.check(client)


def test_a_promise_is_kept_when_all_else_is_full(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(spill={"capacity_bytes": 2 << 20}).start()
    promises = Promises()
    with daemon.client() as client:
        session = promises.open(client)
        promise = client.ask("reserve", client.lease(), KNOWN, 0, 24)[4]
        fill_both_tiers(client, promises, session)
        for _ in range(3):
            granted = client.ask("reserve", client.lease(), KNOWN, 8, 0, promise, 30.0)
            client.ask("abort", granted[4])
        promises.check(client)


def test_two_half_arena_restores_do_not_wait_for_each_other(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    promises = Promises()
    with daemon.client() as one, daemon.client() as two:
        sessions = [promises.open(one), promises.open(one)]
        for session in sessions:
            for _ in range(BLOCKS // 16):
                promises.swap_out(one, session, 16)
        promises.resume(two)
        clients = (one, two)
        held = {}
        for client, session in zip(clients, sessions, strict=True):
            held[client] = client.send(
                "acquire", client.lease(), session, 0, KNOWN, 0, BLOCKS, 60.0
            )
        for client, session in zip(clients, sessions, strict=True):
            at = 0
            while at < BLOCKS:
                granted = client.reply(held[client])
                assert granted[0] == "granted", granted
                at += len(granted[6]) // 8
                client.ask("release", granted[4])
                held[client] = client.send(
                    "acquire", client.lease(), session, 0, KNOWN, at, max(BLOCKS - at, 1), 60.0
                )
            client.reply(held[client])
        assert_books_balance(daemon, 2 * BLOCKS)
