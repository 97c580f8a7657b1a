"""The messages of the protocol as typed structs, and their frames.

A frame is a little-endian u32 length and one MessagePack array `[tag, id, field, ...]`; structs
may grow at their end. Numbers of many blocks travel as packed little-endian arrays in one `bin`
(`U32`, `U64` below name the element), never as lists. `docs/PROTOCOL.md` is the specification;
this file is what the daemon and the client library share of it.
"""

import struct
from typing import Final

import msgspec

from kvtier_client.layout import Layout as Layout  # noqa: PLC0414  (part of the wire)
from kvtier_client.wire_parts import U32, U64
from kvtier_client.wire_parts import FoldInfo as FoldInfo  # noqa: PLC0414
from kvtier_client.wire_parts import HeldLease as HeldLease  # noqa: PLC0414
from kvtier_client.wire_parts import Limits as Limits  # noqa: PLC0414
from kvtier_client.wire_parts import NodeInfo as NodeInfo  # noqa: PLC0414

PROTOCOL_VERSION: Final = 1
FRAME_HEADER: Final = struct.Struct("<I")
NO_NODE: Final = 0xFFFFFFFF
"""As a parent: the root has none. As a node: every node of the session."""

HELD: Final = 1
CACHED: Final = 2

TIER_NONE: Final = 0
TIER_DRAM: Final = 1
TIER_NVME: Final = 2
TIER_LOST: Final = 255

KEYS = bytes  # packed 16-byte content keys


# ---------------------------------------------------------------- requests


class Request(msgspec.Struct, array_like=True, frozen=True):
    """Base of all requests; `id` is chosen by the client and comes back in the reply."""

    id: int


class Hello(Request, frozen=True, tag="hello"):
    """First message of a connection. `member` is -1 at first, later what `Welcome` said."""

    version: int
    name: str
    group: bytes
    secret: bytes
    member: int = -1
    leases: list[HeldLease] = []


class RegisterLayout(Request, frozen=True, tag="register_layout"):
    """Make a layout known to the tenant."""

    layout: Layout


class OpenSession(Request, frozen=True, tag="open_session"):
    """Create a session (or return it, when the token is known): node 0 is its root."""

    token: bytes
    layouts: list[bytes]
    priority: int = 0
    name: str = ""


class ResumeSession(Request, frozen=True, tag="resume_session"):
    """Open a session again by its token, in this or an earlier life of the daemon."""

    token: bytes


class CloseSession(Request, frozen=True, tag="close_session"):
    """End a session and everything it holds."""

    session: int


class Describe(Request, frozen=True, tag="describe"):
    """Ask what is stored of a session."""

    session: int


class Fork(Request, frozen=True, tag="fork"):
    """Add node `node` (the client's choice, never used before) below `parent`."""

    session: int
    node: int
    parent: int
    fork_tokens: int


class Prune(Request, frozen=True, tag="prune"):
    """End a node: with its whole subtree, or only its own continuation past its children."""

    session: int
    node: int
    subtree: bool = True


class SetRetention(Request, frozen=True, tag="set_retention"):
    """Make the stored blocks of a node, or of all (`NO_NODE`), HELD or CACHED."""

    session: int
    node: int
    retention: int


class Fold(Request, frozen=True, tag="fold"):
    """Let go of pages `first .. first+pages` of a branch in `grace_s`: HELD until then, they are
    CACHED from then on. `kept` says how many entries of them the client keeps; `oneway` as for
    commit."""

    session: int
    node: int
    first: int
    pages: int
    grace_s: float
    kept: int = 0
    oneway: int = 0


class Unfold(Request, frozen=True, tag="unfold"):
    """Keep pages `first .. first+pages` of a branch again, those that are still there, and bring
    them to DRAM."""

    session: int
    node: int
    first: int
    pages: int


class SetPriority(Request, frozen=True, tag="set_priority"):
    """Blocks of sessions of low priority (0..255) leave DRAM first."""

    session: int
    priority: int


class PutBlob(Request, frozen=True, tag="put_blob"):
    """Replace the blob of a session (`NO_NODE`) or node; a version not above the stored one is
    a repeat."""

    session: int
    node: int
    version: int
    data: bytes


class GetBlob(Request, frozen=True, tag="get_blob"):
    """Read a node's blob, or the session's own (`NO_NODE`)."""

    session: int
    node: int


class Reserve(Request, frozen=True, tag="reserve"):
    """Lease `blocks` free slots for writing, and promise `ahead` more.

    `draw` names a lease whose promise this request is taken from. Names are given at commit.
    """

    lease: int
    layout: bytes
    blocks: int
    ahead: int = 0
    draw: int = 0
    wait_s: float = 0.0
    ttl_s: float = 0.0


class Commit(Request, frozen=True, tag="commit"):
    """Publish slots `index` of a write lease as pages of a node.

    `layout` must be one of the session's. With `oneway` no reply is sent: later replies
    acknowledge it in `acked`, and a failure comes as a `Failed` push. `checksums` (xxh3-64 of the
    whole block) only under `end_to_end`, else empty.
    """

    lease: int
    session: int
    node: int
    index: U32
    pages: U32
    valid: U32
    retention: int = HELD
    oneway: int = 0
    checksums: U64 = b""


class Abort(Request, frozen=True, tag="abort"):
    """Give back what a write lease has not committed: nothing writes to it any more."""

    lease: int


class Acquire(Request, frozen=True, tag="acquire"):
    """Lease pages `first .. first+pages` of a branch for reading; may return a leading window."""

    lease: int
    session: int
    node: int
    layout: bytes
    first: int
    pages: int
    wait_s: float = 0.0
    ttl_s: float = 0.0


class Renew(Request, frozen=True, tag="renew"):
    """Give a lease `ttl_s` more from now."""

    lease: int
    ttl_s: float


class Release(Request, frozen=True, tag="release"):
    """End a read lease; with `oneway` as for commit."""

    lease: int
    oneway: int = 0


class Prefetch(Request, frozen=True, tag="prefetch"):
    """Bring pages to DRAM without a lease; a `Ready` push with `ticket` says how it ended."""

    ticket: int
    session: int
    node: int
    layout: bytes
    first: int
    pages: int
    priority: int = 0
    deadline_s: float = 0.0


class Cancel(Request, frozen=True, tag="cancel"):
    """Forget a prefetch."""

    ticket: int


class Lookup(Request, frozen=True, tag="lookup"):
    """Leading hits of `keys` per layout; with `lease` the hits cannot be dropped until release."""

    layouts: list[bytes]
    keys: KEYS
    lease: int = 0
    ttl_s: float = 0.0


class ReserveKeys(Request, frozen=True, tag="reserve_keys"):
    """Lease slots for those of `keys` that are not stored yet."""

    lease: int
    layout: bytes
    keys: KEYS
    wait_s: float = 0.0
    ttl_s: float = 0.0


class CommitKeys(Request, frozen=True, tag="commit_keys"):
    """Publish slots `index` of a write lease under `keys`; `pages` is each key's place in its
    prefix, so that tails are dropped before heads."""

    lease: int
    index: U32
    keys: KEYS
    pages: U32
    valid: U32
    oneway: int = 0
    checksums: U64 = b""


class AcquireKeys(Request, frozen=True, tag="acquire_keys"):
    """Lease the leading stored ones of `keys` for reading."""

    lease: int
    layout: bytes
    keys: KEYS
    wait_s: float = 0.0
    ttl_s: float = 0.0


class Hold(Request, frozen=True, tag="hold"):
    """Keep the leading stored ones of `keys` for a session until it unholds them or closes."""

    session: int
    layout: bytes
    keys: KEYS


class Unhold(Request, frozen=True, tag="unhold"):
    """Let go of keys that a session holds."""

    session: int
    layout: bytes
    keys: KEYS


class Remove(Request, frozen=True, tag="remove"):
    """Drop keyed blocks that nobody holds or reads."""

    layout: bytes
    keys: KEYS


class Goodbye(Request, frozen=True, tag="goodbye"):
    """The client closes: its requests that wait end with an error, and its leases end but those
    of `keep`, whose copies still run."""

    keep: U64 = b""


ClientRequest = (
    Hello | RegisterLayout | OpenSession | ResumeSession | CloseSession | Describe | Fork | Prune
    | SetRetention | Fold | Unfold | SetPriority | PutBlob | GetBlob | Reserve | Commit | Abort
    | Acquire | Renew | Release | Prefetch | Cancel | Lookup | ReserveKeys | CommitKeys
    | AcquireKeys | Hold | Unhold | Remove | Goodbye
)  # fmt: skip


# ----------------------------------------------------------------- replies


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """Base of all replies. `boot` names the daemon's life; `acked` is the highest one-way number
    of this connection below which everything was handled."""

    id: int
    boot: int
    acked: int


class Welcome(Reply, frozen=True, tag="welcome"):
    """Answer to `Hello`. The arena's file descriptor comes with its first byte (SCM_RIGHTS).

    `lost_leases` are those of `Hello.leases` that ended while the client was away.
    """

    version: int
    daemon: str
    instance: bytes
    tenant: str
    member: int
    arena_id: bytes
    arena_bytes: int
    integrity: str
    limits: Limits
    lost_leases: list[int] = []


class LayoutRegistered(Reply, frozen=True, tag="layout_registered"):
    """The layout is known; its blocks lie in slots of `slot_bytes`."""

    fingerprint: bytes
    block_bytes: int
    slot_bytes: int


class SessionReply(Reply, frozen=True, tag="session"):
    """A session and what is stored of it."""

    session: int
    created: bool
    priority: int
    layouts: list[bytes]
    nodes: list[NodeInfo]


class Done(Reply, frozen=True, tag="done"):
    """The request took effect; `count` is how many blocks (leases, keys) it touched."""

    count: int = 0


class Unfolded(Reply, frozen=True, tag="unfolded"):
    """Which of the pages asked are `gone`; the others are HELD. `loading` blocks are on their way
    from a slower tier."""

    gone: U32
    loading: int = 0


class Granted(Reply, frozen=True, tag="granted"):
    """A lease. `offsets` are arena bytes, one per block.

    Reads also have `valid` tokens, and `checksums` under `end_to_end`; `ReserveKeys` has `index`,
    the positions of the keys that the slots are for. `lease` is the full id that other verbs and
    other members of the group use. `restored` says how many of the blocks had to be brought back
    from a slower tier for this request.
    """

    lease: int
    ttl_s: float
    offsets: U64
    valid: U32 = b""
    checksums: U64 = b""
    index: U32 = b""
    restored: int = 0


class Hits(Reply, frozen=True, tag="hits"):
    """Leading hits, one count per layout asked; `lease` 0 when none was asked or nothing hit."""

    hits: list[int]
    lease: int = 0


class Blob(Reply, frozen=True, tag="blob"):
    """`version` 0 and no data when none was stored."""

    version: int
    data: bytes


class Report(Reply, frozen=True, tag="report"):
    """Answer of the admin verbs: a tree of plain values."""

    data: dict[str, object]


class Error(Reply, frozen=True, tag="error"):
    """A typed failure; `pages` are those it speaks of."""

    code: int
    message: str
    pages: U32 = b""


AnyReply = (
    Welcome | LayoutRegistered | SessionReply | Done | Unfolded | Granted | Hits | Blob | Report
    | Error
)  # fmt: skip

# ------------------------------------------------------------------ pushes


class Ready(Reply, frozen=True, tag="ready"):
    """Push: a prefetch ticket has ended."""

    ticket: int
    loaded: int
    failed: int


class Failed(Reply, frozen=True, tag="failed"):
    """Push: the one-way request `id` failed."""

    code: int
    message: str


class Pressure(Reply, frozen=True, tag="pressure"):
    """Push: the tenant's arena rose above its high watermark (`level` 1) or fell below low (0)."""

    level: int
    free_bytes: int


class Revoke(Reply, frozen=True, tag="revoke"):
    """Push: the lease ran out and is quarantined; abort or release it as soon as its copies end."""

    lease: int


Push = Ready | Failed | Pressure | Revoke


def frame(message: msgspec.Struct, encoder: msgspec.msgpack.Encoder) -> bytes:
    """One message as a frame."""
    body = encoder.encode(message)
    return FRAME_HEADER.pack(len(body)) + body
