"""A neighbour: a client process that asks as much as it can, well or ill, until it is killed.

python -m kvtierd.bench.neighbour_process SOCKET ADMIN_SOCKET KIND PAUSE_S

It says a line on stdout when it is at work. What it stores is never written: only the daemon's
time is of interest.
"""

import contextlib
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import msgpack

from kvtier_client.admin import AdminClient
from kvtierd.bench.daemons import TENANT
from kvtierd.bench.plan import KIB
from kvtierd.bench.round_trips import READ_BYTES, Caller, Connection, Names

NEIGHBOUR_BYTES: Final = 64 * KIB
BATCH: Final = Names(256)
LARGE: Final = Names(1024)
BRANCHES: Final = 8
WAIT_S: Final = 10.0
NICE: Final = 15
PIPELINE: Final = 128
"""Requests that a flood has on their way; below the daemon's limit."""
KEYS: Final = 4096


def pack(message: list[Any]) -> bytes:
    """A frame."""
    body: bytes = msgpack.packb(message)
    return struct.pack("<I", len(body)) + body


def pump(sock: socket.socket, data: bytes) -> None:
    """Send, and throw away what comes back."""
    sock.setblocking(False)
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view) :]
        except BlockingIOError:
            sock.setblocking(True)
            sock.recv(READ_BYTES)
            sock.setblocking(False)
    sock.setblocking(True)


class Neighbour:
    """What the kinds of neighbours do, once."""

    def __init__(self, client_path: str, admin_path: str) -> None:
        self.path = client_path
        self.caller = Caller(client_path, NEIGHBOUR_BYTES)
        self.admin = AdminClient(admin_path)

    def flood(self) -> None:
        """Small requests, many at a time."""
        caller = self.caller
        frames = (pack(["describe", caller.number + i, caller.session]) for i in range(PIPELINE))
        pump(caller.sock, b"".join(frames))
        caller.number += PIPELINE

    def garbage(self) -> None:
        """Frames that are no requests."""
        frames = [os.urandom(24) for _ in range(PIPELINE)]
        pump(self.caller.sock, b"".join(struct.pack("<I", 24) + each for each in frames))

    def storm(self) -> None:
        """Slots that are leased and given back."""
        self.caller.ask("abort", self.caller.reserve(BATCH.blocks, WAIT_S))

    def batches(self) -> None:
        """Blocks stored and read in batches."""
        self._batch(BATCH)

    def large(self) -> None:
        """The same with more blocks in a request."""
        self._batch(LARGE)

    def _batch(self, names: Names) -> None:
        caller = self.caller
        caller.commit(caller.reserve(names.blocks, WAIT_S), names)
        caller.read(0, names.blocks, WAIT_S)
        caller.renew()

    def spiller(self) -> None:
        """Blocks that go to NVMe and come back."""
        caller = self.caller
        caller.commit(caller.reserve(BATCH.blocks, WAIT_S), BATCH)
        self.admin.call("evict", tenant=TENANT, blocks=BATCH.blocks)
        caller.read(0, BATCH.blocks, WAIT_S)
        caller.renew()

    def searcher(self) -> None:
        """Long lists of keys that are not there."""
        self.caller.ask("lookup", [self.caller.fingerprint], os.urandom(16 * KEYS))

    def sessions(self) -> None:
        """Sessions and branches that are opened and closed: each is a change of the catalog."""
        for node in range(1, BRANCHES):
            self.caller.ask("fork", self.caller.session, node, 0, 0)
        self.caller.renew()

    def visitor(self) -> None:
        """Connections that come and go."""
        Connection(self.path).sock.close()


KINDS: Final = (
    "flood", "garbage", "storm", "batches", "large", "spiller", "searcher", "sessions", "visitor",
)  # fmt: skip


def main(client_path: str, admin_path: str, kind: str, pause_s: str) -> None:
    """Work until the process is killed."""
    os.nice(NICE)
    work: Callable[[], None] = getattr(Neighbour(client_path, admin_path), kind)
    told = False
    while True:
        with contextlib.suppress(AssertionError):  # it was refused; a heavy neighbour tries again
            work()
        if not told:
            sys.stdout.write("at work\n")
            sys.stdout.flush()
            told = True
        time.sleep(float(pause_s))


if __name__ == "__main__":
    main(*sys.argv[1:])
