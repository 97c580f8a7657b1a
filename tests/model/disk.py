"""A simulated NVMe tier: jobs end when a test says so, and how; every 4 KiB page is one number.

The headers are the real ones, on a memfd; a block's payload is its value repeated in each of its
pages, so that any mixture of two blocks shows.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from kvtierd.tiers.bodies import CHECKSUM_XXH3, W_FLAGS, W_PAYLOAD_SUM, W_PLACE, places, seal_bodies
from kvtierd.tiers.headers import SpillHeaders, create, new_superblock, open_headers
from kvtierd.tiers.pool import Priority
from kvtierd.tiers.records import SlabEntry
from kvtierd.tiers.scan import scan_parts
from kvtierd.tiers.spill_files import SpillScan
from kvtierd.tiers.spill_io import (
    ClearJob,
    Done,
    Job,
    JobResult,
    QueueFull,
    ReadJob,
    SpillCounters,
    Status,
    WriteJob,
)
from kvtierd.tiers.superblock import Expected, Geometry, Kind

PAGE = 4096
INSTANCE = b"a simulated host"
MIXED = 0
"""What a block reads as whose pages differ."""


def value_of(pages: np.ndarray, first: int, count: int) -> int:
    """The value of a block, MIXED when its pages do not agree."""
    part = pages[first : first + count]
    return int(part[0]) if (part == part[0]).all() else MIXED


@dataclass(slots=True, eq=False)
class Pending:
    """A job that has been submitted."""

    job: Job
    done: Done

    def cancel(self) -> None:
        """Nothing does this to a simulated job."""


class SimDisk:
    """One spill file of simulated pages; implements `SpillIO`, and what a restart reads."""

    encrypted = False

    def __init__(self, geometry: Geometry, queue_jobs: int) -> None:
        self.geometry = geometry
        self.queue_jobs = queue_jobs
        self.pages = np.zeros(geometry.payload_bytes // PAGE, np.uint64)
        superblock = new_superblock(Kind.SPILL, geometry, instance=INSTANCE, generation=1)
        headers = create(os.memfd_create("spill headers", os.MFD_CLOEXEC), superblock, "spill")
        assert isinstance(headers, SpillHeaders)
        self.headers = headers
        self.pending: list[Pending] = []
        self.words = headers.words
        self.slots: dict[int, SlabEntry] = {}
        self.lost_payload = False

    # ------------------------------------------------------------ SpillIO

    def room_bytes(self, priority: Priority) -> int:
        return (1 << 40) if len(self.pending) < self.queue_jobs else -1

    def submit(self, job: Job, done: Done) -> Pending:
        if len(self.pending) >= self.queue_jobs:
            raise QueueFull
        self.pending.append(Pending(job, done))
        return self.pending[-1]

    def assign_slab(self, entry: SlabEntry) -> None:
        self.slots[entry.slab] = entry
        first = entry.slab * self.geometry.max_slots
        every = np.arange(first, first + entry.slots, dtype=np.int64)
        self.headers.write_words(every, np.zeros(len(every), np.uint64))
        self.headers.assign_slab(entry)

    def free_slab(self, slab: int) -> None:
        del self.slots[slab]
        self.headers.free_slab(slab)

    def counters(self) -> SpillCounters:
        return SpillCounters(*[0] * 14)

    def close(self, deadline_s: float) -> bool:
        self.headers.close()
        return True

    # --------------------------------------------------------- completion

    def finish(self, at: int, status: Status = Status.OK, only: int | None = None) -> None:
        """End a submitted job; with `status`, or only block `only` of it with that status."""
        pending = self.pending.pop(at)
        job, count = pending.job, len(pending.job.slots)
        statuses = np.zeros(count, np.uint8)
        if isinstance(job, ClearJob):
            statuses[:] = Status.FAILED if status else Status.OK
        elif only is None:
            statuses[:] = status
        else:
            statuses[only % count] = status
        sums = np.zeros(count, np.uint64)
        if isinstance(job, WriteJob):
            self._write(job, statuses, sums)
        elif isinstance(job, ReadJob):
            self._read(job, statuses, sums)
        elif not statuses.any():
            self.headers.write_words(job.slots, np.zeros(count, np.uint64))
        pending.done(JobResult(job, statuses, np.zeros(count, np.int32), sums))

    def _write(self, job: WriteJob, statuses: np.ndarray, sums: np.ndarray) -> None:
        arena = job.arena.view(np.uint64)
        for i in range(len(job.slots)):
            if statuses[i] in (Status.OK, Status.UNSURE):
                first, count = self.place(int(job.slots[i]))
                source = int(job.offsets[i]) // PAGE
                self.pages[first : first + count] = arena[source : source + count]
                sums[i] = value_of(arena, source, count)
                known = int(job.bodies[i, W_PAYLOAD_SUM])
                if known not in (0, sums[i]):
                    statuses[i], sums[i] = Status.MISMATCH, known
        written = (Status.OK, Status.UNSURE, Status.MISMATCH)
        wrote = np.flatnonzero(np.isin(statuses, written))
        bodies = job.bodies[wrote].copy()
        bodies[:, W_PAYLOAD_SUM] = sums[wrote]
        bodies[:, W_PLACE] = places(Kind.SPILL, job.slots[wrote])
        bodies[:, W_FLAGS] &= ~np.uint64(0xFF << 48)
        bodies[:, W_FLAGS] |= np.uint64(CHECKSUM_XXH3 << 48)
        seal_bodies(bodies)
        self.headers.write_bodies(job.slots[wrote], bodies)
        self.headers.write_words(job.slots[wrote], job.words[wrote])

    def _read(self, job: ReadJob, statuses: np.ndarray, sums: np.ndarray) -> None:
        arena = job.arena.view(np.uint64)
        for i in range(len(job.slots)):
            first, count = self.place(int(job.slots[i]))
            target = int(job.offsets[i]) // PAGE
            arena[target : target + count] = self.pages[first : first + count]
            sums[i] = value_of(self.pages, first, count)
            if statuses[i] == Status.OK and sums[i] != job.checksums[i]:
                statuses[i] = Status.MISMATCH

    def place(self, slot: int) -> tuple[int, int]:
        """First page of a slot, and how many it has."""
        slab, place = divmod(slot, self.geometry.max_slots)
        pages = self.slots[slab].slot_bytes // PAGE
        return slab * (self.geometry.slab_bytes // PAGE) + place * pages, pages

    # ------------------------------------------------------------ restart

    def restart(self) -> None:
        """What another life finds: the file; jobs under way are gone."""
        self.pending.clear()
        headers = open_headers(os.dup(self.headers.fd), Expected(Kind.SPILL), "spill")
        assert isinstance(headers, SpillHeaders)
        self.headers.close()
        self.headers = headers
        self.words = headers.words
        self.slots = {entry.slab: entry for entry in headers.slab_table().entries()}

    def slabs(self) -> list[SlabEntry]:
        return list(self.slots.values())

    def scan(self) -> Iterator[SpillScan]:
        for part in scan_parts(self.headers):
            lost = np.full(len(part.slots), self.lost_payload)
            yield SpillScan(msgspec.structs.replace(part), lost)


class Clock:
    """As much of an event loop as the mover needs, under a test's time."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.timers: list[tuple[float, Callable[..., None], tuple[object, ...]]] = []

    def time(self) -> float:
        return self.now_s

    def call_soon_threadsafe(self, call: Callable[..., None], *args: object) -> None:
        call(*args)

    def call_later(self, delay_s: float, call: Callable[..., None], *args: object) -> None:
        self.timers.append((self.now_s + delay_s, call, args))

    def advance(self, seconds: float) -> None:
        """Let time pass and run what was due."""
        self.now_s += seconds
        due = [timer for timer in self.timers if timer[0] <= self.now_s]
        self.timers = [timer for timer in self.timers if timer[0] > self.now_s]
        for _, call, args in due:
            call(*args)
