"""Requests that wait for room: which of them goes on next.

    lanes, in their order ──► priorities, the highest first ──► groups, in turns ──► in order

Only the first of a line is tried, so that many waiting requests cost no more than a few, and so
that a large one is not passed by what came later.
"""

from collections.abc import Iterator
from enum import IntEnum
from typing import Final

from kvtier_client import wire
from kvtierd.core.leases import Peer, Ticket
from kvtierd.fair import FairQueue

_ONE_TENANT: Final = 0


class Lane(IntEnum):
    """Requests that wait, in the order of their lanes; each waits only behind its own lane.

    A reader never waits behind a writer, whose room may come from what the reader's client holds.
    """

    PROMISED = 0
    READ = 1
    WRITE = 2
    PREFETCH = 3


def lane_of(request: wire.Request) -> Lane:
    """The lane of a request that may wait."""
    if isinstance(request, wire.Reserve):
        return Lane.PROMISED if request.draw else Lane.WRITE
    if isinstance(request, wire.ReserveKeys):
        return Lane.WRITE
    return Lane.PREFETCH if isinstance(request, wire.Prefetch) else Lane.READ


Line = tuple[Lane, int, int]
"""Lane, priority (negative) and number of the pool."""


class Waiting:
    """The requests of one tenant that wait for room."""

    def __init__(self) -> None:
        self._lines: dict[Line, FairQueue[Ticket]] = {}
        self._tickets: dict[Ticket, Line] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(list(self._tickets))

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._tickets

    def of_group(self, peer: Peer) -> int:
        """How many are of a peer's group."""
        return sum(ticket.peer.group is peer.group for ticket in self._tickets)

    def append(self, ticket: Ticket) -> None:
        """It waits now."""
        line = lane_of(ticket.request), -ticket.priority, ticket.pool.number
        self._tickets[ticket] = line
        self._lines.setdefault(line, FairQueue()).put(_flow(ticket), ticket)

    def remove(self, ticket: Ticket) -> None:
        """It does not wait any more."""
        line, flow = self._tickets.pop(ticket), _flow(ticket)
        queue = self._lines[line]
        if queue.first(flow) is ticket:  # as nearly always
            queue.take(flow)
        else:
            queue.take_if(lambda each: each is ticket)
        queue.charge(flow, 1.0)
        if not queue:
            del self._lines[line]

    def lines(self) -> list[Line]:
        """All lines, in the order in which they go on."""
        return sorted(self._lines)

    def first(self, line: Line) -> Ticket | None:
        """Whose turn it is in a line."""
        queue = self._lines.get(line)
        return queue.first(queue.next_flow()) if queue else None


def _flow(ticket: Ticket) -> tuple[int, int]:
    return _ONE_TENANT, id(ticket.peer.group)
