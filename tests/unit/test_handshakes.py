"""Handshakes: one that stops midway ends, leaves its place, and holds up no other."""

import socket
import struct
import threading
from pathlib import Path

import msgpack
import pytest

from kvtierd import server
from tests.support.raw import RawClient
from tests.support.served import Served
from tests.support.wait import until

HELLO = msgpack.packb(["hello", 1, 1, "half", b"g" * 16, b"s" * 16])
FRAME = struct.pack("<I", len(HELLO)) + HELLO
CONNECTIONS = 12
HALVES = 3
"""As many as one process may have of so few, less one."""


def dial(served: Served, said: bytes) -> socket.socket:
    """A connection on which so much was said."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(5.0)
    sock.connect(served.client_path)
    sock.sendall(said)
    return sock


@pytest.mark.parametrize("said", [b"", FRAME[:2], FRAME[:4], FRAME[:-1]], ids=len)
def test_a_handshake_that_stops_midway_ends_and_leaves_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(server, "HELLO_TIMEOUT_S", 0.05)

    def scene(served: Served) -> None:
        for _ in range(5):
            halves = [dial(served, said) for _ in range(HALVES)]
            for half in halves:
                assert half.recv(100) == b""
                half.close()
        with served.client() as client:
            client.ask("cancel", 1)
        assert served.tenant()["clients"] == 0

    Served(tmp_path, limits={"connections": CONNECTIONS}).play(scene)


def test_a_peer_that_is_gone_before_its_welcome_is_forgotten(tmp_path: Path) -> None:
    def scene(served: Served) -> None:
        for _ in range(20):
            dial(served, FRAME).close()
        with served.client() as client:
            until(lambda: served.tenant()["clients"] == 1, "only who is there is counted")
            client.ask("cancel", 1)
        until(lambda: served.tenant()["clients"] == 0, "nobody is counted")
        assert served.faults() == 0

    Served(tmp_path).play(scene)


def test_handshakes_do_not_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HELLO_TIMEOUT_S", 3600.0)

    def scene(served: Served) -> None:
        halves = [dial(served, FRAME[:cut]) for cut in (0, 3, 10)]
        whole = dial(served, FRAME)
        assert whole.recv(4), "the fourth waits for those before it"
        for sock in (*halves, whole):
            sock.close()

    Served(tmp_path).play(scene)


def test_all_clients_come_back_at_once(tmp_path: Path) -> None:
    """As they do after a restart: of one group and of many, each on a connection of its own."""
    welcomes: list[list[object]] = []

    def come(served: Served, group: bytes) -> None:
        with RawClient(served.client_path, group, b"s" * 32) as client:
            client.hello()
            client.ask("cancel", 1)
            welcomes.append(client.welcome)

    def scene(served: Served) -> None:
        groups = [bytes([number % 6]) * 16 for number in range(24)]
        threads = [threading.Thread(target=come, args=(served, group)) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(welcomes) == len(groups)
        assert served.faults() == 0

    Served(tmp_path).play(scene)
