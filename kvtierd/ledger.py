"""Changes on their way to the catalog: stored in their order, and kept until they are.

    save ──► waiting ──► one batch under way ──stored──► done(None)
                ▲                 │
                └─────refused─────┘ done(error); tried again with the next ones, or after a while

One batch is under way at a time, and all that comes meanwhile is the next one: so changes share
their transactions, and none overtakes an earlier one that was refused.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from kvtier_client.errors import SpillFull
from kvtierd.catalog.errors import CatalogError
from kvtierd.catalog.rows import Op, SaveBlob
from kvtierd.catalog.writer import CatalogWriter

RETRY_S: Final = 0.5
"""Pause before what was refused is tried again, when nobody asks sooner."""
CHANGE_BYTES: Final = 1 << 10
"""What a change counts as, beside its blob."""
WAITING_BYTES: Final = 128 << 20
"""What may wait; requests that would add to more are refused."""

Done = Callable[[CatalogError | None], None]

log = logging.getLogger(__name__)


class Ledger:
    """Between the daemon and the writer of the catalog; lives on the event loop's thread."""

    def __init__(self, writer: CatalogWriter, loop: asyncio.AbstractEventLoop) -> None:
        self._writer, self._loop = writer, loop
        self._waiting: list[Op] = []
        self._dones: list[Done] = []
        self._waiting_bytes = 0
        self._again_s = 0.0
        self._refusal: CatalogError | None = None
        self.refused = 0
        """Changes that the catalog has refused, and does not have yet."""
        self.idle = asyncio.Event()
        """Nothing is under way."""
        self.idle.set()

    @property
    def behind(self) -> bool:
        """Whether there are changes that are not stored yet."""
        return bool(self._waiting) or not self.idle.is_set()

    def check_room(self) -> None:
        """Refuse a request that would add changes to too many. Errors: SpillFull."""
        if self._waiting_bytes > WAITING_BYTES:
            why: object = self._refusal or "its disk is too slow"
            raise SpillFull(f"not done: too many changes wait for the catalog: {why}")

    def save(self, ops: Sequence[Op], done: Done | None = None) -> None:
        """Have changes stored; `done` is told when they, and all before them, are or are not."""
        self._waiting += ops
        self._waiting_bytes += _size_bytes(ops)
        if done is not None:
            self._dones.append(done)
        if self.idle.is_set():
            self._begin()

    def retry(self) -> None:
        """Called now and then: try again what was refused."""
        if self._waiting and self.idle.is_set() and self._loop.time() >= self._again_s:
            self._begin()

    def _begin(self) -> None:
        """Give the catalog all that waits."""
        batch, dones = self._waiting, self._dones
        self._waiting, self._dones = [], []
        if not batch:
            _tell(dones, None)
            return
        self.idle.clear()

        def from_thread(error: CatalogError | None) -> None:
            self._loop.call_soon_threadsafe(self._ended, batch, dones, error)

        try:
            self._writer.submit(batch, from_thread)
        except CatalogError as error:
            self._ended(batch, dones, error)

    def _ended(self, batch: list[Op], dones: list[Done], error: CatalogError | None) -> None:
        self.idle.set()
        self._refusal = error
        if error is None:
            self.refused = 0
            self._waiting_bytes -= _size_bytes(batch)
        else:
            log.error("catalog: %s", error)
            self.refused = len(batch)
            self._waiting = batch + self._waiting
            self._again_s = self._loop.time() + RETRY_S
        if self._dones or (self._waiting and error is None):
            self._begin()
        _tell(dones, error)


def _tell(dones: list[Done], error: CatalogError | None) -> None:
    for done in dones:
        done(error)


def _size_bytes(ops: Sequence[Op]) -> int:
    blobs = sum(len(op.data) for op in ops if isinstance(op, SaveBlob))
    return len(ops) * CHANGE_BYTES + blobs
