"""What all adapters share: a store as the benchmark sees it, the timed round, the line protocol.

An adapter is a process that reads JSON lines and answers each with one: first a `Setup`, then an
`Order` for every round. It needs numpy and nothing of this project, as it runs in the Python
environment of the store.
"""

import contextlib
import json
import mmap
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

START_MAX_S: Final = 120.0
POLL_S: Final = 0.02

Bytes = NDArray[np.uint8]


class Unavailable(Exception):
    """The store cannot be compared on this host."""


@dataclass(frozen=True)
class Setup:
    """What an adapter is told once: `shm` and `disk` are directories that the driver removes."""

    round_bytes: int
    sizes: tuple[int, ...]
    shm: str
    disk: str
    program: str = ""
    variant: str = ""


@dataclass(frozen=True)
class Order:
    """One round: all of `round_bytes` out and in, in blocks of `size`, `batch` of them a call.

    Gets come in the order of the puts, or `shuffled`, so that a store cannot know the next one.
    """

    turn: int
    size: int
    batch: int
    shuffled: bool = False


@dataclass(frozen=True)
class Times:
    """Seconds of one round. memcpy went from the same sources, and to the same targets."""

    memcpy_put_s: float
    put_s: float
    memcpy_get_s: float
    get_s: float


def plain_memory(size_bytes: int) -> Bytes:
    """Anonymous memory in pages of 4 KiB, touched.

    Never in huge pages: the shared memory of most hosts has none, and what a copy gains from them
    on one side only is no property of a store.
    """
    area = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_NOHUGEPAGE)
    memory = np.frombuffer(area, np.uint8)
    memory.fill(1)
    return memory


class Peer:
    """A store. A round's blocks are known by number; only `put`, `settle` and `get` are timed."""

    version = ""

    def memory(self, size_bytes: int) -> Bytes:
        """Where sources and targets lie; a store may need memory that it knows."""
        return plain_memory(size_bytes)

    def begin(self, order: Order, blocks: int) -> None:
        """Prepare names for a round's blocks, none of which is stored."""

    def put(self, first: int, blocks: Sequence[Bytes]) -> None:
        """Store blocks `first..` with one call."""
        raise NotImplementedError

    def settle(self) -> None:
        """Return when all puts of the round are acknowledged."""

    def find(self) -> None:
        """Do what may be done long before the gets; not timed."""

    def get(self, first: int, blocks: Sequence[Bytes]) -> None:
        """Fill blocks `first..` with one call."""
        raise NotImplementedError

    def end(self) -> None:
        """Forget the round's blocks."""


class Rounds:
    """The buffers of a process, and the round that is measured with them."""

    def __init__(self, peer: Peer, round_bytes: int) -> None:
        self.peer = peer
        self.sources = peer.memory(round_bytes)
        self.sources[:] = np.frombuffer(os.urandom(round_bytes), np.uint8)
        self.targets = peer.memory(round_bytes)
        self.middles = plain_memory(round_bytes)
        self.measured = 0

    def measure(self, order: Order) -> Times:
        """One round. Errors: AssertionError when a get does not bring back what was put."""
        peer, size = self.peer, order.size
        count = len(self.sources) // size
        sources, middles, targets = (
            [memory[i * size : (i + 1) * size] for i in range(count)]
            for memory in (self.sources, self.middles, self.targets)
        )
        self.measured += 1
        for number, source in enumerate(sources):  # what an earlier round stored is not the same
            source[:16] = np.array([self.measured, number], "<u8").view(np.uint8)
        starts = range(0, count, order.batch)
        outs = [(i, sources[i : i + order.batch]) for i in starts]
        ins = [(i, targets[i : i + order.batch]) for i in starts]
        if order.shuffled:
            random.Random(order.turn).shuffle(ins)
        peer.begin(order, count)

        def puts() -> None:
            for first, blocks in outs:
                peer.put(first, blocks)
            peer.settle()

        def gets() -> None:
            for first, blocks in ins:
                peer.get(first, blocks)

        memcpy_put_s = seconds(lambda: copy(middles, sources))
        memcpy_get_s = seconds(lambda: copy(targets, middles))
        self.targets.fill(0)
        put_s = seconds(puts)
        peer.find()
        times = Times(memcpy_put_s, put_s, memcpy_get_s, seconds(gets))
        assert np.array_equal(self.sources, self.targets), "a get brought back other bytes"
        peer.end()
        return times


def copy(targets: Sequence[Bytes], sources: Sequence[Bytes]) -> None:
    """memcpy, block by block."""
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)


def seconds(work: Callable[[], None]) -> float:
    """How long it takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def serve(start: Callable[[Setup], AbstractContextManager[Peer]]) -> None:
    """Answer the driver until it closes the pipe; then the store is ended."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the store's own code prints goes to the log

    def say(answer: dict[str, object]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    told = json.loads(sys.stdin.readline())
    setup = Setup(**told | {"sizes": tuple(told["sizes"])})
    try:
        with start(setup) as peer:
            rounds = Rounds(peer, setup.round_bytes)
            say({"version": peer.version})
            for line in sys.stdin:
                say(asdict(rounds.measure(Order(**json.loads(line)))))
    except Unavailable as why:
        say({"unavailable": str(why)})
    except Exception as problem:
        say({"failed": f"{type(problem).__name__}: {problem}"})
        raise


# ------------------------------------------------------------------ servers


@contextlib.contextmanager
def server(
    command: Sequence[str], ready: Callable[[], bool], environment: dict[str, str] | None = None
) -> Iterator[None]:
    """A store's own server process, for as long as it is needed. Errors: Unavailable."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=sys.stderr,
        env=os.environ | (environment or {}),
    )  # fmt: skip
    try:
        deadline_s = time.monotonic() + START_MAX_S
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise Unavailable(f"its server did not start: {' '.join(command)}")
            time.sleep(POLL_S)
        yield
    finally:
        process.kill()
        process.wait()


def listens(address: str | tuple[str, int]) -> bool:
    """Whether somebody accepts connections at a socket path or a TCP address."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(address) == 0


def free_port() -> int:
    """A TCP port of the loopback address that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
