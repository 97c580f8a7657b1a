"""Carries out what the core asks for below DRAM: demote, promote, clear, verify.

The core decides what moves; the mover turns rows into jobs of the spill tier, holds them back while
the tier's queue is full, and brings every result back to the core on the event loop. Jobs that wait
go on by urgency, and among equals in fair turns of the clients that they are for.
"""

import asyncio
import mmap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtierd.core import copies
from kvtierd.core.actions import Clear, Demote, Hurry, Promote, Verify
from kvtierd.core.blocks import Rows
from kvtierd.core.slabs import ready_words
from kvtierd.core.state import State
from kvtierd.core.tenant import Pool
from kvtierd.dram_headers import DramHeaders, body_fields
from kvtierd.fair import OWN_WORK, FairQueue
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.bodies import Bodies, compose
from kvtierd.tiers.pool import Priority
from kvtierd.tiers.spill_io import (
    ClearJob,
    Job,
    JobResult,
    QueueFull,
    ReadJob,
    SpillIO,
    Status,
    WriteJob,
)  # fmt: skip
from kvtierd.tiers.superblock import Kind

CLEAR_RETRY_S: Final = 1.0
"""Pause before NVMe headers that could not be cleared are tried again."""

_OUTCOME: Final = np.full(len(Status), copies.IO_ERROR, np.uint8)
_OUTCOME[Status.OK] = copies.OK
_OUTCOME[Status.MISMATCH] = copies.MISMATCH
_OUTCOME[Status.CANCELLED] = copies.CANCELLED


_Work = Demote | Promote | Clear | Verify


@dataclass(frozen=True, slots=True)
class _Move:
    """An action and its job, made at once: what the headers say must not change while it waits."""

    action: _Work
    job: Job
    size_bytes: int


class Mover:
    """Between the core and the spill tier; lives on the event loop's thread."""

    def __init__(
        self,
        state: State,
        spill: SpillIO,
        arenas: dict[str, Arena],
        loop: asyncio.AbstractEventLoop,
        after: Callable[[], None],
    ) -> None:
        self._state, self._spill, self._arenas = state, spill, arenas
        state.world.publisher = DramHeaders(state.world, arenas)
        self._loop, self._after = loop, after
        self._queues: dict[Priority, FairQueue[_Move]] = {
            priority: FairQueue() for priority in Priority
        }
        self._running: set[int] = set()
        self.closed = False
        self._scratch = np.empty(0, np.uint8)
        """Page-aligned memory in which blocks are verified; as large as a batch was."""
        self.idle = asyncio.Event()
        self.idle.set()
        self._do: dict[type, Callable[[Any], None]] = {
            Demote: self._demote,
            Promote: self._promote,
            Hurry: self._hurry,
            Clear: self._clear,
            Verify: self._verify,
        }

    @property
    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """Which actions the mover carries out."""
        return self._do

    # ---------------------------------------------------------------- NVMe

    def _demote(self, action: Demote) -> None:
        priority = Priority.DEMAND_WRITE if action.urgent else Priority.BACKGROUND
        self._submit(action, priority, len(action.rows) * action.pool.slot_bytes)

    def _promote(self, action: Promote) -> None:
        priority = Priority.DEMAND_READ if action.urgent else Priority.PREFETCH
        self._submit(action, priority, len(action.rows) * action.pool.slot_bytes)

    def _clear(self, action: Clear) -> None:
        self._submit(action, Priority.BACKGROUND, 0)

    def _verify(self, action: Verify) -> None:
        self._submit(action, Priority.BACKGROUND, len(action.rows) * action.pool.slot_bytes)

    def _submit(self, action: _Work, priority: Priority, size: int) -> None:
        if self.closed:
            return
        self.idle.clear()
        self._put(_Move(action, self._job(action, priority), size))

    def _put(self, move: _Move) -> None:
        """Begin a job, or have it wait: none that takes room passes one that waits for it."""
        priority = move.job.priority
        behind = any(self._queues[each] for each in Priority if each <= priority)
        if (behind and move.size_bytes) or not self._begin(move):
            self._queues[priority].put(move.job.flow, move)

    def _begin(self, move: _Move) -> bool:
        """Hand a job to the spill tier; False when its queue has no room for it."""
        priority = move.job.priority
        if self._running and move.size_bytes > self._spill.room_bytes(priority):
            return False  # when nothing runs, a job may be larger than the whole queue
        try:
            self._spill.submit(move.job, self._done_from_thread(move.action))
        except QueueFull:
            return False
        self._running.add(move.action.batch)
        self._queues[priority].charge(move.job.flow, move.size_bytes)
        return True

    def _hurry(self, action: Hurry) -> None:
        """Make what waits to be fetched ahead of need urgent, where a request needs it now."""
        flow = action.pool.tenant.number, action.client

        def needed(move: _Move) -> bool:
            promote = move.action
            return (
                isinstance(promote, Promote)
                and promote.pool is action.pool
                and bool(np.isin(promote.rows, action.rows).any())
            )

        for move in self._queues[Priority.PREFETCH].take_if(needed):
            job = replace(move.job, priority=Priority.DEMAND_READ, flow=flow)
            self._put(replace(move, job=job))

    def _job(self, action: _Work, priority: Priority) -> Job:
        pool = action.pool
        if isinstance(action, Clear):
            return ClearJob(action.slots, priority, (pool.tenant.number, OWN_WORK))
        if isinstance(action, Verify):
            return self._verify_job(action, priority)
        arena = self._arenas[pool.tenant.name].payload
        length_bytes = pool.layout.block_bytes
        if isinstance(action, Promote):
            offsets = pool.tenant.arena.offsets(pool.dram, action.dst)
            names = self._bodies(pool, action.rows) if self._spill.encrypted else None
            return ReadJob(
                action.src, arena, offsets, length_bytes, action.checksums, priority, names,
                (pool.tenant.number, action.client),
            )  # fmt: skip
        world = self._state.world
        bodies = self._bodies(pool, action.rows)
        words = ready_words(world.table.seq[action.rows])
        offsets = pool.tenant.arena.offsets(pool.dram, action.src)
        return WriteJob(
            action.dst, arena, offsets, length_bytes, bodies, words, priority,
            (pool.tenant.number, OWN_WORK),
        )  # fmt: skip

    def _verify_job(self, action: Verify, priority: Priority) -> ReadJob:
        """A read into memory of the mover's own."""
        pool, slot_bytes = action.pool, action.pool.slot_bytes
        size_bytes = len(action.rows) * slot_bytes
        if len(self._scratch) < size_bytes:
            self._scratch = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
        offsets = np.arange(len(action.rows)) * slot_bytes
        names = self._bodies(pool, action.rows) if self._spill.encrypted else None
        return ReadJob(
            action.slots, self._scratch, offsets, pool.layout.block_bytes, action.checksums,
            priority, names, (pool.tenant.number, OWN_WORK),
        )  # fmt: skip

    def _bodies(self, pool: Pool, rows: Rows) -> Bodies:
        """What headers in spill files say of rows, but for what the tier fills in."""
        return compose(len(rows), body_fields(self._state.world, pool, rows, Kind.SPILL, 0, 0))

    def _done_from_thread(self, action: _Work) -> Callable[[JobResult], None]:
        def done(result: JobResult) -> None:
            self._loop.call_soon_threadsafe(self._done, action, result)

        return done

    def _done(self, action: _Work, result: JobResult) -> None:
        """A job has ended: tell the core, then begin what waited."""
        self._running.remove(action.batch)
        try:
            self._tell(action, result)
        finally:  # whatever that raises, what waits goes on
            self._after()
            self._begin_queued()

    def _tell(self, action: _Work, result: JobResult) -> None:
        now_s = self._loop.time()
        outcome: NDArray[np.uint8] = _OUTCOME[result.status]
        if isinstance(action, Demote):
            self._state.demoted(action.batch, outcome, result.checksums, now_s)
        elif isinstance(action, Promote):
            self._state.promoted(action.batch, outcome, now_s)
        elif isinstance(action, Verify):
            self._state.verified(outcome, now_s)
        elif result.ok:
            self._state.cleared(action.batch, now_s)
        else:
            self._loop.call_later(CLEAR_RETRY_S, self._clear, action)

    def _begin_queued(self) -> None:
        if self.closed:
            return
        for queue in self._queues.values():
            while queue and self._begin(queue.first(flow := queue.next_flow())):
                queue.take(flow)
            if queue:  # a large one waits until enough has ended; nothing may begin before it
                break
        if not self._running and not any(self._queues.values()):
            self.idle.set()

    def close(self) -> None:
        """Begin nothing more: the tier closes. What is left out, the next start does again."""
        self.closed = True

    @property
    def running(self) -> int:
        """Jobs that the spill tier has."""
        return len(self._running)

    @property
    def queued(self) -> int:
        """Jobs that wait for room in the spill tier."""
        return sum(len(queue) for queue in self._queues.values())
