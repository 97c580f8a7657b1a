"""kvtierd through its sync client: a daemon of its own, blocks in DRAM.

Variant "oneway": single blocks go out with one-way commits, and all of them are acknowledged before
the clock stops; otherwise every call returns acknowledged.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import kvtierd
from kvtier_client import Client
from kvtier_client.client import Session
from kvtierd.bench.daemons import BLOCK_TOKENS, daemon, layout
from kvtierd.bench.plan import GIB, Plan
from tests.bench.peers.adapters.peer import Bytes, Order, Peer, Setup, serve

ARENA_BYTES: Final = GIB


class Kvtierd(Peer):
    """A session for each block size, a node of it for each round."""

    version = kvtierd.__version__

    def __init__(self, client: Client, setup: Setup) -> None:
        self.client = client
        self.sessions = {size: client.open_session([layout(size)]) for size in setup.sizes}
        self.oneway = setup.variant == "oneway"
        self.session: Session
        self.node = 0

    def begin(self, order: Order, blocks: int) -> None:
        self.session = self.sessions[order.size]
        self.node += 1
        self.session.fork(self.node, 0, 0)

    def put(self, first: int, blocks: Sequence[Bytes]) -> None:
        session, node = self.session, self.node
        if len(blocks) == 1:
            session.swap_out(blocks[0], first, BLOCK_TOKENS, node=node, ack=not self.oneway)
        else:
            session.swap_out(blocks, (first, first + len(blocks)), BLOCK_TOKENS, node=node)

    def settle(self) -> None:
        if self.oneway:
            self.client.flush()

    def get(self, first: int, blocks: Sequence[Bytes]) -> None:
        if len(blocks) == 1:
            self.session.swap_in(blocks[0], first, node=self.node)
        else:
            self.session.swap_in(blocks, (first, first + len(blocks)), node=self.node)

    def end(self) -> None:
        self.session.prune(self.node)


@contextmanager
def start(setup: Setup) -> Iterator[Peer]:
    """A daemon whose arena holds a round of each block size."""
    with (
        daemon(Plan(Path(setup.disk)), ARENA_BYTES) as process,
        Client(process.client_path, name="bench-peers", prefault=True) as client,
    ):
        yield Kvtierd(client, setup)


if __name__ == "__main__":
    serve(start)
