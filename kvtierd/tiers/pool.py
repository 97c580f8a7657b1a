"""A bounded pool of threads: the most urgent task first, fair between clients, no task kills it.

Python's own executor is first come, first served: a demand read would wait behind a whole batch
of background writes, and a client's single block behind another's thousands. Here each class of
urgency is a fair queue. Less urgent work gets a turn now and then, so that it goes on under any
load: what it frees is what the urgent work will need.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Final

from kvtierd.fair import FairQueue, Flow

log = logging.getLogger(__name__)

UPSIDE_DOWN: Final = 8
"""Every so many tasks, the least urgent one is taken."""


class Priority(IntEnum):
    """The order in which queued work is begun."""

    DEMAND_READ = 0
    DEMAND_WRITE = 1
    PREFETCH = 2
    BACKGROUND = 3


Task = Callable[[], None]


class WorkPool:
    """Threads that take tasks by priority; the submitter bounds what it puts in.

    A task should turn its failures into results; one that raises anyway is logged and counted, and
    its thread goes on.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._ready = threading.Condition()
        self._queues: list[FairQueue[tuple[Task, float]]] = [FairQueue() for _ in Priority]
        self._queued = 0
        self._taken = 0
        self._closing = False
        self._busy_s = 0.0
        self._crashes = 0
        self._begun_s = [0.0] * threads
        """When each thread began what it is doing; 0 while it waits."""
        self._ended_s = 0.0
        """When a task has ended last."""
        self._threads = [
            threading.Thread(target=self._run, args=(index,), name=f"{name}-{index}", daemon=True)
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, priority: Priority, flow: Flow, cost: float, tasks: Sequence[Task]) -> None:
        """Queue tasks of a client, each of which costs as much; never blocks."""
        with self._ready:
            queue = self._queues[priority]
            for task in tasks:
                queue.put(flow, (task, cost))
            self._queued += len(tasks)
            self._ready.notify(len(tasks))

    def _take(self) -> Task:
        self._taken += 1
        queues = self._queues if self._taken % UPSIDE_DOWN else reversed(self._queues)
        queue = next(queue for queue in queues if queue)
        flow = queue.next_flow()
        task, cost = queue.take(flow)
        queue.charge(flow, cost)
        self._queued -= 1
        return task

    @property
    def queued_tasks(self) -> int:
        """Tasks that no thread has begun."""
        return self._queued

    def stuck_s(self, now_s: float) -> float:
        """For how long tasks have been under way without any of them ending; 0 when none is.

        `now_s` is of the monotonic clock.
        """
        begun = [begun_s for begun_s in self._begun_s if begun_s]
        return now_s - max(min(begun), self._ended_s) if begun else 0.0

    @property
    def busy_s(self) -> float:
        """Seconds that threads spent in tasks, all threads together."""
        return self._busy_s

    @property
    def crashes(self) -> int:
        """Tasks that raised."""
        return self._crashes

    def close(self, deadline_s: float) -> bool:
        """Run what is queued, then end the threads; whether all ended before the deadline."""
        with self._ready:
            self._closing = True
            self._ready.notify_all()
        end = time.monotonic() + deadline_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, index: int) -> None:
        while True:
            with self._ready:
                while not self._queued and not self._closing:
                    self._ready.wait()
                if not self._queued:
                    return
                task = self._take()
            begun_s = self._begun_s[index] = time.monotonic()
            try:
                task()
            except BaseException:
                log.exception("a task of %s failed", threading.current_thread().name)
                with self._ready:
                    self._crashes += 1
            del task
            self._begun_s[index] = 0.0
            with self._ready:
                self._ended_s = time.monotonic()
                self._busy_s += self._ended_s - begun_s
