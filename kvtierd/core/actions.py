"""What the core asks the daemon to do. Actions of one event are carried out in their order."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvtier_client.wire import Reply
from kvtierd.core.blocks import Rows, Slots

if TYPE_CHECKING:
    from kvtierd.core.leases import Member, Peer
    from kvtierd.core.tenant import Pool, Tenant
    from kvtierd.core.tree import Node, Session


@dataclass(slots=True)
class Send:
    """Send a reply or a push to a peer."""

    peer: "Peer"
    message: Reply


@dataclass(slots=True)
class Publish:
    """Write the header bodies of rows whose DRAM slots have just become READY."""

    pool: "Pool"
    rows: Rows
    slots: Slots
    lease: int


@dataclass(slots=True)
class PublishOne:
    """`Publish` for one row."""

    pool: "Pool"
    row: int
    slot: int
    lease: int


@dataclass(slots=True)
class AssignSlab:
    """Record in a tier's slab directory whose a slab is; `tenant` None means NVMe."""

    tenant: "Tenant | None"
    slab: int
    pool: "Pool | None"


@dataclass(slots=True)
class Demote:
    """Copy blocks DRAM -> NVMe; answer with `State.demoted`."""

    batch: int
    pool: "Pool"
    rows: Rows
    src: Slots
    dst: Slots
    urgent: bool


@dataclass(slots=True)
class Promote:
    """Copy blocks NVMe -> DRAM and verify them; answer with `State.promoted`."""

    batch: int
    pool: "Pool"
    rows: Rows
    src: Slots
    dst: Slots
    checksums: NDArray[np.uint64]
    urgent: bool


@dataclass(slots=True)
class Clear:
    """Clear the words of NVMe slots on the medium; answer with `State.cleared`."""

    batch: int
    pool: "Pool"
    slots: Slots


@dataclass(slots=True)
class RecordMember:
    """Write a client process into (or, when it is gone, out of) the arena's client table."""

    tenant: "Tenant"
    member: "Member"


@dataclass(slots=True)
class SaveSession:
    """Catalog: a session was opened or its priority changed."""

    session: "Session"


@dataclass(slots=True)
class SaveNodes:
    """Catalog: nodes were added or changed."""

    nodes: "list[Node]"


@dataclass(slots=True)
class DropNodes:
    """Catalog: node ids of a session were pruned and are never used again."""

    session: "Session"
    nodes: list[int]


@dataclass(slots=True)
class DropSession:
    """Catalog: a session was closed; its tombstone stays until its headers are cleared."""

    session: "Session"


@dataclass(slots=True)
class SaveLayout:
    """Catalog: a tenant registered a layout."""

    pool: "Pool"


@dataclass(slots=True)
class SaveBlob:
    """Catalog: replace a blob; `node` is NO_NODE for the session's own."""

    session: "Session"
    node: int
    version: int
    data: bytes


@dataclass(slots=True)
class LoadBlob:
    """Catalog: read a blob and send it as the reply to request `id`."""

    peer: "Peer"
    id: int
    session: "Session"
    node: int


@dataclass(slots=True)
class SaveHolds:
    """Catalog: a session holds (or no longer holds) keyed blocks."""

    session: "Session"
    pool: "Pool"
    keys: list[bytes]
    held: bool


@dataclass(slots=True)
class Note:
    """Something an operator should find in the log and among the events."""

    kind: str
    text: str


Action = (
    Note | Send | Publish | PublishOne | AssignSlab | Demote | Promote | Clear | RecordMember
    | SaveSession | SaveNodes | DropNodes | DropSession | SaveLayout | SaveBlob | LoadBlob
    | SaveHolds
)  # fmt: skip
