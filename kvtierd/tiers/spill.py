"""The NVMe tier: takes jobs, bounds what is in flight, and sees every job to its result.

    submit ──► parts in the pool, most urgent first ──► next step's parts ──► done(result)

The thread that ends the last part of a step goes on with the next step. Whatever a part does, its
job comes to its end and its room is given back.
"""

import logging
import os
import threading
from functools import partial
from typing import Final

import numpy as np

from kvtierd.tiers.pool import Priority, WorkPool
from kvtierd.tiers.records import SlabEntry
from kvtierd.tiers.spill_files import SpillFiles
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
from kvtierd.tiers.spill_work import Part, Running, SpillWork

log = logging.getLogger(__name__)

JOBS_MAX: Final = 1024
"""Jobs in flight."""
ROOM_SHARE: Final = {
    Priority.DEMAND_READ: 1.0,
    Priority.DEMAND_WRITE: 0.75,
    Priority.PREFETCH: 0.5,
    Priority.BACKGROUND: 0.25,
}
"""How full the queue may become with a job of each priority."""
PART_COST_BYTES: Final = 64 << 10
"""What a part costs its client beside its bytes."""
_TOTALS: Final = tuple(
    name
    for name in SpillCounters.__dataclass_fields__
    if name not in ("jobs_in_flight", "queued_tasks", "in_flight_bytes", "busy_s")
)


class SpillTier:
    """Spill files that have begun, behind a pool of threads; `SpillIO` says what is promised."""

    def __init__(self, files: SpillFiles) -> None:
        self._files = files
        self._work = SpillWork(files)
        self.encrypted = any(file.cipher.keys for file in files.files)
        self._queue_bytes = files.settings.queue_bytes
        self._closed = False
        self._lock = threading.Lock()
        self._running: set[Running] = set()
        self._in_flight_bytes = 0
        self._totals = dict.fromkeys(_TOTALS, 0)
        self._pool = WorkPool(files.settings.io_threads, "spill")

    # ------------------------------------------------------------ admission

    def room_bytes(self, priority: Priority) -> int:
        """Payload bytes that may be submitted now at this priority."""
        with self._lock:
            return self._room(priority)

    def _room(self, priority: Priority) -> int:
        if len(self._running) >= JOBS_MAX:
            return 0
        return max(0, int(self._queue_bytes * ROOM_SHARE[priority]) - self._in_flight_bytes)

    def submit(self, job: Job, done: Done) -> Running:
        """Begin a job; the ticket is the running job."""
        assert not self._closed
        running = Running(job, done)
        parts = self._work.begin(running, alone=not self._in_flight_bytes)
        with self._lock:
            room = self._room(job.priority)
            alone = self._in_flight_bytes == 0
            if len(self._running) >= JOBS_MAX or (running.size_bytes > room and not alone):
                raise QueueFull(f"{running.size_bytes} bytes submitted, room for {room}")
            self._in_flight_bytes += running.size_bytes
            self._running.add(running)
        self._put(running, parts)
        return running

    def _put(self, running: Running, parts: list[Part]) -> None:
        running.pending = len(parts)
        tasks = [partial(self._run, running, part) for part in parts]
        tasks = tasks or [partial(self._advance, running)]
        cost = running.size_bytes / len(tasks) + PART_COST_BYTES
        self._pool.put(running.job.priority, running.job.flow, cost, tasks)

    def assign_slab(self, entry: SlabEntry) -> None:
        """Give a slab to a layout."""
        self._files.assign_slab(entry)

    def free_slab(self, slab: int) -> None:
        """Take a slab back."""
        self._files.free_slab(slab)

    # ------------------------------------------------------------ the course of a job

    def _run(self, running: Running, part: Part) -> None:
        if running.cancelled and not part.begun:
            running.status[part.blocks] = Status.CANCELLED
        else:
            try:
                part.work()
            except Exception as error:
                log.exception("spill: a part of a job failed")
                number = error.errno if isinstance(error, OSError) else None
                running.mark(part.blocks, part.crashed, number)
                with self._lock:
                    self._totals["crashes"] += 1
        with self._lock:
            running.pending -= 1
            last = running.pending == 0
        if last:
            self._advance(running)

    def _advance(self, running: Running) -> None:
        while running.steps:
            parts = running.steps.pop(0)()
            if len(parts) == 1:
                running.pending = 1
                self._run(running, parts[0])  # goes on by itself; spares a hop to another thread
                return
            if parts:
                self._put(running, parts)
                return
        self._finish(running)

    def _finish(self, running: Running) -> None:
        _report(running)
        with self._lock:
            self._account(running)
            self._in_flight_bytes -= running.size_bytes
            self._running.discard(running)
        running.done(JobResult(running.job, running.status, running.errnos, running.checksums))

    # ------------------------------------------------------------ the tier as a whole

    def _account(self, running: Running) -> None:
        job, totals = running.job, self._totals
        blocks = len(running.status) - int(np.count_nonzero(running.status))
        match job:
            case WriteJob():
                totals["written_blocks"] += blocks
                totals["written_bytes"] += blocks * job.length_bytes
            case ReadJob():
                totals["read_blocks"] += blocks
                totals["read_bytes"] += blocks * job.length_bytes
            case ClearJob():
                totals["cleared_blocks"] += blocks
        if blocks == len(running.status):
            return
        counts = np.bincount(running.status, minlength=len(Status)).tolist()
        totals["cancelled_blocks"] += counts[Status.CANCELLED]
        totals["full_blocks"] += counts[Status.FULL]
        totals["failed_blocks"] += counts[Status.FAILED] + counts[Status.UNSURE]
        totals["lost_blocks"] += counts[Status.LOST]
        totals["mismatched_blocks"] += counts[Status.MISMATCH]

    def stuck_s(self, now_s: float) -> float:
        """For how long work has been under way without any of it ending; 0 when none is."""
        return self._pool.stuck_s(now_s)

    def counters(self) -> SpillCounters:
        """A snapshot for the metrics."""
        with self._lock:
            totals = dict(self._totals)
            totals["crashes"] += self._pool.crashes
            return SpillCounters(
                **totals,
                jobs_in_flight=len(self._running),
                queued_tasks=self._pool.queued_tasks,
                in_flight_bytes=self._in_flight_bytes,
                busy_s=self._pool.busy_s,
            )

    def close(self, deadline_s: float) -> bool:
        """Finish what was submitted, cancelling what is queued when half the time is over."""
        self._closed = True
        if not self._pool.close(deadline_s / 2):
            with self._lock:
                for running in self._running:
                    running.cancel()
            if not self._pool.close(deadline_s / 2):
                return False  # a thread is still in the kernel, and needs its descriptors
        self._files.close()
        return True


def _report(running: Running) -> None:
    """Log what went wrong with a job: one line, however many blocks it hit."""
    if not np.count_nonzero(running.status > Status.CANCELLED):
        return
    bad = np.flatnonzero(running.status > Status.CANCELLED)
    number = int(running.errnos[bad[0]])
    log.error(
        "spill: %d of %d blocks of a %s failed; the first, in slot %d: %s%s",
        len(bad),
        len(running.status),
        type(running.job).__name__,
        int(running.job.slots[bad[0]]),
        Status(int(running.status[bad[0]])).name,
        f" ({os.strerror(number)})" if number else "",
    )
