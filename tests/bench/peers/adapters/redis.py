"""Redis (or Valkey) over its Unix socket, without persistence, through a minimal RESP client."""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from tests.bench.peers.adapters.peer import Bytes, Peer, Setup, listens, serve, server
from tests.bench.peers.adapters.stream import Stream, StreamPeer


class Redis(StreamPeer):
    """Blocks are strings, overwritten in each round; a batch is one pipeline."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        stream.send([b"INFO server\r\n"])
        fields = dict(line.split(b":", 1) for line in iter(stream.line, b"") if b":" in line)
        name = b"valkey" if b"valkey_version" in fields else b"redis"
        self.version = (name + b" " + fields[name + b"_version"]).decode()

    def put(self, first: int, blocks: Sequence[Bytes]) -> None:
        parts: list[bytes | Bytes] = []
        for name, block in zip(self.names[first:], blocks, strict=False):
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, self.size)
            parts += [head, block, b"\r\n"]
        self.stream.send(parts)
        for _ in blocks:
            assert self.stream.line() == b"+OK"

    def get(self, first: int, blocks: Sequence[Bytes]) -> None:
        names = self.names[first : first + len(blocks)]
        self.stream.send(
            [b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(n), n) for n in names)]
        )
        for block in blocks:
            assert self.stream.line() == b"$%d" % self.size
            self.stream.fill(block)


@contextmanager
def start(setup: Setup) -> Iterator[Peer]:
    """A server that keeps freed memory, so that no round pays for first touches."""
    path = os.path.join(setup.shm, "socket")
    command = [
        setup.program, "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no",
        "--dir", setup.shm, "--daemonize", "no",
    ]  # fmt: skip
    keep = {"MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1"}
    with server(command, lambda: listens(path), keep), closing(Stream(path)) as stream:
        yield Redis(stream)


if __name__ == "__main__":
    serve(start)
