"""Swap-out and swap-in through the sync client, against memcpy of the same bytes.

Both sides copy every block twice: from a source to a middle place and from there to a destination.
The middle places of memcpy are plain buffers, those of the client are arena slots. Sources and
destinations are the same; all of them have been touched before.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier_client import Client
from kvtier_client.client import Session
from tests.bench.daemons import BLOCK_BYTES, BLOCK_TOKENS, MIB, daemon, layout
from tests.bench.figures import Figure, middle

BLOCKS: Final = 64
"""Blocks of a round, and buffers that sources, middle places and destinations rotate over."""
ROUNDS: Final = 61
WARM_ROUNDS: Final = 5
ARENA_BYTES: Final = 512 * MIB

Bytes = NDArray[np.uint8]


class Memory:
    """Sources, destinations and memcpy's middle places. Shapes: each [BLOCKS, BLOCK_BYTES]."""

    def __init__(self) -> None:
        self.source = np.frombuffer(os.urandom(BLOCKS * BLOCK_BYTES), np.uint8)
        self.source = self.source.reshape(BLOCKS, BLOCK_BYTES).copy()
        self.middle = np.ones_like(self.source)
        self.target = np.ones_like(self.source)
        self.rows = [(self.source[i], self.middle[i], self.target[i]) for i in range(BLOCKS)]

    def memcpy_batch(self) -> None:
        """All blocks out, then all blocks in."""
        for source, between, _ in self.rows:
            np.copyto(between, source)
        for _, between, target in self.rows:
            np.copyto(target, between)

    def memcpy_single(self) -> None:
        """Each block out and in before the next."""
        for source, between, target in self.rows:
            np.copyto(between, source)
            np.copyto(target, between)

    def check(self) -> None:
        """The last round has brought every byte back."""
        assert np.array_equal(self.source, self.target)
        self.target.fill(1)


@contextmanager
def session() -> Iterator[tuple[Client, Session]]:
    """A session of a daemon of its own."""
    with (
        daemon(ARENA_BYTES) as process,
        Client(process.client_path, name="bench", prefault=True) as client,
    ):
        yield client, client.open_session([layout()])


def seconds(work: Callable[[], None]) -> float:
    """How long it takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def batch() -> list[Figure]:
    """64 blocks with one swap-out and one swap-in."""
    memory, ratios, speeds = Memory(), [], []
    with session() as (_, kv):

        def ours() -> None:
            kv.swap_out(memory.source, (0, BLOCKS), BLOCK_TOKENS, node=node)
            kv.swap_in(memory.target, (0, BLOCKS), node=node)

        for node in range(1, ROUNDS + WARM_ROUNDS + 1):
            kv.fork(node, 0, 0)
            mine_s = seconds(ours)
            memory.check()
            kv.prune(node)
            plain_s = seconds(memory.memcpy_batch)
            if node > WARM_ROUNDS:
                ratios.append(plain_s / mine_s)
                speeds.append(2 * BLOCKS * BLOCK_BYTES / plain_s / 1e9)
    note = f"{BLOCKS} blocks of 1 MiB; memcpy {np.median(speeds):.1f} GB/s"
    return [middle("dram.batch.ratio_memcpy", ratios, 0.95, note=note)]


def single() -> list[Figure]:
    """64 blocks one after the other: a pre-granted slot, a one-way commit, one round trip in."""
    memory, ratios, plain_us = Memory(), [], []
    with session() as (client, kv):

        def ours() -> None:
            out, back = kv.swap_out, kv.swap_in
            for page, (source, _, target) in enumerate(memory.rows):
                out(source, page, BLOCK_TOKENS, node=node, ack=False)
                back(target, page, node=node)

        for node in range(1, ROUNDS + WARM_ROUNDS + 1):
            kv.fork(node, 0, 0)
            mine_s = seconds(ours)
            memory.check()
            client.flush()
            kv.prune(node)
            plain_s = seconds(memory.memcpy_single)
            if node > WARM_ROUNDS:
                ratios.append(plain_s / mine_s)
                plain_us.append(plain_s / BLOCKS * 1e6)
    note = f"1 MiB out and in; memcpy of both {np.median(plain_us):.0f} us"
    return [middle("dram.single.ratio_memcpy", ratios, 0.70, note=note)]
