"""What the client does while nobody calls it: renewing, and giving back what is idle."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from kvtier_client import wire
from kvtier_client.client import Client
from kvtier_client.pool import POOL_IDLE_S, pool_blocks
from tests.client.scripted import LIMITS, ScriptedDaemon


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def client(daemon: ScriptedDaemon, clock: Clock) -> Client:
    client = Client(daemon.path)
    client._core.now_s = clock
    return client


def small(layout: wire.Layout, client: Client, page: int = 0) -> None:
    session = client.open_session([layout], token=b"t" * 16)
    session.swap_out(os.urandom(4096), page, 4)


def test_idle_pregranted_slots_are_given_back(
    client: Client, daemon: ScriptedDaemon, clock: Clock, layout: wire.Layout
) -> None:
    with client:
        small(layout, client)
        client._driver.tend()
        assert daemon.slots - len(daemon.free) > 1
        clock.now_s += POOL_IDLE_S + 0.1
        client._driver.tend()
        client.flush()
        client.lookup([], [])
        assert daemon.slots - len(daemon.free) == 1


def test_slots_in_use_are_renewed_at_half_their_life(
    client: Client, daemon: ScriptedDaemon, clock: Clock, layout: wire.Layout
) -> None:
    with client:
        session = client.open_session([layout])

        def slow(views: object, i: int, j: int) -> None:
            clock.now_s += LIMITS.lease_ttl_s * 0.6
            client._driver.tend()

        session.swap_out(slow, range(16), 4)
        assert daemon.seen["Renew"] == 1


def test_stale_pregranted_slots_are_not_used(
    client: Client, daemon: ScriptedDaemon, clock: Clock, layout: wire.Layout
) -> None:
    with client:
        small(layout, client)
        before = daemon.seen["Reserve"]
        clock.now_s += LIMITS.lease_ttl_s
        small(layout, client, page=1)
        commits = [r.lease for r in daemon.log if isinstance(r, wire.Commit)]
        assert commits[0] != commits[1]
        assert daemon.seen["Reserve"] >= before


def test_a_revoked_lease_is_given_back_and_not_used(
    client: Client, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    with client:
        small(layout, client)
        (first,) = [r.lease for r in daemon.log if isinstance(r, wire.Commit)]
        daemon.push(wire.Revoke(0, 1, 0, first))
        client.lookup([], [])
        small(layout, client, page=1)
        last = [r.lease for r in daemon.log if isinstance(r, wire.Commit)][-1]
        assert last != first
        assert first in [r.lease for r in daemon.log if isinstance(r, wire.Abort)]


def test_a_client_comes_back_by_itself_after_a_restart(
    client: Client, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    with client:
        session = client.open_session([layout])
        lives = ["kill"]
        daemon.fault = lambda request: (
            lives.pop() if lives and isinstance(request, wire.Describe) else ""
        )
        answered = threading.Event()
        client._core.send(wire.Describe, session.id).watchers.append(answered.set)
        client._driver.flush()
        assert answered.wait(30)  # by the keeper alone: nobody calls the client
        assert client.boot_id == 2
        assert daemon.seen["ResumeSession"] == 1


def test_a_pool_is_bounded_by_arena_and_limits() -> None:
    assert pool_blocks(1 << 20, 64 << 30, 65536) == 16
    assert pool_blocks(1 << 20, 64 << 20, 65536) == 2
    assert pool_blocks(1 << 20, 16 << 20, 65536) == 0
    assert pool_blocks(1 << 20, 64 << 30, 4) == 4
    assert pool_blocks(32 << 20, 64 << 30, 65536) == 2
    assert pool_blocks(128 << 10, 64 << 30, 65536) == 32  # small slots: 4 MiB of them
    assert pool_blocks(4 << 10, 64 << 30, 65536) == 64


def test_no_wait_is_longer_than_the_daemon_allows(
    daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    daemon.limits = msgspec.structs.replace(LIMITS, wait_max_s=0.5)
    with Client(daemon.path) as client:
        client.reserve(layout, 1, wait_s=30.0).close()
        (asked,) = [r for r in daemon.log if isinstance(r, wire.Reserve)]
        assert asked.wait_s == 0.5


def test_the_library_is_light_and_free_of_torch() -> None:
    code = (
        "import sys, kvtier_client; light = 'numpy' not in sys.modules; kvtier_client.Client;"
        "sys.exit(0 if light and 'torch' not in sys.modules else 1)"
    )
    client = Path(__file__).parents[2] / "client"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(client)}, check=False
    )
    assert done.returncode == 0
