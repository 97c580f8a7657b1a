"""Blocks found in headers at a start: each gets a row at once, and copies of one block are one.

A block found is a row from the moment it is read: the BlockTable is where it ends up, so nothing
is held twice. `Copies` of one name are settled afterwards, and the rows of those that lose go back.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtierd.core.blocks import F_HELD, F_LOST, NONE, Rows, Slots, span
from kvtierd.core.tree import Fold
from kvtierd.core.world import World

_U64 = NDArray[np.uint64]
_I64 = NDArray[np.int64]
_BOOLS = NDArray[np.bool_]


@dataclass(slots=True)
class Found:
    """Blocks found in a part of one header file, as columns, in the order of their slots."""

    slots: Slots
    pool: NDArray[np.uint32]
    owner0: _U64
    owner1: _U64
    node: _U64
    page: _U64
    valid: _U64
    checksum: _U64
    seq: _U64
    parent: _U64
    fork_tokens: _U64
    keyed: _BOOLS
    held: _BOOLS
    lost: _BOOLS
    in_dram: bool

    def take(self, which: NDArray[np.generic]) -> "Found":
        """The chosen blocks."""
        columns = {n: getattr(self, n)[which] for n in self.__slots__ if n != "in_dram"}
        return Found(**columns, in_dram=self.in_dram)

    def __len__(self) -> int:
        return len(self.slots)


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
    folds: list[tuple[int, Fold]]
    """Of each node, by its id."""


@dataclass(slots=True)
class Pieces:
    """Rows beside each other that are blocks of one node, as columns with one value per piece."""

    first: _I64
    count: _I64
    pool: _I64
    owner0: _U64
    owner1: _U64
    node: _I64
    parent: _I64
    fork_tokens: _I64
    seq: _U64
    """The highest seq of the piece's blocks."""

    def take(self, which: "NDArray[np.generic] | slice") -> "Pieces":
        """The chosen pieces."""
        return Pieces(*(getattr(self, name)[which] for name in self.__slots__))

    def __len__(self) -> int:
        return len(self.first)


def join(parts: list[Pieces]) -> Pieces:
    """All pieces of all parts."""
    return Pieces(*(np.concatenate([getattr(p, n) for p in parts]) for n in Pieces.__slots__))


def add_rows(world: World, found: Found) -> Rows:
    """A row for each block, without a name; an NVMe copy whose payload is gone is marked LOST."""
    rows = world.add_rows(len(found))
    dram, nvme = (found.slots, NONE) if found.in_dram else (NONE, found.slots)
    name = (0, 0, 0, 0, 0, NONE, 0, 0, world.touch)
    flags = found.held * np.uint8(F_HELD) + found.lost * np.uint8(F_LOST)
    world.table.fill(
        span(rows), dram, nvme, name, (0, 0, 0, 0), owner0=found.owner0, owner1=found.owner1,
        checksum=found.checksum, seq=found.seq, pool=found.pool, page=found.page,
        valid=found.valid, flags=flags,
    )  # fmt: skip
    world.seq = max(world.seq, int(found.seq.max()))
    return rows


def pieces(found: Found, rows: Rows) -> Pieces:
    """Where the session blocks among the rows lie, as pieces of one node each."""
    new = np.ones(len(rows), np.bool_)
    new[1:] = rows[1:] != rows[:-1] + 1
    for column in (
        found.pool, found.owner0, found.owner1, found.node, found.parent, found.fork_tokens,
        found.keyed,
    ):  # fmt: skip
        new[1:] |= column[1:] != column[:-1]
    starts = np.flatnonzero(new)
    seq = np.maximum.reduceat(found.seq, starts)
    of_nodes = ~found.keyed[starts]
    counts = np.diff(starts, append=len(rows))[of_nodes]
    starts = starts[of_nodes]
    node, parent, fork = (
        column[starts].astype(np.int64) for column in (found.node, found.parent, found.fork_tokens)
    )
    return Pieces(
        rows[starts], counts, found.pool[starts].astype(np.int64), found.owner0[starts],
        found.owner1[starts], node, parent, fork, seq[of_nodes],
    )  # fmt: skip


def settle(world: World, rows: Rows, names: _I64) -> tuple[_I64, Rows, Rows]:
    """Of several copies of each name, choose one: the newest, and of equal ones that in DRAM.

    The winner takes over the NVMe slot of its twin, a copy of the same bytes: equal seq, and the
    checksum that it had before, if it had one (other bytes were changed in DRAM meanwhile; without
    the copy the next demotion finds that out). Returns the names, their winners, and the losers,
    of which twins have no slot any more.
    """
    table = world.table
    in_dram, seq = table.dram[rows] != NONE, table.seq[rows]
    order = np.lexsort((~in_dram, ~seq, names))
    rows, names, in_dram, seq = rows[order], names[order], in_dram[order], seq[order]
    first = np.ones(len(rows), np.bool_)
    first[1:] = names[1:] != names[:-1]
    firsts = np.flatnonzero(first)
    winner = firsts[np.cumsum(first) - 1]
    known, checksum = table.checksum[rows[winner]], table.checksum[rows]
    twin = ~first & (seq == seq[winner]) & ~in_dram & in_dram[winner]
    twin &= (known == 0) | (checksum == known)
    places = np.flatnonzero(twin)
    _, one = np.unique(winner[places], return_index=True)
    twins = rows[places[one]]
    good = (table.flags[twins] & F_LOST) == 0
    twins, into = twins[good], rows[winner[places[one]]][good]
    table.nvme[into], table.checksum[into] = table.nvme[twins], table.checksum[twins]
    table.nvme[twins] = NONE
    return names[firsts], rows[firsts], rows[~first]
