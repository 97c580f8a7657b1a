"""Round trips of the control plane, against a bare echo, all processes on one core.

The same client code drives both: a blocking socket, `msgpack` to pack and unpack. The daemon's
message differs in every round trip, as real ones do.
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
from typing import Any, Final

import msgpack

from tests.bench.daemons import BLOCK_TOKENS, MIB, daemon, pinned
from tests.bench.figures import Figure, middle
from tests.support.raw import RawClient, layout, u32

BLOCK_BYTES: Final = MIB
PAIRS: Final = 32
"""Round trips of a round."""
ROUNDS: Final = 121
WARM_ROUNDS: Final = 10
BATCH_BLOCKS: Final = 256
ARENA_BYTES: Final = 512 * MIB


def ask(sock: socket.socket, message: list[Any]) -> list[Any]:
    """One round trip of a short message."""
    body = msgpack.packb(message)
    sock.sendall(struct.pack("<I", len(body)) + body)
    data = sock.recv(65536)
    while len(data) < 4 + struct.unpack_from("<I", data)[0]:
        data += sock.recv(65536)
    reply: list[Any] = msgpack.unpackb(data[4:])
    return reply


@contextlib.contextmanager
def echo() -> Iterator[tuple[socket.socket, int]]:
    """A connection to a running echo server, and its process id."""
    with tempfile.TemporaryDirectory(prefix="kvtierd-bench-") as place:
        path = os.path.join(place, "echo.sock")
        command = [sys.executable, "-m", "tests.bench.echo_server", path]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline()
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                    sock.connect(path)
                    yield sock, process.pid
            finally:
                process.kill()


class Writer:
    """Reserves and commits, each commit under a name of its own; drops all between rounds."""

    def __init__(self, client: RawClient) -> None:
        self.sock = client.socket
        self.sock.settimeout(None)  # a timeout would cost a system call more, and echo has none
        self.number = 1000
        self.fingerprint = self.ask("register_layout", layout(block_bytes=BLOCK_BYTES))[4]
        self.open()

    def ask(self, verb: str, *fields: Any) -> list[Any]:
        self.number += 1
        return ask(self.sock, [verb, self.number, *fields])

    def open(self) -> None:
        """A new session."""
        self.session = self.ask("open_session", os.urandom(16), [self.fingerprint])[4]
        self.page = 0

    def close(self) -> None:
        """End the session: its slots are free again."""
        self.ask("close_session", self.session)

    def one(self) -> None:
        """One block, two round trips."""
        self.number += 1
        granted = ask(self.sock, ["reserve", self.number, self.number, self.fingerprint, 1])
        self.number += 1
        page = self.page.to_bytes(4, "little")
        self.page += 1
        names = (b"\0\0\0\0", page, b"\x10\0\0\0")
        done = ask(self.sock, ["commit", self.number, granted[4], self.session, 0, *names])
        assert done[0] == "done", done

    def batch(self) -> None:
        """As many blocks as an engine moves at once, two round trips."""
        granted = self.ask("reserve", self.number, self.fingerprint, BATCH_BLOCKS)
        done = self.ask("commit", granted[4], self.session, 0, ALL, ALL, FULL)
        assert done[0] == "done", done


ALL: Final = u32(*range(BATCH_BLOCKS))
FULL: Final = u32(*[BLOCK_TOKENS] * BATCH_BLOCKS)


def each_us(work: Callable[[], object], times: int) -> float:
    """Mean time of one call."""
    begun = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - begun) / times * 1e6


def measure() -> list[Figure]:
    """The figures of this benchmark."""
    ratios, one_us, batch_us, echo_us = [], [], [], []
    with daemon(ARENA_BYTES) as process, process.client() as client, echo() as (sock, pid):
        writer = Writer(client)
        message = ["reserve", 7, 1234, writer.fingerprint, 1]
        assert ask(sock, message) == message
        assert process.process is not None
        with pinned(process.process.pid, pid):
            for turn in range(ROUNDS + WARM_ROUNDS):
                bare = each_us(lambda: ask(sock, message), PAIRS)
                mine = each_us(writer.one, PAIRS)
                writer.close()
                writer.open()
                many = each_us(writer.batch, 1)
                writer.close()
                writer.open()
                if turn >= WARM_ROUNDS:
                    ratios.append(mine / bare)
                    one_us.append(mine)
                    echo_us.append(bare)
                    batch_us.append(many)
    return [
        middle("control.one.ratio_echo", ratios, 3.0, "lower", "reserve + commit of one block"),
        middle("control.one.us", one_us, better="lower"),
        middle("control.echo.us", echo_us, better="lower"),
        middle("control.256.us", batch_us, 200.0, "lower", "reserve + commit of 256 blocks"),
    ]
