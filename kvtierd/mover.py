"""Carries out what the core asks for below DRAM: demote, promote, clear.

The core decides what moves; the mover turns rows into jobs of the spill tier, holds them back while
the tier's queue is full, and brings every result back to the core on the event loop.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtierd.core import copies
from kvtierd.core.actions import Clear, Demote, Promote
from kvtierd.core.slabs import ready_words
from kvtierd.core.state import State
from kvtierd.dram_headers import DramHeaders, body_fields
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.bodies import (
    compose,
)  # fmt: skip
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


@dataclass(frozen=True, slots=True)
class _Move:
    """An action and its job, made at once: what the headers say must not change while it waits."""

    action: Demote | Promote | Clear
    job: Job
    priority: Priority
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
        self._queues: dict[Priority, deque[_Move]] = {priority: deque() for priority in Priority}
        self._running: set[int] = set()
        self.idle = asyncio.Event()
        self.idle.set()
        self._do: dict[type, Callable[[Any], None]] = {
            Demote: self._demote,
            Promote: self._promote,
            Clear: self._clear,
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

    def _submit(self, action: Demote | Promote | Clear, priority: Priority, size: int) -> None:
        self.idle.clear()
        move = _Move(action, self._job(action, priority), priority, size)
        if self._queues[priority] or not self._begin(move):
            self._queues[priority].append(move)

    def _begin(self, move: _Move) -> bool:
        """Hand a job to the spill tier; False when its queue has no room for it."""
        if self._running and move.size_bytes > self._spill.room_bytes(move.priority):
            return False  # when nothing runs, a job may be larger than the whole queue
        try:
            self._spill.submit(move.job, self._done_from_thread(move.action))
        except QueueFull:
            return False
        self._running.add(move.action.batch)
        return True

    def _job(self, action: Demote | Promote | Clear, priority: Priority) -> Job:
        pool = action.pool
        if isinstance(action, Clear):
            return ClearJob(action.slots, priority)
        arena = self._arenas[pool.tenant.name].payload
        length_bytes = pool.layout.block_bytes
        if isinstance(action, Promote):
            offsets = pool.tenant.arena.offsets(pool.dram, action.dst)
            return ReadJob(action.src, arena, offsets, length_bytes, action.checksums, priority)
        world = self._state.world
        bodies = compose(len(action.rows), body_fields(world, pool, action.rows, Kind.SPILL, 0, 0))
        words = ready_words(world.table.seq[action.rows])
        offsets = pool.tenant.arena.offsets(pool.dram, action.src)
        return WriteJob(action.dst, arena, offsets, length_bytes, bodies, words, priority)

    def _done_from_thread(self, action: Demote | Promote | Clear) -> Callable[[JobResult], None]:
        def done(result: JobResult) -> None:
            self._loop.call_soon_threadsafe(self._done, action, result)

        return done

    def _done(self, action: Demote | Promote | Clear, result: JobResult) -> None:
        """A job has ended: tell the core, then begin what waited."""
        self._running.remove(action.batch)
        now_s = self._loop.time()
        outcome: NDArray[np.uint8] = _OUTCOME[result.status]
        if isinstance(action, Demote):
            self._state.demoted(action.batch, outcome, result.checksums, now_s)
        elif isinstance(action, Promote):
            self._state.promoted(action.batch, outcome, now_s)
        elif result.ok:
            self._state.cleared(action.batch, now_s)
        else:
            self._loop.call_later(CLEAR_RETRY_S, self._clear, action)
        self._after()
        self._begin_queued()

    def _begin_queued(self) -> None:
        for queue in self._queues.values():
            while queue and self._begin(queue[0]):
                queue.popleft()
        if not self._running and not any(self._queues.values()):
            self.idle.set()

    @property
    def queued(self) -> int:
        """Jobs that wait for room in the spill tier."""
        return sum(len(queue) for queue in self._queues.values())
