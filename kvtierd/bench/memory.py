"""The reference of the DRAM tier: numpy's memcpy of the same bytes between plain buffers."""

import os
import time
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

PATTERN_BYTES: Final = 1 << 20
"""Random bytes that sources repeat; drawing all of them would take longer than the benchmark."""

Bytes = NDArray[np.uint8]


class Buffers:
    """Sources, memcpy's middle places and destinations, allocated one by one and touched.

    One large array would have huge pages, as arenas do where the host allows it. Sources and
    destinations may be fewer than the blocks (`ends`), which then come to them in turns.
    """

    def __init__(self, blocks: int, block_bytes: int, ends: int = 0) -> None:
        ends = ends or blocks
        turns = -(-blocks // ends)
        self.sources = ([_random(block_bytes) for _ in range(ends)] * turns)[:blocks]
        self.middles = [np.ones(block_bytes, np.uint8) for _ in range(blocks)]
        self.targets = ([np.ones(block_bytes, np.uint8) for _ in range(ends)] * turns)[:blocks]
        self.rows = list(zip(self.sources, self.middles, self.targets, strict=True))
        self.round_bytes = 2 * blocks * block_bytes
        """What a round copies: each block out and in."""

    def memcpy_out(self) -> None:
        """All blocks from their sources to their middle places."""
        for source, between, _ in self.rows:
            np.copyto(between, source)

    def memcpy_in(self) -> None:
        """All blocks from their middle places to their destinations."""
        for _, between, target in self.rows:
            np.copyto(target, between)

    def memcpy_batch(self) -> None:
        """All blocks out, then all blocks in."""
        self.memcpy_out()
        self.memcpy_in()

    def memcpy_pairs(self) -> None:
        """Each block out and in before the next."""
        for source, between, target in self.rows:
            np.copyto(between, source)
            np.copyto(target, between)

    def check(self) -> None:
        """The last round has brought every byte back."""
        for source, _, target in self.rows:
            assert np.array_equal(source, target), "what came back is not what went out"
        for target in self.targets:
            target.fill(1)


def _random(block_bytes: int) -> Bytes:
    """A buffer of random bytes, unlike any other."""
    drawn = np.frombuffer(os.urandom(min(block_bytes, PATTERN_BYTES)), np.uint8)
    return np.resize(drawn, block_bytes)


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
