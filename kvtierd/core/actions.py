"""What the core asks the daemon to do. Actions of one event are carried out in their order."""

from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtier_client.wire import Reply
from kvtierd.core.blocks import Rows, Slots

if TYPE_CHECKING:
    from kvtierd.core.leases import Member, Peer
    from kvtierd.core.tenant import Pool, Tenant
    from kvtierd.core.tree import Fold, Node, Session


class Send(msgspec.Struct):
    """Send a reply or a push to a peer."""

    peer: "Peer"
    message: Reply


class HangUp(msgspec.Struct):
    """Close a peer's connection: nothing that it still brings is carried out."""

    peer: "Peer"


class AssignSlab(msgspec.Struct):
    """Record in a tier's slab directory whose a slab is; `tenant` None means NVMe."""

    tenant: "Tenant | None"
    slab: int
    pool: "Pool | None"


class Demote(msgspec.Struct):
    """Copy blocks DRAM -> NVMe; answer with `State.demoted`."""

    batch: int
    pool: "Pool"
    rows: Rows
    src: Slots
    dst: Slots
    urgent: bool


class Promote(msgspec.Struct):
    """Copy blocks NVMe -> DRAM and verify them; answer with `State.promoted`."""

    batch: int
    pool: "Pool"
    rows: Rows
    src: Slots
    dst: Slots
    checksums: NDArray[np.uint64]
    urgent: bool
    client: int
    """Pid of the client that it is for; OWN_WORK when it is for nobody's request."""


class Hurry(msgspec.Struct):
    """A request waits for blocks on their way to DRAM: those fetched ahead are urgent now."""

    pool: "Pool"
    rows: Rows
    client: int


class Clear(msgspec.Struct):
    """Clear the words of NVMe slots on the medium; answer with `State.cleared`."""

    batch: int
    pool: "Pool"
    slots: Slots


class Verify(msgspec.Struct):
    """Read blocks on NVMe into no slot and verify them; answer with `State.verified`.

    There is one at a time."""

    batch: int
    pool: "Pool"
    rows: Rows
    slots: Slots
    checksums: NDArray[np.uint64]


class RecordMember(msgspec.Struct):
    """Write a client process into (or, when it is gone, out of) the arena's client table."""

    tenant: "Tenant"
    member: "Member"


class SaveSession(msgspec.Struct):
    """Catalog: a session was opened or its priority changed."""

    session: "Session"


class SaveNodes(msgspec.Struct):
    """Catalog: nodes were added or changed."""

    nodes: "list[Node]"


class SaveFold(msgspec.Struct):
    """Catalog: pages of a node were folded or unfolded, or their grace period is over."""

    node: "Node"
    fold: "Fold"
    until_ran_s: float
    """When it ends, in the daemon's running time."""


class DropFolds(msgspec.Struct):
    """Catalog: the retention of nodes was set for all their pages together."""

    nodes: "list[Node]"


class DropNodes(msgspec.Struct):
    """Catalog: node ids of a session were pruned and are never used again."""

    session: "Session"
    nodes: list[int]


class DropSession(msgspec.Struct):
    """Catalog: a session was closed; its tombstone stays until its headers are cleared."""

    session: "Session"


class ForgetSession(msgspec.Struct):
    """Catalog: nothing on any medium is of a closed session any more; its tombstone goes."""

    tenant: "Tenant"
    token_hash: bytes


class SaveLayout(msgspec.Struct):
    """Catalog: a tenant registered a layout."""

    pool: "Pool"


class SaveBlob(msgspec.Struct):
    """Catalog: replace a blob; `node` is NO_NODE for the session's own."""

    session: "Session"
    node: int
    version: int
    data: bytes


class LoadBlob(msgspec.Struct):
    """Catalog: read a blob and send it as the reply to request `id`."""

    peer: "Peer"
    id: int
    session: "Session"
    node: int


class SaveHolds(msgspec.Struct):
    """Catalog: a session holds (or no longer holds) keyed blocks."""

    session: "Session"
    pool: "Pool"
    keys: list[bytes]
    held: bool


class SaveScrub(msgspec.Struct):
    """Catalog: a pass over all blocks on NVMe has ended now."""


class Note(msgspec.Struct):
    """Something an operator should find in the log; `kind` is what to search for."""

    kind: str
    text: str


Action = (
    Note | Send | HangUp | AssignSlab | Demote | Promote | Hurry | Clear | Verify | RecordMember
    | SaveSession | SaveNodes | SaveFold | DropFolds | DropNodes | DropSession | ForgetSession
    | SaveLayout | SaveBlob | LoadBlob | SaveHolds | SaveScrub
)  # fmt: skip
