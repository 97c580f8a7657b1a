"""Vectored block I/O: how runs of blocks move between memory and a file, and what failed of them.

A *run* is a series of blocks that lie one after another in the file; it moves in one system call
where the kernel lets it. When a call fails, the run is taken apart, so that one bad block does not
take its neighbours with it.
"""

import errno
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

ALIGN_BYTES = 4096
"""O_DIRECT's unit for file offsets, memory addresses and lengths."""
RUN_BYTES_MAX = 4 << 20
"""What one system call, and one turn of a pool thread, moves at most (give or take a block)."""
RUN_BLOCKS_MAX = min(os.sysconf("SC_IOV_MAX"), 1024)
AGAIN_TRIES_MAX = 50
AGAIN_PAUSE_S = 0.002

I64 = npt.NDArray[np.int64]


class Kernel(Protocol):
    """The system calls that touch payload bytes; a test puts a failing disk in their place."""

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        """As `os.pwritev`."""
        ...

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        """As `os.preadv`."""
        ...

    def fdatasync(self, fd: int, /) -> None:
        """As `os.fdatasync`."""
        ...


class LinuxKernel:
    """The real system calls."""

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        """As `os.pwritev`."""
        return os.pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        """As `os.preadv`."""
        return os.preadv(fd, buffers, offset)

    def fdatasync(self, fd: int, /) -> None:
        """As `os.fdatasync`."""
        os.fdatasync(fd)


Runs = list[tuple[int, int]]
"""Ranges of blocks, in the order of their places, that lie one after another in a file."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a job is cut."""

    order: I64 | None
    """Sorts the blocks by place; None when they are sorted."""
    tasks: list[Runs]
    """What one thread does at one go."""


def round_up(length_bytes: int) -> int:
    """A length rounded up to the unit of O_DIRECT."""
    return (length_bytes + (ALIGN_BYTES - 1)) & -ALIGN_BYTES


def plan(places: I64, size_bytes: int, task_bytes: int) -> Plan:
    """Cut blocks of one size at `places` into tasks of about `task_bytes`, and those into runs.

    Shapes: `places`: [n], numbers that grow by `size_bytes` from a block to its neighbour in the
    same file only.
    """
    steps = places[1:] - places[:-1]
    order = None
    if np.count_nonzero(steps < 0):
        order = np.argsort(places, kind="stable")
        ordered = places[order]
        steps = ordered[1:] - ordered[:-1]
    breaks = np.flatnonzero(steps != size_bytes) + 1
    tasks: list[Runs] = []
    runs: Runs = []
    per_task = left = max(task_bytes // size_bytes, 1)
    at = 0
    for last in [*breaks.tolist(), len(places)]:
        while at < last:
            end = min(last, at + min(left, RUN_BLOCKS_MAX))
            runs.append((at, end))
            left -= end - at
            at = end
            if not left:
                tasks.append(runs)
                runs, left = [], per_task
    if runs:
        tasks.append(runs)
    return Plan(order, tasks)


Call = Callable[[int, Sequence[memoryview], int], int]


def transfer(call: Call, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Move `buffers` completely; returns the bytes moved, fewer only where the medium ends.

    Short transfers are carried on from the last aligned place (O_DIRECT takes no other), until
    one moves less than a page. Interrupted calls are repeated by Python itself; EAGAIN is repeated
    here, a bounded number of times.

    Errors: `OSError` as soon as a call moves nothing because of one.
    """
    sizes = [len(buffer) for buffer in buffers]
    total, moved, again = sum(sizes), 0, 0
    while moved < total:
        rest = buffers if moved == 0 else _skip(buffers, moved)
        try:
            count = call(fd, rest, offset + moved)
        except BlockingIOError:
            again += 1
            if again > AGAIN_TRIES_MAX:
                raise
            time.sleep(AGAIN_PAUSE_S)
            continue
        if moved + count < total:
            count -= count % ALIGN_BYTES
            if count == 0:
                return moved
        moved += count
    return moved


def _skip(buffers: Sequence[memoryview], count_bytes: int) -> list[memoryview]:
    rest: list[memoryview] = []
    for buffer in buffers:
        if count_bytes < len(buffer):
            rest.append(buffer[count_bytes:])
        count_bytes = max(0, count_bytes - len(buffer))
    return rest


def move_run(
    call: Call, fd: int, buffers: Sequence[memoryview], offset: int, cut_errno: int
) -> list[int]:
    """Move a run of blocks; returns one errno per block, 0 for those that moved completely.

    A block where the medium ended without an error gets `cut_errno`. After an error the blocks
    are tried one by one: the kernel does not tell which of them was the bad one.
    """
    sizes = [len(buffer) for buffer in buffers]
    try:
        moved = transfer(call, fd, buffers, offset)
    except OSError as error:
        if len(buffers) == 1:
            return [error.errno or errno.EIO]
        results: list[int] = []
        for buffer, size in zip(buffers, sizes, strict=True):
            results += move_run(call, fd, [buffer], offset, cut_errno)
            offset += size
        return results
    if moved == sum(sizes):
        return [0] * len(sizes)
    ends = np.cumsum(sizes)
    return [int(code) for code in np.where(ends <= moved, 0, cut_errno)]
