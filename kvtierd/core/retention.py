"""Which blocks of a session are HELD: retention of whole nodes, and of pages that are folded.

    fold ──► GRACE: HELD ──grace period──► OVER: CACHED
                 └──────────unfold──────► BACK: HELD ◄──unfold, of what is still there──┘

A fold is recorded in the catalog with the sequence number at which it happened, as the retention of
a node is: at a start it is applied again to the blocks that are as old. Setting the retention of a
node ends its folds.
"""

import heapq
import math
from bisect import bisect_right
from typing import Final

import numpy as np

from kvtier_client.errors import InvalidArgument, QuotaExceeded, SpillFull
from kvtier_client.wire import (
    CACHED,
    HELD,
    NO_NODE,
    Done,
    Fold,
    FoldInfo,
    SetRetention,
    Unfold,
    Unfolded,
)  # fmt: skip
from kvtierd.core import tree
from kvtierd.core.actions import DropFolds, SaveFold, SaveNodes
from kvtierd.core.blocks import F_HELD, F_LOST, NONE, Rows
from kvtierd.core.copies import Copies
from kvtierd.core.leases import Peer, pack_u32
from kvtierd.core.read_ahead import ReadAhead
from kvtierd.core.tenant import Tenant
from kvtierd.core.tree import FoldState, Node, Session, node_of, rows_in, session_of
from kvtierd.core.world import World

FOLDS_PER_TICK: Final = 256
"""Grace periods that end in one tick; those beyond end in the next ones."""
DUE_SPARE: Final = 1024
"""Ended entries that may lie among those of running grace periods before they are thrown out."""


def fold_infos(node: Node, now_s: float) -> list[FoldInfo]:
    """The folded pages of a node, for whoever asks."""
    return [
        FoldInfo(fold.first, fold.end - fold.first, fold.kept, fold.left_s(now_s))
        for fold in node.folded
    ]


class Retention:
    """Makes blocks HELD and CACHED."""

    def __init__(self, world: World, copies: Copies, ahead: ReadAhead) -> None:
        self.world, self.copies, self.ahead = world, copies, ahead
        self._due: list[tuple[float, int, Node, tree.Fold]] = []  # a heap
        self._due_limit = DUE_SPARE
        self._number = 0

    # ------------------------------------------------------------ requests

    def set_retention(self, peer: Peer, req: SetRetention) -> Done:
        """Make the stored blocks of a node (or of all) HELD or CACHED."""
        session = session_of(peer, req.session)
        if req.retention not in (HELD, CACHED):
            raise InvalidArgument(f"retention {req.retention} is neither HELD (1) nor CACHED (2)")
        nodes = (
            list(session.nodes.values()) if req.node == NO_NODE else [node_of(session, req.node)]
        )
        world = self.world
        rows = np.concatenate([run.rows[run.rows != NONE] for node in nodes for run in node.runs])
        if req.retention == HELD:
            self._keep(session.tenant, rows)
        else:
            self._let_go(rows)
        for node in nodes:
            node.retention, node.retention_seq = req.retention, world.seq
        world.actions.append(SaveNodes(nodes))
        folded = [node for node in nodes if node.folds]
        if folded:
            world.actions.append(DropFolds(folded))
        for node in folded:
            session.folds -= len(node.folds)
            for fold in node.folds:
                fold.state = FoldState.BACK
            node.folds = []
        return Done(req.id, world.boot, peer.acked, len(rows))

    def fold(self, peer: Peer, req: Fold) -> Done:
        """Keep pages for a grace period; a repeat while that runs changes nothing."""
        world, limit_s = self.world, self.world.limits.fold_grace_max_s
        session = session_of(peer, req.session)
        node, first, end = self._pages(session, req)
        if not 0.0 <= req.grace_s <= limit_s:
            raise InvalidArgument(
                f"grace_s {req.grace_s} is outside 0..{limit_s} (limits.fold_grace_max)"
            )
        if not 0 <= req.kept <= 0xFFFFFFFF:
            raise InvalidArgument(f"kept {req.kept} is outside 0..2^32-1")
        rows, known = rows_in(node, first, end), self._find(node, first, end)
        done = Done(req.id, world.boot, peer.acked, len(rows))
        if (
            known is not None and known.state is FoldState.GRACE
            and (known.grace_s, known.kept) == (req.grace_s, req.kept)
            and not np.count_nonzero(world.table.seq[rows] > known.seq)
        ):  # fmt: skip
            return done
        self._check_quota(session, known)
        if req.grace_s:
            self._keep(session.tenant, rows)
        else:
            self._let_go(rows)
        state = FoldState.GRACE if req.grace_s else FoldState.OVER
        until_s = world.now_s + req.grace_s
        fold = tree.Fold(first, end, world.seq, state, req.grace_s, until_s, req.kept)
        self._record(node, fold, known)
        self._wait_for(node, fold)
        world.counters["folds"] += 1
        return done

    def unfold(self, peer: Peer, req: Unfold) -> Unfolded:
        """Keep again what is still there of some pages, and bring it to DRAM."""
        world, table = self.world, self.world.table
        session = session_of(peer, req.session)
        node, first, end = self._pages(session, req)
        rows, known = rows_in(node, first, end), self._find(node, first, end)
        cached = np.count_nonzero(table.flags[rows] & F_HELD) < len(rows)
        folded = known is not None and known.state is not FoldState.BACK
        if cached or folded:
            self._check_quota(session, known)
            self._keep(session.tenant, rows)
            kept, never = 0 if known is None else known.kept, math.inf
            fold = tree.Fold(first, end, world.seq, FoldState.BACK, never, never, kept)
            self._record(node, fold, known)
        gone = self._gone(node, first, end)
        if folded:
            world.counters["unfolds"] += 1
            world.counters["unfold_misses"] += bool(gone)
        loading = sum(
            self.ahead.fetch(pool, mine, peer.member.pid) for pool, mine in world.by_pool(rows)
        )
        return Unfolded(req.id, world.boot, peer.acked, gone, loading)

    def _pages(self, session: Session, req: Fold | Unfold) -> tuple[Node, int, int]:
        """Whose pages of a branch are meant, the node's or an ancestor's, and which."""
        limit, end = self.world.limits.blocks_per_request, req.first + req.pages
        if not 0 < req.pages <= limit or not 0 <= req.first <= 0xFFFFFFFF:
            raise InvalidArgument(f"{req.pages} pages from {req.first}: allowed are 1..{limit}")
        node = node_of(session, req.node)
        tokens, shared = session.pools[0].layout.block_tokens, end
        while req.first < node.runs[0].start and node.parent is not None:
            shared = min(shared, -(-node.fork_tokens // tokens))
            node = node.parent
        if end > shared:
            raise InvalidArgument(
                f"pages {req.first}..{end - 1} are not of one node: the branch of node {req.node} "
                f"leaves node {node.id} in page {shared}"
            )
        return node, req.first, end

    @staticmethod
    def _find(node: Node, first: int, end: int) -> tree.Fold | None:
        """What is known of just these pages. Errors: InvalidArgument when they overlap others."""
        at = bisect_right(node.folds, first, key=lambda fold: fold.first)
        for near in node.folds[max(at - 1, 0) : at + 1]:
            if (near.first, near.end) == (first, end):
                return near
            if near.first < end and first < near.end:
                raise InvalidArgument(
                    f"pages {first}..{end - 1} of node {node.id} overlap with {near.first}.."
                    f"{near.end - 1}, which were folded together: name those"
                )
        return None

    def _check_quota(self, session: Session, known: tree.Fold | None) -> None:
        limit = self.world.limits.nodes_per_session
        if known is None and session.folds >= limit:
            raise QuotaExceeded(f"the session has {limit} folds (limits.nodes_per_session)")

    def _gone(self, node: Node, first: int, end: int) -> bytes:
        """Pages that no reader could have, packed; a page is there when all its parts are."""
        there = np.ones(end - first, np.bool_)
        for run in node.runs:
            rows = run.rows[first - run.start : end - run.start]
            lost = (self.world.table.flags[rows] & F_LOST) != 0
            there[: len(rows)] &= (rows != NONE) & ~lost
            there[len(rows) :] = False
        return pack_u32(np.flatnonzero(~there) + first)

    # -------------------------------------------------------------- blocks

    def _keep(self, tenant: Tenant, rows: Rows) -> None:
        """Make rows HELD. Errors: SpillFull, and nothing changed, when they cannot all be."""
        world, table = self.world, self.world.table
        extra = {
            pool.number: int(np.count_nonzero((table.flags[mine] & F_HELD) == 0))
            for pool, mine in world.by_pool(rows)
        }
        if any(extra.values()) and not tenant.keeps(extra):
            raise SpillFull(f"{sum(extra.values())} more HELD blocks do not fit; nothing changed")
        self._flag(rows, F_HELD)

    def _let_go(self, rows: Rows) -> None:
        """Make rows CACHED; lost ones that nobody holds any more are forgotten."""
        self._flag(rows, 0)
        lost = rows[(self.world.table.flags[rows] & F_LOST) != 0]
        lost = lost[~self.world.table.kept(lost)]
        if len(lost):
            self.world.unname(lost)
            self.copies.drop(lost)

    def _flag(self, rows: Rows, held: int) -> None:
        world, table = self.world, self.world.table
        for pool, mine in world.by_pool(rows):
            before = world.kept(mine)
            table.flags[mine] = (table.flags[mine] & ~np.uint8(F_HELD)) | np.uint8(held)
            pool.held += world.kept(mine) - before
            pool.tenant.arena.epoch += 1

    # ------------------------------------------------------- grace periods

    def _record(self, node: Node, fold: tree.Fold, known: tree.Fold | None) -> None:
        """Put a fold in place of what was known of its pages, also in the catalog."""
        if known is not None:
            known.state = FoldState.BACK
            node.folds[node.folds.index(known)] = fold
        else:
            self._add(node, fold)
        self._save(node, fold)

    @staticmethod
    def _add(node: Node, fold: tree.Fold) -> None:
        node.folds.insert(bisect_right(node.folds, fold.first, key=lambda f: f.first), fold)
        node.session.folds += 1

    def _save(self, node: Node, fold: tree.Fold) -> None:
        until_s = fold.until_s + self.world.ran_offset_s
        self.world.actions.append(SaveFold(node, fold, until_s))

    def _wait_for(self, node: Node, fold: tree.Fold) -> None:
        """Remember when a grace period ends."""
        if fold.state is not FoldState.GRACE or fold.until_s == math.inf:
            return
        self._number += 1
        heapq.heappush(self._due, (fold.until_s, self._number, node, fold))
        if len(self._due) > self._due_limit:
            self._due = [due for due in self._due if self._runs(due[2], due[3])]
            heapq.heapify(self._due)
            self._due_limit = 2 * len(self._due) + DUE_SPARE

    def _runs(self, node: Node, fold: tree.Fold) -> bool:
        return fold.state is FoldState.GRACE and self.world.nodes.get(node.index) is node

    def tick(self) -> None:
        """End the grace periods whose time is over."""
        for _ in range(FOLDS_PER_TICK):
            if not self._due or self._due[0][0] > self.world.now_s:
                return
            _, _, node, fold = heapq.heappop(self._due)
            if self._runs(node, fold):
                rows = self._old(node, fold)
                held = int(np.count_nonzero(self.world.table.flags[rows] & F_HELD))
                self.world.counters["grace_released_blocks"] += held
                self._let_go(rows)
                fold.state = FoldState.OVER
                self._save(node, fold)

    def _old(self, node: Node, fold: tree.Fold) -> Rows:
        """The rows that a fold speaks of."""
        rows = rows_in(node, fold.first, fold.end)
        old: Rows = rows[self.world.table.seq[rows] <= fold.seq]
        return old

    def restore(self, node: Node, fold: tree.Fold) -> None:
        """Apply a fold of an earlier life to the blocks that were found.

        A crash forgets some running time; more than was asked is never left of a grace period."""
        fold.until_s = min(fold.until_s, self.world.now_s + fold.grace_s)
        self._add(node, fold)
        rows = self._old(node, fold)
        if fold.state is FoldState.OVER:
            self._let_go(rows)
        else:
            self._flag(rows, F_HELD)
        self._wait_for(node, fold)
