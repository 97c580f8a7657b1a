"""Blocks under content keys, for engines' prefix caches: look up, put, get, hold, remove."""

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier_client import wire
from kvtier_client.arena import pack_u32
from kvtier_client.core import Core
from kvtier_client.effects import Op, Run, call, check_window, patiently, reply_of
from kvtier_client.errors import InvalidArgument, LeaseExpired, RequestError
from kvtier_client.integrity import checksums, mismatches
from kvtier_client.leases import Lease, RegisteredLayout
from kvtier_client.ops import LayoutRef, SessionCore, need_layout, simple
from kvtier_client.pages import page_numbers, page_runs
from kvtier_client.records import Copier, Records, copier
from kvtier_client.swap import WINDOW_ATTEMPTS, window_blocks


def join_keys(keys: bytes | Sequence[bytes]) -> bytes:
    """Content keys as one string. Errors: InvalidArgument for a key that has not 16 bytes."""
    try:
        whole = isinstance(keys, bytes) or all(len(key) == 16 for key in keys)
        packed = keys if isinstance(keys, bytes) else b"".join(keys)
    except TypeError:  # something in it is no string of bytes
        whole, packed = False, b""
    if not whole or len(packed) % 16:
        raise InvalidArgument("every content key has 16 bytes")
    return packed


def lookup(core: Core, keys: Any, layouts: Any) -> Op[list[int]]:
    """Leading hits per layout; takes no lease."""
    if isinstance(layouts, wire.Layout | bytes):
        layouts = [layouts]
    fingerprints = []
    for layout in layouts:
        known = yield from need_layout(core, layout)
        fingerprints.append(known.fingerprint)
    pending = core.send(wire.Lookup, fingerprints, join_keys(keys))
    reply = yield from reply_of(core, pending, wire.Hits)
    return reply.hits


def _store(source: Copier, lease: Lease, index: NDArray[np.uint32], first: int) -> None:
    """Copy those records that slots were granted for, neighbours at a time."""
    source.prepare()
    done = 0
    for start, count in page_runs(index):
        source.store(lease.slots(done, count), first + start, lease.core.crew)
        done += count


def put_keys(
    core: Core,
    layout: LayoutRef,
    keys: Any,
    records: Records,
    pages: Any,
    valid: Any,
    wait_s: float,
) -> Op[int]:
    """Store the keyed blocks that are not stored yet; see `Client.put_keys`."""
    known = yield from need_layout(core, layout)
    packed = join_keys(keys)
    n = len(packed) // 16
    tokens = known.layout.block_tokens
    lengths = pack_u32(tokens if valid is None else valid, "valid", n)
    places = pack_u32(np.arange(n), "pages") if pages is None else page_numbers(pages)[1]
    if len(places) != 4 * n:
        raise InvalidArgument(f"{len(places) // 4} pages for {n} keys: give one for each key")
    source = copier(records, n, known.block_bytes, writable=False)
    stored, step = 0, window_blocks(core, known)
    for first in range(0, n, step):
        last = min(first + step, n)
        part = (packed[16 * first : 16 * last], places[4 * first : 4 * last])
        part_valid = lengths[4 * first : 4 * last]
        for attempt in range(WINDOW_ATTEMPTS):
            try:
                stored += yield from _put_window(
                    core, known, part, part_valid, source, first, wait_s
                )
                break
            except LeaseExpired:
                core.stats.repeated_windows += 1
                if attempt + 1 == WINDOW_ATTEMPTS:
                    raise
    return stored


def _put_window(
    core: Core,
    known: RegisteredLayout,
    part: tuple[bytes, bytes],
    valid: bytes,
    source: Copier,
    first: int,
    wait_s: float,
) -> Op[int]:
    keys, pages = part

    def ask(slice_s: float) -> tuple[Any, ...]:
        return core.next_lease(), known.fingerprint, keys, slice_s

    asked_s, granted = yield from patiently(core, wire.ReserveKeys, ask, wait_s)
    if not granted.offsets:
        return 0
    lease = core.granted(known, granted, True, asked_s)
    count = len(lease.offsets)
    lease.begin()
    try:
        index = np.frombuffer(granted.index, "<u4")
        yield Run(lambda: _store(source, lease, index, first), count * known.block_bytes)
        places = np.arange(count, dtype="<u4")
        chosen = np.frombuffer(keys, "V16")[index].tobytes()
        pending = core.send(
            wire.CommitKeys,
            *(lease.id, places.tobytes(), chosen),
            np.frombuffer(pages, "<u4")[index].tobytes(),
            np.frombuffer(valid, "<u4")[index].tobytes(),
            *(0, checksums(lease, places)),
            lease=lease,
        )
        lease.named_blocks = count
    finally:
        core.end_lease(lease)
    yield from reply_of(core, pending, wire.Done)
    core.stats.put_bytes += count * known.block_bytes
    return count


def get_keys(core: Core, layout: LayoutRef, keys: Any, records: Records, wait_s: float) -> Op[int]:
    """Copy the leading stored blocks into records; see `Client.get_keys`."""
    known = yield from need_layout(core, layout)
    packed = join_keys(keys)
    n = len(packed) // 16
    target = copier(records, n, known.block_bytes, writable=True)
    target.prepare()
    hits, step = 0, core.limits().blocks_per_request
    for _ in range(n + WINDOW_ATTEMPTS):
        if hits == n:
            break
        part = packed[16 * hits : 16 * min(n, hits + step)]
        got = yield from _get_window(core, known, part, target, hits, wait_s)
        if got == 0:
            break
        hits += max(got, 0)
    core.stats.got_bytes += hits * known.block_bytes
    return hits


def _get_window(
    core: Core, known: RegisteredLayout, keys: bytes, target: Copier, first: int, wait_s: float
) -> Op[int]:
    """How many leading blocks were copied; -1 when the lease was lost meanwhile."""

    def ask(slice_s: float) -> tuple[Any, ...]:
        return core.next_lease(), known.fingerprint, keys, slice_s

    asked_s, granted = yield from patiently(core, wire.AcquireKeys, ask, wait_s)
    if not granted.offsets:
        return 0
    lease = core.granted(
        known, check_window(granted, len(keys) // 16), write=False, asked_s=asked_s
    )
    lease.begin()
    got = len(lease.offsets)
    bad: list[int] = []
    try:
        slots = lease.slots(0, got)
        yield Run(lambda: target.load(slots, first, core.crew), got * known.block_bytes)
        if lease.checksums:
            yield Run(lambda: bad.extend(mismatches(lease)), got * known.block_bytes)
        whole = not lease.lost
        core.stats.restored_bytes += lease.restored * known.block_bytes
    finally:
        core.end_lease(lease)
    if bad and whole:
        core.stats.changed_blocks += len(bad)
        yield from _forget(core, known, [keys[16 * k : 16 * k + 16] for k in bad])
        return bad[0]
    return got if whole else -1


def _forget(core: Core, known: RegisteredLayout, keys: list[bytes]) -> Op[None]:
    """Drop blocks that are not what was put, so that the next to ask puts them again."""
    with contextlib.suppress(RequestError):
        yield from call(core, wire.Done, wire.Remove, known.fingerprint, b"".join(keys))


def hold(
    session: SessionCore, request: type[wire.Request], layout: LayoutRef, keys: Any
) -> Op[int]:
    """Hold or unhold keyed blocks; returns how many."""
    known = yield from need_layout(session.core, layout)
    return (yield from simple(session, request, known.fingerprint, join_keys(keys)))


def remove(core: Core, layout: LayoutRef, keys: Any) -> Op[int]:
    """Drop keyed blocks that nobody holds or reads; returns how many."""
    known = yield from need_layout(core, layout)
    reply = yield from call(core, wire.Done, wire.Remove, known.fingerprint, join_keys(keys))
    return reply.count
