"""The thread that writes the catalog, in order, for an event loop that never waits.

A batch is one transaction. Reads go through the same queue: what was submitted before a read is
seen by it.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from kvtierd.catalog.errors import CatalogBusy, CatalogError
from kvtierd.catalog.rows import BlobRecord, Op
from kvtierd.catalog.store import Catalog

_T = TypeVar("_T")

log = logging.getLogger(__name__)

QUEUE_OPS: Final = 65536
"""Changes and reads that may wait; beyond that `submit` and `read_blob` refuse."""

STOP_TIMEOUT_S: Final = 10.0


class _Batch:
    __slots__ = ("done", "ops")

    def __init__(self, ops: Sequence[Op], done: Callable[[CatalogError | None], None]) -> None:
        self.ops, self.done = ops, done


class _Read:
    __slots__ = ("done", "node", "session", "tenant")

    def __init__(
        self,
        tenant: str,
        session: bytes,
        node: int,
        done: Callable[[BlobRecord | CatalogError | None], None],
    ) -> None:
        self.tenant, self.session, self.node, self.done = tenant, session, node, done


class CatalogWriter:
    """Owns a catalog from `start` to `close`. Callbacks come from its thread."""

    def __init__(self, catalog: Catalog, queue_ops: int = QUEUE_OPS) -> None:
        self._catalog = catalog
        self._queue: deque[_Batch | _Read] = deque()
        self._queued_ops = 0
        self._queue_ops = queue_ops
        self._changed = threading.Condition()
        self._closing = False
        self._begun_s = 0.0
        """When the thread began what it is doing; 0 while it waits."""
        self._thread = threading.Thread(target=self._run, name="catalog", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs; false after `start` means trouble."""
        return self._thread.is_alive()

    @property
    def queued(self) -> int:
        """Changes and reads that wait."""
        return self._queued_ops

    def stuck_s(self, now_s: float) -> float:
        """For how long the thread has been at one transaction or read; `now_s` is monotonic."""
        return now_s - self._begun_s if self._begun_s else 0.0

    def submit(self, ops: Sequence[Op], done: Callable[[CatalogError | None], None]) -> None:
        """Queue a batch of changes; `done` is told how its transaction ended.

        Durability: see `Catalog.apply`; only what `done(None)` was called for is stored.
        Errors: `CatalogBusy` when the queue is full or closed; nothing was queued then.
        """
        self._put(_Batch(ops, done), len(ops))

    def read_blob(
        self,
        tenant: str,
        session: bytes,
        node: int,
        done: Callable[[BlobRecord | CatalogError | None], None],
    ) -> None:
        """Queue the reading of a blob; `done` gets it, None (there is none), or an error.

        Errors: `CatalogBusy` as for `submit`.
        """
        self._put(_Read(tenant, session, node, done), 1)

    def _put(self, item: _Batch | _Read, ops: int) -> None:
        with self._changed:
            full = self._queued_ops and self._queued_ops + ops > self._queue_ops
            if self._closing or full:  # alone, a batch may be larger than the whole queue
                raise CatalogBusy(
                    f"cannot queue {ops} changes for {self._catalog.path}",
                    "it is closing" if self._closing else f"{self._queued_ops} wait already",
                    "ask again later; if it lasts, the disk of the state directory is too slow",
                )
            self._queue.append(item)
            self._queued_ops += ops
            self._changed.notify()

    def close(self, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """Write all that is queued, stop and close the catalog; false when that took too long."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._catalog.close()
        return True

    # ---------------------------------------------------------- the thread

    def _run(self) -> None:
        while self._turn():
            pass

    def _turn(self) -> bool:
        """Carry out what is queued, once there is something; false when it is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            items, self._queue = self._queue, deque()
        for item in items:
            if isinstance(item, _Batch):
                self._finish(len(item.ops), item.done, self._apply(item.ops))
            else:
                self._read(item)
        return bool(items)

    def _apply(self, ops: Sequence[Op]) -> CatalogError | None:
        self._begun_s = time.monotonic()
        try:
            self._catalog.apply(ops)
        except CatalogError as error:
            return error
        except Exception as error:
            return self._unexpected(error)
        finally:
            self._begun_s = 0.0
        return None

    def _read(self, item: _Read) -> None:
        found: BlobRecord | CatalogError | None
        self._begun_s = time.monotonic()
        try:
            found = self._catalog.get_blob(item.tenant, item.session, item.node)
        except CatalogError as error:
            found = error
        except Exception as error:
            found = self._unexpected(error)
        self._begun_s = 0.0
        self._finish(1, item.done, found)

    def _unexpected(self, error: Exception) -> CatalogError:
        # The thread must outlive whatever one request runs into: everything queues behind it.
        log.error("catalog: unexpected error", exc_info=error)
        return CatalogError(
            f"cannot use {self._catalog.path}", f"{type(error).__name__}: {error}", "see the log"
        )

    def _finish(self, ops: int, done: Callable[[_T], None], result: _T) -> None:
        with self._changed:
            self._queued_ops -= ops
        with contextlib.suppress(RuntimeError):  # the loop that was to be told is closed
            done(result)
