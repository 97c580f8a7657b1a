"""The admin client: one verb, one report, and clear words when nobody is there."""

import errno
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvtier_client import admin_wire, wire
from kvtier_client.admin import AdminClient
from kvtier_client.errors import ConnectionLost, InvalidArgument, ProtocolError, Timeout

Answer = Callable[[admin_wire.AdminRequest], list[bytes]]
encoder = msgspec.msgpack.Encoder()
decoder = msgspec.msgpack.Decoder(admin_wire.AdminRequest)


def serve(path: Path, answer: Answer) -> threading.Thread:
    """Answer one connection until it is closed."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(1)

    def work() -> None:
        with listener, listener.accept()[0] as conn:
            while head := conn.recv(4, socket.MSG_WAITALL):
                body = conn.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL)
                for piece in answer(decoder.decode(body)):
                    conn.sendall(piece)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def report(request: admin_wire.AdminRequest, **data: object) -> bytes:
    return wire.frame(wire.Report(request.id, 1, 0, data), encoder)


def test_a_report_comes_back_as_a_tree(tmp_path: Path) -> None:
    def answer(request: admin_wire.AdminRequest) -> list[bytes]:
        assert isinstance(request, admin_wire.Evict)
        frame = report(request, tenant=request.tenant, blocks=request.blocks)
        return [frame[:3], frame[3:]]

    thread = serve(tmp_path / "a", answer)
    with AdminClient(tmp_path / "a") as admin:
        assert admin.call("evict", tenant="t", blocks=4) == {"tenant": "t", "blocks": 4}
    thread.join(10)


def test_a_typed_error_is_raised(tmp_path: Path) -> None:
    thread = serve(
        tmp_path / "a",
        lambda request: [wire.frame(wire.Error(request.id, 1, 0, 204, "no tenant x"), encoder)],
    )
    with AdminClient(tmp_path / "a") as admin, pytest.raises(InvalidArgument, match="no tenant x"):
        admin.call("evict", tenant="x")
    thread.join(10)


def test_a_silent_daemon_ends_in_a_timeout(tmp_path: Path) -> None:
    thread = serve(tmp_path / "a", lambda _: [])
    with AdminClient(tmp_path / "a", timeout_s=0.1) as admin, pytest.raises(Timeout, match="stats"):
        admin.call("stats")
    thread.join(10)


@pytest.mark.parametrize("noise", [b"\xff\xff\xff\xff", b"\x01\0\0\0\xc1"])
def test_noise_is_a_protocol_error(tmp_path: Path, noise: bytes) -> None:
    thread = serve(tmp_path / "a", lambda _: [noise])
    with AdminClient(tmp_path / "a") as admin, pytest.raises(ProtocolError):
        admin.call("stats")
    thread.join(10)


def test_nobody_there_and_wrong_verbs(tmp_path: Path) -> None:
    with AdminClient(tmp_path / "nobody") as admin:
        with pytest.raises(ConnectionLost, match="is kvtierd running"):
            admin.call("stats")
        with pytest.raises(InvalidArgument, match="there are stats"):
            admin.call("format")
        with pytest.raises(InvalidArgument, match="colour"):
            admin.call("stats", colour=1)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EACCES, "Permission denied; be root or the daemon's user"),
        (errno.ENOENT, "No such file or directory; is kvtierd running"),
        (errno.ECONNREFUSED, "Connection refused; is kvtierd running"),
    ],
)
def test_what_stands_in_the_way_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with AdminClient(tmp_path / "a") as admin:
        monkeypatch.setattr(admin, "_connected", refuse)
        with pytest.raises(ConnectionLost, match=remedy):
            admin.call("stats")
