"""The tables and counters that all parts of the core work on, and the actions it asks for."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtier_client.errors import InvalidArgument
from kvtierd.core.actions import Action
from kvtierd.core.blocks import (
    F_DOOMED,
    NONE,
    U_KEPT,
    BlockTable,
    NodeTable,
    Rows,
    Slots,
    span,
)  # fmt: skip
from kvtierd.core.keys import KeyIndex
from kvtierd.core.slabs import Slabs
from kvtierd.core.tenant import Pool, Tenant
from kvtierd.core.tree import Node


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """What the core refuses to go beyond."""

    blocks_per_request: int
    leases_per_group: int
    lease_ttl_s: float
    lease_ttl_max_s: float
    wait_max_s: float
    sessions_per_tenant: int
    nodes_per_session: int
    blob_bytes: int
    groups: int
    layouts_per_tenant: int
    waiting_per_tenant: int
    quarantine_fraction: float
    high_watermark: float
    low_watermark: float
    exchange_headroom: float
    orphan_ttl_s: float
    power: bool
    end_to_end: bool
    scrub_rate_bytes: int = 32 << 20
    """Per second."""
    scrub_interval_s: float = math.inf
    fold_grace_max_s: float = math.inf


COUNTERS = (
    "committed_blocks", "committed_bytes", "acquired_blocks", "acquired_bytes", "spilled_blocks",
    "spilled_bytes", "restored_blocks", "restored_bytes", "evicted_clean_blocks",
    "dropped_cached_blocks", "lost_blocks", "checksum_mismatches", "io_errors", "expired_leases",
    "refused_reserves", "duplicate_blocks", "pruned_blocks", "closed_sessions", "reaped_orphans",
    "cancelled_prefetch_blocks", "read_ahead_blocks", "scrubbed_blocks", "scrubbed_bytes",
    "scrub_bad_blocks", "scrub_passes", "folds", "unfolds", "unfold_misses",
    "grace_released_blocks",
)  # fmt: skip


@dataclass(slots=True)
class Batch:
    """Blocks on their way between tiers."""

    pool: Pool
    rows: Rows
    slots: Slots


class OneBlock(msgspec.Struct):
    """A node's block that is about to become READY in DRAM, and what its body says."""

    pool: Pool
    node: Node
    slot: int
    page: int
    valid: int
    seq: int
    checksum: int
    kept: bool
    lease: int


class NodeBlocks(msgspec.Struct):
    """The same for several blocks of a node, without checksums. Shapes: each array [n]."""

    pool: Pool
    node: Node
    slots: Slots
    pages: NDArray[np.int64]
    valid: NDArray[np.int64]
    seqs: NDArray[np.uint64]
    kept: bool
    lease: int


class Publisher(Protocol):
    """Writes header bodies of DRAM slots; the core makes the words READY after it returns."""

    def publish(self, pool: Pool, rows: Rows, slots: Slots, lease: int) -> None:
        """Write the bodies of rows of one pool, whose columns are set."""

    def publish_node(self, blocks: NodeBlocks) -> None:
        """The same for blocks of one node; their rows need not exist yet."""

    def publish_one(self, block: OneBlock) -> None:
        """The same for one block."""


@dataclass(slots=True, eq=False)
class World:
    """Everything the core knows."""

    limits: CoreLimits
    nvme: Slabs
    boot: int
    salt: int
    generation: int
    now_s: float = 0.0
    ran_offset_s: float = 0.0  # now_s and this: how long the daemon has run in all its lives
    nvme_stuck: bool = False  # moves do not end: nobody should wait for them
    table: BlockTable = field(default_factory=BlockTable)
    node_table: NodeTable = field(default_factory=NodeTable)
    tenants: dict[str, Tenant] = field(default_factory=dict)
    pools: list[Pool] = field(default_factory=list)
    nodes: dict[int, Node] = field(default_factory=dict)
    actions: list[Action] = field(default_factory=list)
    batches: dict[int, Batch] = field(default_factory=dict)
    verifying: Batch | None = None  # blocks that the scrub has in hand
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    seq: int = 0
    doomed: int = 0  # rows that nobody names any more and somebody still reads or moves
    tombstones: dict[tuple[Tenant, bytes], int] = field(default_factory=dict)  # closed sessions
    next_batch: int = 1
    keys: KeyIndex = field(init=False)
    publisher: Publisher = field(init=False)

    def __post_init__(self) -> None:
        table = self.table
        self.keys = KeyIndex(table.owner0, table.owner1, table.pool, self.salt)

    @property
    def touch(self) -> int:
        """The clock of last uses: quarter seconds."""
        return int(self.now_s * 4.0)

    def add_rows(self, n: int) -> Rows:
        """Rows from the BlockTable; keeps the KeyIndex on the table's columns."""
        capacity = self.table.capacity
        rows = self.table.add(n)
        if self.table.capacity != capacity:
            self.keys.rebind(self.table.owner0, self.table.owner1, self.table.pool)
        return rows

    def add_row(self) -> int:
        """One row; the short path of `add_rows`."""
        table = self.table
        return table.add_one() if table.used < table.capacity else int(self.add_rows(1)[0])

    def take_seqs(self, n: int) -> NDArray[np.uint64]:
        """The next `n` sequence numbers."""
        first = self.seq + 1
        self.seq += n
        return np.arange(first, first + n, dtype=np.uint64)

    def start_batch(self, pool: Pool, rows: Rows, slots: Slots) -> int:
        """Remember a batch in flight; returns its number."""
        number = self.next_batch
        self.next_batch += 1
        self.batches[number] = Batch(pool, rows, slots)
        return number

    def by_pool(self, rows: Rows) -> Iterator[tuple[Pool, Rows]]:
        """Split rows by their pool."""
        if not len(rows):
            return
        pools = self.table.pool[span(rows)]
        first = pools.item(0)
        if np.count_nonzero(pools == first) == len(rows):
            yield self.pools[first], rows
            return
        for number in np.unique(pools).tolist():
            yield self.pools[number], rows[pools == number]

    def pin(self, pool: Pool, rows: Rows) -> None:
        """Rows of one pool may not be dropped, once more."""
        table = self.table
        pool.held += len(rows) - self.kept(rows)
        pool.tenant.arena.epoch += 1
        table.pins[rows] += 1

    def kept(self, rows: Rows) -> int:
        """How many of the rows may not be dropped."""
        return int(np.count_nonzero(self.table.use[span(rows)] & U_KEPT))

    def ttl_s(self, asked_s: float) -> float:
        """The life of a lease for which `asked_s` was asked (0: the default)."""
        if not 0.0 <= asked_s <= self.limits.lease_ttl_max_s:
            raise InvalidArgument(
                f"ttl_s {asked_s} is outside 0..{self.limits.lease_ttl_max_s} "
                "(limits.lease_ttl_max)"
            )
        return asked_s or self.limits.lease_ttl_s

    def wait_s(self, asked_s: float) -> float:
        """A checked waiting time."""
        if not 0.0 <= asked_s <= self.limits.wait_max_s:
            raise InvalidArgument(
                f"wait_s {asked_s} is outside 0..{self.limits.wait_max_s} (limits.wait_max)"
            )
        return asked_s

    def doomed_owners(self) -> list[bytes]:
        """Owners of the rows that nobody names any more; O(capacity)."""
        table = self.table
        rows = np.flatnonzero(table.used_mask() & ((table.flags & F_DOOMED) != 0))
        owners = np.stack([table.owner0[rows], table.owner1[rows]], axis=1).astype("<u8")
        packed = owners.tobytes()
        return [packed[i : i + 16] for i in range(0, len(packed), 16)]

    def unname(self, rows: Rows) -> None:
        """Take rows that are about to go out of the tree or the KeyIndex."""
        nodes = self.table.node[rows]
        keyed = rows[nodes == NONE]
        if len(keyed):
            self.keys.remove(keyed.astype(np.int32))
        for index in np.unique(nodes[nodes != NONE]).tolist():
            node = self.nodes[index]
            mine = rows[nodes == index]
            for run, pool in zip(node.runs, node.session.pools, strict=True):
                of_part = mine[self.table.pool[mine] == pool.number]
                places = self.table.page[of_part].astype(np.int64) - run.start
                same = places < run.length
                places, of_part = places[same], of_part[same]
                at = run.rows[places]
                run.rows[places[at == of_part]] = NONE
