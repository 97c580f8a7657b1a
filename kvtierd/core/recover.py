"""Rebuilds the tables from what the media say of themselves and what the catalog knows.

Each block found in a header names its session, node and page (or its key); of several copies of
one name the newest wins, since a commit replaces only what is shorter or less kept. Blocks of
closed sessions and pruned nodes are freed; blocks of sessions that the catalog does not know become
orphans, kept until their client resumes them or their time is over. Slots that an earlier life's
client may still write or read stay as they are (see reclaim.py).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtier_client.wire import HELD, NO_NODE
from kvtierd.core.actions import Note
from kvtierd.core.blocks import F_DOOMED, F_HELD, F_LOST, NONE, Rows, Slots
from kvtierd.core.slabs import READY, Slabs
from kvtierd.core.state import State
from kvtierd.core.tenant import Pool, Tenant
from kvtierd.core.tree import Node, Run, Session, shared_pages

_U64 = NDArray[np.uint64]
_READERS = np.uint64(0xFF00)


@dataclass(slots=True)
class Found:
    """Blocks found in the headers of one tier, as columns; all of one pool once split."""

    slots: Slots
    owner0: _U64
    owner1: _U64
    node: _U64
    page: _U64
    valid: _U64
    checksum: _U64
    seq: _U64
    lease: _U64
    parent: _U64
    fork_tokens: _U64
    keyed: NDArray[np.bool_]
    held: NDArray[np.bool_]
    lost: NDArray[np.bool_]
    in_dram: NDArray[np.bool_]

    def take(self, which: NDArray[np.generic]) -> "Found":
        """The chosen blocks."""
        return Found(*(getattr(self, name)[which] for name in self.__slots__))

    def __len__(self) -> int:
        return len(self.slots)


def join(first: Found, second: Found) -> Found:
    """All blocks of both."""
    return Found(
        *(np.concatenate([getattr(first, n), getattr(second, n)]) for n in Found.__slots__)
    )


@dataclass(slots=True)
class FoundNode:
    """A node as the catalog knows it."""

    node: int
    parent: int
    fork_tokens: int
    retention: int
    retention_seq: int
    ended: bool


@dataclass(slots=True)
class FoundSession:
    """A session as the catalog knows it."""

    token_hash: bytes
    name: str
    priority: int
    layouts: list[bytes]
    since_seq: int
    idle_s: float
    closed: bool
    nodes: list[FoundNode]
    pruned: list[int]
    blob_versions: dict[int, int]
    holds: list[tuple[bytes, bytes]]


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

    def blocks(self, pool: Pool, found: Found) -> None:
        """Make rows of the blocks found in a pool's slabs; what is left over is freed."""
        if not len(found):
            return
        order = np.lexsort(
            (~found.in_dram, ~found.seq, found.page, found.node, found.owner1, found.owner0,
             found.keyed)
        )  # fmt: skip
        found = self._without_earlier(pool, found.take(order))
        if not len(found):
            return
        same = self._same_name(found)
        first = np.flatnonzero(~same)
        group = np.cumsum(~same) - 1
        winner = first[group]  # place of each block's winner
        twin = self._twins(found, same, winner)
        rows = self._rows(pool, found, first, np.flatnonzero(twin), winner)
        keep = self._name(pool, found, first, rows)
        used = np.zeros(len(found), np.bool_)
        used[first[keep]] = True
        used |= twin & np.isin(winner, first[keep])
        used &= ~(found.lost & ~found.in_dram)
        self._free(pool, found, ~used)
        self.outcome.blocks += int(keep.sum())

    def _without_earlier(self, pool: Pool, found: Found) -> Found:
        """Free blocks of earlier sessions of a token that has a new one: they have its names."""
        changed = (found.owner0[1:] != found.owner0[:-1]) | (found.owner1[1:] != found.owner1[:-1])
        changed |= found.keyed[1:] != found.keyed[:-1]
        starts = np.flatnonzero(np.concatenate([[True], changed]))
        sessions = pool.tenant.sessions
        since = np.zeros(len(starts), np.uint64)
        for i, owner in enumerate(found.owner0[starts].tolist()):
            session = sessions.get(owner)
            if session is not None and not found.keyed[starts[i]]:
                since[i] = session.since_seq
        earlier = found.seq < np.repeat(since, np.diff(starts, append=len(found)))
        if not earlier.any():
            return found
        self._free(pool, found, earlier)
        return found.take(~earlier)

    @staticmethod
    def _twins(
        found: Found, same: NDArray[np.bool_], winner: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """The NVMe copies of winners in DRAM: at most one each, and of the same bytes.

        A copy whose checksum is not the one that the block had before is of bytes that changed
        in DRAM meanwhile; without it the next demotion finds that out."""
        twin: NDArray[np.bool_] = same & (found.seq == found.seq[winner])
        twin &= found.in_dram != found.in_dram[winner]
        known = found.checksum[winner]
        twin &= (known == 0) | (found.checksum == known)
        places = np.flatnonzero(twin)
        _, first = np.unique(winner[places], return_index=True)
        twin[:] = False
        twin[places[first]] = True
        return twin

    @staticmethod
    def _same_name(found: Found) -> NDArray[np.bool_]:
        """True where a block has the name of the one before it."""
        same = np.zeros(len(found), np.bool_)
        keyed = found.keyed
        equal = (found.owner0[1:] == found.owner0[:-1]) & (found.owner1[1:] == found.owner1[:-1])
        equal &= keyed[1:] == keyed[:-1]
        paged = (found.node[1:] == found.node[:-1]) & (found.page[1:] == found.page[:-1])
        same[1:] = equal & (keyed[1:] | paged)
        return same

    def _rows(
        self,
        pool: Pool,
        found: Found,
        first: NDArray[np.int64],
        twins: NDArray[np.int64],
        winner: NDArray[np.int64],
    ) -> Rows:
        """Rows for the winners, with the slots of both their copies."""
        world = self.world
        rows = world.add_rows(len(first))
        table = world.table
        table.owner0[rows], table.owner1[rows] = found.owner0[first], found.owner1[first]
        table.checksum[rows], table.seq[rows] = found.checksum[first], found.seq[first]
        table.pool[rows] = pool.number
        table.node[rows] = NONE
        table.page[rows], table.valid[rows] = found.page[first], found.valid[first]
        table.touch[rows] = world.touch
        table.readers[rows] = 0
        table.pins[rows] = 0
        table.priority[rows] = 0
        dram, nvme = np.full(len(found), NONE), np.full(len(found), NONE)
        for places in (first, twins):
            good = places[~(found.lost[places] & ~found.in_dram[places])]
            at = winner[good]
            into = found.in_dram[good]
            dram[at[into]] = found.slots[good[into]]
            nvme[at[~into]] = found.slots[good[~into]]
            table_sum = found.checksum[good[~into]]
            table.checksum[rows[np.searchsorted(first, at[~into])]] = table_sum
        table.dram[rows], table.nvme[rows] = dram[first], nvme[first]
        flags = np.where(found.held[first], F_HELD, 0).astype(np.uint8)
        flags[(dram[first] == NONE) & (nvme[first] == NONE)] |= F_LOST
        table.flags[rows] = flags
        world.seq = max(world.seq, int(found.seq.max()))
        return rows

    def _name(
        self, pool: Pool, found: Found, first: NDArray[np.int64], rows: Rows
    ) -> NDArray[np.bool_]:
        """Put the winners' rows into the tree or the KeyIndex; returns which found their place."""
        world, table = self.world, self.world.table
        keep = np.zeros(len(first), np.bool_)
        keyed = found.keyed[first]
        lost = (table.flags[rows] & F_LOST) != 0
        fresh = keyed & ~lost
        if fresh.any():
            twice = world.keys.insert(rows[fresh].astype(np.int32))
            keep |= fresh & ~np.isin(rows, twice)
        of_nodes = np.flatnonzero(~keyed)
        if len(of_nodes):
            names = first[of_nodes]
            starts = np.flatnonzero(np.concatenate([[True], self._next_node(found, names)]))
            for start, end in zip(starts, [*starts[1:].tolist(), len(names)], strict=True):
                some = of_nodes[start:end]
                keep[some] = self._name_node(pool, found, first[some], rows[some])
        kept = rows[keep]
        pool.clean += int(((table.dram[kept] != NONE) & (table.nvme[kept] != NONE)).sum())
        pool.held += world.kept(kept)
        for slabs, column in ((pool.tenant.arena, table.dram), (world.nvme, table.nvme)):
            there = kept[column[kept] != NONE]
            slabs.row_of[column[there]] = there + 1
        table.remove(rows[~keep])
        self.outcome.lost += int((lost & keep).sum())
        return keep

    @staticmethod
    def _next_node(found: Found, names: NDArray[np.int64]) -> NDArray[np.bool_]:
        """True where a block's node is not that of the block before it."""
        a, b = names[1:], names[:-1]
        changed: NDArray[np.bool_] = (
            (found.owner0[a] != found.owner0[b])
            | (found.owner1[a] != found.owner1[b])
            | (found.node[a] != found.node[b])
        )
        return changed

    def _name_node(
        self, pool: Pool, found: Found, places: NDArray[np.int64], rows: Rows
    ) -> NDArray[np.bool_]:
        """Give one node its rows; returns which it can have."""
        table, nothing = self.world.table, np.zeros(len(rows), np.bool_)
        at = int(places[0])
        owner = np.array([found.owner0[at], found.owner1[at]], np.uint64).tobytes()
        node_id = int(found.node[at])
        session = self._session_of(pool, owner)
        if session is None or node_id in session.pruned:
            return nothing
        node = session.nodes.get(node_id) or self._node_from_header(session, found, at)
        if node in self._guessed:
            self._correct(node, found, at)
        run = node.runs[self._part(session, pool)]
        pages = found.page[places].astype(np.int64)
        good = pages >= run.start
        if node.ended:
            good &= pages < shared_pages(node)
        lost = (table.flags[rows] & F_LOST) != 0
        held = found.held[places].copy()
        old = found.seq[places] <= node.retention_seq
        held[old] = node.retention == HELD
        if session.found_in_headers:
            held[:] = True
        good &= ~lost | held
        table.flags[rows] = np.where(held, F_HELD, 0).astype(np.uint8) | np.where(lost, F_LOST, 0)
        table.node[rows] = node.index
        table.priority[rows] = session.priority
        mine = rows[good]
        if len(mine):
            run.reach(int(pages[good].max()) + 1)
            run.rows[pages[good] - run.start] = mine
            last = int(pages[good].max()) * pool.layout.block_tokens + int(table.valid[mine[-1]])
            node.tokens = max(node.tokens, last)
            self.world.node_table.tokens[node.index] = node.tokens
        return good

    def _session_of(self, pool: Pool, owner: bytes) -> Session | None:
        """The session of blocks found; an unknown one becomes an orphan, a closed one is None."""
        tenant = pool.tenant
        session = tenant.sessions.get(int.from_bytes(owner[:8], "little"))
        if session is not None:
            return session
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

    def _node_from_header(self, session: Session, found: Found, at: int) -> Node:
        """A node that the catalog does not know, from what its blocks say of it.

        While nothing is known of its parent either, that is made with no part in the root."""
        add = self.state.sessions.add_node
        node_id, fork = int(found.node[at]), int(found.fork_tokens[at])
        parent_id = int(found.parent[at])
        parent = session.nodes.get(parent_id)
        if parent is None:
            parent = add(session, parent_id, session.nodes[0], 0, HELD)
            self._guessed.add(parent)
        return add(session, node_id, parent, fork, HELD)

    def _correct(self, node: Node, found: Found, at: int) -> None:
        """Blocks of a node whose parent was guessed say what its parent is."""
        session, above = node.session, node.parent
        self._guessed.discard(node)
        parent = session.nodes.get(int(found.parent[at]))
        if parent is None:
            parent = self.state.sessions.add_node(
                session, int(found.parent[at]), session.nodes[0], 0, HELD
            )
            self._guessed.add(parent)
        assert above is not None
        del above.children[node.id]
        parent.children[node.id] = node
        node.parent, node.fork_tokens = parent, int(found.fork_tokens[at])
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

    def _free(self, pool: Pool, found: Found, which: NDArray[np.bool_]) -> None:
        """Free the slots of blocks that did not become rows."""
        for in_dram in (True, False):
            slots = found.slots[which & (found.in_dram == in_dram)]
            if not len(slots):
                continue
            self.outcome.discarded += len(slots)
            if in_dram:
                arena = pool.tenant.arena
                read = (arena.words[slots] & _READERS) != 0
                if read.any():
                    self._doom(pool, found.take(np.flatnonzero(which & found.in_dram)[read]))
                    slots = slots[~read]
                if len(slots):
                    arena.free(pool.dram, slots, READY)
            else:
                self.state.copies.clear(pool, slots)

    def _doom(self, pool: Pool, found: Found) -> None:
        """Keep slots that clients of an earlier life may still read, without a name."""
        rows = self.world.add_rows(len(found))
        table = self.world.table
        table.owner0[rows], table.owner1[rows] = found.owner0, found.owner1
        table.checksum[rows], table.seq[rows] = found.checksum, found.seq
        table.dram[rows], table.nvme[rows] = found.slots, NONE
        table.pool[rows], table.node[rows] = pool.number, NONE
        table.page[rows], table.valid[rows] = found.page, found.valid
        table.touch[rows], table.readers[rows], table.pins[rows] = self.world.touch, 0, 0
        table.flags[rows], table.priority[rows] = F_DOOMED, 0
        pool.tenant.arena.row_of[found.slots] = rows + 1
        self.world.doomed += len(rows)

    # ----------------------------------------------------------------- end

    def finish(self, tenant: Tenant, holds: list[FoundSession]) -> None:
        """Restore holds; tombstones go when what is left of their sessions is cleared."""
        for found in holds:
            session = tenant.sessions.get(int.from_bytes(found.token_hash[:8], "little"))
            if session is not None and found.holds:
                self._holds(tenant, session, found.holds)
        for name, hashed in self._closed:
            if name == tenant.name:
                self.world.tombstones[tenant, hashed] = 0

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


def adopt_slabs(slabs: Slabs, pool: Pool, numbers: list[int], *, dram: bool) -> None:
    """Take over the slabs that a directory gives to a pool."""
    part = pool.dram if dram else pool.nvme
    for slab in numbers:
        slabs.adopt(slab, part)
