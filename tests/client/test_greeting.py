"""A daemon that accepts a connection and says nothing does not keep a client for ever."""

import contextlib
import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtier_client import looping, wire
from kvtier_client.errors import ConnectionLost, QuotaExceeded
from kvtier_client.protocol import Protocol
from tests.client.scripted import ScriptedDaemon
from tests.client.shells import Shells


@pytest.fixture
def silent(tmp_path: Path) -> Any:
    """A socket at which nobody answers; connections wait in its backlog."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "kv.sock"))
        listener.listen(8)
        listener.settimeout(30.0)
        yield listener


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looping, "GREETING_TIMEOUT_S", 0.05)


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_a_daemon_that_does_not_answer_hello_is_tried_again(
    silent: socket.socket, tmp_path: Path, kind: str
) -> None:
    with contextlib.closing(Shells(kind)) as shells:
        client = shells.open(tmp_path / "kv.sock", deadline_s=25.0)
        problems: list[BaseException] = []

        def connect() -> None:
            try:
                client.connect()
            except ConnectionLost as problem:
                problems.append(problem)

        caller = threading.Thread(target=connect)
        caller.start()
        held, _ = silent.accept()
        with held:
            again, _ = silent.accept()  # it does not wait for ever, and comes again
            again.close()
            with ScriptedDaemon(tmp_path / "kv.sock"):
                caller.join(30)
                assert problems == []
                client.close()


def test_silence_ends_in_an_error_at_the_deadline_and_the_next_call_succeeds(
    shells: Shells, silent: socket.socket, tmp_path: Path
) -> None:
    client = shells.open(tmp_path / "kv.sock", deadline_s=0.2)
    with pytest.raises(ConnectionLost, match="no daemon answered"):
        client.connect()
    with ScriptedDaemon(tmp_path / "kv.sock"):
        client._core.deadline_s = 30.0
        client.connect()
        client.close()


def test_a_refusal_that_comes_before_hello_is_told(
    shells: Shells, silent: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, open_ = threading.Event(), Protocol.open

    def open_late(protocol: Protocol) -> None:
        assert refused.wait(30)  # connected, and nothing said yet
        open_(protocol)

    def refuse() -> None:
        connection, _ = silent.accept()
        with connection:
            error = wire.Error(0, 1, 0, QuotaExceeded.code, "no more connections")
            connection.sendall(wire.frame(error, msgspec.msgpack.Encoder()))
        refused.set()

    monkeypatch.setattr(Protocol, "open", open_late)
    monkeypatch.setattr(looping, "GREETING_TIMEOUT_S", 30.0)
    daemon = threading.Thread(target=refuse)
    daemon.start()
    client = shells.open(tmp_path / "kv.sock")
    with pytest.raises(QuotaExceeded, match="no more connections"):
        client.connect()
    daemon.join()
