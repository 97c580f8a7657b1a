"""The Unix socket to the daemon, as both shells use it: connecting, reading, and its pace."""

import contextlib
import os
import random
import socket
from typing import Final

from kvtier_client.core import Core
from kvtier_client.errors import ConnectionLost, KvtierError, ProtocolError
from kvtier_client.protocol import Phase

RECEIVE_BYTES: Final = 64 << 10
"""Most bytes of one read. Twice as many would be memory that is mapped and returned each time."""
DESCRIPTORS: Final = 4
"""Most descriptors taken with one read; the protocol passes one."""
BACKOFF_FIRST_S: Final = 0.01
BACKOFF_LAST_S: Final = 0.5
SHORT_LIFE_S: Final = 0.25
"""A connection that lived shorter is followed by a pause, so that no storm of them arises."""
TEND_PERIOD_S: Final = 0.5
"""How often an idle client reads pushes, renews, and gives back what it does not use."""
CLOSE_TIMEOUT_S: Final = 5.0


def new_socket() -> socket.socket:
    """A stream socket that never blocks and is not inherited."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    return sock


def backoff_s(attempt: int) -> float:
    """How long to wait before connecting again; grows, and differs between clients."""
    longest = min(BACKOFF_LAST_S, BACKOFF_FIRST_S * (1 << min(attempt, 10)))
    return longest * random.uniform(0.5, 1.0)  # noqa: S311


def receive(sock: socket.socket) -> bytes:
    """The bytes that are there, after WELCOME. Errors: BlockingIOError, ConnectionLost."""
    data = sock.recv(RECEIVE_BYTES)
    if not data:
        raise ConnectionLost("the daemon closed the connection")
    return data


class Greeting:
    """The first part of a connection, in which the arena's descriptor comes."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.fds: list[int] = []

    def receive(self, sock: socket.socket) -> bool:
        """Read once; True when WELCOME was taken and the arena is mapped.

        Errors: BlockingIOError; ConnectionLost; ProtocolError; the daemon's refusal.
        """
        data, fds, _, _ = socket.recv_fds(sock, RECEIVE_BYTES, DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        self.fds.extend(fds)
        if not data:
            raise ConnectionLost("the daemon closed the connection during HELLO")
        core = self.core
        with core.lock:
            core.protocol.receive(data)
            if core.protocol.phase is Phase.GREETING:
                return False
            if not self.fds:
                raise ProtocolError("WELCOME came without the arena's descriptor")
            core.adopt_arena(self.fds[0])
            core.handle_events()
        return True

    def close(self) -> None:
        """Close the descriptors: the mapping does not need them."""
        for fd in self.fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.fds.clear()


class Pace:
    """How long to wait before the next attempt to connect."""

    def __init__(self) -> None:
        self._attempts = 0
        self._since_s = float("-inf")

    def connected(self, now_s: float) -> None:
        """A connection was made."""
        self._since_s = now_s

    def delay_s(self, now_s: float) -> float:
        """Nothing after a connection that lived long enough; else longer each time."""
        if now_s - self._since_s >= SHORT_LIFE_S and self._since_s > float("-inf"):
            self._attempts, self._since_s = 0, float("-inf")
            return 0.0
        self._attempts += 1
        return 0.0 if self._attempts == 1 else backoff_s(self._attempts - 2)


def is_final(problem: BaseException) -> bool:
    """Whether connecting again would end the same way."""
    if isinstance(problem, KvtierError):
        return not problem.retryable
    return not isinstance(problem, OSError)


def no_daemon(path: str, reason: object, waited_s: float) -> ConnectionLost:
    """The error of a call that found no daemon until its deadline."""
    return ConnectionLost(
        f"no daemon answered at {path} for {waited_s:.1f} s (last: {reason}): "
        "is kvtierd running, and is this its socket?"
    )
