"""The ThoughtTree: sessions, their nodes, and which rows of the BlockTable each node has.

A session has parts, one per layout it was opened with (KV-cache group x rank); a node has one
run of rows per part. A child starts at page `fork_tokens // block_tokens`; while it has no copy of
its own of a partly filled first page, its ancestor's page is read up to the fork.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtier_client.errors import UnknownBranch, UnknownSession
from kvtierd.core.blocks import NONE, Rows

if TYPE_CHECKING:
    from kvtierd.core.leases import Group, Peer
    from kvtierd.core.tenant import Pool, Tenant

PARTS_MAX: Final = 256
"""Layouts of a session, and of a look-up."""
TOKENS_MAX: Final = 1 << 31
"""Tokens of a branch; their number has 32 bits in tables."""
PAGE_GAP_MAX: Final = 4096
"""How far past a node's last page a block may be named: bounds what one block can allocate."""


class Run:
    """The rows of one node in one part: `rows[page - start]`, NONE where there is no block."""

    __slots__ = ("ahead", "ahead_end", "data", "length", "read_end", "start", "view")

    def __init__(self, start: int) -> None:
        self.read_end = -1  # the page behind the last read
        self.ahead = 0  # pages of the last read-ahead, which ended before page `ahead_end`
        self.ahead_end = 0
        self.start = start
        self.length = 0
        self.data = np.empty(0, np.int64)
        self.view = self.data.data  # of the same memory: cheap access to one row

    @property
    def rows(self) -> Rows:
        """A view of the run, from page `start` on."""
        return self.data[: self.length]

    def reach(self, pages: int) -> None:
        """Lengthen the run so that it has places up to page `pages` (exclusive)."""
        need = pages - self.start
        if need <= self.length:
            return
        if need > len(self.data):
            grown = np.full(max(need, 2 * len(self.data), 8), NONE, np.int64)
            grown[: self.length] = self.data[: self.length]
            self.data, self.view = grown, grown.data
        self.length = need

    def cut(self, pages: int) -> Rows:
        """Shorten the run to end before page `pages`; returns what it had there, NONE included."""
        keep = min(max(pages - self.start, 0), self.length)
        gone, self.data = self.rows[keep:], self.data[:keep].copy()
        self.view, self.length = self.data.data, keep
        return gone


class FoldState(enum.IntEnum):
    """What became of a range of pages that was folded; the catalog has these numbers."""

    BACK = 0  # unfolded: HELD
    GRACE = 1  # HELD until its time is over
    OVER = 2  # CACHED


@dataclass(slots=True, eq=False)
class Fold:
    """Pages `first .. end` of a node that are kept or not for themselves, apart from the node.

    It speaks of blocks up to `seq`; later ones have their own retention."""

    first: int
    end: int
    seq: int
    state: FoldState
    grace_s: float  # as it was asked
    until_s: float
    kept: int  # entries that stay with the client

    def left_s(self, now_s: float) -> float:
        """What is left of the grace period."""
        return max(self.until_s - now_s, 0.0) if self.state is FoldState.GRACE else 0.0


class Node:
    """A run of blocks with one parent."""

    __slots__ = (
        "blob_version", "children", "ended", "folds", "fork_tokens", "id", "index", "parent",
        "retention", "retention_seq", "runs", "session", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        session: "Session",
        node: int,
        parent: "Node | None",
        fork_tokens: int,
        retention: int,
        index: int,
    ) -> None:
        self.session, self.id, self.parent = session, node, parent
        self.fork_tokens, self.retention, self.index = fork_tokens, retention, index
        self.retention_seq = 0  # blocks up to this seq have the node's retention, not their own
        self.tokens = fork_tokens  # of the branch up to the node's last block
        self.ended = False
        self.blob_version = 0
        self.children: dict[int, Node] = {}
        self.folds: list[Fold] = []  # in the order of their pages; none overlaps another
        tokens = session.pools[0].layout.block_tokens
        self.runs = [Run(fork_tokens // tokens) for _ in session.pools]

    @property
    def folded(self) -> list[Fold]:
        """Its folds that were not taken back."""
        return [fold for fold in self.folds if fold.state is not FoldState.BACK]


class Session:
    """One request's KV: a tree of nodes that owns its HELD blocks."""

    def __init__(
        self, sid: int, token_hash: bytes, tenant: "Tenant", pools: "list[Pool]", name: str
    ) -> None:
        self.sid, self.token_hash, self.tenant, self.pools, self.name = (
            sid, token_hash, tenant, pools, name,
        )  # fmt: skip
        owner = np.frombuffer(token_hash, np.uint64)
        self.owner0, self.owner1 = int(owner[0]), int(owner[1])
        self.priority = 0
        self.nodes: dict[int, Node] = {}
        self.pruned: set[int] = set()  # node ids are never used again
        self.groups: set[Group] = set()  # groups that have it open; none: an orphan
        self.holds: dict[int, set[int]] = {}  # pool number -> rows of keyed blocks
        self.blob_version = 0
        self.folds = 0  # of all its nodes
        self.since_seq = 0  # blocks below it are of an earlier session of the same token
        self.idle_since_s = 0.0
        self.found_in_headers = False  # the catalog did not know it

    def part_of(self, pool: "Pool") -> int:
        """The part that `pool` is; raises ValueError when it is none of the session's."""
        return 0 if self.pools[0] is pool else self.pools.index(pool)

    def rows_of(self, nodes: "Iterable[Node]") -> "PartRows":
        """The rows of nodes, NONE included."""
        nodes = list(nodes)
        return [[node.runs[part].rows for node in nodes] for part in range(len(self.pools))]


def session_of(peer: "Peer", sid: int) -> Session:
    """A session that the peer's group has opened or resumed. Errors: UnknownSession."""
    session = peer.group.tenant.sessions.get(sid)
    if session is None or sid not in peer.group.sessions:
        raise UnknownSession(
            f"session {sid:016x} is not open in this group; open or resume it by its token"
        )
    return session


def node_of(session: Session, node: int) -> Node:
    """A node of a session. Errors: UnknownBranch."""
    found = session.nodes.get(node)
    if found is None:
        what = "was pruned" if node in session.pruned else "does not exist"
        raise UnknownBranch(f"node {node} of session {session.sid:016x} {what}")
    return found


def subtree(node: Node) -> list[Node]:
    """The node and all below it, parents first."""
    found = [node]
    for each in found:
        found.extend(each.children.values())
    return found


def shared_pages(node: Node) -> int:
    """Before which page an ended node still has what its children share.

    A page that a fork divides stays: a child may not have its own copy of it yet.
    """
    fork = max((child.fork_tokens for child in node.children.values()), default=0)
    return -(-fork // node.session.pools[0].layout.block_tokens)


def rows_in(node: Node, first: int, end: int) -> Rows:
    """The rows of a node's own pages `first .. end`, of all parts."""
    parts = [run.rows[max(first - run.start, 0) : max(end - run.start, 0)] for run in node.runs]
    rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
    there: Rows = rows[rows != NONE]
    return there


PartRows = list[list[Rows]]
"""For each part of a session arrays of rows, NONE among them."""


def trim_to_children(node: Node) -> PartRows:
    """Cut an ended node to its children's largest fork point; returns the rows it had beyond."""
    pages = shared_pages(node)
    return [[run.cut(pages)] for run in node.runs]


def remove_branch(node: Node) -> tuple[list[Node], PartRows]:
    """Take a node and its subtree out of the tree, and of its ancestors what nobody needs.

    An ancestor that has ended and is left without children goes too; the first that stays is
    trimmed if it has ended. Returns the nodes that went and the rows that lost their name.
    """
    gone = subtree(node)
    parent = node.parent
    assert parent is not None, "the root is never pruned"
    del parent.children[node.id]
    while parent.ended and not parent.children and parent.parent is not None:
        gone.append(parent)
        above = parent.parent
        del above.children[parent.id]
        parent = above
    session = node.session
    cut = session.rows_of(gone)
    for each in gone:
        del session.nodes[each.id]
        session.pruned.add(each.id)
        session.folds -= len(each.folds)
        each.runs.clear()  # whoever still knows the node keeps no memory of its rows
    if parent.ended:
        cut = [mine + more for mine, more in zip(cut, trim_to_children(parent), strict=True)]
    return gone, cut


def resolve(node: Node, part: int, first: int, count: int) -> tuple[Rows, dict[int, int]]:
    """The rows of pages `first .. first+count` of the branch that ends in `node`.

    Returns rows (NONE where no block is stored) and, for pages that a fork divides, the tokens
    that belong to the branch.
    """
    run = node.runs[part]
    lo, hi = first - run.start, first - run.start + count
    if lo >= 0 and whole_page(node, run, first):
        if hi <= run.length:
            return run.rows[lo:hi].copy(), {}
        rows = np.full(count, NONE, np.int64)
        have = run.rows[lo:hi]
        rows[: len(have)] = have
        return rows, {}
    rows = np.full(count, NONE, np.int64)
    divided: dict[int, int] = {}
    tokens = node.session.pools[part].layout.block_tokens
    at: Node | None = node
    limit_tokens: int | None = None
    while at is not None:
        run = at.runs[part]
        end = run.start + run.length
        if limit_tokens is not None:
            end = min(end, -(-limit_tokens // tokens))
        a, b = max(first, run.start), min(first + count, end)
        if a < b:
            place = rows[a - first : b - first]
            found = run.rows[a - run.start : b - run.start]
            fresh = (place == NONE) & (found != NONE)
            place[fresh] = found[fresh]
            if limit_tokens is not None and limit_tokens % tokens:
                page = limit_tokens // tokens
                if a <= page < b and fresh[page - a]:
                    divided[page] = limit_tokens % tokens
        if at.parent is not None:
            limit_tokens = (
                at.fork_tokens if limit_tokens is None else min(limit_tokens, at.fork_tokens)
            )
        at = at.parent
    return rows, divided


def whole_page(node: Node, run: Run, page: int) -> bool:
    """Whether pages from `page` on, which is not before the run, are the node's own."""
    return node.parent is None or run.start < page or not _divided(node)


def _divided(node: Node) -> bool:
    return bool(node.fork_tokens % node.session.pools[0].layout.block_tokens)
