"""What the sync and the async handles share: the values that need no daemon to answer."""

import os

import numpy as np
from numpy.typing import NDArray

from kvtier_client import wire
from kvtier_client.arena import Arena, Bytes, Offsets
from kvtier_client.core import Core, Counters
from kvtier_client.cost import CostModel
from kvtier_client.crew import usual_threads
from kvtier_client.errors import InvalidArgument
from kvtier_client.leases import Lease
from kvtier_client.ops import SessionCore
from kvtier_client.protocol import Pending, Phase


class ClientState:
    """A connection to kvtierd that survives its restarts."""

    def __init__(self, core: Core) -> None:
        self._core = core

    @property
    def connected(self) -> bool:
        """Whether there is a connection just now; a call makes one where there is none."""
        return self._core.protocol.phase is Phase.READY

    @property
    def boot_id(self) -> int:
        """The daemon's present life; another number means that it restarted."""
        return self._core.protocol.boot

    @property
    def limits(self) -> wire.Limits:
        """What the daemon accepts from one client."""
        return self._core.limits()

    @property
    def tenant(self) -> str:
        """The tenant that this process's uid belongs to."""
        return self._core.tenant

    @property
    def arena(self) -> Arena | None:
        """The mapping, once connected."""
        return self._core.arena

    @property
    def stats(self) -> Counters:
        """What this client has done."""
        return self._core.stats

    @property
    def cost(self) -> CostModel:
        """Swap or recompute, from this client's own timings."""
        return self._core.cost


class SessionState:
    """One request's KV in the daemon: a tree of nodes that only its end frees."""

    def __init__(self, session: SessionCore) -> None:
        self._session = session

    @property
    def token(self) -> bytes:
        """128 secret bits that resume the session, from any process of the tenant."""
        return self._session.token

    @property
    def id(self) -> int:
        """Its number, the same over restarts."""
        return self._session.id

    @property
    def created(self) -> bool:
        """Whether opening it made it, rather than found it."""
        return self._session.created

    @property
    def priority(self) -> int:
        """Higher is demoted later."""
        return self._session.priority

    @property
    def layouts(self) -> list[bytes]:
        """The fingerprints of its parts."""
        return self._session.layouts


class LeaseState:
    """Slots in the arena, until the lease ends."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    @property
    def id(self) -> int:
        """The id by which other members of the group name it."""
        return self._lease.id

    @property
    def offsets(self) -> Offsets:
        """Arena offsets of its slots. Shapes: [blocks]. Units: bytes."""
        return self._lease.offsets

    @property
    def blocks(self) -> list[Bytes]:
        """A view of every block in the arena. Shapes: each [block_bytes]."""
        return self._lease.blocks()

    @property
    def ended(self) -> bool:
        """Whether it was given back, ran out, or was lost in a restart."""
        return self._lease.closed or self._lease.lost or self._lease.revoked


class WriteState(LeaseState):
    """Slots to write."""

    @property
    def promise(self) -> int:
        """Blocks promised ahead that were not drawn yet."""
        return self._lease.promise


class ReadState(LeaseState):
    """Slots to read."""

    @property
    def valid(self) -> NDArray[np.uint32]:
        """Valid tokens of each block. Shapes: [blocks]."""
        return self._lease.valid


class TicketState:
    """A prefetch under way."""

    def __init__(self, number: int, pending: Pending) -> None:
        self._number = number
        self._pending = pending

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._pending.done


def new_core(
    socket_path: str | os.PathLike[str],
    name: str,
    deadline_s: float,
    group: bytes | None,
    secret: bytes | None,
    prefault: bool,
    copy_threads: int | None,
) -> Core:
    """The state of a new client; a group of its own unless one is given.

    Errors: InvalidArgument for less than one copy thread.
    """
    if copy_threads is not None and copy_threads < 1:
        raise InvalidArgument(f"copy_threads {copy_threads}: the caller's own thread is the first")
    return Core(
        os.fspath(socket_path),
        name or f"pid-{os.getpid()}",
        os.urandom(16) if group is None else group,
        os.urandom(16) if secret is None else secret,
        deadline_s,
        prefault,
        usual_threads() if copy_threads is None else copy_threads,
    )
