"""The protocol over a blocking socket with `msgpack` and nothing else: what a round trip costs.

The same few lines drive the daemon and the bare echo that it is compared with.
"""

import contextlib
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Self

import msgpack
import msgspec

from kvtier_client.wire import PROTOCOL_VERSION
from kvtierd.bench.daemons import BLOCK_BYTES, BLOCK_TOKENS, layout

READ_BYTES: Final = 65536


def ask(sock: socket.socket, message: list[Any]) -> list[Any]:
    """One round trip of a short message; pushes that come before its reply are passed over."""
    body = msgpack.packb(message)
    sock.sendall(struct.pack("<I", len(body)) + body)
    data = b""
    while True:
        data += sock.recv(READ_BYTES)
        while len(data) >= 4 and len(data) >= (end := 4 + struct.unpack_from("<I", data)[0]):
            reply: list[Any] = msgpack.unpackb(data[4:end])
            if reply[1] == message[1]:
                return reply
            data = data[end:]


@contextlib.contextmanager
def echo() -> Iterator[tuple[socket.socket, int]]:
    """A connection to a running echo server, and its process id."""
    with tempfile.TemporaryDirectory(prefix="kvtierd-bench-") as place:
        path = os.path.join(place, "echo.sock")
        command = [sys.executable, "-m", "kvtierd.bench.echo_server", path]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline()
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                    sock.connect(path)
                    yield sock, process.pid
            finally:
                process.kill()


class Connection:
    """A connection that has said HELLO."""

    def __init__(self, client_path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(client_path)
        self.number = 1000
        self.ask("hello", PROTOCOL_VERSION, "bench", os.urandom(16), os.urandom(32), -1, [])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def ask(self, verb: str, *fields: Any) -> list[Any]:
        """A call that must succeed."""
        self.number += 1
        reply = ask(self.sock, [verb, self.number, *fields])
        assert reply[0] != "error", reply
        return reply


class Caller(Connection):
    """A connection with a session for blocks of one size."""

    def __init__(self, client_path: str, block_bytes: int = BLOCK_BYTES) -> None:
        super().__init__(client_path)
        described = msgspec.to_builtins(layout(block_bytes))
        self.fingerprint = self.ask("register_layout", described)[4]
        self.open()

    def open(self) -> None:
        """A new session."""
        self.session = self.ask("open_session", os.urandom(16), [self.fingerprint])[4]
        self.page = 0

    def renew(self) -> None:
        """End the session, so that its slots are free again, and open another."""
        self.ask("close_session", self.session)
        self.open()

    def reserve(self, blocks: int, wait_s: float = 0.0) -> int:
        """Lease slots; returns the lease."""
        wanted = (self.number, self.fingerprint, blocks, 0, 0, wait_s)
        return int(self.ask("reserve", *wanted)[4])

    def read(self, first: int, blocks: int, wait_s: float = 0.0) -> None:
        """Lease pages for reading, and give them back."""
        wanted = (self.number, self.session, 0, self.fingerprint, first, blocks, wait_s)
        self.ask("release", self.ask("acquire", *wanted)[4])

    def commit(self, lease: int, names: "Names") -> None:
        """Publish the next pages of the session."""
        self.ask("commit", lease, self.session, 0, names.index, names.pages(self.page), names.full)
        self.page += names.blocks


class Names:
    """The packed arrays by which so many blocks are named; made before anything is timed."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.index = u32(*range(blocks))
        self.full = u32(*[BLOCK_TOKENS] * blocks)

    def pages(self, first: int) -> bytes:
        """As many pages from `first` on."""
        return u32(*range(first, first + self.blocks)) if first else self.index


def u32(*values: int) -> bytes:
    """Values as the protocol packs them."""
    return struct.pack(f"<{len(values)}I", *values)


def each_us(work: Callable[[], object], times: int) -> float:
    """Mean time of one call."""
    begun = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - begun) / times * 1e6
