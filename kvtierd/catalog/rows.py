"""What the catalog stores, as structs: the changes it is told, and what it gives back at start.

A session is named by its tenant and the 16-byte hash of its token; two tenants that use one token
have two sessions.
"""

import msgspec

from kvtier_client.wire import Layout


class NodeRecord(msgspec.Struct, frozen=True, gc=False):
    """One living node."""

    node: int
    parent: int
    fork_tokens: int
    retention: int
    ended: bool
    retention_seq: int = 0
    """Blocks up to this seq have the node's retention, later ones their own."""


class FoldRecord(msgspec.Struct, frozen=True, gc=False):
    """Pages `first .. end` of a node that were folded, apart from the node's own retention.

    Units: `until_s` is a time of the daemon's running, as `SaveClock` has it.
    """

    node: int
    first: int
    end: int
    seq: int
    """Blocks up to this seq are meant, later ones have their own retention."""
    state: int
    """0 unfolded (HELD), 1 HELD until its time, 2 CACHED."""
    grace_s: float
    until_s: float
    kept: int


# --------------------------------------------------------------------- changes


class SaveLayout(msgspec.Struct, frozen=True):
    """A tenant has registered a layout."""

    tenant: str
    layout: Layout


class SaveSession(msgspec.Struct, frozen=True):
    """A session was opened, or its name, priority or layouts changed.

    Blocks whose seq is below `since_seq` are of an earlier session of the same token.
    """

    tenant: str
    session: bytes
    name: str
    priority: int
    layouts: tuple[bytes, ...]
    created_s: float
    since_seq: int = 0


class SaveNodes(msgspec.Struct, frozen=True):
    """Nodes were added or changed."""

    tenant: str
    session: bytes
    nodes: tuple[NodeRecord, ...]


class SaveFold(msgspec.Struct, frozen=True):
    """Pages of a node were folded or unfolded, or their grace period is over."""

    tenant: str
    session: bytes
    fold: FoldRecord


class DropFolds(msgspec.Struct, frozen=True):
    """Nodes have no folds any more."""

    tenant: str
    session: bytes
    nodes: tuple[int, ...]


class DropNodes(msgspec.Struct, frozen=True):
    """Nodes were pruned: their blobs go, their ids stay as tombstones."""

    tenant: str
    session: bytes
    nodes: tuple[int, ...]


class DropSession(msgspec.Struct, frozen=True):
    """A session was closed: all of it goes, its name stays as a tombstone."""

    tenant: str
    session: bytes


class ForgetSession(msgspec.Struct, frozen=True):
    """The headers of a closed session are cleared: its tombstone goes."""

    tenant: str
    session: bytes


class SaveIdle(msgspec.Struct, frozen=True):
    """How long sessions have been without a client so far, counted while the daemon runs."""

    sessions: tuple[tuple[str, bytes, float], ...]


class SaveClock(msgspec.Struct, frozen=True):
    """For how long the daemon has run in all its lives: the time that grace periods are counted
    in. Units: seconds."""

    ran_s: float


class SaveBlob(msgspec.Struct, frozen=True):
    """Replace the blob of a node, or of the session (`NO_NODE`)."""

    tenant: str
    session: bytes
    node: int
    version: int
    data: bytes


class Hold(msgspec.Struct, frozen=True):
    """A session holds keyed blocks of a layout."""

    tenant: str
    session: bytes
    layout: bytes
    keys: tuple[bytes, ...]


class Unhold(msgspec.Struct, frozen=True):
    """A session lets go of keyed blocks."""

    tenant: str
    session: bytes
    layout: bytes
    keys: tuple[bytes, ...]


class SaveScrub(msgspec.Struct, frozen=True):
    """A pass over all blocks in the spill files has ended. Units: Unix seconds."""

    ended_s: float


Op = (
    SaveLayout | SaveSession | SaveNodes | SaveFold | DropFolds | DropNodes | DropSession
    | ForgetSession | SaveIdle | SaveClock | SaveBlob | Hold | Unhold | SaveScrub
)  # fmt: skip


# --------------------------------------------------------------------- records


class BlobRecord(msgspec.Struct, frozen=True):
    """A stored blob."""

    version: int
    data: bytes


class LayoutRecord(msgspec.Struct, frozen=True):
    """A layout that a tenant has registered."""

    tenant: str
    fingerprint: bytes
    layout: Layout


class SessionRecord(msgspec.Struct, frozen=True):
    """A session with everything that belongs to it; a closed one has nothing but its name.

    `blob_versions` is by node (`NO_NODE` for the session's own); `holds` are pairs of a layout's
    fingerprint and a key; `pruned` are node ids that are never used again.
    """

    tenant: str
    session: bytes
    name: str
    priority: int
    layouts: tuple[bytes, ...]
    since_seq: int
    created_s: float
    idle_s: float
    closed: bool
    nodes: list[NodeRecord]
    pruned: list[int]
    blob_versions: dict[int, int]
    holds: list[tuple[bytes, bytes]]
    folds: list[FoldRecord] = []


class CatalogSnapshot(msgspec.Struct, frozen=True):
    """The whole catalog but the blobs' data."""

    instance: bytes
    generation: int
    layouts: list[LayoutRecord]
    sessions: list[SessionRecord]
    ran_s: float = 0.0
    spill_files: int = 0
