"""A blocking Unix socket with scatter/gather I/O, for the stores that are spoken to over one.

Written for speed: a block is sent from where it lies and received to where it belongs, without a
copy in this process. Only the short lines between blocks are copied.
"""

import socket
from collections.abc import Sequence
from typing import Final

from tests.bench.peers.adapters.peer import Bytes, Order, Peer

SOCKET_BUFFER_BYTES: Final = 4 << 20
TIMEOUT_S: Final = 30.0
LINE_MAX: Final = 4096
PARTS_MAX: Final = 512
"""Buffers of one sendmsg; Linux takes 1024."""


class Stream:
    """A connection: gathered writes, lines, and blocks received in place."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self.socket.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        self.socket.settimeout(TIMEOUT_S)
        self.socket.connect(path)
        self.ahead = b""
        """Received and not yet consumed: a line, and perhaps the beginning of a block."""

    def close(self) -> None:
        """End the connection."""
        self.socket.close()

    def send(self, parts: Sequence[bytes | Bytes]) -> None:
        """Send all parts, one after the other."""
        left = [memoryview(part) for part in parts]
        while left:
            sent = self.socket.sendmsg(left[:PARTS_MAX])
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if sent:
                left[0] = left[0][sent:]

    def line(self) -> bytes:
        """The next line, without its end."""
        while (end := self.ahead.find(b"\r\n")) < 0:
            self.ahead += self.received(LINE_MAX)
        line, self.ahead = self.ahead[:end], self.ahead[end + 2 :]
        return line

    def fill(self, block: Bytes) -> None:
        """Receive a block and the line end behind it."""
        view = memoryview(block)
        known = min(len(self.ahead), len(view))
        view[:known] = self.ahead[:known]
        self.ahead = self.ahead[known:]
        while known < len(view):
            got = self.socket.recv_into(view[known:])
            if not got:
                raise ConnectionError("the server ended the connection within a block")
            known += got
        assert self.line() == b""

    def received(self, most: int) -> bytes:
        """Some bytes. Errors: ConnectionError at the end."""
        data = self.socket.recv(most)
        if not data:
            raise ConnectionError("the server ended the connection")
        return data


class StreamPeer(Peer):
    """A store of named values behind a stream; the names come again in each round."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.names: list[bytes] = []
        self.size = 0

    def begin(self, order: Order, blocks: int) -> None:
        self.size = order.size
        self.names = [b"%d.%d" % (order.size, i) for i in range(blocks)]
