"""Many client processes at once, against as many processes that copy the same bytes by memcpy.

The same processes do both, in turns; all begin at one time and are counted over one interval.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO, Final

from kvtier_client.errors import DaemonError
from kvtierd.bench.client_process import BLOCKS
from kvtierd.bench.daemons import BLOCK_BYTES, daemon
from kvtierd.bench.figures import Cell, Figure, middle
from kvtierd.bench.plan import MIB, Plan

COUNTS: Final = (1, 2, 4, 8, 16)
ROUNDS: Final = 7
WARM_ROUNDS: Final = 1
ROUND_S: Final = 0.6
LEAD_S: Final = 0.02
"""From asking until the common begin."""
BUDGETS: Final = {8: 0.9}
SLAB_BYTES: Final = 64 * MIB


class Clients:
    """Running client processes."""

    def __init__(self, processes: "list[subprocess.Popen[str]]") -> None:
        self._processes = processes
        for process in processes:
            _line(process)

    def begin(self, work: str, round_s: float) -> None:
        """Have all of them work for some time from now on."""
        begin_s = time.monotonic() + LEAD_S
        for process in self._processes:
            _stream(process.stdin).write(f"{work} {begin_s} {begin_s + round_s}\n")
            _stream(process.stdin).flush()

    def end(self) -> float:
        """Wait for the end of that time; returns how many bytes they moved together."""
        return sum(float(_line(process)) for process in self._processes)

    def bytes_per_s(self, work: str, round_s: float) -> float:
        """What all of them copy together."""
        self.begin(work, round_s)
        return self.end() / round_s


def _stream(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def _line(process: "subprocess.Popen[str]") -> str:
    line = _stream(process.stdout).readline()
    if not line:
        raise DaemonError(
            f"a client process of the benchmark ended with code {process.wait()}; "
            "what it wrote is above"
        )
    return line


@contextmanager
def clients(count: int, socket_path: str) -> Iterator[Clients]:
    """So many processes, ended afterwards."""
    command = [sys.executable, "-m", "kvtierd.bench.client_process", socket_path]
    with ExitStack() as stack:
        processes = []
        for _ in range(count):
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                start_new_session=True,
            )  # fmt: skip
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        yield Clients(processes)


def arena_bytes(count: int) -> int:
    """Room for every client's blocks, and for slots that are granted ahead."""
    slabs = -(-count * BLOCKS * BLOCK_BYTES // SLAB_BYTES)
    return (slabs + max(slabs // 4, 4)) * SLAB_BYTES


def measure(plan: Plan) -> list[Figure]:
    """Each number of clients."""
    figures, round_s = [], plan.duration_s(ROUND_S)
    for count in plan.some(COUNTS):
        pairs = []
        with (
            daemon(plan, arena_bytes(count)) as process,
            clients(count, process.client_path) as all_,
        ):
            for turn in range(WARM_ROUNDS + plan.rounds(ROUNDS)):
                mine, plain = (all_.bytes_per_s(work, round_s) for work in ("swap", "memcpy"))
                if turn >= WARM_ROUNDS:
                    pairs.append((mine / 1e9, plain / 1e9))
        speeds, plains = zip(*pairs, strict=True)
        cells = [Cell("clients (GB/s)", str(count), column) for column in ("daemon", "memcpy")]
        name = f"dram.clients{count}"
        figures += [
            middle(f"{name}.gb_s", speeds, cell=cells[0]),
            middle(f"{name}.memcpy.gb_s", plains, cell=cells[1]),
            middle(
                f"{name}.ratio_parallel_memcpy",
                [mine / plain for mine, plain in pairs],
                BUDGETS.get(count),
                note=f"{count} processes, batches of {BLOCKS} blocks of 1 MiB",
            ),
        ]
    return figures
