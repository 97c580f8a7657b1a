"""The session verbs: open, resume, close, fork, prune, priority, blobs."""

import hashlib

import numpy as np

from kvtier_client.errors import (
    InvalidArgument,
    LayoutMismatch,
    QuotaExceeded,
    UnknownBranch,
    UnknownSession,
)  # fmt: skip
from kvtier_client.layout import DTYPE_BYTES
from kvtier_client.wire import (
    HELD,
    NO_NODE,
    TIER_DRAM,
    TIER_LOST,
    TIER_NONE,
    TIER_NVME,
    Blob,
    CloseSession,
    Describe,
    Done,
    Fork,
    GetBlob,
    Layout,
    LayoutRegistered,
    NodeInfo,
    OpenSession,
    Prune,
    PutBlob,
    RegisterLayout,
    ResumeSession,
    SessionReply,
    SetPriority,
)  # fmt: skip
from kvtierd.core.actions import (
    DropNodes,
    DropSession,
    LoadBlob,
    SaveBlob,
    SaveLayout,
    SaveNodes,
    SaveSession,
)  # fmt: skip
from kvtierd.core.blocks import F_LOST, NONE, not_none
from kvtierd.core.copies import Copies
from kvtierd.core.leases import Peer, pack_u32
from kvtierd.core.reads import Reads
from kvtierd.core.retention import fold_infos
from kvtierd.core.slabs import SlabPool
from kvtierd.core.tenant import SLOT_ALIGN, Pool, Tenant
from kvtierd.core.tree import (
    PARTS_MAX,
    TOKENS_MAX,
    Node,
    PartRows,
    Run,
    Session,
    node_of,
    remove_branch,
    session_of,
    trim_to_children,
)  # fmt: skip
from kvtierd.core.world import World
from kvtierd.core.writes import Writes

CLOSED_MAX = 65536
"""Closed sessions of a tenant whose repeated close still succeeds."""
_NAME_MAX = 200


def token_hash(token: bytes) -> bytes:
    """The 16 bytes by which a token is known; its first 8 are the session's id."""
    return hashlib.sha256(b"kvtierd-session" + token).digest()[:16]


class Sessions:
    """Sessions of all tenants."""

    def __init__(self, world: World, copies: Copies, writes: Writes, reads: Reads) -> None:
        self.world, self.copies, self.writes, self.reads = world, copies, writes, reads

    # ------------------------------------------------------------- layouts

    def register_layout(self, peer: Peer, req: RegisterLayout) -> LayoutRegistered:
        """Make a layout known to the tenant; repeating it is free."""
        layout, tenant = req.layout, peer.group.tenant
        fingerprint = layout.fingerprint()
        pool = tenant.pools.get(fingerprint)
        if pool is None:
            self._check_layout(layout, tenant)
            pool = self.add_pool(tenant, layout)
            self.world.actions.append(SaveLayout(pool))
        return LayoutRegistered(
            req.id, self.world.boot, peer.acked, fingerprint, layout.block_bytes, pool.slot_bytes
        )

    def add_pool(self, tenant: Tenant, layout: Layout) -> Pool:
        """A new pool, without slabs yet."""
        world = self.world
        slot_bytes = -(-layout.block_bytes // SLOT_ALIGN) * SLOT_ALIGN
        number = len(world.pools)
        dram = SlabPool(number, slot_bytes, self.slots_per_slab(tenant.arena, slot_bytes))
        nvme = SlabPool(
            number, slot_bytes, self.slots_per_slab(world.nvme, slot_bytes), tenant.nvme_quota
        )
        pool = Pool(number, tenant, layout, dram, nvme)
        world.pools.append(pool)
        tenant.pools[pool.fingerprint] = pool
        return pool

    @staticmethod
    def slots_per_slab(slabs: object, slot_bytes: int) -> int:
        """How many slots of a size a slab is cut into."""
        slab_bytes: int = slabs.slab_bytes  # type: ignore[attr-defined]
        max_slots: int = slabs.max_slots  # type: ignore[attr-defined]
        return min(slab_bytes // slot_bytes, max_slots)

    def _check_layout(self, layout: Layout, tenant: Tenant) -> None:
        slab_bytes = min(tenant.arena.slab_bytes, self.world.nvme.slab_bytes)
        if layout.dtype not in DTYPE_BYTES:
            raise LayoutMismatch(f"dtype {layout.dtype!r} is none of {', '.join(DTYPE_BYTES)}")
        numbers = (layout.layers, layout.block_tokens, layout.tp_size)
        if min(numbers) < 1 or layout.block_tokens > 65536 or layout.tp_size > 4096:
            raise LayoutMismatch("layers, block_tokens and tp_size are at least 1")
        if layout.latent < 0 or layout.kv_heads < 0 or layout.head_dim < 0 or layout.group < 0:
            raise LayoutMismatch("a layout's sizes are not negative")
        if not 0 <= layout.tp_rank < layout.tp_size or (layout.replicated and layout.tp_rank):
            raise LayoutMismatch("tp_rank is outside 0..tp_size-1, or not 0 in a replicated layout")
        if layout.codec == "raw" and layout.block_bytes != layout.raw_block_bytes():
            raise LayoutMismatch(
                f"block_bytes is {layout.block_bytes}, but a raw block of this layout has "
                f"{layout.raw_block_bytes()}"
            )
        if not 1 <= layout.block_bytes <= slab_bytes:
            raise LayoutMismatch(
                f"a block of {layout.block_bytes} bytes does not fit a slab of {slab_bytes} "
                "(arena.slab_bytes, spill.slab_bytes)"
            )
        if max(map(len, (layout.model, layout.codec, layout.extra))) > 4096:
            raise LayoutMismatch("model, codec and extra are at most 4096 characters long")
        if len(tenant.pools) >= self.world.limits.layouts_per_tenant:
            raise QuotaExceeded(f"tenant {tenant.name} has its {len(tenant.pools)} layouts already")

    # ------------------------------------------------------------ sessions

    def open(self, peer: Peer, req: OpenSession) -> SessionReply:
        """Create a session with its root node, or return the one that has this token."""
        tenant = peer.group.tenant
        hashed = self._hash(req.token)
        session = tenant.sessions.get(int.from_bytes(hashed[:8], "little"))
        created = session is None
        if session is None:
            session = self._create(peer, req, hashed)
        elif [pool.fingerprint for pool in session.pools] != req.layouts:
            if not session.found_in_headers:
                raise LayoutMismatch("the token's session was opened with other layouts")
            self._adopt_layouts(session, self._pools(peer, req.layouts))
        self._attach(peer, session)
        return self._reply(peer, req.id, session, created)

    def _create(self, peer: Peer, req: OpenSession, hashed: bytes) -> Session:
        tenant, limits = peer.group.tenant, self.world.limits
        pools = self._pools(peer, req.layouts)
        if len(tenant.sessions) >= limits.sessions_per_tenant:
            raise QuotaExceeded(
                f"tenant {tenant.name} has {len(tenant.sessions)} sessions "
                "(limits.sessions_per_tenant)"
            )
        self._check_priority(req.priority)
        if len(req.name) > _NAME_MAX:
            raise InvalidArgument(f"a session's name has at most {_NAME_MAX} characters")
        session = self.add_session(tenant, hashed, pools, req.name)
        session.priority = req.priority
        session.since_seq = self.world.seq + 1
        root = self.add_node(session, 0, None, 0, HELD)
        self.world.actions += [SaveSession(session), SaveNodes([root])]
        return session

    def _pools(self, peer: Peer, fingerprints: list[bytes]) -> list[Pool]:
        """The parts of a session with these layouts. Errors: InvalidArgument, LayoutMismatch."""
        if not 0 < len(set(fingerprints)) == len(fingerprints) <= PARTS_MAX:
            raise InvalidArgument(f"a session has 1..{PARTS_MAX} distinct layouts")
        pools = [self.writes.pool(peer, fingerprint) for fingerprint in fingerprints]
        if len({pool.layout.block_tokens for pool in pools}) != 1:
            raise LayoutMismatch("all layouts of a session have the same block_tokens")
        return pools

    def add_session(self, tenant: Tenant, hashed: bytes, pools: list[Pool], name: str) -> Session:
        """Put a session without nodes into the tenant."""
        sid = int.from_bytes(hashed[:8], "little")
        session = Session(sid, hashed, tenant, pools, name)
        session.idle_since_s = self.world.now_s
        tenant.sessions[sid] = session
        tenant.closed.pop(sid, None)
        self.world.tombstones.pop((tenant, hashed), None)
        return session

    @staticmethod
    def _adopt_layouts(session: Session, pools: list[Pool]) -> None:
        """Give a session that only its headers remembered the parts its client says it has."""
        if not set(session.pools) <= set(pools):
            raise LayoutMismatch("blocks of this session are stored in layouts it does not name")
        for node in session.nodes.values():
            runs = dict(zip(session.pools, node.runs, strict=True))
            start = node.runs[0].start
            node.runs = [runs.get(pool) or Run(start) for pool in pools]
        session.pools = pools

    def add_node(
        self, session: Session, node: int, parent: Node | None, fork_tokens: int, retention: int
    ) -> Node:
        """Put a node into a session's tree."""
        above = NO_NODE if parent is None else parent.id
        index = self.world.node_table.add(node, above, fork_tokens)
        added = Node(session, node, parent, fork_tokens, retention, index)
        session.nodes[node] = added
        self.world.nodes[index] = added
        if parent is not None:
            parent.children[node] = added
        return added

    def resume(self, peer: Peer, req: ResumeSession) -> SessionReply:
        """Open a session again by its token, in this or an earlier life of the daemon."""
        sid = int.from_bytes(self._hash(req.token)[:8], "little")
        session = peer.group.tenant.sessions.get(sid)
        if session is None:
            raise UnknownSession("no session of this tenant has this token; it may have expired")
        self._attach(peer, session)
        return self._reply(peer, req.id, session, created=False)

    def _attach(self, peer: Peer, session: Session) -> None:
        if session.found_in_headers:
            session.found_in_headers = False
            nodes = list(session.nodes.values())
            self.world.actions += [SaveSession(session), SaveNodes(nodes)]
        session.groups.add(peer.group)
        peer.group.sessions.add(session.sid)

    @staticmethod
    def _hash(token: bytes) -> bytes:
        if len(token) != 16:
            raise InvalidArgument(f"a session token has 16 random bytes, not {len(token)}")
        return token_hash(token)

    def describe(self, peer: Peer, req: Describe) -> SessionReply:
        """What is stored of a session."""
        return self._reply(peer, req.id, session_of(peer, req.session), created=False)

    def _reply(self, peer: Peer, request_id: int, session: Session, created: bool) -> SessionReply:
        return SessionReply(
            request_id, self.world.boot, peer.acked, session.sid, created, session.priority,
            [pool.fingerprint for pool in session.pools],
            [self._node_info(node) for node in session.nodes.values()],
        )  # fmt: skip

    def _node_info(self, node: Node) -> NodeInfo:
        table = self.world.table
        pages, valid, tiers = [], [], []
        for run in node.runs:
            there = np.flatnonzero(run.rows != NONE)
            rows = run.rows[there]
            pages.append(pack_u32(there + run.start))
            valid.append(pack_u32(table.valid[rows]))
            tier = np.where(table.nvme[rows] != NONE, TIER_NVME, TIER_NONE)
            tier[table.dram[rows] != NONE] = TIER_DRAM
            tier[(table.flags[rows] & F_LOST) != 0] = TIER_LOST
            tiers.append(tier.astype(np.uint8).tobytes())
        parent = NO_NODE if node.parent is None else node.parent.id
        return NodeInfo(
            node.id, parent, node.fork_tokens, node.retention, node.ended, node.blob_version,
            pages, valid, tiers, fold_infos(node, self.world.now_s),
        )  # fmt: skip

    def close(self, peer: Peer, req: CloseSession) -> Done:
        """End a session and everything it holds; a repeat succeeds."""
        tenant = peer.group.tenant
        if req.session not in tenant.sessions and req.session in tenant.closed:
            return Done(req.id, self.world.boot, peer.acked, 0)
        session = session_of(peer, req.session)
        return Done(req.id, self.world.boot, peer.acked, self.end(session))

    def end(self, session: Session) -> int:
        """Drop a session's blocks and holds; returns how many blocks."""
        tenant = session.tenant
        cut = session.rows_of(session.nodes.values())
        for number, held in session.holds.items():
            if held:
                self.copies.unpin(self.world.pools[number], np.array(sorted(held), np.int64))
        for group in session.groups:
            group.sessions.discard(session.sid)
        self.reads.cancel_prefetches(tenant, session.sid, None)
        del tenant.sessions[session.sid]
        tenant.closed[session.sid] = None
        if len(tenant.closed) > CLOSED_MAX:
            del tenant.closed[next(iter(tenant.closed))]
        count = self._drop(session, cut)
        self._forget_nodes(list(session.nodes.values()))
        self.world.actions.append(DropSession(session))
        self.world.tombstones[tenant, session.token_hash] = 0
        self.world.counters["closed_sessions"] += 1
        return count

    def _drop(self, session: Session, cut: PartRows) -> int:
        """Drop rows that lost their name, each part's together; returns how many."""
        count = 0
        for pool, rows in zip(session.pools, cut, strict=True):
            count += self.copies.drop_of(pool, np.concatenate(rows))
        return count

    def _forget_nodes(self, nodes: list[Node]) -> None:
        for node in nodes:
            del self.world.nodes[node.index]
            self.world.node_table.remove(node.index)

    # --------------------------------------------------------------- nodes

    def fork(self, peer: Peer, req: Fork) -> Done:
        """Add a node below `parent` at `fork_tokens`; no block is touched."""
        session = session_of(peer, req.session)
        parent = node_of(session, req.parent)
        done = Done(req.id, self.world.boot, peer.acked, 0)
        known = session.nodes.get(req.node)
        if known is not None and known.parent is parent and known.fork_tokens == req.fork_tokens:
            return done
        if known is not None or req.node in session.pruned or not 0 < req.node < NO_NODE:
            raise InvalidArgument(f"node id {req.node} was used before or is not 1..2^32-2")
        if not parent.fork_tokens <= req.fork_tokens < TOKENS_MAX:
            raise InvalidArgument(
                f"fork at token {req.fork_tokens} is before node {parent.id}'s own start "
                f"{parent.fork_tokens}"
            )
        if parent.ended:
            last = max((child.fork_tokens for child in parent.children.values()), default=0)
            if req.fork_tokens > last:
                raise UnknownBranch(f"node {parent.id} has ended at token {last}")
        limit = self.world.limits.nodes_per_session
        if len(session.nodes) + len(session.pruned) >= 16 * limit or len(session.nodes) >= limit:
            raise QuotaExceeded(f"the session has {limit} nodes (limits.nodes_per_session)")
        node = self.add_node(session, req.node, parent, req.fork_tokens, HELD)
        self.world.actions.append(SaveNodes([node]))
        return done

    def prune(self, peer: Peer, req: Prune) -> Done:
        """End a node with its subtree, or only its own continuation; a repeat does nothing."""
        session = session_of(peer, req.session)
        if req.node in session.pruned:
            return Done(req.id, self.world.boot, peer.acked, 0)
        node = node_of(session, req.node)
        if node.parent is None and (req.subtree or not node.children):
            raise InvalidArgument("the root is not pruned; close the session instead")
        if req.subtree or not node.children:
            count = self.prune_branch(session, node)
        else:
            node.ended = True
            cut = trim_to_children(node)
            self.world.actions.append(SaveNodes([node]))
            count = self._drop(session, cut)
        self.world.counters["pruned_blocks"] += count
        return Done(req.id, self.world.boot, peer.acked, count)

    def prune_branch(self, session: Session, node: Node) -> int:
        """Remove a node, its subtree and what its ancestors kept only for it."""
        gone, cut = remove_branch(node)
        count = self._drop(session, cut)
        self._forget_nodes(gone)
        ids = [each.id for each in gone]
        if session.tenant.waiting or session.tenant.loading:
            self.reads.cancel_prefetches(session.tenant, session.sid, ids)
        self.world.actions.append(DropNodes(session, ids))
        return count

    @staticmethod
    def _check_priority(priority: int) -> None:
        if not 0 <= priority <= 255:
            raise InvalidArgument(f"priority {priority} is outside 0..255")

    def set_priority(self, peer: Peer, req: SetPriority) -> Done:
        """Give a session a priority; blocks of low priority leave DRAM first."""
        session = session_of(peer, req.session)
        self._check_priority(req.priority)
        session.priority = req.priority
        count = 0
        for rows in session.rows_of(session.nodes.values()):
            there, at = not_none(np.concatenate(rows))
            self.world.table.priority[at] = req.priority
            count += len(there)
        self.world.actions.append(SaveSession(session))
        return Done(req.id, self.world.boot, peer.acked, count)

    # --------------------------------------------------------------- blobs

    def put_blob(self, peer: Peer, req: PutBlob) -> Done:
        """Replace the blob of a session or node if the version is higher."""
        session = session_of(peer, req.session)
        limit = self.world.limits.blob_bytes
        if len(req.data) > limit:
            raise QuotaExceeded(f"the blob has {len(req.data)} bytes, more than {limit}")
        if not 0 < req.version < 2**63:
            raise InvalidArgument(f"blob version {req.version} is outside 1..2^63-1")
        at = session if req.node == NO_NODE else node_of(session, req.node)
        if req.version > at.blob_version:
            at.blob_version = req.version
            self.world.actions.append(SaveBlob(session, req.node, req.version, req.data))
        return Done(req.id, self.world.boot, peer.acked, 0)

    def get_blob(self, peer: Peer, req: GetBlob) -> Blob | None:
        """Read a blob; the reply comes from the catalog unless there is none."""
        session = session_of(peer, req.session)
        at = session if req.node == NO_NODE else node_of(session, req.node)
        if not at.blob_version:
            return Blob(req.id, self.world.boot, peer.acked, 0, b"")
        self.world.actions.append(LoadBlob(peer, req.id, session, req.node))
        return None
