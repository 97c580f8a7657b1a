"""Whole copies: swap-out and swap-in, in windows, repeated where needed.

While one window is copied the next one is already asked for. No window is waited for while
another is held uncommitted, so two half-finished copies can never wait for each other.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier_client import wire
from kvtier_client.arena import pack_u32
from kvtier_client.core import Core
from kvtier_client.effects import Op, Run, Wait, check_window, patiently, reply_of
from kvtier_client.errors import (
    CapacityError,
    LeaseExpired,
)
from kvtier_client.integrity import checksums, mismatches, refuse
from kvtier_client.leases import Lease, RegisteredLayout
from kvtier_client.ops import LayoutRef, SessionCore, reserve, session_layout
from kvtier_client.pages import neighbours, page_numbers, page_runs
from kvtier_client.pool import SlotPool
from kvtier_client.protocol import Pending
from kvtier_client.records import Copier, Records, copier
from kvtier_client.single import (
    LAZY_RELEASE_BYTES,
    in_one,
    out_one,
    pool_of,
    settle_some,
    single_of,
)

WINDOW_BYTES: Final = 256 << 20
"""Most bytes that one window of a copy leases."""
WINDOW_ARENA_SHARE: Final = 4
"""A window leases at most this fraction (1/4) of the arena, as the next one is asked for too."""
WINDOW_ATTEMPTS: Final = 8
"""How often a window is copied again because its lease was lost on the way."""


def window_blocks(core: Core, layout: RegisteredLayout) -> int:
    """How many blocks one window has."""
    assert core.arena is not None
    most_bytes = min(WINDOW_BYTES, core.arena.size_bytes // WINDOW_ARENA_SHARE)
    return max(1, min(core.limits().blocks_per_request, most_bytes // layout.slot_bytes))


def rising(pages: bytes) -> bool:
    """Whether packed page numbers rise, as a commit names them."""
    numbers = np.frombuffer(pages, "<u4")
    return bool((numbers[1:] > numbers[:-1]).all())


# ----------------------------------------------------------------- swap-out


class OutJob:
    """One swap-out: what goes where."""

    __slots__ = (
        *("ack", "core", "copier", "deadline_s", "draw", "first", "layout", "n"),
        *("node", "pages", "retention", "scattered", "session", "valid"),
    )

    def __init__(
        self, session: SessionCore, layout: RegisteredLayout, pages: Any, valid: Any
    ) -> None:
        self.core = session.core
        self.session = session
        self.layout = layout
        self.first = -1
        """The first page, while `pages` are neighbours that are not packed yet."""
        self.pages = b""
        self.scattered = False
        self.valid: Any = valid
        run = neighbours(pages)
        if run is None:
            self.n, self.pages = page_numbers(pages)
            self.valid = pack_u32(valid, "valid", self.n)
            self.scattered = not rising(self.pages)
        else:
            self.first, self.n = run
        self.node = 0
        self.retention = wire.HELD
        self.ack = True
        self.deadline_s = 0.0
        self.draw: Lease | None = None
        self.copier: Copier

    def prepare(self) -> None:
        """What can wait until the first slots are asked for. Errors: InvalidArgument."""
        self.copier.prepare()
        if self.first >= 0:
            self.pages = np.arange(self.first, self.first + self.n, dtype="<u4").tobytes()
            self.valid = pack_u32(self.valid, "valid", self.n)
            self.first = -1

    def send_commit(
        self, lease: Lease, first: int, i: int, j: int, lazily: bool = False
    ) -> Pending:
        """Name slots `first..` of a lease as blocks `i..j` of the job.

        `lazily`: without `ack` it may wait for the next request.
        """
        core, count = self.core, j - i
        pages, valid = self.pages[4 * i : 4 * j], self.valid[4 * i : 4 * j]
        if count == 1:
            index, sums = first.to_bytes(4, "little"), b""
            if core.integrity == "end_to_end":
                sums = checksums(lease, np.array([first], np.uint32))
        else:
            places = np.arange(first, first + count, dtype="<u4")
            if self.scattered:
                order = np.argsort(np.frombuffer(pages, "<u4"), kind="stable")
                places = places[order]
                pages = np.frombuffer(pages, "<u4")[order].tobytes()
                valid = np.frombuffer(valid, "<u4")[order].tobytes()
            index, sums = places.tobytes(), checksums(lease, places)
        names = (lease.id, self.session.id, self.node, index, pages, valid)
        fields = (*names, self.retention, 0, sums)
        if self.ack:
            pending = core.send(wire.Commit, *fields, lease=lease)
        else:
            pending = core.send_oneway(wire.Commit, *fields, lease=lease, lazily=lazily)
        lease.named_blocks += count
        return pending

    def copy(self, lease: Lease, first: int, i: int, j: int) -> Op[None]:
        """Copy blocks `i..j` into slots `first..` of a lease."""
        slots = lease.slots(first, j - i)
        yield Run(
            lambda: self.copier.store(slots, i, self.core.crew), (j - i) * self.layout.block_bytes
        )


def swap_out(
    session: SessionCore,
    records: Records,
    pages: Any,
    valid: Any,
    node: int,
    layout: LayoutRef | None,
    retention: int,
    wait_s: float,
    ack: bool,
    draw: Lease | None,
) -> Op[None]:
    """Store records as pages of a node; see `Session.swap_out`."""
    core = session.core
    known = yield from session_layout(session, layout)
    if type(pages) is int and type(valid) is int and draw is None:
        single = single_of(session, layout, node, pages, records)
        if single is not None and (yield from out_one(single, valid, retention, ack)):
            return
    job = OutJob(session, known, pages, valid)
    n = job.n
    if n == 0:
        return
    job.node, job.retention, job.ack, job.draw = node, retention, ack, draw
    job.copier = copier(records, n, known.block_bytes, False)
    if not ack:
        yield from settle_some(core)
    if draw is None:
        pool = pool_of(core, known)
        if pool is not None and n <= pool.largest and (yield from _out_pooled(job, pool)):
            core.stats.swapped_out_bytes += n * known.block_bytes
            return
    job.deadline_s = core.now_s() + wait_s
    step = window_blocks(core, known)
    todo = [(i, min(i + step, n)) for i in range(0, n, step)]
    for _ in range(WINDOW_ATTEMPTS):
        todo = yield from _out_windows(job, todo)
        if not todo:
            core.stats.swapped_out_bytes += n * known.block_bytes
            return
        core.stats.repeated_windows += len(todo)
    raise LeaseExpired(
        f"{len(todo)} windows of a swap-out lost their lease {WINDOW_ATTEMPTS} times: the daemon "
        "restarts again and again, or copies take longer than limits.lease_ttl_s"
    )


def _out_pooled(job: OutJob, pool: SlotPool) -> Op[bool]:
    """Swap out through pre-granted slots; False when the plain way must be taken."""
    core = job.core
    job.prepare()
    with core.lock:
        taken = pool.take(core, job.n)
        refill = None if taken is not None else pool.ask(core)
    if taken is None:
        if refill is None:
            return False
        if not refill.done:
            yield Wait((refill,), core.deadline_s)  # stays the pool's, whatever becomes of us
        with core.lock:
            pool.filled(core, refill)
            taken = pool.take(core, job.n)
        if taken is None:
            return False
    lease, first = taken
    try:
        yield from job.copy(lease, first, 0, job.n)
        pending = job.send_commit(lease, first, 0, job.n, lazily=True)
    finally:
        with core.lock:
            pool.leave(core, lease)
    if job.ack:
        try:
            yield from reply_of(core, pending, wire.Done)
        except LeaseExpired:
            core.stats.repeated_windows += 1
            return False
    return True


class Ask:
    """A lease asked for ahead of its use."""

    __slots__ = ("asked_s", "pending")

    def __init__(self, core: Core, request: type[wire.Request], *fields: Any) -> None:
        self.asked_s = core.now_s()
        self.pending = core.send(request, core.next_lease(), *fields)

    def drop(self, core: Core) -> None:
        """It is not needed: it is given back, now or when the grant comes."""
        core.abandon(self.pending)


def _out_ask(job: OutJob, i: int, j: int) -> Ask:
    core, draw = job.core, job.draw
    wait_s = min(max(0.0, job.deadline_s - core.now_s()), core.limits().wait_max_s)
    source = draw.id if draw is not None and not draw.lost else 0
    return Ask(core, wire.Reserve, job.layout.fingerprint, j - i, 0, source, wait_s)


def _out_lease(job: OutJob, ask: Ask, i: int, j: int) -> Op[Lease]:
    """The lease that was asked for; asked again while the job's wait is not over."""
    core = job.core
    try:
        granted = yield from reply_of(
            core, ask.pending, wire.Granted, max(0.0, job.deadline_s - ask.asked_s)
        )
    except LeaseExpired:
        if job.draw is None:
            raise
        job.draw = None  # the promise went with an earlier life of the daemon
    except CapacityError:
        if core.now_s() >= job.deadline_s:
            raise
    else:
        lease = core.granted(job.layout, granted, True, ask.asked_s)
        if job.draw is not None:
            job.draw.promise = max(0, job.draw.promise - (j - i))
        return lease
    left_s = max(0.0, job.deadline_s - core.now_s())
    return (yield from reserve(core, job.layout.fingerprint, j - i, left_s))


def _out_windows(job: OutJob, windows: list[tuple[int, int]]) -> Op[list[tuple[int, int]]]:
    """Copy windows out; returns those whose lease was lost on the way."""
    core = job.core
    commits: list[tuple[tuple[int, int], Pending]] = []
    ask: Ask | None = _out_ask(job, *windows[0])
    try:
        yield Run(job.prepare, 0)  # while the first request is on its way
        for k, (i, j) in enumerate(windows):
            assert ask is not None
            lease = yield from _out_lease(job, ask, i, j)
            ask = _out_ask(job, *windows[k + 1]) if k + 1 < len(windows) else None
            started_s = core.now_s()
            lease.begin()
            try:
                yield from job.copy(lease, 0, i, j)
                commits.append(((i, j), job.send_commit(lease, 0, i, j)))
            finally:
                core.end_lease(lease)
            moved_bytes = (j - i) * job.layout.block_bytes
            core.cost.observe_swap("dram", moved_bytes, core.now_s() - started_s)
    except BaseException:
        if ask is not None:
            ask.drop(core)
        raise
    return (yield from _lost_windows(job, commits))


def _lost_windows(
    job: OutJob, commits: list[tuple[tuple[int, int], Pending]]
) -> Op[list[tuple[int, int]]]:
    lost: list[tuple[int, int]] = []
    for window, pending in commits if job.ack else []:
        try:
            yield from reply_of(job.core, pending, wire.Done)
        except LeaseExpired:
            lost.append(window)
    return lost


# ------------------------------------------------------------------ swap-in


class InJob:
    """One swap-in: what comes from where."""

    __slots__ = ("copier", "core", "deadline_s", "layout", "node", "session", "valid")

    def __init__(
        self, session: SessionCore, layout: RegisteredLayout, node: int, deadline_s: float
    ) -> None:
        self.core = session.core
        self.session = session
        self.layout = layout
        self.node = node
        self.deadline_s = deadline_s
        self.valid: NDArray[np.uint32]
        self.copier: Copier

    def ask(self, first: int, count: int) -> Ask:
        """Ask for a window that starts at page `first`."""
        core = self.core
        wait_s = min(max(0.0, self.deadline_s - core.now_s()), core.limits().wait_max_s)
        return Ask(
            core,
            wire.Acquire,
            *(self.session.id, self.node, self.layout.fingerprint, first, count, wait_s),
        )

    def lease(self, ask: Ask, first: int, count: int) -> Op[Lease]:
        """The window that was asked for; asked again while the job's wait is not over."""
        core = self.core
        extra_s = max(0.0, self.deadline_s - ask.asked_s)
        try:
            granted = yield from reply_of(core, ask.pending, wire.Granted, extra_s)
        except CapacityError:
            left_s = self.deadline_s - core.now_s()
            if left_s <= 0:
                raise
            place = (self.session.id, self.node, self.layout.fingerprint, first, count)
            asked_s, granted = yield from patiently(
                core, wire.Acquire, lambda wait_s: (core.next_lease(), *place, wait_s), left_s
            )
            return core.granted(self.layout, check_window(granted, count), False, asked_s)
        return core.granted(self.layout, check_window(granted, count), False, ask.asked_s)


def swap_in(
    session: SessionCore,
    records: Records,
    pages: Any,
    node: int,
    layout: LayoutRef | None,
    wait_s: float,
) -> Op[NDArray[np.uint32]]:
    """Bring pages of a branch back; see `Session.swap_in`."""
    core = session.core
    known = yield from session_layout(session, layout)
    if type(pages) is int:
        single = single_of(session, layout, node, pages, records)
        if single is not None and single.row.flags.writeable:
            tokens = yield from in_one(single, wait_s)
            if tokens is not None:
                return np.array([tokens], np.uint32)
    runs = page_runs(pages)
    n = sum(count for _, count in runs)
    job = InJob(session, known, node, core.now_s() + wait_s)
    job.valid = np.empty(n, np.uint32)
    if n == 0:
        return job.valid
    job.copier = copier(records, n, known.block_bytes, True)
    i = 0
    for first, count in runs:
        yield from _in_run(job, i, first, count)
        i += count
    core.stats.swapped_in_bytes += n * known.block_bytes
    return job.valid


def _in_run(job: InJob, i: int, first: int, count: int) -> Op[None]:
    """Copy neighbouring pages in, window by window, to records `i..`."""
    core = job.core
    most = core.limits().blocks_per_request
    done = lost = 0
    ask: Ask | None = job.ask(first, min(count, most))
    try:
        if i == 0:
            yield Run(job.copier.prepare, 0)  # while the first request is on its way
        while ask is not None:
            began_s = core.now_s()
            lease = yield from job.lease(ask, first + done, min(count - done, most))
            got = len(lease.offsets)
            left = count - done - got
            ask = job.ask(first + done + got, min(left, most)) if left else None
            whole = yield from _in_window(job, lease, i + done, first + done, began_s)
            if not whole:
                lost += 1
                core.stats.repeated_windows += 1
                if lost >= WINDOW_ATTEMPTS:
                    raise LeaseExpired(
                        f"page {first + done} lost its read lease {lost} times while it was copied"
                    )
                if ask is not None:
                    ask.drop(core)
                ask = job.ask(first + done, min(count - done, most))
                continue
            done += got
    except BaseException:
        if ask is not None:
            ask.drop(core)
        raise


def _in_window(job: InJob, lease: Lease, i: int, page: int, began_s: float) -> Op[bool]:
    """Copy one window in and release it; False when its lease was lost meanwhile."""
    core, got = job.core, len(lease.offsets)
    size_bytes = got * job.layout.block_bytes
    copy_s = core.now_s()
    bad: list[int] = []
    lease.begin()
    try:
        slots = lease.slots(0, got)
        yield Run(lambda: job.copier.load(slots, i, core.crew), size_bytes)
        if lease.checksums:
            yield Run(lambda: bad.extend(mismatches(lease)), size_bytes)
        refuse(lease, bad, page)
        whole = not lease.lost
    finally:
        core.end_lease(lease, lazily=size_bytes <= LAZY_RELEASE_BYTES)
    job.valid[i : i + got] = lease.valid
    slow = 2 * lease.restored > got
    core.cost.observe_swap(
        "nvme" if slow else "dram", size_bytes, core.now_s() - (began_s if slow else copy_s)
    )
    return whole
