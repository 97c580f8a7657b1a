"""What the daemon has of one cache: a branch of a session's tree, and how far it can be relied on.

A save point is a node with a blob. Its pages never change, so whoever goes on from one writes into
a node of its own, which begins at the last full page they share:

    resumed by two ──► node 0 ──┬── node a   turns of the first
                                └── node b   turns of the second

The cache itself may be cropped and filled anew. Then what is stored under the node's names is no
longer what the cache holds, and the next save goes on in a new node too.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier_client import wire
from kvtier_client.client import Client, Session
from kvtier_client.core import NodeState
from kvtier_client.errors import (
    QuotaExceeded,
    UnknownBranch,
    UnknownSession,
)

ROOT: Final = 0
NODE_BITS: Final = 31
"""Node ids are drawn at random, since processes that do not know of each other add nodes."""


@dataclass(slots=True)
class Branch:
    """Where a cache is stored, and how much of it.

    Units: `stored_tokens` leading ones are in the daemon as the cache has them. Of `node`, pages
    up to `named_tokens` may have been given names, and they are those of the cache up to
    `agreed_tokens`.
    """

    session: Session
    layout: wire.Layout
    path: list[tuple[int, int]]
    """Its nodes from the root on, each with the token at which it begins."""
    own: bool = False
    """Whether the last node of the path is this cache's alone, to write into."""
    stored_tokens: int = 0
    named_tokens: int = 0
    agreed_tokens: int = 0
    version: int = 0
    """Of the blob of the node that is its own; 0 before its first save point."""

    @property
    def node(self) -> int:
        """The last node of the path."""
        return self.path[-1][0]

    def keep(self, tokens: int) -> None:
        """Only the cache's first `tokens` tokens are still what they were."""
        self.stored_tokens = min(self.stored_tokens, tokens)
        self.agreed_tokens = min(self.agreed_tokens, tokens)

    def shared(self) -> "Branch":
        """The same branch for another cache, which must not write into its node."""
        return replace(self, path=list(self.path), own=False)

    def leave(self) -> None:
        """Drop what was written for no save point. Errors: those of the daemon."""
        if self.own and not self.version:
            with contextlib.suppress(UnknownSession):  # it is gone already
                forget(self.session, self.node)

    def continued(self) -> "Branch":
        """A node of its own from the last full page on that is stored.

        Errors: UnknownSession or UnknownBranch when that page was forgotten; QuotaExceeded.
        """
        start = self.stored_tokens - self.stored_tokens % self.layout.block_tokens
        path = [(node, begin) for node, begin in self.path if begin <= start]
        node = int.from_bytes(os.urandom(4), "little") % (2**NODE_BITS - 1) + 1
        self.session.fork(node, path[-1][0], start)
        return Branch(
            self.session,
            self.layout,
            [*path, (node, start)],
            own=True,
            stored_tokens=self.stored_tokens,
            named_tokens=start,
            agreed_tokens=self.stored_tokens,
        )


def new_branch(client: Client, layout: wire.Layout, name: str) -> Branch:
    """A session with nothing in it yet."""
    session = client.open_session(layouts=[layout], name=name)
    return Branch(session, layout, [(ROOT, 0)], own=True)


def branch_to_write(client: Client, known: Branch | None, layout: wire.Layout, name: str) -> Branch:
    """The branch that a cache's next pages go to: its own node while that says what the cache
    holds, else a new one; a new session when it has none that can take it."""
    if known is None or known.layout != layout:
        return new_branch(client, layout, name)
    if known.own and known.named_tokens <= known.agreed_tokens:
        return known
    try:
        return known.continued()
    except (QuotaExceeded, UnknownBranch, UnknownSession):
        return new_branch(client, layout, name)


def path_to(nodes: Sequence[NodeState], node: int) -> list[NodeState]:
    """The nodes from the root to `node`. Errors: UnknownBranch when it was forgotten."""
    by_id = {each.node: each for each in nodes}
    last = by_id.get(node)
    if last is None or last.ended:
        raise UnknownBranch("this save point was forgotten; resume a later one of its conversation")
    path = [last]
    while path[0].parent is not None:
        path.insert(0, by_id[path[0].parent])
    return path


def missing_pages(
    path: Sequence[NodeState], valid: Sequence[int], block_tokens: int
) -> NDArray[np.int64]:
    """Which pages of a branch are not there with as many tokens as they should have."""
    pages, wanted = len(valid), np.asarray(valid)
    there = np.zeros(pages, np.bool_)
    starts = [min(state.fork_tokens // block_tokens, pages) for state in path]
    for state, start, end in zip(path, starts, [*starts[1:], pages], strict=True):
        numbers = np.asarray(state.pages[0], np.int64)
        good = (np.asarray(state.tiers[0]) != wire.TIER_LOST) & (start <= numbers) & (numbers < end)
        numbers, filled = numbers[good], np.asarray(state.valid[0])[good]
        there[numbers[filled >= wanted[numbers]]] = True
    return np.flatnonzero(~there)


def forget(session: Session, node: int) -> None:
    """Drop a save point and all that no other one needs. Errors: UnknownSession."""
    nodes = session.nodes()
    if any(other.node != node and not other.ended and other.blob_version for other in nodes):
        with contextlib.suppress(UnknownBranch):  # it is forgotten already
            session.prune(node, subtree=False)
    else:
        session.close()
