"""The BlockTable: one row per block, as numpy columns."""

import struct
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier_client.wire import NO_NODE

Rows = NDArray[np.int64]
"""Row numbers of the BlockTable."""
Slots = NDArray[np.int64]
"""Slot numbers of one tier."""
Places = slice | NDArray[np.int64]
"""Rows or slots as an index: a slice where they are neighbours."""

NONE: Final = -1

# flags
F_HELD: Final = 1  # may not be dropped before its session ends
F_MOVING: Final = 2  # being copied DRAM -> NVMe
F_FILLING: Final = 4  # being copied NVMe -> DRAM; its DRAM slot is not readable yet
F_DOOMED: Final = 8  # nobody names it any more; freed when its readers and copies have ended
F_LOST: Final = 16  # HELD, but its medium lost it; kept so that the loss is reported
F_VERIFYING: Final = 32  # its NVMe copy is being read by the scrub, and must stay meanwhile
F_BUSY: Final = F_MOVING | F_FILLING | F_DOOMED | F_LOST | F_VERIFYING

# A row is in four arrays. What every move, drop and read looks at is apart, so that a pass over
# many rows touches little memory; what only commits and headers need is together.
_NAME: Final = np.dtype(
    [
        ("owner0", np.uint64),  # session: halves of the token's hash; keyed: halves of the key
        ("owner1", np.uint64),
        ("checksum", np.uint64),  # xxh3-64 of the payload; 0 until it was computed
        ("seq", np.uint64),  # grows with every commit
        ("pool", np.uint32),  # number of the tenant's layout pool
        ("node", np.int32),  # index in the NodeTable; NONE for keyed blocks
        ("page", np.uint32),
        ("valid", np.uint32),  # valid tokens
        ("touch", np.uint32),  # last use, in quarter seconds since the daemon started
        ("pad", np.uint32),
    ]
)
_USE: Final = np.dtype(
    [
        ("flags", np.uint8),
        ("priority", np.uint8),
        ("readers", np.uint16),  # leases that read the DRAM copy
        ("pins", np.uint32),  # holds and lookup leases: may not be dropped
    ]
)
_NAME_PACKED: Final = struct.Struct("<QQQQIiIIIxxxx")
_USE_PACKED: Final = struct.Struct("<BBHI")
_READ: Final = struct.Struct("<16xQ20xII4x")  # checksum, valid, touch
_TOUCH: Final = struct.Struct("<I")
_TOUCH_AT: Final = struct.calcsize("<QQQQIiII")  # behind the columns before it
assert (_NAME_PACKED.size, _READ.size) == (_NAME.itemsize, _NAME.itemsize)
READERS_END: Final = 0xFFFF
"""A row with so many readers takes no more."""
U_KEPT: Final = np.uint64(F_HELD | 0xFFFFFFFF << 32)
"""Bits of `BlockTable.use`: HELD or pinned."""
U_BUSY: Final = np.uint64(F_MOVING | F_FILLING | F_VERIFYING | 0xFFFF << 16)
"""Bits of `BlockTable.use`: being copied, verified or read."""


def rising(values: NDArray[Any]) -> bool:
    """Whether each value is larger than the one before it."""
    above = int(np.count_nonzero(values[1:] > values[:-1]))  # cheaper than `all`
    return above == len(values) - 1


def span(places: NDArray[np.int64]) -> Places:
    """The same places as a slice, if they are neighbours in rising order: it is far cheaper.

    Places that begin with NONE stay as they are: as a slice, -1 would count from the end."""
    n = len(places)
    if n > 1:
        first = places.item(0)
        if first >= 0 and places.item(n - 1) - first == n - 1 and rising(places):
            return slice(first, first + n)
    return places


def not_none(places: NDArray[np.int64]) -> tuple[NDArray[np.int64], Places]:
    """Those places that are not NONE, and the same as an index."""
    n, at = len(places), span(places)
    if at is places and (n != 1 or places.item() == NONE):  # no slice, which has no NONE
        there = places != NONE
        if np.count_nonzero(there) < n:
            at = places = places[there]
    return places, at


class Use(NamedTuple):
    """The columns that matter to a reader of one row."""

    checksum: int
    dram: int
    valid: int
    touch: int
    readers: int
    flags: int


class BlockTable:
    """Columns of all blocks of all tenants.

    `add` gives unused rows whose columns hold stale values: the caller sets every one of them.
    Columns are replaced when the table grows, so take them from the table at each use.
    """

    _names: NDArray[np.void]
    dram: NDArray[np.int64]  # slot, or NONE
    nvme: NDArray[np.int64]  # slot, or NONE
    use: NDArray[np.uint64]  # flags, priority, readers and pins as one word
    flags: NDArray[np.uint8]
    priority: NDArray[np.uint8]
    readers: NDArray[np.uint16]
    pins: NDArray[np.uint32]
    owner0: NDArray[np.uint64]
    owner1: NDArray[np.uint64]
    checksum: NDArray[np.uint64]
    seq: NDArray[np.uint64]
    pool: NDArray[np.uint32]
    node: NDArray[np.int32]
    page: NDArray[np.uint32]
    valid: NDArray[np.uint32]
    touch: NDArray[np.uint32]

    def __init__(self, capacity: int = 1024) -> None:
        self.capacity = 0
        self._free = np.empty(0, np.int32)  # rows that were given back, as a stack
        self._n_free = 0
        self._fresh = 0  # rows from here on have never been used
        self._make(capacity)

    def _make(self, capacity: int) -> None:
        """Make columns of `capacity` rows that begin with those that there are."""
        # zeros() and empty() are lazy: rows become memory when they are first used.
        old, self.capacity = self.capacity, capacity
        names, use = np.zeros(capacity, _NAME), np.zeros(capacity, _USE)
        dram, nvme = np.zeros(capacity, np.int64), np.zeros(capacity, np.int64)
        free = np.empty(capacity, np.int32)
        if old:
            names.view(np.uint64)[: old * _NAME.itemsize // 8] = self._names.view(np.uint64)
            use.view(np.uint64)[:old] = self.use
            dram[:old], nvme[:old] = self.dram, self.nvme
            free[: self._n_free] = self._free[: self._n_free]
        self.dram, self.nvme, self.use = dram, nvme, use.view(np.uint64)
        self._dram_view, self._nvme_view = dram.data, nvme.data
        self._names, self._names_view = names, names.view(np.uint8).data
        self._rows = names.view(np.uint64).reshape(capacity, -1)
        self._use_view = use.view(np.uint8).data
        self._readers_view = use.view(np.uint16).data
        for name in (*_NAME.fields, *_USE.fields):  # type: ignore[misc]
            setattr(self, name, names[name] if name in _NAME.fields else use[name])  # type: ignore[operator]
        self._free, self._free_view = free, free.data

    def fill_one(
        self, row: int, dram: int, nvme: int, name: tuple[int, ...], use: tuple[int, ...]
    ) -> None:
        """Set all columns of one row; the short path of one commit.

        `name`: owner0 to touch, `use`: flags to pins, in the order of the columns.
        """
        _NAME_PACKED.pack_into(self._names_view, row * _NAME_PACKED.size, *name)
        _USE_PACKED.pack_into(self._use_view, row * _USE_PACKED.size, *use)
        self._dram_view[row] = dram
        self._nvme_view[row] = nvme

    def fill(
        self,
        rows: Places,
        dram: NDArray[np.int64] | int,
        nvme: NDArray[np.int64] | int,
        name: tuple[int, ...],
        use: tuple[int, ...],
        **columns: NDArray[Any],
    ) -> None:
        """Set all columns of rows; of `name` and `use` those in `columns` are arrays instead."""
        self._rows[rows] = np.frombuffer(_NAME_PACKED.pack(*name), np.uint64)
        self.use[rows] = np.frombuffer(_USE_PACKED.pack(*use), np.uint64)
        self.dram[rows], self.nvme[rows] = dram, nvme
        for column, values in columns.items():
            getattr(self, column)[rows] = values

    def kept(self, rows: Places) -> NDArray[np.bool_]:
        """Which rows may not be dropped: HELD or pinned ones."""
        kept: NDArray[np.bool_] = (self.use[rows] & U_KEPT) != 0
        return kept

    def use_of(self, row: int) -> Use:
        """Some columns of one row; the short path of one read."""
        checksum, valid, touch = _READ.unpack_from(self._names_view, row * _READ.size)
        flags = self._use_view[row * _USE_PACKED.size]
        readers = self._readers_view[row * 4 + 1]
        return Use(checksum, self._dram_view[row], valid, touch, readers, flags)

    def set_use(self, row: int, touch: int, readers: int) -> None:
        """Set two columns of one row."""
        _TOUCH.pack_into(self._names_view, row * _NAME_PACKED.size + _TOUCH_AT, touch)
        self._readers_view[row * 4 + 1] = readers

    @property
    def used(self) -> int:
        """Rows that stand for a block."""
        return self._fresh - self._n_free

    def add(self, n: int) -> Rows:
        """Take `n` unused rows."""
        again = min(n, self._n_free)
        fresh = n - again
        while self._fresh + fresh > self.capacity:
            self._make(2 * self.capacity)
        self._n_free -= again
        self._fresh += fresh
        rows = np.empty(n, np.int64)
        rows[:again] = self._free[self._n_free : self._n_free + again][::-1]
        rows[again:] = np.arange(self._fresh - fresh, self._fresh)
        return rows

    def add_one(self) -> int:
        """Take one unused row."""
        if self._n_free:
            self._n_free -= 1
            return self._free_view[self._n_free]
        if self._fresh == self.capacity:
            self._make(2 * self.capacity)
        self._fresh += 1
        return self._fresh - 1

    def remove(self, rows: Rows) -> None:
        """Give rows back; each must be in use, and only once in `rows`."""
        n = len(rows)
        assert self._n_free + n <= self._fresh, "a row was removed twice"
        self._free[self._n_free : self._n_free + n] = rows[::-1]
        self._n_free += n

    def used_mask(self) -> NDArray[np.bool_]:
        """True for every row in use; O(capacity), for recounts."""
        mask = np.zeros(self.capacity, np.bool_)
        mask[: self._fresh] = True
        mask[self._free[: self._n_free]] = False
        return mask


class NodeTable:
    """What a block's header says of its node, as columns; rows of the BlockTable refer to it.

    The last place of each column, which the index NONE finds, is what keyed blocks say.
    """

    node: NDArray[np.uint32]
    origin: NDArray[np.uint64]  # parent | fork_tokens << 32
    parent: NDArray[np.uint32]
    fork_tokens: NDArray[np.uint32]
    tokens: NDArray[np.uint32]  # of the branch up to the node's last block

    def __init__(self) -> None:
        self._use(np.empty(0, np.uint32), np.empty(0, np.uint64), np.empty(0, np.uint32), 64)
        self._free: list[int] = []  # indexes that were given back
        self._fresh = 0  # indexes from here on have never been used

    def _use(
        self,
        node: NDArray[np.uint32],
        origin: NDArray[np.uint64],
        tokens: NDArray[np.uint32],
        size: int,
    ) -> None:
        """Make columns of `size` places that begin with these values."""
        old = len(node)
        self.node = np.full(size + 1, NO_NODE, np.uint32)
        self.origin = np.full(size + 1, NO_NODE, np.uint64)
        self.tokens = np.zeros(size + 1, np.uint32)
        self.node[:old], self.origin[:old], self.tokens[:old] = node, origin, tokens
        self.parent, self.fork_tokens = self.origin.view(np.uint32).reshape(-1, 2).T
        self.tokens_view = self.tokens.data

    def add(self, node: int, parent: int, fork_tokens: int) -> int:
        """Store a node and return its index."""
        if self._free:
            index = self._free.pop()
        else:
            index = self._fresh
            self._fresh += 1
            if index == len(self.node) - 1:
                self._use(self.node[:-1], self.origin[:-1], self.tokens[:-1], 2 * index)
        self.node[index], self.parent[index] = node, parent
        self.fork_tokens[index] = self.tokens[index] = fork_tokens
        return index

    def remove(self, index: int) -> None:
        """Give an index back."""
        self._free.append(index)
