"""Whose turn it is: of all that wait, the one who has had least goes next.

Shares are counted twice, among tenants and among the clients of each tenant, so that a tenant with
many clients gets no more than one with a single client. Who was idle begins where the others are:
nothing is saved up, and who asks seldom is served at once (start-time fair queuing: Goyal, Vin and
Cheng, SIGCOMM 1996, with the cost charged when it is known).
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Generic, TypeVar

T = TypeVar("T")
Flow = tuple[int, int]
"""Who something is done for: a tenant's number, and one of its client processes."""
OWN_WORK: Final = -1
"""In a client's place: what the daemon does for the tenant by itself; in a tenant's: for operators.
"""
SHARES_MAX: Final = 4096
"""Clients, or tenants, whose shares are remembered; with more, all begin anew."""


class FairQueue(Generic[T]):
    """Items that wait, in order for each client."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[int, deque[T]]] = {}
        self._tenants = _Shares()
        self._clients: dict[int, _Shares] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, flow: Flow, item: T) -> None:
        """Have an item wait behind those of its client."""
        tenant, client = flow
        clients = self._waiting.get(tenant)
        if clients is None:
            clients = self._waiting[tenant] = {}
            self._tenants.join(tenant, self._waiting)
            self._clients.setdefault(tenant, _Shares())
        items = clients.get(client)
        if items is None:
            items = clients[client] = deque()
            self._clients[tenant].join(client, clients)
        items.append(item)
        self._count += 1

    def next_flow(self) -> Flow:
        """Who has had least of those that wait."""
        tenant = self._tenants.least(self._waiting)
        return tenant, self._clients[tenant].least(self._waiting[tenant])

    def first(self, flow: Flow) -> T:
        """The item that a client waits with."""
        return self._waiting[flow[0]][flow[1]][0]

    def take(self, flow: Flow) -> T:
        """Take a client's first item out; `charge` says later what it cost."""
        tenant, client = flow
        item = self._waiting[tenant][client].popleft()
        self._count -= 1
        self._tidy(tenant, client)
        return item

    def take_if(self, wanted: Callable[[T], bool]) -> list[T]:
        """Take out all items that are wanted elsewhere."""
        taken: list[T] = []
        for tenant, clients in list(self._waiting.items()):
            for client, items in list(clients.items()):
                found = [item for item in items if wanted(item)]
                for item in found:
                    items.remove(item)
                self._tidy(tenant, client)
                taken += found
        self._count -= len(taken)
        return taken

    def _tidy(self, tenant: int, client: int) -> None:
        """Those without items do not wait."""
        clients = self._waiting[tenant]
        if not clients[client]:
            del clients[client]
            if not clients:
                del self._waiting[tenant]

    def charge(self, flow: Flow, cost: float) -> None:
        """A client has had something, by way of the queue or past it."""
        tenant, client = flow
        self._tenants.charge(tenant, cost)
        shares = self._clients.get(tenant)
        if shares is None:
            shares = self._clients[tenant] = _Shares()
        shares.charge(client, cost)


class _Shares:
    """How much each of several has had."""

    __slots__ = ("_floor", "_had")

    def __init__(self) -> None:
        self._had: dict[int, float] = {}
        self._floor = 0.0

    def join(self, key: int, waiting: Iterable[int]) -> None:
        """It waits now, and begins where those are that are served."""
        if len(self._had) > SHARES_MAX:
            self._floor = max(self._had.values())
            self._had = dict.fromkeys(waiting, self._floor)
        self._had[key] = max(self._had.get(key, 0.0), self._floor)

    def least(self, among: Iterable[int]) -> int:
        """Who of those that wait has had least."""
        had = self._had
        key = min(among, key=had.__getitem__)
        self._floor = max(self._floor, had[key])
        return key

    def charge(self, key: int, cost: float) -> None:
        """It has had more."""
        self._had[key] = max(self._had.get(key, 0.0), self._floor) + cost
