"""A bounded pool of threads that runs the most urgent task first, and survives every task.

Python's own executor is first come, first served: a demand read would wait behind a whole batch
of background writes. Here the queue is a heap, and tasks of one priority keep their order.
"""

import heapq
import logging
import threading
import time
from collections.abc import Callable, Sequence
from enum import IntEnum

log = logging.getLogger(__name__)


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
        self._heap: list[tuple[int, int, Task]] = []
        self._number = 0
        self._closing = False
        self._busy_s = 0.0
        self._crashes = 0
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True)
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, priority: int, tasks: Sequence[Task]) -> None:
        """Queue tasks; never blocks."""
        with self._ready:
            for task in tasks:
                self._number += 1
                heapq.heappush(self._heap, (priority, self._number, task))
            self._ready.notify(len(tasks))

    @property
    def queued_tasks(self) -> int:
        """Tasks that no thread has begun."""
        return len(self._heap)

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

    def _run(self) -> None:
        while True:
            with self._ready:
                while not self._heap and not self._closing:
                    self._ready.wait()
                if not self._heap:
                    return
                task = heapq.heappop(self._heap)[2]
            begun = time.monotonic()
            try:
                task()
            except BaseException:
                log.exception("a task of %s failed", threading.current_thread().name)
                with self._ready:
                    self._crashes += 1
            del task
            with self._ready:
                self._busy_s += time.monotonic() - begun
