"""One of many clients: a process that copies when it is told to, and says how much.

python -m kvtierd.bench.client_process SOCKET

A line `WORK BEGIN END` on stdin asks to do WORK from one time of the monotonic clock to another;
the answer on stdout is the number of bytes that were moved in between.
"""

import sys
import time
from collections.abc import Callable
from typing import Final

from kvtier_client import Client
from kvtierd.bench.daemons import BLOCK_BYTES, BLOCK_TOKENS, layout
from kvtierd.bench.memory import Buffers

BLOCKS: Final = 64
ENDS: Final = 16
"""Sources and destinations of a client; its blocks come to them in turns."""
SPILLED_NODES: Final = 8
"""Nodes that `spill` keeps, so that their blocks have to be on NVMe."""
WAIT_S: Final = 60.0


class Worker:
    """Buffers, and a session to swap them through."""

    def __init__(self, client: Client) -> None:
        self.client, self.memory = client, Buffers(BLOCKS, BLOCK_BYTES, ENDS)
        self.kv = client.open_session([layout()])
        self.node = 0

    def swap(self) -> None:
        """All blocks out, then in, under a new name each time."""
        self.node += 1
        self.kv.fork(self.node, 0, 0)
        self.kv.swap_out(self.memory.sources, (0, BLOCKS), BLOCK_TOKENS, node=self.node)
        self.kv.swap_in(self.memory.targets, (0, BLOCKS), node=self.node)
        self.kv.prune(self.node)

    def memcpy(self) -> None:
        """The same copies between plain buffers."""
        self.memory.memcpy_batch()

    def spill(self) -> None:
        """Store blocks as they are in their slots: nothing but the disk slows this down."""
        self.node += 1
        self.kv.fork(self.node, 0, 0)
        with self.client.reserve(layout(), BLOCKS, wait_s=WAIT_S) as lease:
            lease.commit(self.kv, self.node, (0, BLOCKS), BLOCK_TOKENS)
        if self.node > SPILLED_NODES:
            self.kv.prune(self.node - SPILLED_NODES)

    def copied_bytes(self, work: Callable[[], None], begin_s: float, end_s: float) -> float:
        """Repeat `work` between two times; of the last repetition the part before the end counts.

        All clients copy during the whole interval, so that none has the memory for itself.
        """
        time.sleep(max(begin_s - time.monotonic(), 0.0))
        done, before_s = 0.0, time.monotonic()
        while before_s < end_s:
            work()
            now_s = time.monotonic()
            done += min(1.0, (end_s - before_s) / (now_s - before_s))
            before_s = now_s
        return done * self.memory.round_bytes


def _answer(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(socket_path: str) -> None:
    """Serve until stdin ends."""
    with Client(socket_path, name="bench", prefault=True) as client:
        worker = Worker(client)
        worker.swap()
        worker.memory.check()
        _answer("ready")
        for line in sys.stdin:
            work, begin_s, end_s = line.split()
            found = worker.copied_bytes(getattr(worker, work), float(begin_s), float(end_s))
            _answer(str(found))


if __name__ == "__main__":
    main(sys.argv[1])
