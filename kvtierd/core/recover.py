"""Rebuilds the tables from what the media say of themselves and what the catalog knows.

Each block found in a header names its session, node and page (or its key); of several copies of
one name the newest wins, since a commit replaces only what is shorter or less kept. Blocks of
closed sessions and pruned nodes are freed; blocks of sessions that the catalog does not know become
orphans, kept until their client resumes them or their time is over. Slots that an earlier life's
client may still write or read stay as they are (see reclaim.py).

    session ...  add ...  ──►  slabs adopted  ──►  settle  ──►  finish
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier_client.wire import HELD, NO_NODE
from kvtierd.core.actions import Note
from kvtierd.core.blocks import F_DOOMED, F_HELD, F_LOST, NONE, Rows
from kvtierd.core.found import (
    Found,
    FoundSession,
    Pieces,
    add_rows,
    join,
    pieces,
    settle,
)  # fmt: skip
from kvtierd.core.slabs import READY
from kvtierd.core.state import State
from kvtierd.core.tenant import Pool, Tenant
from kvtierd.core.tree import Node, Run, Session, shared_pages

BATCH_ROWS: Final = 1 << 18
"""Blocks named in one pass, so that memory stays bounded (a single node may have more)."""

_READERS: Final = np.uint64(0xFF00)
_EVER: Final = 1 << 62
_PLACE: Final = np.dtype(
    [
        ("index", np.int64),  # in the NodeTable; NONE where the blocks can have no place
        ("start", np.int64),  # first page
        ("end", np.int64),  # before this page, unless the node may still grow
        ("since", np.uint64),  # blocks below it are of an earlier session of the token
        ("retention_seq", np.uint64),  # blocks up to it have the node's retention
        ("node_held", np.bool_),
        ("all_held", np.bool_),
        ("priority", np.uint8),
    ]
)
_NOWHERE: Final = (NONE, 0, 0, 0, 0, False, False, 0)


@dataclass(slots=True)
class Outcome:
    """What a recovery did, for the log."""

    blocks: int = 0
    sessions: int = 0
    orphans: int = 0
    discarded: int = 0
    lost: int = 0


class Recovery:
    """One start's rebuilding; used once, then thrown away."""

    def __init__(self, state: State) -> None:
        self.state, self.world = state, state.world
        self.outcome = Outcome()
        self._closed: set[tuple[str, bytes]] = set()
        self._guessed: set[Node] = set()  # nodes that only their children's blocks speak of
        self._pieces: list[Pieces] = []
        self._keyed: list[Rows] = []

    # ------------------------------------------------------------- catalog

    def session(self, tenant: Tenant, found: FoundSession) -> None:
        """Put a session of the catalog back; its layouts must be registered already."""
        if found.closed:
            self._closed.add((tenant.name, found.token_hash))
            return
        pools = [tenant.pools[fingerprint] for fingerprint in found.layouts]
        session = self.state.sessions.add_session(tenant, found.token_hash, pools, found.name)
        session.priority = found.priority
        session.idle_since_s = self.world.now_s - found.idle_s
        session.pruned = set(found.pruned)
        session.blob_version = found.blob_versions.get(NO_NODE, 0)
        session.since_seq = found.since_seq
        self.outcome.sessions += 1
        waiting = {each.node: each for each in found.nodes}
        while waiting:
            ready = [
                each for each in waiting.values()
                if each.parent == NO_NODE or each.parent in session.nodes
            ]  # fmt: skip
            for each in ready or list(waiting.values()):
                parent = None if each.parent == NO_NODE else session.nodes.get(each.parent)
                parent = parent or (session.nodes.get(0) if each.node else None)
                node = self.state.sessions.add_node(
                    session, each.node, parent, each.fork_tokens, each.retention
                )
                node.ended = each.ended
                node.retention_seq = each.retention_seq
                node.blob_version = found.blob_versions.get(each.node, 0)
                del waiting[each.node]
        if 0 not in session.nodes:
            self.state.sessions.add_node(session, 0, None, 0, HELD)

    # -------------------------------------------------------------- blocks

    def add(self, found: Found) -> None:
        """Make rows of blocks found; they have names, and count, from `settle` on."""
        if not len(found):
            return
        rows = add_rows(self.world, found)
        self._pieces.append(pieces(found, rows))
        self._keyed.append(rows[found.keyed])

    def settle(self) -> None:
        """Name what was added, and free what is left over; all its slabs are their pools' now."""
        parts, self._pieces = self._pieces, []
        if parts:
            every = join(parts)
            for number in np.unique(every.pool).tolist():
                mine = every.take(np.flatnonzero(every.pool == number))
                self._name_pages(self.world.pools[number], mine)
        keyed, self._keyed = self._keyed, []
        if keyed:
            self._name_keyed(np.concatenate(keyed))

    # --------------------------------------------------------------- pages

    def _name_pages(self, pool: Pool, found: Pieces) -> None:
        """Put a pool's session blocks into the tree."""
        found = found.take(np.lexsort((found.node, found.owner0)))
        changed = (found.owner0[1:] != found.owner0[:-1]) | (found.node[1:] != found.node[:-1])
        starts = np.flatnonzero(np.concatenate([[len(found) > 0], changed]))
        ends = np.append(starts[1:], len(found))
        total = np.cumsum(found.count)
        while len(starts):
            done = int(total[starts[0] - 1]) if starts[0] else 0
            n = max(1, int(np.searchsorted(total[ends - 1], done + BATCH_ROWS, side="right")))
            first, last = int(starts[0]), int(ends[n - 1])
            self._name_nodes(pool, found.take(slice(first, last)), starts[:n] - first)
            starts, ends = starts[n:], ends[n:]

    def _name_nodes(self, pool: Pool, found: Pieces, starts: NDArray[np.int64]) -> None:
        """The same for some whole nodes; `starts`: the first piece of each."""
        table = self.world.table
        nodes, places = self._places(pool, found, starts)
        ordinal = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(found)))
        which = np.repeat(ordinal, found.count)
        rows = np.repeat(found.first - np.cumsum(found.count) + found.count, found.count)
        rows += np.arange(len(rows))
        page, start = table.page[rows].astype(np.int64), places["start"]
        fits = (page >= start[which]) & (page < places["end"][which])
        fits &= table.seq[rows] >= places["since"][which]
        fits &= page < pool.pages_max
        if not fits.all():
            self._discard(pool, rows[~fits])
            rows, which, page = rows[fits], which[fits], page[fits]
        # All runs one after the other, each as long as its highest page says.
        page -= start[which]
        length = np.zeros(len(starts), np.int64)
        if len(rows):
            first = np.flatnonzero(np.diff(which, prepend=-1))
            length[which[first]] = np.maximum.reduceat(page, first) + 1
        offset = np.cumsum(length) - length
        at = offset[which] + page
        named = np.full(int(length.sum()), NONE, np.int64)
        named[at] = rows
        twice = named[at] != rows
        if twice.any():
            several = np.zeros(len(named), np.bool_)
            several[at[twice]] = True
            some = several[at]
            names, winners, losers = settle(self.world, rows[some], at[some])
            named[names] = winners
            self._discard(pool, losers)
        self._keep_pages(pool, named, np.repeat(np.arange(len(starts)), length), places)
        self._fill_runs(pool, nodes, named, offset, length)

    def _keep_pages(
        self, pool: Pool, named: Rows, which: NDArray[np.int64], places: NDArray[np.void]
    ) -> None:
        """Give the named rows what their nodes say; lost ones that are not HELD lose their name."""
        table = self.world.table
        at = np.flatnonzero(named != NONE)
        rows, which = named[at], which[at]
        flags = table.flags[rows]
        lost, held = (flags & F_LOST) != 0, (flags & F_HELD) != 0
        old = table.seq[rows] <= places["retention_seq"][which]
        held = np.where(old, places["node_held"][which], held) | places["all_held"][which]
        gone = lost & ~held
        if gone.any():
            named[at[gone]] = NONE
            self._discard(pool, rows[gone])
            rows, which, lost, held = rows[~gone], which[~gone], lost[~gone], held[~gone]
        table.flags[rows] = held * np.uint8(F_HELD) + lost * np.uint8(F_LOST)
        table.node[rows] = places["index"][which]
        table.priority[rows] = places["priority"][which]
        self.outcome.lost += int(lost.sum())
        self._count(pool, rows)

    def _fill_runs(
        self,
        pool: Pool,
        nodes: list[Node | None],
        named: Rows,
        offset: NDArray[np.int64],
        length: NDArray[np.int64],
    ) -> None:
        """Give each node its run of the named rows, up to the last one that is there."""
        tokens, valid = pool.layout.block_tokens, self.world.table.valid
        for node, first, n in zip(nodes, offset.tolist(), length.tolist(), strict=True):
            rows = named[first : first + n]
            if n and rows[-1] == NONE:
                rows = rows[: int(np.flatnonzero(rows != NONE).max(initial=-1)) + 1]
            if node is None or not len(rows):
                continue
            run = node.runs[self._part(node.session, pool)]
            run.reach(run.start + len(rows))
            run.rows[:] = rows
            last = (run.start + run.length - 1) * tokens + int(valid[rows[-1]])
            node.tokens = max(node.tokens, last)
            self.world.node_table.tokens[node.index] = node.tokens

    def _places(
        self, pool: Pool, found: Pieces, starts: NDArray[np.int64]
    ) -> tuple[list[Node | None], NDArray[np.void]]:
        """The node of each group of pieces, None where there is none, and where its blocks go."""
        # The newest piece of a node speaks for it: others may be of an earlier session.
        newest = np.maximum.reduceat(found.seq, starts)
        groups = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(found)))
        best = np.full(len(starts), len(found))
        at = np.flatnonzero(found.seq == newest[groups])
        np.minimum.at(best, groups[at], at)
        nodes = [self._node(pool, piece) for piece in self._each(found.take(best))]
        places = [_NOWHERE if node is None else self._place(node, pool) for node in nodes]
        return nodes, np.array(places, _PLACE)

    @staticmethod
    def _each(found: Pieces) -> Iterator["_Piece"]:
        columns = (found.owner0, found.owner1, found.node, found.parent, found.fork_tokens)
        seq = found.seq
        for values in zip(*(column.tolist() for column in (*columns, seq)), strict=True):
            yield _Piece(*values)

    def _place(self, node: Node, pool: Pool) -> tuple[int, int, int, int, int, bool, bool, int]:
        session = node.session
        return (
            node.index, node.runs[self._part(session, pool)].start,
            shared_pages(node) if node.ended else _EVER, session.since_seq, node.retention_seq,
            node.retention == HELD, session.found_in_headers, session.priority,
        )  # fmt: skip

    def _node(self, pool: Pool, piece: "_Piece") -> Node | None:
        """The node of blocks found; None when its session is closed or newer, or it is pruned."""
        session = self._session_of(pool, piece)
        if session is None or piece.node in session.pruned or piece.seq < session.since_seq:
            return None
        node = session.nodes.get(piece.node) or self._node_from_header(session, piece)
        if node in self._guessed:
            self._correct(node, piece)
        return node

    def _session_of(self, pool: Pool, piece: "_Piece") -> Session | None:
        """The session of blocks found; an unknown one becomes an orphan, a closed one is None."""
        tenant = pool.tenant
        session = tenant.sessions.get(piece.owner0)
        if session is not None:
            return session
        owner = np.array([piece.owner0, piece.owner1], np.uint64).tobytes()
        if (tenant.name, owner) in self._closed:
            return None
        session = self.state.sessions.add_session(tenant, owner, [pool], "")
        session.found_in_headers = True
        self.state.sessions.add_node(session, 0, None, 0, HELD)
        self.outcome.orphans += 1
        self.world.actions.append(
            Note("orphan_found", f"session {session.sid:016x} is in headers, not in the catalog")
        )
        return session

    def _node_from_header(self, session: Session, piece: "_Piece") -> Node:
        """A node that the catalog does not know, from what its blocks say of it.

        While nothing is known of its parent either, that is made with no part in the root."""
        add = self.state.sessions.add_node
        parent = session.nodes.get(piece.parent)
        if parent is None:
            parent = add(session, piece.parent, session.nodes[0], 0, HELD)
            self._guessed.add(parent)
        return add(session, piece.node, parent, piece.fork_tokens, HELD)

    def _correct(self, node: Node, piece: "_Piece") -> None:
        """Blocks of a node whose parent was guessed say what its parent is."""
        session, above = node.session, node.parent
        self._guessed.discard(node)
        parent = session.nodes.get(piece.parent)
        if parent is None:
            parent = self.state.sessions.add_node(session, piece.parent, session.nodes[0], 0, HELD)
            self._guessed.add(parent)
        assert above is not None
        del above.children[node.id]
        parent.children[node.id] = node
        node.parent, node.fork_tokens = parent, piece.fork_tokens
        for run in node.runs:
            run.start = node.fork_tokens // session.pools[0].layout.block_tokens
        table = self.world.node_table
        table.parent[node.index], table.fork_tokens[node.index] = parent.id, node.fork_tokens

    @staticmethod
    def _part(session: Session, pool: Pool) -> int:
        if pool not in session.pools:
            session.pools.append(pool)
            for node in session.nodes.values():
                node.runs.append(Run(node.runs[0].start))
        return session.pools.index(pool)

    # --------------------------------------------------------------- keyed

    def _name_keyed(self, rows: Rows) -> None:
        """Put keyed blocks into the KeyIndex; lost ones are forgotten."""
        keys, table = self.world.keys, self.world.table
        twice = keys.insert(rows.astype(np.int32)).astype(np.int64)
        gone = np.empty(0, np.int64)
        if len(twice):
            there = keys.find(table.owner0[twice], table.owner1[twice], table.pool[twice])
            first = np.unique(there.astype(np.int64))
            every, names = np.concatenate([first, twice]), np.concatenate([first, there])
            names, winners, gone = settle(self.world, every, names)
            other = winners != names
            keys.remove(names[other].astype(np.int32))
            keys.insert(winners[other].astype(np.int32))
            rows = rows[~np.isin(rows, gone)]
        lost = (table.flags[rows] & F_LOST) != 0
        if lost.any():
            keys.remove(rows[lost].astype(np.int32))
            gone, rows = np.concatenate([gone, rows[lost]]), rows[~lost]
        for pool, mine in self.world.by_pool(gone):
            self._discard(pool, mine)
        for i in range(0, len(rows), BATCH_ROWS):
            for pool, mine in self.world.by_pool(rows[i : i + BATCH_ROWS]):
                self._count(pool, mine)

    # -------------------------------------------------------- what is left

    def _count(self, pool: Pool, rows: Rows) -> None:
        """Rows of a pool are named: note where they are, and count them."""
        world, table = self.world, self.world.table
        dram, nvme = table.dram[rows], table.nvme[rows]
        in_dram, in_nvme = dram != NONE, nvme != NONE
        pool.tenant.arena.row_of[dram[in_dram]] = rows[in_dram] + 1
        world.nvme.row_of[nvme[in_nvme]] = rows[in_nvme] + 1
        pool.clean += int(np.count_nonzero(in_dram & in_nvme))
        pool.held += world.kept(rows)
        self.outcome.blocks += len(rows)

    def _discard(self, pool: Pool, rows: Rows) -> None:
        """Give rows of a pool back that have no name, and their slots; what is read waits."""
        if not len(rows):
            return
        table, arena = self.world.table, pool.tenant.arena
        dram, nvme = table.dram[rows], table.nvme[rows]
        in_dram = dram != NONE
        slots = dram[in_dram]
        if len(slots):
            self.outcome.discarded += len(slots)
            read = (arena.words[slots] & _READERS) != 0
            doomed = rows[in_dram][read]
            table.flags[doomed] = F_DOOMED
            arena.row_of[slots[read]] = doomed + 1
            self.world.doomed += len(doomed)
            if not read.all():
                arena.free(pool.dram, slots[~read], READY)
            rows = rows[~np.isin(rows, doomed)]
        self._clear(pool, nvme[nvme != NONE])
        table.remove(rows)

    def _clear(self, pool: Pool, slots: Rows) -> None:
        if len(slots):
            self.outcome.discarded += len(slots)
            self.state.copies.clear(pool, slots)

    # ----------------------------------------------------------------- end

    def finish(self, tenant: Tenant, sessions: list[FoundSession]) -> None:
        """Restore holds and folds, and back what is kept then; tombstones go when what is left of
        their sessions is cleared."""
        for found in sessions:
            session = tenant.sessions.get(int.from_bytes(found.token_hash[:8], "little"))
            if session is None:
                continue
            if found.holds:
                self._holds(tenant, session, found.holds)
            for number, fold in found.folds:
                node = session.nodes.get(number)
                if node is not None:
                    self.state.retention.restore(node, fold)
        for name, hashed in self._closed:
            if name == tenant.name:
                self.world.tombstones[tenant, hashed] = 0
        tenant.back_what_is_there()

    def _holds(self, tenant: Tenant, session: Session, holds: list[tuple[bytes, bytes]]) -> None:
        for fingerprint in {layout for layout, _ in holds}:
            pool = tenant.pools.get(fingerprint)
            if pool is None:
                continue
            keys = b"".join(key for layout, key in holds if layout == fingerprint)
            packed = np.frombuffer(keys, "<u8").reshape(-1, 2)
            rows = self.world.keys.find(packed[:, 0], packed[:, 1], pool.number).astype(np.int64)
            rows = rows[rows != NONE]
            if len(rows):
                self.world.pin(pool, rows)
                session.holds[pool.number] = set(rows.tolist())


@dataclass(slots=True)
class _Piece:
    """What blocks say of their node."""

    owner0: int
    owner1: int
    node: int
    parent: int
    fork_tokens: int
    seq: int
