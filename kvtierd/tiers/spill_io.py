"""What may be asked of the NVMe tier: jobs, their results, and the interface that takes them.

`SpillTier` (spill.py) does it with files; a simulated disk does it under a test's clock. A job is
a batch of blocks; its result says for every block what became of it, so that one bad sector costs
one block. Who submits a job promises that nobody else uses its slots until the result is there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from kvtierd.fair import OWN_WORK, Flow
from kvtierd.tiers.headers import SlotArray
from kvtierd.tiers.pool import Priority
from kvtierd.tiers.records import SlabEntry

U8 = npt.NDArray[np.uint8]
I32 = npt.NDArray[np.int32]
U64 = npt.NDArray[np.uint64]
Offsets = npt.NDArray[np.integer[Any]]
"""Byte offsets; int64 or uint64."""


class Status(IntEnum):
    """What became of one block of a job."""

    OK = 0
    CANCELLED = 1
    """Nothing was begun."""
    FULL = 2
    """Write: the file system has no room (ENOSPC, EDQUOT, EFBIG); the slot's header is untouched.
    """
    FAILED = 3
    """It could not be done (see errno). Write: the slot's header is untouched. Clear: ask again.
    Read: nothing is known about the bytes; ask again."""
    UNSURE = 4
    """Write: the header may or may not have reached the medium; clear the slot before reuse."""
    LOST = 5
    """Read: the medium gave an error or ended; the buffer's content means nothing."""
    MISMATCH = 6
    """The bytes have another checksum. Read: they are not those that were written; the buffer's
    content means nothing. Write: they are not those whose checksum the body gives, which was
    published with them all the same: whoever reads them finds that out."""


NOBODY: Final[Flow] = (OWN_WORK, OWN_WORK)
"""Work that is no tenant's."""


class QueueFull(Exception):
    """More was submitted than `room_bytes` allowed; ask for the room first."""


@dataclass(frozen=True, slots=True, eq=False)
class WriteJob:
    """Write blocks from an arena into spill slots and publish them there.

    A body's checksum is what the bytes in the arena must have, 0 where that is not known yet. The
    job fills in checksum, checksum kind and place, encrypts where that is configured, and seals
    the bodies itself, in a copy.

    Shapes: `slots`, `offsets` (into `arena`, 4 KiB-aligned) and `words`: [n]; `bodies`: [n, 16].
    The arena must reach each offset plus the length rounded up to 4 KiB.
    Durability: when the result says OK, the block is there after the daemon's death; under "power"
    also after the host's.
    """

    slots: SlotArray
    arena: U8
    offsets: Offsets
    length_bytes: int
    bodies: U64
    words: U64
    priority: Priority = Priority.DEMAND_WRITE
    flow: Flow = NOBODY
    """For whom it is done; jobs of one priority take turns."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadJob:
    """Read blocks from spill slots into an arena and verify them.

    Shapes: all [n], `bodies` [n, 16]; `checksums` are those of the bodies. The arena must reach
    each offset plus the length rounded up to 4 KiB, and everything up to there is overwritten.
    """

    slots: SlotArray
    arena: U8
    offsets: Offsets
    length_bytes: int
    checksums: U64
    priority: Priority = Priority.DEMAND_READ
    bodies: U64 | None = None
    """What a write of the blocks would say; needed where the tier is `encrypted`."""
    flow: Flow = NOBODY
    """For whom it is done; jobs of one priority take turns."""


@dataclass(frozen=True, slots=True, eq=False)
class ClearJob:
    """Take back the words of slots; only after OK may the slots be used again.

    Durability: under "power" a cleared block does not come back after the host's reboot.
    """

    slots: SlotArray
    priority: Priority = Priority.BACKGROUND
    flow: Flow = NOBODY
    """For whom it is done; jobs of one priority take turns."""


Job = WriteJob | ReadJob | ClearJob


@dataclass(frozen=True, slots=True, eq=False)
class JobResult:
    """What became of a job, one entry per block.

    Shapes: `status` (of `Status`), `errnos` (0 without an error) and `checksums` (those that a
    write computed or a read found; else 0): [n].
    """

    job: Job
    status: U8
    errnos: I32
    checksums: U64

    @property
    def ok(self) -> bool:
        """Every block is OK."""
        return not self.status.any()


Done = Callable[[JobResult], None]
"""Called once per job, from a pool thread; it should only hand the result over."""


class Ticket(Protocol):
    """A submitted job."""

    def cancel(self) -> None:
        """Begin nothing more of it; blocks that were begun are finished, `done` is still called."""
        ...


@dataclass(frozen=True, slots=True)
class SpillCounters:
    """Totals since the start, and what is going on now."""

    written_blocks: int
    written_bytes: int
    read_blocks: int
    read_bytes: int
    cleared_blocks: int
    full_blocks: int
    failed_blocks: int
    lost_blocks: int
    mismatched_blocks: int
    cancelled_blocks: int
    crashes: int
    """Faults of our own that were turned into failed blocks."""
    jobs_in_flight: int
    queued_tasks: int
    in_flight_bytes: int
    busy_s: float
    """Seconds of all threads together."""


class SpillIO(Protocol):
    """The NVMe tier as the mover uses it. No method but `close` waits for the medium."""

    @property
    def encrypted(self) -> bool:
        """Whether blocks are, or may be, encrypted, so that a ReadJob must name them."""
        ...

    def room_bytes(self, priority: Priority) -> int:
        """Payload bytes that may be submitted now at this priority.

        Less urgent work gets less of the queue, so that a demand read always finds room. A job
        larger than the whole queue is taken when nothing else is in flight.
        """
        ...

    def submit(self, job: Job, done: Done) -> Ticket:
        """Begin a job; `done` gets its result, from another thread.

        Errors: `QueueFull` when it goes beyond `room_bytes`.
        """
        ...

    def assign_slab(self, entry: SlabEntry) -> None:
        """Give a slab (global number), whose slots are all clear, to a layout.

        The slab directory is written with the first block that is published in the slab, and
        before it; where it cannot be, those blocks are FULL or FAILED.
        """
        ...

    def free_slab(self, slab: int) -> None:
        """Take a slab back, after all its slots were cleared."""
        ...

    def stuck_s(self, now_s: float) -> float:
        """For how long work has been under way without any of it ending; 0 when none is.

        `now_s` is of the monotonic clock.
        """
        ...

    def counters(self) -> SpillCounters:
        """A snapshot for the metrics."""
        ...

    def close(self, deadline_s: float) -> bool:
        """Finish what was submitted, cancelling what is queued when half the time is over.

        Returns whether everything ended in time; only then are the files closed.
        """
        ...
