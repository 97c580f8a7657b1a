"""What a spill job consists of: its parts, each done at one go by one thread, and their order.

    write   parts of about a megabyte: checksum, payload   then per file: fdatasync, bodies, words
    read    parts of about a megabyte: payload, verify
    clear                                                  per file: words, fdatasync

A write publishes a file's blocks only after their payload is there, per batch and not per block.
Everything that goes wrong becomes the status of the blocks that it hit.

Where a file is encrypted, payload goes through a buffer of the thread, run by run: encrypted on its
way from the arena to the buffer, decrypted on its way back.
"""

import errno
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import xxhash

from kvtierd.tiers.blockio import (
    ALIGN_BYTES,
    I64,
    RUN_BYTES_MAX,
    Call,
    Plan,
    Runs,
    move_run,
    plan,
    round_up,
)
from kvtierd.tiers.bodies import (
    CHECKSUM_AES_GCM,
    CHECKSUM_XXH3,
    W_FLAGS,
    W_PAYLOAD_SUM,
    W_PLACE,
    checksum_kinds,
    places,
    seal_bodies,
)
from kvtierd.tiers.cipher import CRYPT_WORDS
from kvtierd.tiers.headers import SlotArray
from kvtierd.tiers.spill_files import FILE_SHIFT, OFFSET_MASK, SpillFile, SpillFiles
from kvtierd.tiers.spill_io import (
    U64,
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


Blocks = slice | I64
"""Blocks of a job, as an index."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one thread does at one go, for some of a job's blocks (indexes into the job)."""

    blocks: Blocks
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
        self.crypt_words: U64 = np.zeros((0, len(CRYPT_WORDS)), np.uint64)
        """Of an encrypting write: what the bodies say. Shapes: [n, 4]."""
        self.steps: list[Callable[[], list[Part]]] = []
        """Each begins when all parts of the one before are done."""
        self.pending = 0
        self.cancelled = False

    def cancel(self) -> None:
        """Begin nothing more of it."""
        self.cancelled = True

    def mark(self, blocks: Blocks | int, status: Status, number: int | None) -> None:
        """Note what became of blocks other than OK, and the errno of it."""
        self.status[blocks] = status
        self.errnos[blocks] = number or errno.EIO

    def written(self, blocks: I64) -> I64:
        """Those of the blocks whose bytes are on the medium, be they right or not."""
        status = self.status[blocks]
        found: I64 = blocks[(status == Status.OK) | (status == Status.MISMATCH)]
        return found


class _Cut:
    """Where the blocks of a job lie, in the order of their places in the files."""

    def __init__(self, job: WriteJob | ReadJob, places: I64, size_bytes: int, cut: Plan) -> None:
        self.memory = job.arena.data
        self.length_bytes, self.size_bytes = job.length_bytes, size_bytes
        self.tasks = cut.tasks
        self._order = cut.order
        order = slice(None) if cut.order is None else cut.order
        self.places: list[int] = places[order].tolist()
        self.starts: list[int] = job.offsets[order].tolist()
        """Offsets in the arena."""

    def blocks(self, first: int, last: int) -> Blocks:
        """Which blocks of the job these are."""
        return slice(first, last) if self._order is None else self._order[first:last]

    def sums(self, first: int, last: int, codes: list[int]) -> list[int]:
        """Checksums of the blocks in the arena; 0 for those with an error."""
        memory, length = self.memory, self.length_bytes
        return [
            0 if code else xxhash.xxh3_64_intdigest(memory[start : start + length])
            for start, code in zip(self.starts[first:last], codes, strict=True)
        ]

    def exact(self, first: int, last: int) -> list[memoryview]:
        """The blocks in the arena."""
        memory, length = self.memory, self.length_bytes
        return [memory[start : start + length] for start in self.starts[first:last]]

    def buffers(self, first: int, last: int) -> list[memoryview]:
        """The blocks in the arena, up to the end of their last page."""
        memory, size = self.memory, self.size_bytes
        return [memory[start : start + size] for start in self.starts[first:last]]


class _Bounce(threading.local):
    """A page-aligned buffer of each thread, as large as a run was: RUN_BYTES_MAX, or a block."""

    def __init__(self) -> None:
        self._map = memoryview(b"")

    def get(self, size_bytes: int) -> memoryview:
        """The buffer's first bytes, with whatever was in it."""
        if len(self._map) < size_bytes:
            self._map = memoryview(mmap.mmap(-1, size_bytes))
        return self._map[:size_bytes]


def _split(data: memoryview, size_bytes: int) -> list[memoryview]:
    """The blocks in a buffer, which ends with a page for the last one's tag."""
    return [data[at : at + size_bytes] for at in range(0, len(data) - ALIGN_BYTES, size_bytes)]


def _write_status(number: int | None) -> Status:
    return Status.FULL if number in NO_ROOM else Status.FAILED


class SpillWork:
    """Turns jobs into parts over the spill files; knows nothing of threads."""

    def __init__(self, files: SpillFiles) -> None:
        self._files = files
        self._threads = files.settings.io_threads
        cores = len(os.sched_getaffinity(0))
        self._computing = threading.BoundedSemaphore(max(cores // 2, 1))
        """Threads that hash or encrypt at a time: the others wait for the disk. All at once, they
        would keep the event loop from its core."""
        self._power = files.settings.durability == "power"
        self._encrypt = files.settings.encrypt
        self._bounce = _Bounce()

    def begin(self, running: Running, *, alone: bool) -> list[Part]:
        """The parts of a job's first step; later steps are left with the job.

        `alone`: nothing else is under way, so that all threads should get their share of it.
        """
        job = running.job
        if isinstance(job, ClearJob):
            return self._clear_parts(running)
        cut = self._cut(job, alone)
        running.size_bytes = len(job.slots) * cut.size_bytes
        if isinstance(job, WriteJob):
            running.steps.append(partial(self._publish_parts, running, job))
            if self._encrypt:
                running.crypt_words = np.zeros((len(job.slots), len(CRYPT_WORDS)), np.uint64)
            work = partial(self._write, running, job, cut)
        else:
            work = partial(self._read, running, job, cut)
        return [
            Part(cut.blocks(runs[0][0], runs[-1][1]), partial(work, runs), Status.FAILED)
            for runs in cut.tasks
        ]

    # ------------------------------------------------------------ cutting

    def _cut(self, job: WriteJob | ReadJob, alone: bool) -> _Cut:
        size = round_up(job.length_bytes)
        places, slot_bytes = self._files.locate(job.slots)
        assert (slot_bytes >= size).all(), "a block larger than its slot, or a slab not assigned"
        assert (job.offsets + job.offsets.dtype.type(size) <= len(job.arena)).all(), (
            "a block outside the arena"
        )
        share_bytes = len(places) * size // self._threads if alone else RUN_BYTES_MAX
        return _Cut(job, places, size, plan(places, size, min(share_bytes, RUN_BYTES_MAX)))

    def _publish_parts(self, running: Running, job: WriteJob) -> list[Part]:
        return [
            Part(blocks, partial(self._publish, running, job, file, blocks), Status.UNSURE, True)
            for file, blocks in self._by_file(job.slots, running.written(np.arange(len(job.slots))))
        ]

    def _clear_parts(self, running: Running) -> list[Part]:
        slots = running.job.slots
        return [
            Part(blocks, partial(self._clear, running, file, blocks), Status.FAILED)
            for file, blocks in self._by_file(slots, np.arange(len(slots)))
        ]

    def _by_file(self, slots: SlotArray, blocks: I64) -> list[tuple[SpillFile, I64]]:
        """Blocks of a job, apart by the file that they are in."""
        files = slots[blocks] // self._files.geometry.total_slots
        return [(self._files.files[index], blocks[files == index]) for index in np.unique(files)]

    # ------------------------------------------------------------ payload

    def _write(self, running: Running, job: WriteJob, cut: _Cut, runs: Runs) -> None:
        for first, last in runs:
            blocks = cut.blocks(first, last)
            with self._computing:
                running.checksums[blocks] = cut.sums(first, last, [0] * (last - first))
            known = job.bodies[blocks, W_PAYLOAD_SUM]
            changed = (known != 0) & (known != running.checksums[blocks])
            if np.count_nonzero(changed):
                running.status[blocks] = np.where(changed, Status.MISMATCH, Status.OK)
                running.checksums[blocks] = np.where(changed, known, running.checksums[blocks])
            buffers = cut.buffers(first, last)
            if self._encrypt:
                buffers = self._encrypted(running, job, cut, first, last)
                if not buffers:
                    running.mark(blocks, Status.FULL, errno.EKEYEXPIRED)
                    continue
            codes = self._move(self._files.kernel.pwritev, cut, first, buffers, errno.ENOSPC)
            if any(codes):
                for place, code in enumerate(codes, first):
                    if code:
                        running.mark(cut.blocks(place, place + 1), _write_status(code), code)

    def _encrypted(
        self, running: Running, job: WriteJob, cut: _Cut, first: int, last: int
    ) -> list[memoryview]:
        """The blocks of a run, encrypted; empty when the file's key is used up."""
        blocks, size = cut.blocks(first, last), cut.size_bytes
        file, slots = self._file(cut, first), self._files.local(job.slots[blocks])
        known = job.bodies[blocks].copy()
        known[:, W_PAYLOAD_SUM] = running.checksums[blocks]
        data = self._bounce.get((last - first) * size + ALIGN_BYTES)
        with self._computing:
            words = file.cipher.encrypt(
                known, places(Kind.SPILL, slots), cut.exact(first, last), data, size
            )
        if words is None:
            return []
        running.crypt_words[blocks] = words
        return _split(data, size)

    def _read(self, running: Running, job: ReadJob, cut: _Cut, runs: Runs) -> None:
        for first, last in runs:
            if self._file(cut, first).cipher.keys:
                self._decrypted(running, job, cut, first, last)
                continue
            codes = self._read_run(running, cut, first, last, cut.buffers(first, last))
            self._compare(running, job, cut, first, last, codes)

    def _decrypted(self, running: Running, job: ReadJob, cut: _Cut, first: int, last: int) -> None:
        """Read a run of a file that has encrypted blocks, others among them or not."""
        assert job.bodies is not None, "an encrypted block is read by its name"
        blocks, size = cut.blocks(first, last), cut.size_bytes
        file, slots = self._file(cut, first), self._files.local(job.slots[blocks])
        stored = file.headers.read_bodies(slots)
        data = self._bounce.get((last - first) * size + ALIGN_BYTES)
        pages = _split(data, size)
        codes = self._read_run(running, cut, first, last, pages)
        targets: list[memoryview | None] = [*cut.exact(first, last)]
        for i, kind in enumerate(checksum_kinds(stored).tolist()):
            target = targets[i]
            assert target is not None
            if codes[i] or kind != CHECKSUM_AES_GCM:
                targets[i] = None
            if kind == CHECKSUM_XXH3:  # written before the file was encrypted
                target[:] = pages[i][: len(target)]
            elif kind != CHECKSUM_AES_GCM:  # the medium cannot read the body
                running.mark(cut.blocks(first + i, first + i + 1), Status.LOST, None)
        known = job.bodies[blocks].copy()
        known[:, W_PAYLOAD_SUM] = job.checksums[blocks]
        with self._computing:
            good = file.cipher.decrypt(
                known, places(Kind.SPILL, slots), stored, data, size, targets
            )
        for i in np.flatnonzero(~good).tolist():
            if targets[i] is not None:
                running.mark(cut.blocks(first + i, first + i + 1), Status.MISMATCH, None)
        self._compare(running, job, cut, first, last, codes)

    def _compare(
        self, running: Running, job: ReadJob, cut: _Cut, first: int, last: int, codes: list[int]
    ) -> None:
        """Blocks in the arena whose checksum is another one are not those that were written."""
        blocks = cut.blocks(first, last)
        with self._computing:
            running.checksums[blocks] = cut.sums(first, last, codes)
        wrong = running.checksums[blocks] != job.checksums[blocks]
        if np.count_nonzero(wrong):
            status_now = running.status[blocks]
            wrong &= status_now == Status.OK
            running.status[blocks] = np.where(wrong, Status.MISMATCH, status_now)

    def _read_run(
        self, running: Running, cut: _Cut, first: int, last: int, buffers: list[memoryview]
    ) -> list[int]:
        """Read one run; returns an errno per block."""
        codes = self._move(self._files.kernel.preadv, cut, first, buffers, errno.ENODATA)
        if any(codes):
            for place, code in enumerate(codes, first):
                if code:
                    status = Status.FAILED if code in TRY_AGAIN else Status.LOST
                    running.mark(cut.blocks(place, place + 1), status, code)
        return codes

    def _move(
        self, call: Call, cut: _Cut, first: int, buffers: list[memoryview], cut_errno: int
    ) -> list[int]:
        """Move one run, which begins with block `first`; returns an errno per block."""
        offset = cut.places[first] & OFFSET_MASK
        return move_run(call, self._file(cut, first).payload_fd, buffers, offset, cut_errno)

    def _file(self, cut: _Cut, first: int) -> SpillFile:
        return self._files.files[cut.places[first] >> FILE_SHIFT]

    # ------------------------------------------------------------ headers

    def _publish(self, running: Running, job: WriteJob, file: SpillFile, blocks: I64) -> None:
        """Make written blocks known: payload durable, slab directory, bodies, words, durable."""
        if self._power:
            try:
                self._files.kernel.fdatasync(file.payload_fd)
            except OSError as error:
                running.mark(blocks, Status.FAILED, error.errno)
                return
        for slab, failure in self._files.settle(file.index).items():
            slabs = job.slots[blocks] // self._files.geometry.max_slots
            running.mark(blocks[slabs == slab], _write_status(failure.errno), failure.errno)
        blocks = running.written(blocks)
        slots = self._files.local(job.slots[blocks])
        bodies = job.bodies[blocks]
        if self._encrypt:
            bodies[:, CRYPT_WORDS] = running.crypt_words[blocks]
        else:
            bodies[:, W_PAYLOAD_SUM] = running.checksums[blocks]
        kind = CHECKSUM_AES_GCM if self._encrypt else CHECKSUM_XXH3
        bodies[:, W_PLACE] = places(Kind.SPILL, slots)
        bodies[:, W_FLAGS] &= ~_KIND_MASK
        bodies[:, W_FLAGS] |= np.uint64(kind) << _KIND_SHIFT
        seal_bodies(bodies)
        try:
            file.headers.write_bodies(slots, bodies)
            file.headers.write_words(slots, job.words[blocks])
            self._sync_headers(file)
        except OSError as error:
            running.mark(blocks, Status.UNSURE, error.errno)

    def _clear(self, running: Running, file: SpillFile, blocks: I64) -> None:
        """Clear the words of blocks."""
        slots = self._files.local(running.job.slots[blocks])
        try:
            file.headers.write_words(slots, np.zeros(len(slots), np.uint64))
            self._sync_headers(file)
        except OSError as error:
            running.mark(blocks, Status.FAILED, error.errno)

    def _sync_headers(self, file: SpillFile) -> None:
        if self._power:
            file.headers.sync()
