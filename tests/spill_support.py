"""A spill tier on real files with an arena beside it, and disks that misbehave on request."""

import errno
import fcntl
import mmap
import os
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvtierd.core.slabs import ready_words
from kvtierd.tiers.blockio import LinuxKernel
from kvtierd.tiers.bodies import BODY_WORDS, Bodies, BodyFields, compose
from kvtierd.tiers.master_key import KEY_BYTES
from kvtierd.tiers.pool import Priority
from kvtierd.tiers.records import SlabEntry, parse_keys
from kvtierd.tiers.spill import SpillTier
from kvtierd.tiers.spill_files import SpillFiles, SpillScan, SpillSettings
from kvtierd.tiers.spill_io import ClearJob, Job, JobResult, ReadJob, WriteJob
from kvtierd.tiers.spill_open import open_spill
from kvtierd.tiers.superblock import Kind

KIB = 1024
MIB = 1024 * KIB
WAIT_S = 30.0
INSTANCE = bytes(range(16))
FINGERPRINT = b"0123456789abcdef"
TENANT = 7
BLOCK_BYTES = 16 * KIB
HELD, CACHED = 1, 2

Slots = npt.NDArray[np.int64]


def settings(*paths: Path, **changes: Any) -> SpillSettings:
    """Small files: 4 slabs of 1 MiB each, header places for blocks of 4 KiB."""
    small = SpillSettings(
        paths=tuple(map(str, paths)),
        capacity_bytes=4 * MIB,
        slab_bytes=MIB,
        min_block_bytes=4 * KIB,
        io_threads=4,
        queue_bytes=16 * MIB,
    )
    return msgspec.structs.replace(small, **changes)


def new_arena(size_bytes: int) -> npt.NDArray[np.uint8]:
    """Page-aligned memory, full of bytes that are no block's."""
    arena = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
    arena[:] = 0xEE
    return arena


def contents(seqs: npt.NDArray[np.uint64], length: int) -> npt.NDArray[np.uint8]:
    """The bytes of blocks, each from its sequence number. Shapes: [n] → [n, length]."""
    blocks = np.empty((len(seqs), length), np.uint8)
    for seq, block in zip(seqs.tolist(), blocks, strict=True):
        block[:] = np.random.default_rng(seq).integers(0, 256, length, np.uint8)
    return blocks


def bodies_of(seqs: npt.NDArray[np.uint64], length: int, retention: int = HELD) -> Bodies:
    """Bodies of session blocks as an arena would hold them: no checksum, another place."""
    low, high = np.frombuffer(FINGERPRINT, np.uint64).tolist()
    return compose(
        len(seqs),
        BodyFields(
            kind=Kind.ARENA,
            slot=0,
            owner0=11,
            owner1=12,
            node=0,
            page=seqs,
            valid_tokens=16,
            length_bytes=length,
            payload_sum=0,
            seq=seqs,
            layout0=low,
            layout1=high,
            lease=0,
            parent=0,
            fork_tokens=0,
            tenant=TENANT,
            block_kind=1,
            retention=retention,
            checksum_kind=0,
            priority=0,
            created_s=1,
            generation=1,
        ),
    )


class Rig:
    """An opened tier. `slots(...)` names places in slabs that `assign` has given out."""

    def __init__(
        self, wanted: SpillSettings, generation: int = 0, kernel: LinuxKernel | None = None
    ) -> None:
        self.files: SpillFiles = open_spill(wanted, INSTANCE, generation, kernel)
        self.scans: list[SpillScan] = list(self.files.scan())
        self.files.begin(generation + 1)
        self.tier = SpillTier(self.files)
        self.arena = new_arena(8 * MIB)
        self._next_offset = 0
        self._next_seq = 1 + generation * 1_000_000
        self._known = {
            slot: body
            for part in self.scans
            for slot, body in zip(part.found.slots.tolist(), part.found.bodies, strict=True)
        }
        """What is in each slot, as the core would know it."""

    def __enter__(self) -> "Rig":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.tier.close(WAIT_S)

    def assign(self, slab: int, slot_bytes: int = BLOCK_BYTES) -> Slots:
        """Give a slab to the test's layout; returns its slots."""
        slots = self.files.geometry.slab_bytes // slot_bytes
        entry = SlabEntry(slab, FINGERPRINT, TENANT, slot_bytes, slots, slot_bytes)
        self.tier.assign_slab(entry)
        return slab * self.files.geometry.max_slots + np.arange(slots, dtype=np.int64)

    def found(self) -> Slots:
        """The slots that the opening found blocks in."""
        return np.concatenate([np.zeros(0, np.int64), *(part.found.slots for part in self.scans)])

    def lost(self) -> Slots:
        """Those of them whose payload is gone."""
        parts = [part.found.slots[part.lost] for part in self.scans]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def sums_found(self) -> npt.NDArray[np.uint64]:
        """The checksums that the bodies found at the opening give, in the order of `found`."""
        parts = [part.found.bodies[:, 5] for part in self.scans]
        return np.concatenate([np.zeros(0, np.uint64), *parts])

    def write_job(
        self, slots: Slots, length: int = BLOCK_BYTES, priority: Priority = Priority.DEMAND_WRITE
    ) -> WriteJob:
        """A job that writes new blocks, whose contents are put into the arena."""
        seqs = np.arange(self._next_seq, self._next_seq + len(slots), dtype=np.uint64)
        self._next_seq += len(slots)
        step = -(-length // 4096) * 4096
        if self._next_offset + len(slots) * step > len(self.arena):
            self._next_offset = 0
        first = self._next_offset
        self._next_offset += len(slots) * step  # jobs in flight at once do not share memory
        place = self.arena[first : self._next_offset].reshape(-1, step)
        place[:, :length] = contents(seqs, length)
        bodies = bodies_of(seqs, length)
        self._known.update(zip(slots.tolist(), bodies, strict=True))
        return WriteJob(
            slots,
            self.arena,
            np.uint64(first) + np.arange(len(slots), dtype=np.uint64) * np.uint64(step),
            length,
            bodies,
            ready_words(seqs),
            priority,
        )

    def read_job(
        self, slots: Slots, sums: npt.NDArray[np.uint64], length: int = BLOCK_BYTES
    ) -> ReadJob:
        """A job that reads blocks into a soiled arena."""
        self.arena[:] = 0xDD
        step = -(-length // 4096) * 4096
        offsets = np.arange(len(slots), dtype=np.uint64) * np.uint64(step)
        nothing = np.zeros(BODY_WORDS, np.uint64)
        known = [self._known.get(slot, nothing) for slot in slots.tolist()]
        bodies = np.array(known, np.uint64).reshape(-1, BODY_WORDS)
        return ReadJob(slots, self.arena, offsets, length, sums, bodies=bodies)

    def run(self, job: Job) -> JobResult:
        """Do a job and wait for its result."""
        return self.start(job).get(timeout=WAIT_S)

    def start(self, job: Job) -> "queue.Queue[JobResult]":
        """Submit a job; its result comes through the queue."""
        results: queue.Queue[JobResult] = queue.Queue()
        self.tier.submit(job, results.put)
        return results

    def write(self, slots: Slots, length: int = BLOCK_BYTES) -> JobResult:
        """Write new blocks."""
        return self.run(self.write_job(slots, length))

    def read(
        self, slots: Slots, sums: npt.NDArray[np.uint64], length: int = BLOCK_BYTES
    ) -> JobResult:
        """Read blocks back into a soiled arena."""
        return self.run(self.read_job(slots, sums, length))

    def clear(self, slots: Slots) -> JobResult:
        """Clear slots."""
        return self.run(ClearJob(slots))

    def in_arena(self, result: JobResult) -> npt.NDArray[np.uint8]:
        """What lies in the arena where a job's blocks are. Shapes: [n, length]."""
        assert isinstance(result.job, WriteJob | ReadJob)
        length = result.job.length_bytes
        return np.stack([self.arena[at : at + length] for at in result.job.offsets.tolist()])


Buffers = Sequence[memoryview]


class CountingKernel(LinuxKernel):
    """Notes the size of every payload call, in buffers."""

    def __init__(self) -> None:
        self.writes: list[int] = []
        self.reads: list[int] = []

    def pwritev(self, fd: int, buffers: Buffers, offset: int, /) -> int:
        self.writes.append(len(buffers))
        return os.pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Buffers, offset: int, /) -> int:
        self.reads.append(len(buffers))
        return os.preadv(fd, buffers, offset)


class BadKernel(LinuxKernel):
    """Calls `trouble(name, offset, size)` before each payload call; it may raise, or cut the size.

    `trouble` returns how many bytes may be moved; the call then moves no more.
    """

    def __init__(self, trouble: Callable[[str, int, int], int]) -> None:
        self.trouble = trouble
        self.on = False

    def _cut(self, name: str, buffers: Buffers, offset: int) -> Buffers:
        size = sum(map(len, buffers))
        left = self.trouble(name, offset, size) if self.on else size
        kept: list[memoryview] = []
        for buffer in buffers:
            kept.append(buffer[: max(left, 0)])
            left -= len(buffer)
        return kept

    def pwritev(self, fd: int, buffers: Buffers, offset: int, /) -> int:
        return os.pwritev(fd, self._cut("write", buffers, offset), offset)

    def preadv(self, fd: int, buffers: Buffers, offset: int, /) -> int:
        return os.preadv(fd, self._cut("read", buffers, offset), offset)

    def fdatasync(self, fd: int, /) -> None:
        if self.on:
            self.trouble("sync", 0, 0)
        os.fdatasync(fd)


def failing_at(name: str, number: int, first: int, last: int) -> Callable[[str, int, int], int]:
    """Trouble: calls of one kind that touch bytes first..last of a file fail."""

    def trouble(call: str, offset: int, size: int) -> int:
        if call == name and offset < last and offset + size > first:
            raise OSError(number, os.strerror(number))
        return size

    return trouble


class GateKernel(LinuxKernel):
    """Payload writes wait until the gate is opened."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()

    def pwritev(self, fd: int, buffers: Buffers, offset: int, /) -> int:
        if os.fstat(fd).st_nlink:  # not the probe of O_DIRECT
            self.entered.release()
            assert self.gate.wait(WAIT_S)
        return os.pwritev(fd, buffers, offset)


class RefusingKernel(LinuxKernel):
    """A file system that takes no O_DIRECT."""

    def pwritev(self, fd: int, buffers: Buffers, offset: int, /) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return os.pwritev(fd, buffers, offset)


def new_key(path: Path) -> str:
    """A master key in a file of its own."""
    path.write_bytes(os.urandom(KEY_BYTES))
    path.chmod(0o400)
    return str(path)


def stored_keys(rig: Rig, file: int = 0) -> list[int]:
    """Numbers of the data keys in a file's table, one per copy."""
    return [record.number for record in parse_keys(rig.files.files[file].headers.key_table())[0]]


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))
