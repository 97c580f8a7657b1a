"""The short way for one small block: as few steps as possible, and the long way when in doubt.

A swap-out takes a pre-granted slot and costs no round trip, a swap-in costs one. Whatever is not
plain (no slot at hand, an error, a restart on the way) is left to `swap.py`, which repeats safely.
"""

from typing import Any, Final

import numpy as np

from kvtier_client import wire
from kvtier_client.arena import Bytes
from kvtier_client.core import Core
from kvtier_client.effects import Op, Wait
from kvtier_client.errors import LeaseExpired
from kvtier_client.leases import RegisteredLayout
from kvtier_client.ops import SessionCore
from kvtier_client.pool import SlotPool, pool_blocks

SINGLE_BYTES: Final = 1 << 20
"""Largest block copied in place; a larger one is worth a hop to a thread in the async shell."""
LAZY_RELEASE_BYTES: Final = 2 << 20
"""The release of so little may wait for the next request, unless the arena is under pressure."""
UNSETTLED_LIMIT: Final = 256
"""Requests without answer or acknowledgement above which `ack=False` waits for them first."""
FIRST_SLOT: Final = bytes(4)


class Single:
    """One block: where it belongs, and the caller's memory."""

    __slots__ = ("core", "layout", "node", "page", "row", "session")

    def __init__(
        self, session: SessionCore, layout: RegisteredLayout, node: int, page: int, row: Bytes
    ) -> None:
        self.core = session.core
        self.session = session
        self.layout = layout
        self.node = node
        self.page = page
        self.row = row


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


def out_one(single: Single, valid: int, retention: int, ack: bool) -> Op[bool]:
    """Swap one block out through a pre-granted slot; False when the long way must be taken."""
    core, page, block_bytes = single.core, single.page, single.layout.block_bytes
    pool = core.pools.get(single.layout.fingerprint)
    fits = 0 <= page <= 0xFFFFFFFF and 0 <= valid <= 0xFFFFFFFF
    if pool is None or not fits or core.protocol.unsettled >= UNSETTLED_LIMIT:
        return False
    with core.lock:
        taken = pool.take(core, 1)
    if taken is None:
        return False
    lease, index = taken
    offset = int(lease.offsets[index])
    try:
        np.copyto(lease.arena.bytes[offset : offset + block_bytes], single.row)
        with core.lock:
            lease.named_blocks += 1
            send = core.send if ack else core.send_oneway
            pending = send(
                wire.Commit,
                lease.id,
                single.session.id,
                single.node,
                index.to_bytes(4, "little"),
                page.to_bytes(4, "little"),
                valid.to_bytes(4, "little"),
                retention,
                lease=lease,
            )
    finally:
        with core.lock:
            pool.leave(core, lease)
    if ack:
        try:
            yield Wait((pending,), core.deadline_s)
            pending.value(wire.Done)
        except LeaseExpired:
            core.stats.repeated_windows += 1
            return False
        except BaseException:
            core.abandon(pending)
            raise
    core.stats.swapped_out_bytes += block_bytes
    return True


def in_one(single: Single, wait_s: float) -> Op[int | None]:
    """Swap one block in; its valid tokens, or None when the long way must be taken."""
    core, block_bytes = single.core, single.layout.block_bytes
    protocol, page = core.protocol, single.page
    wait_s = min(wait_s, core.limits().wait_max_s)
    if not 0 <= page <= 0xFFFFFFFF:
        return None
    pending = core.send(
        wire.Acquire,
        core.next_lease(),
        single.session.id,
        single.node,
        single.layout.fingerprint,
        page,
        1,
        wait_s,
    )
    try:
        yield Wait((pending,), core.deadline_s + wait_s)
    except BaseException:
        core.abandon(pending)
        raise
    reply, arena = pending.reply, core.arena
    if type(reply) is not wire.Granted or arena is None:
        return None  # the long way asks again and raises what is wrong
    held, offset = protocol.held, int.from_bytes(reply.offsets, "little")
    sound = len(reply.offsets) == 8 == 2 * len(reply.valid)
    whole = False
    try:
        if sound and offset + block_bytes <= arena.size_bytes and reply.lease in held:
            np.copyto(single.row, arena.bytes[offset : offset + block_bytes])
            whole = reply.lease in held  # else a restart took it away while the bytes were copied
    finally:
        with core.lock:
            if held.pop(reply.lease, None) is not None:
                core.send_oneway(wire.Release, reply.lease, lazily=not core.stats.pressure)
    if not whole:
        return None
    core.stats.swapped_in_bytes += block_bytes
    return int.from_bytes(reply.valid, "little")
