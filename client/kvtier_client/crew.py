"""Threads that copy together: one core alone does not use all the bandwidth of the memory.

The thread that wants a copy takes part in it, and pieces go one by one to whoever is free, so a
helper that comes late, or not at all, delays nobody.
"""

import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Final

COPY_THREADS_MAX: Final = 4
"""Copy threads of a client that was not told how many, the caller's own one among them."""
SHARED_BYTES: Final = 3 << 20
"""Smallest copy that is worth waking somebody."""
PIECE_BYTES: Final = 1 << 20
"""About how much is copied at a time where a copy can be cut freely."""

log = logging.getLogger("kvtier_client")

Work = Callable[[int], None]
"""Copies one piece; called once with each piece's number, by any thread."""


def usual_threads() -> int:
    """How many threads copy when nobody says: one for each core that this process may use."""
    return min(len(os.sched_getaffinity(0)), COPY_THREADS_MAX)


class Share:
    """One copy that several threads work on."""

    __slots__ = ("_changed", "_helpers", "_open", "_pieces", "_problem", "_work")

    def __init__(self, pieces: int, work: Work) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._pieces: Iterator[int] = iter(range(pieces))
        self._work = work
        self._open = True
        self._helpers = 0
        self._problem: BaseException | None = None

    def help(self) -> None:
        """Copy pieces beside the caller, unless it is done already."""
        with self._changed:
            if not self._open:
                return
            self._helpers += 1
        try:
            self._copy()
        except BaseException as problem:
            self._problem = problem
        finally:
            with self._changed:
                self._helpers -= 1
                self._changed.notify_all()

    def lead(self) -> None:
        """Copy pieces until none is left; returns or raises only when nobody copies any more.

        Errors: what the first piece that failed raised; the others are not begun then.
        """
        try:
            self._copy()
        finally:
            self._end()
        if self._problem is not None:
            raise self._problem

    def _copy(self) -> None:
        try:
            while (piece := next(self._pieces, None)) is not None:
                self._work(piece)
        except BaseException:
            self._pieces = iter(())
            raise

    def _end(self) -> None:
        interrupted: BaseException | None = None
        while self._busy():
            try:
                with self._changed:
                    self._changed.wait_for(self._idle)
            except BaseException as problem:  # a signal's handler: the slots are still written to
                self._pieces = iter(())
                interrupted = problem
        if interrupted is not None:
            raise interrupted

    def _busy(self) -> bool:
        with self._changed:
            self._open = False
            return self._helpers > 0

    def _idle(self) -> bool:
        return self._helpers == 0


class Crew:
    """The copy threads of one client; they are started by the first copy that is large enough."""

    def __init__(self, threads: int) -> None:
        """`threads` with the caller's own one: 1 starts none."""
        self.threads = max(1, threads)
        self._calls: queue.SimpleQueue[Share | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._helpers: list[threading.Thread] = []
        self._closed = False

    def run(self, pieces: int, size_bytes: int, work: Work) -> None:
        """Call `work` for pieces `0..pieces`, which have about `size_bytes` together.

        Returns or raises only when no piece is being copied any more. Errors: those of `work`.
        """
        helpers = 0
        if size_bytes >= SHARED_BYTES:
            helpers = min(self.threads, pieces) - 1
        if helpers <= 0 or not self._ready():
            for piece in range(pieces):
                work(piece)
            return
        share = Share(pieces, work)
        for _ in range(helpers):
            self._calls.put(share)
        share.lead()

    def _ready(self) -> bool:
        """Start the helpers if need be; False when they were sent home."""
        if self._helpers or self._closed:
            return not self._closed
        with self._lock:
            if not self._closed and not self._helpers:
                weakref.finalize(self, _dismiss, self._calls, self.threads - 1).atexit = False
                self._start()
        return not self._closed

    def _start(self) -> None:
        for _ in range(self.threads - 1):
            helper = threading.Thread(
                target=_help, args=(self._calls,), name="kvtier-copy", daemon=True
            )
            try:
                helper.start()
            except RuntimeError as problem:  # no more threads for this process
                log.warning("copying with %d threads only: %s", len(self._helpers) + 1, problem)
                self.threads = len(self._helpers) + 1
                return
            self._helpers.append(helper)

    def close(self) -> None:
        """Send the helpers home when they are done; later copies are their callers' own."""
        with self._lock:
            self._closed = True
            helpers, self._helpers = self._helpers, []
        _dismiss(self._calls, len(helpers))
        for helper in helpers:
            helper.join()


def _help(calls: "queue.SimpleQueue[Share | None]") -> None:
    while (share := calls.get()) is not None:
        share.help()
        del share  # it holds the caller's records


def _dismiss(calls: "queue.SimpleQueue[Share | None]", helpers: int) -> None:
    for _ in range(helpers):
        calls.put(None)
