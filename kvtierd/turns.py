"""Shares the event loop's time between clients, and measures how long their requests take.

    a turn of the loop: sockets are read ──► requests that wait, one by one, for SLICE_S ──► again

A request is carried out as soon as it is read while nobody waits and the slice of this turn is not
used up. What comes then waits: each time, the client that has had least of the loop's time is
served. So a flood, or a client with large requests, costs the others one slice and one request.
"""

import asyncio
import time
from typing import Final, Protocol

from kvtierd.fair import FairQueue, Flow

SLICE_S: Final = 0.0001
"""Time for requests before the sockets are looked at again; at least one that waits is served."""
POLL_S: Final = 0.00005
"""Bytes read sooner than this after a turn has ended may have come while it lasted."""
FINE: Final = 16
"""Classes of a duration within a factor of two."""


class Waiting(Protocol):
    """A connection with requests that were read but not carried out."""

    flow: Flow
    served: "Served | None"

    def serve_one(self) -> bool:
        """Carry out one request; whether there is another."""
        ...


class Served:
    """What was done for one client process.

    Units: a duration is from when the daemon may have had the request to when its reply was
    written. Replies that wait for room, for NVMe or for the catalog are not among them.
    """

    __slots__ = ("busy_s", "classes", "connections", "requests")

    def __init__(self) -> None:
        self.connections = 0
        self.requests = 0
        self.busy_s = 0.0
        self.classes: dict[int, int] = {}
        """Requests by the class of their duration."""

    def add(self, duration_s: float) -> None:
        """A request was answered."""
        us16 = int(duration_s * 16e6)
        shift = max(us16.bit_length() - FINE.bit_length(), 0)
        place = shift * FINE + (us16 >> shift)
        self.classes[place] = self.classes.get(place, 0) + 1
        self.requests += 1

    def absorb(self, other: "Served") -> None:
        """Count what was done for another one, too."""
        self.requests += other.requests
        self.busy_s += other.busy_s
        for place, count in other.classes.items():
            self.classes[place] = self.classes.get(place, 0) + count

    def quantile_s(self, part: float) -> float:
        """The duration that this part of the requests did not exceed, to a sixteenth; 0 of none."""
        left = part * self.requests
        for place in sorted(self.classes):
            left -= self.classes[place]
            if left <= 0:
                shift = max(place // FINE - 1, 0)
                return float((place - shift * FINE + 1) << shift) / 16e6
        return 0.0

    def report(self) -> dict[str, float]:
        """The same for operators."""
        return {
            "requests": self.requests,
            "busy_s": round(self.busy_s, 6),
            **{f"p{part}_s": self.quantile_s(part / 100) for part in (50, 99)},
            "longest_s": self.quantile_s(1.0),
        }


class Turns:
    """The order in which connections are served; lives on the event loop's thread."""

    def __init__(self) -> None:
        self._queue: FairQueue[Waiting] = FairQueue()
        self._scheduled = False
        self._begun = False
        """Something was read in this turn."""
        self._left_s = 0.0
        """What is left of this turn's slice."""
        self._came_s = 0.0
        """Before this, nothing that is read in this turn can have come."""
        self._looked_s = 0.0
        """When the sockets were last looked at."""
        self._ended_s = 0.0
        """When the last turn had ended."""
        self.served: dict[Flow, Served] = {}
        """By client process, as long as it has a connection."""
        self._past: dict[int, Served] = {}
        """By tenant: what was done for clients that are gone."""

    # ------------------------------------------------------------ who is there

    def enter(self, flow: Flow) -> Served:
        """A connection of a client begins."""
        served = self.served.setdefault(flow, Served())
        served.connections += 1
        return served

    def leave(self, flow: Flow) -> None:
        """A connection of a client has ended."""
        served = self.served[flow]
        served.connections -= 1
        if not served.connections:
            del self.served[flow]
            self._past.setdefault(flow[0], Served()).absorb(served)

    def of_tenant(self, tenant: int) -> Served:
        """What was done for all clients of a tenant since the start."""
        total = Served()
        if tenant in self._past:
            total.absorb(self._past[tenant])
        for flow, served in self.served.items():
            if flow[0] == tenant:
                total.absorb(served)
        return total

    # ------------------------------------------------------------ turns

    @staticmethod
    def now_s() -> float:
        """The time by which requests are measured."""
        return time.monotonic()

    def begin(self) -> float:
        """Bytes were read. Returns a time before which they cannot have come."""
        if not self._begun:
            self._begun = True
            now_s = time.monotonic()
            waited = now_s - self._ended_s > POLL_S  # for them, with nothing else to do
            self._came_s = now_s if waited else self._looked_s
            self._looked_s = now_s
            self._left_s = SLICE_S
            self._schedule()
        return self._came_s

    @property
    def open(self) -> bool:
        """Whether a request may be carried out as soon as it is read."""
        return self._left_s > 0.0 and not self._queue

    def wait(self, connection: Waiting) -> None:
        """A connection has a request that waits."""
        self._queue.put(connection.flow, connection)
        self._schedule()

    def did(self, connection: Waiting, began_s: float, came_s: float, *, answered: bool) -> None:
        """A request was carried out; `answered` says that its reply is written or not wanted."""
        now_s = time.monotonic()
        took_s = now_s - began_s
        self._left_s -= took_s
        self._queue.charge(connection.flow, took_s)
        served = connection.served
        if served is not None:
            served.busy_s += took_s
            if answered:
                served.add(now_s - came_s)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        """Serve those that wait for one slice, then let the sockets be read."""
        queue, self._scheduled = self._queue, False
        if not self._begun:  # the sockets were looked at, and nothing was there
            self._looked_s = self._ended_s
        self._begun = False
        self._left_s = SLICE_S
        while queue:
            connection = queue.take(queue.next_flow())
            if connection.serve_one():
                queue.put(connection.flow, connection)
            if self._left_s <= 0.0:
                break
        if queue:
            self._schedule()
        self._ended_s = time.monotonic()
