"""Handshakes: one that stops midway ends, leaves its place, and holds up no other; one that names
its member ends the older connections of that process."""

import contextlib
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import msgpack
import pytest

from kvtier_client import errors
from kvtierd import server
from tests.support.raw import TIMEOUT_S, Closed, RawClient, layout
from tests.support.served import Served
from tests.support.wait import until

HELLO = msgpack.packb(["hello", 1, 1, "half", b"g" * 16, b"s" * 16])
FRAME = struct.pack("<I", len(HELLO)) + HELLO
CONNECTIONS = 12
HALVES = 3
"""As many as one process may have of so few, less one."""


def dial(served: Served, said: bytes) -> socket.socket:
    """A connection on which so much was said, unless its time was over before."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(TIMEOUT_S)
    sock.connect(served.client_path)
    with contextlib.suppress(BrokenPipeError):
        sock.sendall(said)
    return sock


def ends(sock: socket.socket) -> bool:
    """Whether a connection ends without a word."""
    with sock, contextlib.suppress(ConnectionResetError):  # what came late was not read
        return sock.recv(100) == b""
    return True


@pytest.mark.parametrize("said", [b"", FRAME[:2], FRAME[:4], FRAME[:-1]], ids=len)
def test_a_handshake_that_stops_midway_ends_and_leaves_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    def scene(served: Served) -> None:
        with monkeypatch.context() as impatient:
            impatient.setattr(server, "HELLO_TIMEOUT_S", 0.05)
            for _ in range(5):
                halves = [dial(served, said) for _ in range(HALVES)]
                assert all(ends(half) for half in halves)
        with served.client() as client:
            client.ask("cancel", 1)
        until(lambda: served.tenant()["clients"] == 0, "nobody is counted")

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
            thread.join(30)
        assert len(welcomes) == len(groups)
        assert served.faults() == 0

    Served(tmp_path).play(scene)


def test_what_an_older_connection_still_brings_is_not_carried_out(tmp_path: Path) -> None:
    """Its client has given up what it asked there, and will not give back what it gets now."""

    def scene(served: Served) -> None:
        with served.client() as old, RawClient(served.client_path, old.group, old.secret) as new:
            known = old.ask("register_layout", layout())[4]
            new.member = old.member
            new.hello()
            assert new.member == old.member
            given_up = new.member << 32 | 1
            assert new.code("abort", given_up) == errors.LeaseExpired.code
            with pytest.raises(Closed):
                old.reserve(known, 1)
            assert served.tenant()["leases"] == 0
            new.reserve(known, 1)

    Served(tmp_path).play(scene)


def test_two_clients_of_one_process_and_group_do_not_end_each_other(tmp_path: Path) -> None:
    def scene(served: Served) -> None:
        with served.client() as one, RawClient(served.client_path, one.group, one.secret) as two:
            two.hello()
            two.come_back()
            one.ask("cancel", 1)
            two.ask("cancel", 1)

    Served(tmp_path).play(scene)


FORKING = """
import os, sys
from tests.support.raw import Closed, RawClient
client = RawClient(sys.argv[1])
client.hello()
client.socket.settimeout(None)
if os.fork():
    os._exit(0)
try:
    client.receive()
except Closed:
    print("closed")
"""


def test_a_dead_processs_connection_ends_though_a_child_of_it_keeps_the_socket(
    tmp_path: Path,
) -> None:
    def scene(served: Served) -> None:
        ended = subprocess.run(
            [sys.executable, "-c", FORKING, served.client_path],
            capture_output=True, text=True, timeout=30, check=True,
        )  # fmt: skip
        assert ended.stdout == "closed\n", ended.stderr
        assert served.tenant()["clients"] == 0

    Served(tmp_path).play(scene)
