"""The short way for one small block: as few steps as possible, and the long way when in doubt.

A swap-out takes a pre-granted slot and costs no round trip, a swap-in costs one. Whatever is not
plain (no slot at hand, an error, a restart on the way) is left to `swap.py`, which repeats safely.
"""

from typing import Any, Final

import numpy as np

from kvtier_client import wire
from kvtier_client.arena import Bytes
from kvtier_client.core import Core
from kvtier_client.effects import Op, Run, Wait
from kvtier_client.errors import LeaseExpired
from kvtier_client.leases import Lease, RegisteredLayout
from kvtier_client.ops import LayoutRef, SessionCore, settle
from kvtier_client.pool import SlotPool, pool_blocks
from kvtier_client.protocol import Pending, Phase

SINGLE_BYTES: Final = 1 << 20
"""Largest block copied in place; a larger one is worth a hop to a thread in the async shell."""
LAZY_RELEASE_BYTES: Final = 2 << 20
"""The release of so little may wait for the next request, unless the arena is under pressure."""
UNSETTLED_LIMIT: Final = 256
"""Requests without answer or acknowledgement above which `ack=False` waits for them first; what
has failed among them is told by `flush`."""


class Single:
    """One block: where it belongs, and the caller's memory."""

    __slots__ = ("core", "layout", "node", "page", "pending", "place", "row", "session")

    def __init__(
        self, session: SessionCore, layout: RegisteredLayout, node: int, page: int, row: Bytes
    ) -> None:
        self.core = session.core
        self.session = session
        self.layout = layout
        self.node = node
        self.page = page
        self.row = row
        self.place = (session.id, node, layout.fingerprint)
        """What is read ahead together."""
        self.pending: Pending
        """The request of a swap-in."""


def single_of(
    session: SessionCore, layout: LayoutRef | None, node: int, page: int, records: Any
) -> Single | None:
    """One plain block of a session, or None when the long way must look at it."""
    core = session.core
    if layout is None:
        known = core.layouts.get(session.layouts[0]) if len(session.layouts) == 1 else None
    else:
        known = core.layouts.get(layout)
        if known is not None and known.fingerprint not in session.layouts:
            return None
    if known is None or not 0 <= page <= 0xFFFFFFFF:
        return None
    row = plain_row(core, known, records)
    return None if row is None else Single(session, known, node, page, row)


def plain_row(core: Core, layout: RegisteredLayout, records: Any) -> Bytes | None:
    """The memory of a plain array of one block, or None when the long way must look at it."""
    if (
        type(records) is not np.ndarray
        or records.nbytes != layout.block_bytes
        or layout.block_bytes > SINGLE_BYTES
        or not records.flags.c_contiguous
        or core.integrity == "end_to_end"
    ):
        return None
    if records.ndim == 1 and records.dtype == np.uint8:
        return records
    return records.reshape(-1).view(np.uint8)


def pool_of(core: Core, layout: RegisteredLayout) -> SlotPool | None:
    """The pool of pre-granted slots for a layout, or None where slots are too large for one."""
    pool = core.pools.get(layout.fingerprint)
    if pool is None:
        assert core.arena is not None
        limit = core.limits().blocks_per_request
        blocks = pool_blocks(layout.slot_bytes, core.arena.size_bytes, limit)
        if blocks < 2:
            return None
        with core.lock:
            pool = core.pools.setdefault(layout.fingerprint, SlotPool(layout, blocks))
    return pool


def settle_some(core: Core) -> Op[None]:
    """Before one more one-way request: wait for the earlier ones if they are many."""
    if core.protocol.unsettled >= UNSETTLED_LIMIT:
        yield from settle(core, core.deadline_s)


def write_one(single: Single, valid: int, retention: int, ack: bool) -> Pending | None:
    """Copy one block into a pre-granted slot and queue its commit; None for the long way."""
    core, protocol, block_bytes = single.core, single.core.protocol, single.layout.block_bytes
    pool = core.pools.get(single.layout.fingerprint)
    if pool is None or not 0 <= valid <= 0xFFFFFFFF or protocol.unsettled >= UNSETTLED_LIMIT:
        return None
    with core.lock:
        taken = pool.take(core, 1)
    if taken is None:
        return None
    lease, index = taken
    try:
        offset = lease.offsets.item(index)
        np.copyto(lease.arena.bytes[offset : offset + block_bytes], single.row)
        with core.lock:
            core.stats.requests += 1
            request = wire.Commit(
                protocol.next_id(), lease.id, single.session.id, single.node,
                index.to_bytes(4, "little"), single.page.to_bytes(4, "little"),
                valid.to_bytes(4, "little"), retention,
            )  # fmt: skip
            core.before(request)
            lazily = not ack and not core.stats.pressure
            pending = protocol.submit(request, lease, oneway=not ack, lazily=lazily)
            lease.named_blocks += 1
            lease.unsettled += 1
            core.stats.swapped_out_bytes += block_bytes
            return pending
    finally:
        with core.lock:
            pool.leave(core, lease)


def out_one(single: Single, valid: int, retention: int, ack: bool) -> Op[bool]:
    """Swap one block out through a pre-granted slot; False when the long way must be taken."""
    core = single.core
    pending = write_one(single, valid, retention, ack)
    if pending is None:
        return False
    if ack:
        try:
            yield Wait((pending,), core.deadline_s)
            pending.value(wire.Done)
        except LeaseExpired:
            core.stats.repeated_windows += 1
            core.stats.swapped_out_bytes -= single.layout.block_bytes
            return False
        except BaseException:
            core.abandon(pending)
            raise
    return True


def ask_one(single: Single, wait_s: float) -> float:
    """Queue the request for one block; returns how long to wait for the answer."""
    core, protocol = single.core, single.core.protocol
    wait_s = min(wait_s, core.limits().wait_max_s)
    with core.lock:
        core.stats.requests += 1
        request = wire.Acquire(
            protocol.next_id(), core.next_lease(), single.session.id, single.node,
            single.layout.fingerprint, single.page, 1, wait_s,
        )  # fmt: skip
        single.pending = protocol.submit(request)
        core.ahead.follow(single)
    return core.deadline_s + wait_s


def read_one(single: Single) -> int | None:
    """Copy the block that was granted; its valid tokens, or None for the long way."""
    core, block_bytes = single.core, single.layout.block_bytes
    protocol, reply, arena = core.protocol, single.pending.reply, core.arena
    if type(reply) is not wire.Granted or arena is None:
        return None  # the long way asks again and raises what is wrong
    lease = reply.lease
    with core.lock:
        protocol.held[lease] = wire.HeldLease(lease, False, reply.offsets)
    whole = False
    try:
        offset = int.from_bytes(reply.offsets, "little")
        if len(reply.offsets) == 8 == 2 * len(reply.valid) and offset <= arena.size_bytes:
            np.copyto(single.row, arena.bytes[offset : offset + block_bytes])
            whole = protocol.phase is Phase.READY and protocol.boot == reply.boot
    finally:
        with core.lock:
            protocol.held.pop(lease, None)
            core.stats.requests += 1
            release = wire.Release(protocol.next_id(), lease)
            protocol.submit(release, oneway=True, lazily=not core.stats.pressure)
    if not whole:
        return None  # the daemon restarted while the bytes were copied, or is not to be understood
    core.stats.swapped_in_bytes += block_bytes
    return int.from_bytes(reply.valid, "little")


def copy_ahead(single: Single, lease: Lease, k: int) -> None:
    """Copy a block out of a window."""
    start = lease.offsets.item(k)
    np.copyto(single.row, lease.arena.bytes[start : start + single.layout.block_bytes])


def read_ahead(single: Single, lease: Lease) -> int | None:
    """The valid tokens of a block that was copied out of a window; None for the plain way."""
    core = single.core
    if lease.lost or core.protocol.phase is not Phase.READY:
        return None  # the daemon restarted while the bytes were copied
    core.stats.swapped_in_bytes += single.layout.block_bytes
    core.stats.read_ahead_blocks += 1
    return single.layout.layout.block_tokens


def in_one(single: Single, wait_s: float) -> Op[int | None]:
    """Swap one block in; its valid tokens, or None when the long way must be taken."""
    core = single.core
    window = core.ahead.awaited(single)
    if window is not None:
        yield Wait((window,), core.deadline_s)
    taken = core.ahead.take(single)
    if taken is not None:
        try:
            yield Run(lambda: copy_ahead(single, *taken), single.layout.block_bytes)
        finally:
            core.ahead.leave(taken[0])
        tokens = read_ahead(single, taken[0])
        if tokens is not None:
            return tokens
    timeout_s = ask_one(single, wait_s)
    try:
        yield Wait((single.pending,), timeout_s)
    except BaseException:
        core.abandon(single.pending)
        raise
    return read_one(single)
