"""Write slots granted ahead, so that a small swap-out costs no round trip.

One pool per layout: a write lease of a few slots that later small swap-outs use up one by one.
It is bounded, refilled when half used, and given back when idle, under pressure and at close.
"""

from typing import TYPE_CHECKING, Final

from kvtier_client import wire
from kvtier_client.errors import KvtierError
from kvtier_client.leases import Lease, RegisteredLayout
from kvtier_client.protocol import Pending

if TYPE_CHECKING:
    from kvtier_client.core import Core

POOL_BLOCKS: Final = 16
POOL_BLOCKS_MAX: Final = 64
"""Slots of a pool whose slots are so small that they take `POOL_SMALL_BYTES` at most."""
POOL_SMALL_BYTES: Final = 4 << 20
POOL_BYTES: Final = 64 << 20
POOL_ARENA_SHARE: Final = 32
"""A pool holds at most this fraction (1/32) of the arena."""
POOL_IDLE_S: Final = 2.0
"""A pool that nobody used for so long is given back."""
POOL_RETRY_S: Final = 1.0
"""After the arena had no room for a pool, or was under pressure, none is asked for so long."""


class SlotPool:
    """Pre-granted write slots of one layout."""

    def __init__(self, layout: RegisteredLayout, blocks: int) -> None:
        self.layout = layout
        self.blocks = blocks
        self.largest = max(1, blocks // 2)
        """Largest number of blocks that one swap-out takes from it."""
        self.lease: Lease | None = None
        self.refill: Pending | None = None
        self._used = 0
        self._used_s = 0.0
        self._asked_s = 0.0
        self._retry_s = 0.0

    def take(self, core: "Core", count: int) -> tuple[Lease, int] | None:
        """`count` neighbouring places of the lease, or None when it must be refilled first.

        Whoever takes them calls `leave` when they are committed or given up.
        """
        now_s = core.now_s()
        self._used_s = now_s
        lease = self.lease
        if lease is None:
            return None
        if self._used + count > len(lease.offsets) or not lease.usable(now_s):
            self._drop(core)
            return None
        first = self._used
        self._used += count
        lease.users += 1
        if self._used * 2 >= self.blocks and self.refill is None and now_s >= self._retry_s:
            self._ask(core, now_s)
        if lease.renewal_due(now_s):
            core.renew(lease, 0.0)
        return lease, first

    def leave(self, core: "Core", lease: Lease) -> None:
        """The places taken are committed, or nothing writes to them any more."""
        lease.users -= 1
        if lease.retired and lease.users == 0:
            core.end_lease(lease)

    def ask(self, core: "Core") -> Pending | None:
        """The refill under way, asked for if need be; None soon after the arena had no room."""
        now_s = core.now_s()
        if self.refill is None and now_s >= self._retry_s:
            self._ask(core, now_s)
        return self.refill

    def filled(self, core: "Core", refill: Pending) -> None:
        """Take over a refill that has been answered, unless another thread did."""
        if self.refill is not refill:
            return
        self.refill = None
        if isinstance(refill.reply, wire.Granted):
            self._drop(core)
            self.lease = core.granted(self.layout, refill.reply, True, self._asked_s)
            self._used = 0
            core.stats.pool_refills += 1
        else:
            self._retry_s = core.now_s() + POOL_RETRY_S

    def retire(self, core: "Core") -> None:
        """Give everything back, and ask for nothing for a while."""
        self._retry_s = core.now_s() + POOL_RETRY_S
        refill, self.refill = self.refill, None
        if refill is not None:
            if isinstance(refill.reply, wire.Granted):
                core.end_lease(core.granted(self.layout, refill.reply, True, self._asked_s))
            else:
                core.protocol.abandon(refill)
        self._drop(core)

    def revoked(self, core: "Core", lease: Lease) -> None:
        """The daemon asks for a lease back."""
        if lease is self.lease:
            self._drop(core)

    def tidy(self, core: "Core", now_s: float) -> None:
        """Give back what has been idle."""
        idle = now_s - self._used_s > POOL_IDLE_S
        if idle and (self.lease is not None or self.refill is not None):
            self.retire(core)
            self._retry_s = 0.0

    def _drop(self, core: "Core") -> None:
        lease, self.lease = self.lease, None
        if lease is None:
            return
        lease.retired = True
        if lease.users == 0:
            core.end_lease(lease)

    def _ask(self, core: "Core", now_s: float) -> None:
        self._asked_s = now_s
        try:
            self.refill = core.send(
                wire.Reserve, core.next_lease(), self.layout.fingerprint, self.blocks
            )
        except KvtierError:
            self._retry_s = now_s + POOL_RETRY_S


def pool_blocks(slot_bytes: int, arena_bytes: int, limit: int) -> int:
    """How many slots a pool of this layout has; below 2 there is none."""
    by_size = min(POOL_BYTES, arena_bytes // POOL_ARENA_SHARE) // slot_bytes
    wanted = min(max(POOL_BLOCKS, POOL_SMALL_BYTES // slot_bytes), POOL_BLOCKS_MAX)
    return min(wanted, by_size, limit)
