"""What a spill job consists of: its parts, each done at one go by one thread, and their order.

    write   parts of about a megabyte: checksum, payload   then per file: fdatasync, bodies, words
    read    parts of about a megabyte: payload, verify
    clear, bodies                                          per file: words or bodies, fdatasync

A write publishes a file's blocks only after their payload is there, per batch and not per block.
Everything that goes wrong becomes the status of the blocks that it hit.
"""

import errno
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import xxhash

from kvtierd.tiers.blockio import I64, RUN_BYTES_MAX, Plan, move_run, plan, round_up
from kvtierd.tiers.bodies import (
    CHECKSUM_XXH3,
    W_FLAGS,
    W_PAYLOAD_SUM,
    W_PLACE,
    places,
    seal_bodies,
)
from kvtierd.tiers.spill_files import SpillFile, SpillFiles
from kvtierd.tiers.spill_io import (
    BodiesJob,
    ClearJob,
    Done,
    Job,
    ReadJob,
    Status,
    WriteJob,
)
from kvtierd.tiers.superblock import Kind

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
TRY_AGAIN: Final = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EINTR, errno.ENOBUFS})
"""Errors of a read that say nothing about the bytes."""
_KIND_SHIFT: Final = np.uint64(48)
_KIND_MASK: Final = np.uint64(0xFF << 48)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one thread does at one go, for some of a job's blocks (indexes into the job)."""

    blocks: I64
    work: Callable[[], None]
    crashed: Status
    """What its blocks become when the work raises."""
    begun: bool = False
    """Its blocks are half done, so that it is not cancelled."""


class Running:
    """A job under way: the result as it grows, and the steps that are left."""

    def __init__(self, job: Job, done: Done) -> None:
        count = len(job.slots)
        self.job = job
        self.done = done
        self.size_bytes = 0
        """Payload bytes it has in flight."""
        self.status = np.zeros(count, np.uint8)
        self.errnos = np.zeros(count, np.int32)
        self.checksums = np.zeros(count, np.uint64)
        self.steps: list[Callable[[], list[Part]]] = []
        """Each begins when all parts of the one before are done."""
        self.pending = 0
        self.cancelled = False

    def cancel(self) -> None:
        """Begin nothing more of it."""
        self.cancelled = True

    def mark(self, blocks: I64, status: Status, number: int | None) -> None:
        """Note what became of blocks other than OK, and the errno of it."""
        self.status[blocks] = status
        self.errnos[blocks] = number or errno.EIO

    def good(self, blocks: I64) -> I64:
        """Those of the blocks that nothing has happened to."""
        found: I64 = blocks[self.status[blocks] == Status.OK]
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """Where the blocks of a job lie, and how they are grouped. Shapes: [n]."""

    files: I64
    offsets: I64
    sizes_bytes: I64
    plan: Plan


def _write_status(number: int | None) -> Status:
    return Status.FULL if number in NO_ROOM else Status.FAILED


class SpillWork:
    """Turns jobs into parts over the spill files; knows nothing of threads."""

    def __init__(self, files: SpillFiles) -> None:
        self._files = files
        self._threads = files.settings.io_threads
        self._power = files.settings.durability == "power"

    def begin(self, running: Running) -> list[Part]:
        """The parts of a job's first step; later steps are left with the job."""
        job = running.job
        if isinstance(job, ClearJob | BodiesJob):
            return self._header_parts(running)
        cut = self._cut(job)
        running.size_bytes = int(cut.sizes_bytes.sum())
        if isinstance(job, WriteJob):
            running.steps.append(partial(self._publish_parts, running, job, cut.files))
            return self._payload_parts(cut, partial(self._write, running, job, cut))
        return self._payload_parts(cut, partial(self._read, running, job, cut))

    # ------------------------------------------------------------ cutting

    def _cut(self, job: WriteJob | ReadJob) -> _Cut:
        sizes = round_up(job.lengths.astype(np.int64))
        files, offsets, slot_bytes = self._files.locate(job.slots)
        assert (sizes <= slot_bytes).all(), "a block larger than its slot, or a slab not assigned"
        ends = job.offsets.astype(np.int64) + sizes
        assert (ends <= len(job.arena)).all(), "a block outside the arena"
        share_bytes = -(-int(sizes.sum()) // self._threads)
        task_bytes = min(share_bytes, RUN_BYTES_MAX)
        return _Cut(files, offsets, sizes, plan(files, offsets, sizes, task_bytes))

    @staticmethod
    def _payload_parts(cut: _Cut, work: Callable[[Sequence[I64]], None]) -> list[Part]:
        order = cut.plan.order
        bounds = [*cut.plan.run_starts.tolist(), len(order)]
        tasks = [*cut.plan.task_starts.tolist(), len(bounds) - 1]
        parts = []
        for first, last in itertools.pairwise(tasks):
            runs = [order[bounds[i] : bounds[i + 1]] for i in range(first, last)]
            blocks = order[bounds[first] : bounds[last]]
            parts.append(Part(blocks, partial(work, runs), Status.FAILED))
        return parts

    def _publish_parts(self, running: Running, job: WriteJob, files: I64) -> list[Part]:
        written = running.good(np.arange(len(files)))
        return [
            Part(blocks, partial(self._publish, running, job, file, blocks), Status.UNSURE, True)
            for file, blocks in self._by_file(files[written], written)
        ]

    def _header_parts(self, running: Running) -> list[Part]:
        files, _, _ = self._files.locate(running.job.slots)
        return [
            Part(blocks, partial(self._rewrite, running, file, blocks), Status.FAILED)
            for file, blocks in self._by_file(files, np.arange(len(files)))
        ]

    def _by_file(self, files: I64, blocks: I64) -> list[tuple[SpillFile, I64]]:
        return [(self._files.files[index], blocks[files == index]) for index in np.unique(files)]

    # ------------------------------------------------------------ payload

    def _write(self, running: Running, job: WriteJob, cut: _Cut, runs: Sequence[I64]) -> None:
        memory = job.arena.data
        for blocks in runs:
            starts = job.offsets[blocks].tolist()
            running.checksums[blocks] = [
                xxhash.xxh3_64_intdigest(memory[start : start + length])
                for start, length in zip(starts, job.lengths[blocks].tolist(), strict=True)
            ]
            codes = self._move(self._files.kernel.pwritev, job, cut, blocks, errno.ENOSPC)
            for block, code in zip(blocks, codes, strict=True):
                if code:
                    running.mark(block, _write_status(code), code)

    def _read(self, running: Running, job: ReadJob, cut: _Cut, runs: Sequence[I64]) -> None:
        memory = job.arena.data
        for blocks in runs:
            codes = self._move(self._files.kernel.preadv, job, cut, blocks, errno.ENODATA)
            for block, code in zip(blocks, codes, strict=True):
                if code:
                    status = Status.FAILED if code in TRY_AGAIN else Status.LOST
                    running.mark(block, status, code)
            moved = running.good(blocks)
            starts, lengths = job.offsets[moved].tolist(), job.lengths[moved].tolist()
            running.checksums[moved] = [
                xxhash.xxh3_64_intdigest(memory[start : start + length])
                for start, length in zip(starts, lengths, strict=True)
            ]
            wrong = running.checksums[moved] != job.checksums[moved]
            running.status[moved[wrong]] = Status.MISMATCH

    def _move(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        job: WriteJob | ReadJob,
        cut: _Cut,
        blocks: I64,
        cut_errno: int,
    ) -> list[int]:
        """Move one run; returns an errno per block."""
        memory = job.arena.data
        starts, sizes = job.offsets[blocks].tolist(), cut.sizes_bytes[blocks].tolist()
        buffers = [memory[s : s + size] for s, size in zip(starts, sizes, strict=True)]
        file = self._files.files[cut.files[blocks[0]]]
        return move_run(call, file.payload_fd, buffers, int(cut.offsets[blocks[0]]), cut_errno)

    # ------------------------------------------------------------ headers

    def _publish(self, running: Running, job: WriteJob, file: SpillFile, blocks: I64) -> None:
        """Make written blocks known: payload durable, slab directory, bodies, words, durable."""
        if self._power:
            try:
                self._files.kernel.fdatasync(file.payload_fd)
            except OSError as error:
                running.mark(blocks, Status.FAILED, error.errno)
                return
        slabs = job.slots[blocks] // self._files.geometry.max_slots
        for slab, failure in self._files.settle(file.index).items():
            running.mark(blocks[slabs == slab], _write_status(failure.errno), failure.errno)
        blocks = running.good(blocks)
        slots = self._files.local(job.slots[blocks])
        bodies = job.bodies[blocks]
        bodies[:, W_PAYLOAD_SUM] = running.checksums[blocks]
        bodies[:, W_PLACE] = places(Kind.SPILL, slots)
        bodies[:, W_FLAGS] &= ~_KIND_MASK
        bodies[:, W_FLAGS] |= np.uint64(CHECKSUM_XXH3) << _KIND_SHIFT
        seal_bodies(bodies)
        try:
            file.headers.write_bodies(slots, bodies)
            file.headers.write_words(slots, job.words[blocks])
            self._sync_headers(file)
        except OSError as error:
            running.mark(blocks, Status.UNSURE, error.errno)

    def _rewrite(self, running: Running, file: SpillFile, blocks: I64) -> None:
        """Clear the words of blocks, or write their bodies anew."""
        job, slots = running.job, self._files.local(running.job.slots[blocks])
        try:
            if isinstance(job, BodiesJob):
                bodies = job.bodies[blocks]
                seal_bodies(bodies)
                file.headers.write_bodies(slots, bodies)
            else:
                file.headers.write_words(slots, np.zeros(len(slots), np.uint64))
            self._sync_headers(file)
        except OSError as error:
            running.mark(blocks, Status.FAILED, error.errno)

    def _sync_headers(self, file: SpillFile) -> None:
        if self._power:
            file.headers.sync()
