"""What messages of the protocol consist of, beside plain values."""

import msgspec

U32 = bytes  # packed little-endian u32 values
U64 = bytes  # packed little-endian u64 values


class HeldLease(msgspec.Struct, array_like=True, frozen=True):
    """A lease that a returning client still holds; `offsets` are the arena bytes of its slots."""

    lease: int
    write: bool
    offsets: U64


class Limits(msgspec.Struct, array_like=True, frozen=True):
    """What the daemon accepts from one client."""

    frame_bytes: int
    requests_in_flight: int
    blocks_per_request: int
    leases_per_group: int
    lease_ttl_s: float
    lease_ttl_max_s: float
    wait_max_s: float
    blob_bytes: int


class FoldInfo(msgspec.Struct, array_like=True, frozen=True):
    """Pages `first .. first+pages` of a node that are folded.

    `kept` entries of them stay with the client. While `grace_left_s` is above 0 they are HELD; at 0
    that is over.
    """

    first: int
    pages: int
    kept: int
    grace_left_s: float


class NodeInfo(msgspec.Struct, array_like=True, frozen=True):
    """One node of a session and what is stored of it, per part (rank and group) of the session.

    `pages[part]`, `valid[part]` (valid tokens) and `tiers[part]` (u8) are parallel arrays of the
    pages that have a block; a page that is missing in one part does not exist as a whole.
    """

    node: int
    parent: int
    fork_tokens: int
    retention: int
    ended: bool
    blob_version: int
    pages: list[U32]
    valid: list[U32]
    tiers: list[bytes]
    folds: list[FoldInfo] = []
