"""Operations on the connection, sessions, leases and tickets, written once for both shells.

Each is a generator as `effects.py` describes it. Whole copies are in `swap.py` and `keyed.py`.
"""

import contextlib
import os
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from kvtier_client import wire
from kvtier_client.arena import pack_u32
from kvtier_client.core import Core, Folded, NodeState
from kvtier_client.effects import Op, Pause, Run, Wait, call, check_window, patiently, reply_of
from kvtier_client.errors import (
    ConnectionLost,
    InvalidArgument,
    LayoutMismatch,
    LeaseExpired,
    ProtocolError,
    RequestError,
    Timeout,
    TransportError,
    UnknownSession,
)
from kvtier_client.integrity import checksums, mismatches, refuse
from kvtier_client.leases import Lease, RegisteredLayout
from kvtier_client.pages import page_numbers, page_range
from kvtier_client.protocol import Pending

FLUSH_PAUSE_S: Final = 0.001
FLUSH_PAUSE_MAX_S: Final = 0.05
LayoutRef = wire.Layout | bytes
"""A layout, or the fingerprint of one that was registered."""


class SessionCore:
    """One open session, as operations see it."""

    __slots__ = ("closing", "core", "created", "id", "layouts", "priority", "token")

    def __init__(self, core: Core, token: bytes, reply: wire.SessionReply) -> None:
        self.core = core
        self.token = token
        self.id = reply.session
        self.created = reply.created
        self.priority = reply.priority
        self.layouts = reply.layouts
        self.closing = False


# ------------------------------------------------------------- the connection


def connect(core: Core) -> Op[None]:
    """Return when the daemon has said welcome for the first time."""
    yield Wait((core.greeting,), core.deadline_s)


def ping(core: Core, timeout_s: float) -> Op[None]:
    """One round trip that changes nothing."""
    pending = core.send(wire.Cancel, 0)
    try:
        yield Wait((pending,), timeout_s)
        pending.value(wire.Done)
    except TransportError:
        core.abandon(pending)
        raise
    except RequestError:
        pass  # a daemon that minds an unknown ticket has answered all the same


def settle(core: Core, timeout_s: float) -> Op[None]:
    """Return when every one-way request so far is acknowledged, or has failed. Errors: Timeout."""
    deadline_s = core.now_s() + timeout_s
    pause_s = FLUSH_PAUSE_S
    with core.lock:
        waiting = core.protocol.unacked
    while not all(one.done for one in waiting):
        yield from ping(core, max(0.0, deadline_s - core.now_s()))
        if all(one.done for one in waiting):
            break
        if core.now_s() > deadline_s:
            raise Timeout(
                f"one-way requests were not acknowledged in {timeout_s} s: the daemon is busy or "
                "stuck; keep the source pages and flush again"
            )
        yield Pause(pause_s)
        pause_s = min(2 * pause_s, FLUSH_PAUSE_MAX_S)


def flush(core: Core, timeout_s: float) -> Op[None]:
    """Return when every one-way request so far is acknowledged.

    Errors: the first failure of a one-way request since the last flush; Timeout.
    """
    yield from settle(core, timeout_s)
    _raise_failures(core)


def _raise_failures(core: Core) -> None:
    with core.lock:
        failures = list(core.failures)
        core.failures.clear()
    if failures:
        for other in failures[1:]:
            failures[0].add_note(f"also: {other}")
        raise failures[0]


def need_layout(core: Core, layout: LayoutRef) -> Op[RegisteredLayout]:
    """The registered layout, registering it first if need be. Errors: LayoutMismatch."""
    known = core.layouts.get(layout)
    if known is not None:
        return known
    if isinstance(layout, bytes):
        raise LayoutMismatch(
            f"layout {layout.hex()} is not known to this client: call register_layout first"
        )
    reply = yield from call(core, wire.LayoutRegistered, wire.RegisterLayout, layout)
    if reply.block_bytes != layout.block_bytes or reply.slot_bytes < reply.block_bytes:
        raise ProtocolError(
            f"layout of {layout.block_bytes} bytes was registered as {reply.block_bytes} in slots "
            f"of {reply.slot_bytes}"
        )
    known = RegisteredLayout(layout, reply.fingerprint, reply.block_bytes, reply.slot_bytes)
    with core.lock:
        core.layouts[layout] = core.layouts[reply.fingerprint] = known
        core.protocol.layouts[reply.fingerprint] = layout
    return known


def register_layout(core: Core, layout: wire.Layout) -> Op[bytes]:
    """Make a layout known; returns its fingerprint."""
    known = yield from need_layout(core, layout)
    return known.fingerprint


# ----------------------------------------------------------------- sessions


def open_session(
    core: Core, layouts: Sequence[LayoutRef], token: bytes | None, priority: int, name: str
) -> Op[SessionCore]:
    """Create a session, or return the one of this token."""
    fingerprints = []
    for layout in layouts:
        known = yield from need_layout(core, layout)
        fingerprints.append(known.fingerprint)
    token = os.urandom(16) if token is None else token
    reply = yield from call(
        core, wire.SessionReply, wire.OpenSession, token, fingerprints, priority, name
    )
    return _entered(core, token, reply)


def resume_session(core: Core, token: bytes) -> Op[SessionCore]:
    """Return the session of this token. Errors: UnknownSession."""
    reply = yield from call(core, wire.SessionReply, wire.ResumeSession, token)
    return _entered(core, token, reply)


def _entered(core: Core, token: bytes, reply: wire.SessionReply) -> SessionCore:
    with core.lock:
        core.protocol.sessions[reply.session] = token
    return SessionCore(core, token, reply)


def close_session(session: SessionCore) -> Op[int]:
    """End a session and drop all it owns; repeating it is harmless.

    If no answer comes in time, it is carried out later all the same, as soon as the daemon is back.
    """
    core = session.core
    with core.lock:
        if session.id not in core.protocol.sessions:
            return 0
        before = core.stats.reconnects
        repeated, session.closing = session.closing, True
        pending = core.send(wire.CloseSession, session.id)
        pending.watchers.append(lambda: _forget_closed(session, pending))
    try:
        reply = yield from reply_of(core, pending, wire.Done)
    except UnknownSession:
        if core.stats.reconnects == before and not repeated:
            raise
        return 0  # an earlier request or life of the daemon had closed it already
    return reply.count


def _forget_closed(session: SessionCore, pending: Pending) -> None:
    # Until it is closed it is resumed after a restart: else the repeat would find nothing.
    if pending.error is None or isinstance(pending.error, UnknownSession):
        session.core.protocol.sessions.pop(session.id, None)


def describe(session: SessionCore) -> Op[list[NodeState]]:
    """The nodes of a session and what is stored of each."""
    reply = yield from call(session.core, wire.SessionReply, wire.Describe, session.id)
    session.priority = reply.priority
    return [_node_state(node) for node in reply.nodes]


def _node_state(info: wire.NodeInfo) -> NodeState:
    return NodeState(
        info.node,
        None if info.parent == wire.NO_NODE else info.parent,
        info.fork_tokens,
        info.retention,
        info.ended,
        info.blob_version,
        tuple(np.frombuffer(part, "<u4") for part in info.pages),
        tuple(np.frombuffer(part, "<u4") for part in info.valid),
        tuple(np.frombuffer(part, np.uint8) for part in info.tiers),
        tuple(
            Folded((each.first, each.first + each.pages), each.kept, each.grace_left_s)
            for each in info.folds
        ),
    )


def simple(session: SessionCore, request: type[wire.Request], *fields: Any) -> Op[int]:
    """A session verb that answers with a count."""
    reply = yield from call(session.core, wire.Done, request, session.id, *fields)
    return reply.count


def set_priority(session: SessionCore, priority: int) -> Op[None]:
    """Protect a session's blocks more (or less) from demotion."""
    yield from simple(session, wire.SetPriority, priority)
    session.priority = priority


def put_blob(session: SessionCore, data: bytes, node: int | None, version: int) -> Op[None]:
    """Replace the blob of a session or node; a version not above the stored one is a repeat."""
    if version < 1:
        raise InvalidArgument(f"blob version {version}: versions start at 1 and grow")
    place = wire.NO_NODE if node is None else node
    yield from simple(session, wire.PutBlob, place, version, bytes(data))


def get_blob(session: SessionCore, node: int | None) -> Op[tuple[int, bytes]]:
    """The version and the bytes of a blob; version 0 when none was stored."""
    place = wire.NO_NODE if node is None else node
    reply = yield from call(session.core, wire.Blob, wire.GetBlob, session.id, place)
    return reply.version, reply.data


def session_layout(session: SessionCore, layout: LayoutRef | None) -> Op[RegisteredLayout]:
    """The layout a call means: the one named, else the session's only one."""
    if layout is not None:
        known = yield from need_layout(session.core, layout)
        if known.fingerprint not in session.layouts:
            raise LayoutMismatch("the layout is not one of the session's: open it with the layout")
        return known
    if len(session.layouts) != 1:
        raise InvalidArgument(
            f"the session has {len(session.layouts)} layouts: name the one you mean"
        )
    return (yield from need_layout(session.core, session.layouts[0]))


# ------------------------------------------------------------------- leases


def reserve(
    core: Core,
    layout: LayoutRef,
    blocks: int,
    wait_s: float,
    ahead: int = 0,
    draw: Lease | None = None,
    ttl_s: float = 0.0,
) -> Op[Lease]:
    """Lease `blocks` slots for writing, waiting up to `wait_s` while eviction makes room."""
    known = yield from need_layout(core, layout)
    if draw is not None:
        draw.check_writable()

    def ask(slice_s: float) -> tuple[Any, ...]:
        counter, source = core.next_lease(), 0 if draw is None else draw.id
        return counter, known.fingerprint, blocks, ahead, source, slice_s, ttl_s

    asked_s, granted = yield from patiently(core, wire.Reserve, ask, wait_s)
    if len(granted.offsets) != 8 * blocks:
        raise ProtocolError(f"{blocks} slots were asked, {len(granted.offsets) // 8} granted")
    lease = core.granted(known, granted, True, asked_s)
    lease.promise = ahead
    if draw is not None:
        draw.promise = max(0, draw.promise - blocks)
    return lease


def commit(
    lease: Lease,
    session: SessionCore,
    node: int,
    pages: Any,
    valid: Any,
    retention: int,
    oneway: bool,
    index: Any,
) -> Op[None]:
    """Publish slots of a write lease as pages of a node."""
    count, packed_pages = page_numbers(pages)
    packed_valid = pack_u32(valid, "valid", count)
    chosen = None if index is None else np.atleast_1d(np.asarray(index))
    core = lease.core
    with core.lock:
        places = lease.name(count, chosen)
    order = np.argsort(np.frombuffer(packed_pages, "<u4"), kind="stable")  # a commit's pages rise
    places = places[order]
    packed_pages = np.frombuffer(packed_pages, "<u4")[order].tobytes()
    packed_valid = np.frombuffer(packed_valid, "<u4")[order].tobytes()
    sums = checksums(lease, places)
    send = core.send_oneway if oneway else core.send
    try:
        pending = send(
            wire.Commit,
            *(lease.id, session.id, node, places.tobytes(), packed_pages, packed_valid),
            *(retention, 0, sums),
            lease=lease,
        )
        if not oneway:
            yield from reply_of(core, pending, wire.Done)
    except RequestError:
        with core.lock:
            lease.unname(places)
        raise


def end_lease(lease: Lease) -> Op[None]:
    """Release a read lease; give back what a write lease has not committed."""
    core = lease.core
    pending = core.end_lease(lease)
    if pending is not None:
        with contextlib.suppress(LeaseExpired, InvalidArgument):  # it had ended by itself
            yield from reply_of(core, pending, wire.Done)


def acquire(
    session: SessionCore,
    pages: tuple[int, int],
    node: int,
    layout: LayoutRef | None,
    wait_s: float,
    ttl_s: float,
) -> Op[Lease]:
    """Lease a leading window of pages `first..last` (`last` excluded) for reading."""
    core = session.core
    known = yield from session_layout(session, layout)
    first, last = page_range(pages)

    def ask(slice_s: float) -> tuple[Any, ...]:
        counter = core.next_lease()
        return (counter, session.id, node, known.fingerprint, first, last - first, slice_s, ttl_s)

    asked_s, granted = yield from patiently(core, wire.Acquire, ask, wait_s)
    lease = core.granted(known, check_window(granted, last - first), False, asked_s)
    if lease.checksums:
        bad: list[int] = []
        try:
            size_bytes = len(lease.offsets) * known.block_bytes
            yield Run(lambda: bad.extend(mismatches(lease)), size_bytes)
            refuse(lease, bad, first)
        except BaseException:
            core.end_lease(lease)
            raise
    return lease


def renew(lease: Lease, ttl_s: float) -> Op[None]:
    """Make a lease live on. Errors: LeaseExpired."""
    lease.check_open()
    pending = lease.core.renew(lease, ttl_s)
    yield from reply_of(lease.core, pending, wire.Done)


def prefetch(
    session: SessionCore,
    pages: tuple[int, int],
    node: int,
    layout: LayoutRef | None,
    priority: int,
    deadline_s: float,
) -> Op[tuple[int, Pending]]:
    """Ask for pages to be brought into DRAM; returns the ticket and what ends with it."""
    core = session.core
    known = yield from session_layout(session, layout)
    first, last = page_range(pages)
    number, ticket = core.next_ticket(), Pending(None)
    with core.lock:
        core.tickets[number] = ticket
    try:
        yield from call(
            core,
            wire.Done,
            wire.Prefetch,
            *(number, session.id, node, known.fingerprint, first, last - first),
            *(priority, deadline_s),
        )
    except BaseException:
        with core.lock:
            core.tickets.pop(number, None)
        raise
    return number, ticket


def ticket_wait(core: Core, ticket: Pending, timeout_s: float) -> Op[wire.Ready]:
    """Wait until a prefetch has ended."""
    yield Wait((ticket,), timeout_s)
    return ticket.value(wire.Ready)


def ticket_cancel(core: Core, number: int) -> Op[None]:
    """Stop a prefetch; whoever waits for it gets what was loaded so far, if the daemon says."""
    yield from call(core, wire.Done, wire.Cancel, number)
    with core.lock:
        ticket = core.tickets.pop(number, None)
        if ticket is not None:
            ticket.end(wire.Ready(0, core.protocol.boot, 0, number, 0, 0))


def close(core: Core, timeout_s: float) -> Op[None]:
    """Give everything back before the connection is closed.

    Copies of other threads or tasks end first; one that takes longer than `timeout_s` keeps its
    slots. Whatever else the daemon keeps for this client ends with a Goodbye, which may take the
    rest of that time; what it could not be told by then ends with the process.
    Errors: the first failure of a one-way request that no flush has told; ConnectionLost when
    one-way commits were not acknowledged.
    """
    deadline_s = core.now_s() + timeout_s
    with core.lock:
        owing = core.protocol.owing
        core.ahead.drop()
        for pool in core.pools.values():
            pool.retire(core)
    while core.copying() and core.now_s() < deadline_s:
        yield Pause(FLUSH_PAUSE_S)
    if owing:
        yield from _say_goodbye(core, deadline_s)
    _raise_failures(core)


def _say_goodbye(core: Core, deadline_s: float) -> Op[None]:
    with core.lock:
        for lease in list(core.leases.values()):
            if not lease.busy:
                lease.close()
        commits = [p for p in core.protocol.unacked if isinstance(p.request, wire.Commit)]
        copying = [
            id for id in core.protocol.held if id not in core.leases or core.leases[id].busy
        ]  # a lease that only `held` knows is being read by the short way
        goodbye = core.send(wire.Goodbye, np.array(copying, "<u8").tobytes())
    try:
        yield Wait((goodbye,), max(0.0, deadline_s - core.now_s()))
    except TransportError as problem:
        left = sum(not one.done for one in commits)
        if left:
            raise ConnectionLost(
                f"the client closed before {left} one-way commits were acknowledged: their blocks "
                f"may not be stored ({problem})"
            ) from problem
