"""Client groups, their members, and the leases they hold on slots and rows.

    write lease:  reserved ──commit of every slot, abort──► ended
                  reserved ──deadline──► QUARANTINED ──abort, or death of the group──► ended
    read lease:   granted ──release──► ended
                  granted ──deadline──► over time (kept: a DMA may still read) ──release, death──►

A lease is identified by `member << 32 | counter`; the client chooses the counter, so that a
repeated request finds its first result. Silence never ends a group: only its processes' death,
or its own acknowledgement, frees what it could still be writing or reading.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtier_client.errors import InvalidArgument
from kvtier_client.wire import Request
from kvtierd.core.blocks import Places, Rows, Slots

if TYPE_CHECKING:
    from kvtierd.core.tenant import Pool, Tenant

MEMBERS_MAX: Final = 1024
FIRST_RECOVERED_ID: Final = 1 << 48
"""From here: leases that stand for what clients of an earlier life may still read. Bits 32-47 say
whose, like those of every lease."""
ENDED_MAX: Final = 4096
"""Ended leases whose result a group's repeats still get."""


class Kind(Enum):
    """What a lease permits."""

    WRITE = 1
    READ = 2
    PIN = 3  # a lookup's: the blocks cannot be dropped


@dataclass(slots=True, eq=False)
class Member:
    """One client process of a group; `index` is its place in the arena's client table."""

    index: int
    group: "Group"
    pid: int
    start_time: int
    uid: int
    alive: bool = True
    returned: bool = True  # False: of an earlier life, and it has not come back yet
    listed: bool = True  # in the arena's client table, since it may hold leases


@dataclass(slots=True, eq=False)
class Group:
    """The connections of one engine; owns leases and opens sessions."""

    id: bytes
    secret_hash: bytes
    tenant: "Tenant"
    members: list[Member] = field(default_factory=list)
    leases: dict[int, "Lease"] = field(default_factory=dict)
    sessions: set[int] = field(default_factory=set)
    ended: "dict[int, tuple[int, Pool]]" = field(default_factory=dict)  # the oldest first
    peers: "set[Peer]" = field(default_factory=set)
    idle_since_s: float = 0.0  # when its last connection closed

    @property
    def returned(self) -> bool:
        """Whether none of its living processes is still missing after a restart."""
        return all(member.returned or not member.alive for member in self.members)

    @property
    def alive(self) -> bool:
        """Whether any of its processes still runs."""
        return any(member.alive for member in self.members)


class Lease(msgspec.Struct, eq=False):
    """A group's right to slots of one pool.

    `slots` of a write lease turn to -1 as they are committed; `rows` belong to read leases and
    pins. `promise` is the capacity, in blocks, that is still promised beyond the slots.
    """

    id: int
    group: Group
    pool: "Pool"
    kind: Kind
    deadline_s: float
    array: Slots | None
    rows: Rows
    offsets: bytes
    valid: bytes = b""
    checksums: bytes = b""
    index: bytes = b""
    left: int = 0
    promise: int = 0
    expired: bool = False
    recovered: bool = False  # found in the headers of an earlier life, not claimed yet
    restored: int = 0  # blocks of a read lease that had to come from a slower tier
    one: int = -1  # the only slot, while no array was needed for it

    @property
    def slots(self) -> Slots:
        """The slots as an array, made when it is first asked for."""
        if self.array is None:
            self.array = np.array((self.one,), np.int64)
            self.one = -1
        return self.array

    def slot_at(self, index: int) -> int:
        """One slot of a write lease; -1 where there is none, or none any more."""
        if self.array is None:
            return -1 if index else self.one
        return self.array.item(index) if index < len(self.array) else -1


@dataclass(slots=True, eq=False)
class Peer:
    """One connection as the core sees it; `conn` is the server's own."""

    conn: object
    group: Group
    member: Member
    boot: int
    handled: int = 0  # the highest number of a one-way request so far
    unstored: list[int] = field(default_factory=list)  # of those that the catalog does not have
    tickets: dict[int, "Ticket"] = field(default_factory=dict)  # prefetch tickets
    open: bool = True

    @property
    def acked(self) -> int:
        """Up to which number one-way requests were carried out, and survive this daemon."""
        return min(self.handled, *self.unstored) - 1 if self.unstored else self.handled


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that waits: for room (`loading` false) or for blocks on their way to DRAM."""

    peer: Peer
    request: Request
    pool: "Pool"
    deadline_s: float
    rows: Rows
    divided: dict[int, int] = field(default_factory=dict)
    seqs: NDArray[np.uint64] | None = None  # of rows, once they are loading
    loading: bool = False
    prefetch: bool = False
    ended: bool = False  # a prefetch that was reported to its peer
    priority: int = 0
    asked: int = 0
    restored: int = 0  # blocks that were fetched from a slower tier for it


def owner_of(lease_id: int) -> int:
    """The member that a lease is of; NO_OWNER for what several may read."""
    return lease_id >> 32 & 0xFFFF


def unpack_u32(packed: bytes) -> NDArray[np.int64]:
    """Packed u32 values as int64. Errors: InvalidArgument when the length does not fit."""
    if len(packed) % 4:
        raise InvalidArgument(f"u32 values have 4 bytes each; {len(packed)} bytes do not fit")
    return np.frombuffer(packed, "<u4").astype(np.int64)


def unpack_u64(packed: bytes) -> NDArray[np.uint64]:
    """Packed u64 values. Errors: InvalidArgument when the length does not fit."""
    if len(packed) % 8:
        raise InvalidArgument(f"u64 values have 8 bytes each; {len(packed)} bytes do not fit")
    return np.frombuffer(packed, "<u8")


def unpack_places(packed: bytes) -> Places:
    """Packed u32 values as an index: a slice where they count up by one. Errors: as above."""
    n, first = len(packed) // 4, int.from_bytes(packed[:4], "little")
    if n and packed == np.arange(first, first + n, dtype="<u4").tobytes():
        return slice(first, first + n)
    return unpack_u32(packed)


def pack_u32(values: NDArray[np.generic]) -> bytes:
    """Values as packed little-endian u32."""
    return values.astype("<u4").tobytes()


def pack_u64(values: NDArray[np.generic]) -> bytes:
    """Values as packed little-endian u64."""
    return values.astype("<u8").tobytes()
