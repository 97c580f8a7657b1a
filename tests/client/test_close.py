"""A client that closes, or whose daemon takes nothing any more: nobody waits on, nothing is lost
without a word."""

import contextlib
import os
import threading
import warnings

import pytest

from kvtier_client import blocking, wire
from kvtier_client.client import Client
from kvtier_client.errors import ConnectionLost, TransportError
from tests.client.scripted import ScriptedDaemon
from tests.client.shells import Caller, Shells
from tests.client.test_shells import records
from tests.support.wait import until


def test_a_close_ends_the_calls_of_others(
    shells: Shells, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    client = shells.open(daemon.path, deadline_s=3600.0)
    session = client.open_session([layout])
    daemon.fault = lambda request: "mute" if isinstance(request, wire.Describe) else ""
    callers = [Caller(session.nodes) for _ in range(3)]
    until(lambda: daemon.seen["Describe"] == len(callers), "all have asked")
    client.close()
    for caller in callers:
        assert isinstance(caller.end(), ConnectionLost)


def test_a_close_ends_a_call_that_is_greeting(
    shells: Shells, daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocking, "TEND_PERIOD_S", 0.05)
    monkeypatch.setattr(daemon, "_hello", lambda sock, hello: True)
    client = shells.open(daemon.path, deadline_s=3600.0)
    caller = Caller(client.connect)
    until(lambda: daemon.seen["Hello"], "it has said hello")
    client.close()
    assert isinstance(caller.end(), ConnectionLost)


def test_commits_that_a_close_could_not_hear_of_are_told(
    shells: Shells, daemon: ScriptedDaemon, layout: wire.Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = shells.open(daemon.path)
    session = client.open_session([layout])
    session.swap_out(records(1), 0, 4)
    daemon.withhold_acks = True
    session.swap_out(records(1), 1, 4, ack=False)
    monkeypatch.setattr("kvtier_client.client.CLOSE_TIMEOUT_S", 0.2)
    monkeypatch.setattr("kvtier_client.aio.CLOSE_TIMEOUT_S", 0.2)
    daemon.fault = lambda request: "drop"
    with pytest.raises(ConnectionLost, match="before 1 one-way commits were acknowledged"):
        client.close()
    client.close()


def test_a_close_that_owes_nothing_waits_for_no_daemon(
    shells: Shells, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    client = shells.open(daemon.path)
    session = client.open_session([layout])
    session.swap_out(records(24), (0, 24), 4, ack=False)
    client.flush()
    session.acquire((0, 2)).close()
    client.flush()
    daemon.fault = lambda request: "drop"
    client.close()
    assert daemon.seen["Goodbye"] == 0


def test_a_daemon_that_takes_no_bytes_holds_nobody_longer_than_its_deadline(
    shells: Shells, daemon: ScriptedDaemon, layout: wire.Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocking, "SEND_STALL_S", 3600.0)
    client = shells.open(daemon.path)
    session = client.open_session([layout])
    go_on = threading.Event()

    def stall(request: wire.Request) -> str:
        go_on.wait()
        return ""

    daemon.fault = stall
    client._core.deadline_s = 0.2
    try:
        for version in range(1, 5):  # more than the socket's buffer takes
            caller = Caller(lambda v=version: session.put_blob(bytes(900_000), version=v))
            assert isinstance(caller.end(), TransportError)
    finally:
        daemon.fault = lambda request: ""
        go_on.set()
        client._core.deadline_s = 30.0
    assert session.nodes()[0].node == 0


def test_a_thread_that_reads_comes_back_when_another_drops_the_connection(
    daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    with Client(daemon.path, deadline_s=3600.0) as client:
        session = client.open_session([layout])
        mute = ["mute"]
        daemon.fault = lambda r: mute.pop() if mute and isinstance(r, wire.Describe) else ""
        caller = Caller(session.nodes)
        until(lambda: daemon.seen["Describe"] and client._driver._reading, "it reads")
        client._driver._drop(client._driver._sock, "as a failed send does")  # type: ignore[arg-type]
        assert caller.end() is None  # it has asked again
        assert client.stats.reconnects == 1


def test_views_of_slots_are_refused_to_a_forked_child(
    daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    with Client(daemon.path) as client, client.reserve(layout, 1) as lease:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads run; the child only asks
            child = os.fork()
        if child == 0:
            with contextlib.suppress(ConnectionLost):
                lease.blocks[0][:] = 1
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
