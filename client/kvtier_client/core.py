"""What one client knows, shared by its sync and its async shell: protocol, arena, leases, limits.

Operations (`ops.py`, `swap.py`) change it under `lock`; the shells move its bytes and wait.
"""

import os
import threading
import time
from collections import deque
from typing import Any, Final

import msgspec

from kvtier_client import wire
from kvtier_client.ahead import CHANGES, ReadAhead
from kvtier_client.arena import Arena
from kvtier_client.cost import CostModel
from kvtier_client.crew import Crew
from kvtier_client.errors import ConnectionLost, KvtierError
from kvtier_client.leases import Lease, RegisteredLayout, Renewal
from kvtier_client.pool import SlotPool
from kvtier_client.protocol import Pending, Protocol

DEFAULT_DEADLINE_S: Final = 30.0
FAILURES_LIMIT: Final = 1024
"""Failures of one-way requests that are kept until `flush`; the oldest make room."""


class Folded(msgspec.Struct, frozen=True):
    """Pages `(first, last)` (`last` excluded) of a node that are folded.

    `kept` entries of them stayed with the engine. While `grace_left_s` is above 0 they are HELD; at
    0 they may be dropped. Units: seconds of the daemon's running time, `math.inf` for no end.
    """

    pages: tuple[int, int]
    kept: int
    grace_left_s: float


class Unfolded(msgspec.Struct, frozen=True):
    """What was still there of folded pages `(first, last)`, all of it HELD now.

    `leading` pages from the first on are there, in all parts of the session; `gone` are those that
    are not. `loading` blocks are on their way from a slower tier.
    """

    pages: tuple[int, int]
    leading: int
    gone: tuple[int, ...]
    loading: int


class NodeState(msgspec.Struct, frozen=True):
    """One node of a session and what is stored of it.

    Shapes: `pages`, `valid` and `tiers` have one array per part of the session (one for each of
    its layouts, in their order); the three arrays of a part run in parallel.
    """

    node: int
    parent: int | None
    fork_tokens: int
    retention: int
    ended: bool
    blob_version: int
    pages: tuple[Any, ...]
    valid: tuple[Any, ...]
    tiers: tuple[Any, ...]
    folds: tuple[Folded, ...] = ()


class TicketResult(msgspec.Struct, frozen=True):
    """How a prefetch ended: blocks that are in DRAM now, and blocks that are not."""

    loaded: int
    failed: int


class Counters:
    """What this client has done, for its owner's statistics."""

    def __init__(self) -> None:
        self.swapped_out_bytes = 0
        self.swapped_in_bytes = 0
        self.put_bytes = 0
        self.got_bytes = 0
        self.restored_bytes = 0
        """Keyed blocks that had to come back from a slower tier before they were got."""
        self.read_ahead_blocks = 0
        self.changed_blocks = 0
        """Keyed blocks that were not what had been put: misses."""
        self.requests = 0
        self.reconnects = 0
        self.repeated_windows = 0
        self.pool_refills = 0
        self.arena_remaps = 0
        self.pressure = False

    def as_dict(self) -> dict[str, int]:
        """All of them by name."""
        return {name: int(value) for name, value in vars(self).items()}


class Core:
    """The state of one client."""

    def __init__(
        self,
        path: str,
        name: str,
        group: bytes,
        secret: bytes,
        deadline_s: float,
        prefault: bool,
        copy_threads: int,
    ) -> None:
        self.path = path
        self.deadline_s = deadline_s
        self.prefault = prefault
        self.lock = threading.RLock()
        self.crew = Crew(copy_threads)
        self.protocol = Protocol(name, group, secret)
        self.arena: Arena | None = None
        self.integrity = "spill"
        self.tenant = ""
        self.stats = Counters()
        self.cost = CostModel()
        self.layouts: dict[wire.Layout | bytes, RegisteredLayout] = {}
        self.leases: dict[int, Lease] = {}
        self.tickets: dict[int, Pending] = {}
        self.pools: dict[bytes, SlotPool] = {}
        self.ahead = ReadAhead(self)
        self.failures: deque[KvtierError] = deque(maxlen=FAILURES_LIMIT)
        self.now_s = time.monotonic
        self._pid = os.getpid()
        self._lease = 0
        self._ticket = 0
        self.greeting = Pending(None)
        """Ends with the first Welcome."""

    # ------------------------------------------------------------- requests

    def send(self, kind: type[wire.Request], *fields: Any, lease: Lease | None = None) -> Pending:
        """Build and queue a request with a reply."""
        with self.lock:
            self.stats.requests += 1
            request = kind(self.protocol.next_id(), *fields)
            self.before(request)
            pending = self.protocol.submit(request, lease)
            if lease is not None:
                lease.unsettled += 1
            return pending

    def send_oneway(
        self,
        kind: type[wire.Request],
        *fields: Any,
        lease: Lease | None = None,
        lazily: bool = False,
    ) -> Pending:
        """Build and queue a request without a reply.

        `lazily` as for `Protocol.submit`; under pressure nothing waits.
        """
        with self.lock:
            self.stats.requests += 1
            request = kind(self.protocol.next_id(), *fields)
            self.before(request)
            owner = self if lease is None else lease
            lazily = lazily and not self.stats.pressure
            pending = self.protocol.submit(request, owner, oneway=True, lazily=lazily)
            if lease is not None:
                lease.unsettled += 1
            return pending

    def settled(self, pending: Pending) -> None:
        """A one-way request about no lease has ended; `flush` tells of its failure."""
        if pending.error is not None:
            self.failures.append(pending.error)

    def before(self, request: wire.Request) -> None:
        """Nothing of a session that a request changes is read from what was leased before."""
        if self.ahead.streams and type(request) in CHANGES:
            self.ahead.drop(request.session)  # type: ignore[attr-defined]

    def abandon(self, pending: Pending) -> None:
        """Nobody waits for `pending` any more; what it was granted is given back."""
        with self.lock:
            if not pending.done:
                self.protocol.abandon(pending)
            elif isinstance(pending.reply, wire.Granted) and pending.reply.lease:
                lease = pending.reply.lease
                held = self.protocol.held.pop(lease, None)
                if held is not None:
                    self.send(wire.Abort if held.write else wire.Release, lease)

    def check_process(self) -> None:
        """Errors: ConnectionLost in a forked child, which has neither socket nor mapping."""
        if os.getpid() != self._pid:
            raise ConnectionLost(
                f"this client was opened by process {self._pid} and is used in its child "
                f"{os.getpid()}: open a client of its own after the fork"
            )

    def is_child(self) -> bool:
        """Whether this is a forked copy of the process that opened the client."""
        return os.getpid() != self._pid

    # --------------------------------------------------------------- leases

    def next_lease(self) -> int:
        """A 32-bit lease counter that no lease of this client has."""
        with self.lock:
            while True:
                self._lease = self._lease % 0xFFFFFFFF + 1
                if self.full_id(self._lease) not in self.protocol.held:
                    return self._lease

    def full_id(self, counter: int) -> int:
        """The id by which other verbs name the lease."""
        return max(self.protocol.member, 0) << 32 | counter

    def next_ticket(self) -> int:
        """A prefetch ticket that was never used before."""
        with self.lock:
            self._ticket += 1
            return self._ticket

    def granted(
        self, layout: RegisteredLayout, reply: wire.Granted, write: bool, asked_s: float
    ) -> Lease:
        """Enter a granted lease."""
        with self.lock:
            assert self.arena is not None, "a lease was granted before the arena was mapped"
            lease = Lease(self, self.arena, layout, reply, write, asked_s)
            self.leases[lease.id] = lease
            return lease

    def renew(self, lease: Lease, ttl_s: float) -> Pending:
        """Ask for `ttl_s` more from now on (0: as long as at first)."""
        with self.lock:
            ask_s = ttl_s if ttl_s > 0 else lease.ttl_s
            renewal = Renewal(lease, self.now_s(), ask_s)
            self.stats.requests += 1
            request = wire.Renew(self.protocol.next_id(), lease.id, ask_s)
            pending = self.protocol.submit(request, renewal)
            lease.renewing = True
            return pending

    def end_lease(self, lease: Lease, lazily: bool = False) -> Pending | None:
        """Begin nothing more under a lease and give back what it did not commit.

        `lazily`: a release may wait for the next request, or for `tidy`.
        The pending `Abort`, or None when there was nothing to abort.
        """
        with self.lock:
            if lease.closed:
                return None
            pending = None
            if not lease.write:
                self.send_oneway(wire.Release, lease.id, lease=lease, lazily=lazily)
            elif lease.unfinished:
                lease.aborted = True
                pending = self.send(wire.Abort, lease.id, lease=lease)
            lease.close()
            return pending

    def copying(self) -> bool:
        """Whether any operation is copying from or to leased slots."""
        with self.lock:
            return any(lease.busy for lease in self.leases.values())

    def limits(self) -> wire.Limits:
        """The daemon's limits. Errors: ConnectionLost before the first connection."""
        if self.protocol.limits is None:
            raise ConnectionLost(f"not connected to {self.path} yet: call connect() first")
        return self.protocol.limits

    # --------------------------------------------------------------- events

    def adopt_arena(self, fd: int) -> None:
        """Map the arena of the Welcome that is first in `events`, unless it is mapped already."""
        welcome = next(e for e in self.protocol.events if isinstance(e, wire.Welcome))
        arena = self.arena
        if arena is not None and arena.arena_id == welcome.arena_id:
            return
        mapped = Arena(fd, welcome.arena_id, welcome.arena_bytes)
        if self.prefault:
            mapped.populate()
        if arena is not None:
            self.stats.arena_remaps += 1
            for lease in self.leases.values():
                lease.lost = True
        self.arena = mapped

    def handle_events(self) -> None:
        """Carry out what the daemon told without being asked; call after each `receive`."""
        events = self.protocol.events
        while events:
            event = events.popleft()
            if isinstance(event, wire.Welcome):
                self._welcome(event)
            elif isinstance(event, wire.Ready):
                ticket = self.tickets.pop(event.ticket, None)
                if ticket is not None:
                    ticket.end(event)
            elif isinstance(event, wire.Pressure):
                self.stats.pressure = event.level > 0
                if event.level > 0:
                    self.ahead.drop()
                    for pool in self.pools.values():
                        pool.retire(self)
            else:
                self._revoke(event.lease)

    def _welcome(self, welcome: wire.Welcome) -> None:
        self.integrity, self.tenant = welcome.integrity, welcome.tenant
        for id in welcome.lost_leases:
            if id in self.leases:
                self.leases[id].lost = True
        if self.greeting.done:
            self.stats.reconnects += 1
            self.ahead.drop()
            for number, ticket in list(self.tickets.items()):
                del self.tickets[number]  # prefetches die with the daemon's life
                ticket.end(wire.Ready(0, welcome.boot, 0, number, 0, 0))
        else:
            self.greeting.end(welcome)

    def _revoke(self, id: int) -> None:
        self.ahead.revoked(id)
        lease = self.leases.get(id)
        if lease is None:
            return
        lease.revoked = True
        for pool in self.pools.values():
            pool.revoked(self, lease)

    def tidy(self) -> None:
        """Renew what is being copied and give back idle slots.

        Called now and then by the shells, so that an idle client keeps nothing from others.
        """
        with self.lock:
            now_s = self.now_s()
            for lease in list(self.leases.values()):
                if lease.copying and lease.renewal_due(now_s):
                    self.renew(lease, 0.0)
            for pool in self.pools.values():
                pool.tidy(self, now_s)
            self.ahead.tidy(now_s)

    def fail_all(self, error: KvtierError) -> None:
        """End everything that waits (the client closes)."""
        with self.lock:
            self.protocol.fail_all(error)
            for ticket in self.tickets.values():
                ticket.end(None, error)
            self.tickets.clear()
