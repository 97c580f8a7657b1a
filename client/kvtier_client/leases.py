"""A granted lease on the client's side: what it covers and when it ends.

    granted ──commit…──▶ all named ──acknowledged──▶ gone
       │ ╲
       │  ╲ revoked or lost ──▶ no new commit; copies end, then abort or release
       └──abort / release──▶ gone, once nothing unsettled refers to it

Until it is gone it is listed in HELLO, so that a daemon which restarts keeps its slots.
"""

from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtier_client import wire
from kvtier_client.arena import Arena, Bytes, Offsets, unpack_offsets
from kvtier_client.errors import ConnectionLost, InvalidArgument, LeaseExpired, ProtocolError
from kvtier_client.protocol import Pending
from kvtier_client.records import Slots

if TYPE_CHECKING:
    from kvtier_client.core import Core

STALE_SHARE: Final = 0.9
"""Part of a lease's life after which the client begins nothing more under it."""
RENEW_SHARE: Final = 0.5
"""Part of a lease's life after which it is renewed while it is in use."""


class RegisteredLayout(msgspec.Struct, frozen=True):
    """A layout and what the daemon said of it."""

    layout: wire.Layout
    fingerprint: bytes
    block_bytes: int
    slot_bytes: int


class Lease:
    """Slots that this client may write, or read, until the lease ends."""

    __slots__ = (
        "aborted",
        "arena",
        "checksums",
        "closed",
        "copying",
        "core",
        "failed",
        "id",
        "layout",
        "lost",
        "named",
        "named_blocks",
        "offsets",
        "promise",
        "renew_s",
        "renewing",
        "restored",
        "retired",
        "revoked",
        "stale_s",
        "ttl_s",
        "unsettled",
        "users",
        "valid",
        "write",
    )

    def __init__(
        self,
        core: "Core",
        arena: Arena,
        layout: RegisteredLayout,
        granted: wire.Granted,
        write: bool,
        asked_s: float,
    ) -> None:
        self.core = core
        self.arena = arena
        self.layout = layout
        self.id = granted.lease
        self.write = write
        self.offsets: Offsets = unpack_offsets(granted.offsets)
        arena.check(self.offsets, layout.block_bytes)
        self.valid: NDArray[np.uint32] = np.frombuffer(granted.valid, "<u4")
        if not write and len(self.valid) != len(self.offsets):
            raise ProtocolError(
                f"a read lease of {len(self.offsets)} slots names {len(self.valid)} valid lengths"
            )
        self.checksums = granted.checksums
        self.restored = granted.restored
        self.promise = 0
        self.named: NDArray[np.bool_] | None = None
        self.named_blocks = 0
        self.unsettled = 0
        self.users = 0
        self.closed = self.lost = self.revoked = self.failed = False
        self.aborted = self.renewing = self.retired = self.copying = False
        self.renewed(asked_s, granted.ttl_s)
        self.lost = self.id not in core.protocol.held  # in a restart just after its grant

    # ---------------------------------------------------------------- its life

    def renewed(self, asked_s: float, ttl_s: float) -> None:
        """Count its life from when it was asked for, which is never later than the daemon does."""
        self.ttl_s = ttl_s
        self.renew_s = asked_s + ttl_s * RENEW_SHARE
        self.stale_s = asked_s + ttl_s * STALE_SHARE

    def usable(self, now_s: float) -> bool:
        """Whether writing and committing may still begin under it."""
        return not (self.lost or self.revoked or self.closed) and now_s < self.stale_s

    def renewal_due(self, now_s: float) -> bool:
        """Whether half of its life is over and nobody asked for more yet."""
        gone = self.renewing or self.closed or self.lost or self.revoked
        return now_s > self.renew_s and not gone

    def begin(self) -> None:
        """A copy from or to its slots begins. Errors: ConnectionLost when the client closed."""
        with self.core.lock:
            if self.closed:
                raise ConnectionLost("this client was closed")
            self.copying = True

    @property
    def busy(self) -> bool:
        """Whether an operation of this client is copying from or to its slots."""
        return self.users > 0 or (self.copying and not self.closed)

    @property
    def unfinished(self) -> bool:
        """Whether the daemon still keeps something for it that is not committed."""
        return self.named_blocks < len(self.offsets) or self.promise > 0 or self.failed

    def settled(self, pending: Pending) -> None:
        """A request about it has ended; the last one lets go of it."""
        self.unsettled -= 1
        error = pending.error
        if error is not None and not isinstance(pending.request, wire.Abort | wire.Release):
            self.failed = True
            self.lost = self.lost or isinstance(error, LeaseExpired)
            if pending.number:
                self.core.failures.append(error)
        if self.closed:
            self._let_go()

    def close(self) -> None:
        """Begin nothing more under it; it is held until its requests have ended."""
        self.closed = True
        self._let_go()

    def _let_go(self) -> None:
        if self.unsettled:
            return
        self.core.protocol.held.pop(self.id, None)
        self.core.leases.pop(self.id, None)
        if self.write and self.failed and not self.aborted:
            self.aborted = True  # what could not be committed is given back
            self.core.send(wire.Abort, self.id)

    # --------------------------------------------------------------- its slots

    def slots(self, first: int, count: int) -> Slots:
        """Some of its slots for a copy."""
        layout = self.layout
        return Slots(
            self.arena, self.offsets[first : first + count], layout.block_bytes, layout.slot_bytes
        )

    def blocks(self) -> list[Bytes]:
        """A view of every block. Shapes: each [block_bytes].

        Errors: ConnectionLost in a forked child, where touching one would kill it.
        """
        self.core.check_process()
        views = self.arena.blocks(self.offsets, self.layout.block_bytes)
        if not self.write:
            for view in views:
                view.flags.writeable = False
        return views

    def name(self, count: int, index: "NDArray[np.integer] | None") -> NDArray[np.uint32]:
        """Choose slots to commit: those of `index`, else the next `count` that have no name.

        Errors: LeaseExpired when it has ended; InvalidArgument for slots it does not have.
        """
        self.check_writable()
        total = len(self.offsets)
        if self.named is None:
            self.named = np.zeros(total, np.bool_)
        if index is None:
            free = np.flatnonzero(~self.named)[:count]
            if len(free) < count:
                raise InvalidArgument(
                    f"{count} blocks to commit, {len(free)} of the lease's {total} are unnamed"
                )
            index = free
        if len(index) != count or (count and not 0 <= int(index.min()) <= int(index.max()) < total):
            raise InvalidArgument(f"{count} pages need {count} index values in 0..{total - 1}")
        self.named[index] = True
        self.named_blocks = int(np.count_nonzero(self.named))
        return index.astype("<u4")

    def unname(self, index: NDArray[np.uint32]) -> None:
        """The commit of these slots was refused: they may be committed again."""
        if self.named is not None:
            self.named[index] = False
            self.named_blocks = int(np.count_nonzero(self.named))

    def check_writable(self) -> None:
        """Errors: InvalidArgument for a read lease, LeaseExpired when it has ended."""
        if not self.write:
            raise InvalidArgument("a read lease commits nothing: reserve a write lease")
        self.check_open()

    def check_open(self) -> None:
        """Errors: LeaseExpired when it has ended."""
        if self.closed or self.lost or self.revoked:
            how = "was given back" if self.closed else "ran out or was lost in a restart"
            raise LeaseExpired(f"lease {self.id:#x} {how}: ask for a new one and copy again")


class Renewal:
    """Takes note of a renewal's outcome."""

    __slots__ = ("asked_s", "lease", "ttl_s")

    def __init__(self, lease: Lease, asked_s: float, ttl_s: float) -> None:
        self.lease = lease
        self.asked_s = asked_s
        self.ttl_s = ttl_s

    def settled(self, pending: Pending) -> None:
        """A longer life from when it was asked, or the end of the lease."""
        self.lease.renewing = False
        if pending.error is None:
            self.lease.renewed(self.asked_s, self.ttl_s)
        elif isinstance(pending.error, LeaseExpired):
            self.lease.revoked = True
