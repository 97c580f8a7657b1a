"""A plain file on tmpfs: the fastest store without a server, without any of its guarantees."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.bench.peers.adapters.peer import Bytes, Order, Peer, Setup, serve


class Tmpfs(Peer):
    """Blocks at fixed places of one file that stays; a batch is one pwritev and one preadv."""

    version = f"Linux {os.uname().release}"

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.size = 0

    def begin(self, order: Order, blocks: int) -> None:
        self.size = order.size

    def put(self, first: int, blocks: Sequence[Bytes]) -> None:
        assert os.pwritev(self.descriptor, blocks, first * self.size) == self.size * len(blocks)

    def get(self, first: int, blocks: Sequence[Bytes]) -> None:
        assert os.preadv(self.descriptor, blocks, first * self.size) == self.size * len(blocks)


@contextmanager
def start(setup: Setup) -> Iterator[Peer]:
    """An open file."""
    descriptor = os.open(os.path.join(setup.shm, "blocks"), os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        yield Tmpfs(descriptor)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    serve(start)
