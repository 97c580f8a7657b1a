"""memcached over its Unix socket, through a minimal client of its text protocol."""

import getpass
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Final

from tests.bench.peers.adapters.peer import Bytes, Peer, Setup, listens, serve, server
from tests.bench.peers.adapters.stream import Stream, StreamPeer

MEMORY_MIB: Final = 1024
ITEM_MAX_MIB: Final = 32


class Memcached(StreamPeer):
    """Blocks are items, overwritten in each round; a batch is a pipeline of sets and one get."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        stream.send([b"version\r\n"])
        self.version = stream.line().decode().removeprefix("VERSION ")

    def put(self, first: int, blocks: Sequence[Bytes]) -> None:
        parts: list[bytes | Bytes] = []
        for name, block in zip(self.names[first:], blocks, strict=False):
            parts += [b"set %s 0 0 %d\r\n" % (name, self.size), block, b"\r\n"]
        self.stream.send(parts)
        for _ in blocks:
            assert self.stream.line() == b"STORED"

    def get(self, first: int, blocks: Sequence[Bytes]) -> None:
        names = self.names[first : first + len(blocks)]
        self.stream.send([b"get " + b" ".join(names) + b"\r\n"])
        for name, block in zip(names, blocks, strict=True):
            assert self.stream.line() == b"VALUE %s 0 %d" % (name, self.size)
            self.stream.fill(block)
        assert self.stream.line() == b"END"


@contextmanager
def start(setup: Setup) -> Iterator[Peer]:
    """A server with room for all blocks of all sizes."""
    path = os.path.join(setup.shm, "socket")
    command = [
        setup.program, "-u", getpass.getuser(), "-s", path, "-m", str(MEMORY_MIB),
        "-I", f"{ITEM_MAX_MIB}m",
    ]  # fmt: skip
    with server(command, lambda: listens(path)), closing(Stream(path)) as stream:
        yield Memcached(stream)


if __name__ == "__main__":
    serve(start)
