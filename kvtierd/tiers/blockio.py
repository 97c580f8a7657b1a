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


@dataclass(frozen=True, slots=True)
class Plan:
    """How a job is cut: `order` sorts its blocks by place, the others are bounds into `order`."""

    order: I64
    run_starts: I64
    """First block of every run."""
    task_starts: I64
    """First run of every task; a task is what one thread does at one go."""


def round_up(lengths_bytes: I64) -> I64:
    """Lengths rounded up to the unit of O_DIRECT."""
    return (lengths_bytes + (ALIGN_BYTES - 1)) & -ALIGN_BYTES


def plan(files: I64, offsets: I64, sizes_bytes: I64, task_bytes: int) -> Plan:
    """Cut a job into tasks of about `task_bytes` and each task into runs; vectorised.

    Shapes: one entry per block in `files`, `offsets` (in the file) and `sizes_bytes`.
    """
    order = np.lexsort((offsets, files))
    file, offset, size = files[order], offsets[order], sizes_bytes[order]
    before = np.cumsum(size) - size
    new_file = np.empty(len(order), np.bool_)
    new_file[:1] = True
    new_file[1:] = file[1:] != file[:-1]
    place = np.arange(len(order), dtype=np.int64)
    task = before // max(task_bytes, 1)
    new_task = new_file.copy()
    new_task[1:] |= task[1:] != task[:-1]
    new_run = new_task.copy()
    new_run[1:] |= offset[1:] != offset[:-1] + size[:-1]
    first = np.maximum.accumulate(np.where(new_run, place, 0))
    new_run |= (place - first) % RUN_BLOCKS_MAX == 0
    run_starts = np.flatnonzero(new_run)
    task_starts = np.flatnonzero(new_task[run_starts])
    return Plan(order, run_starts, task_starts)


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
