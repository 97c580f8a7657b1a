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
F_BUSY: Final = F_MOVING | F_FILLING | F_DOOMED | F_LOST

_ROW: Final = np.dtype(
    [
        ("owner0", np.uint64),  # session: halves of the token's hash; keyed: halves of the key
        ("owner1", np.uint64),
        ("checksum", np.uint64),  # xxh3-64 of the payload; 0 until it was computed
        ("seq", np.uint64),  # grows with every commit
        ("dram", np.int64),  # slot, or NONE
        ("nvme", np.int64),  # slot, or NONE
        ("pool", np.uint32),  # number of the tenant's layout pool
        ("node", np.int32),  # index in the NodeTable; NONE for keyed blocks
        ("page", np.uint32),
        ("valid", np.uint32),  # valid tokens
        ("touch", np.uint32),  # last use, in quarter seconds since the daemon started
        ("readers", np.uint16),  # leases that read the DRAM copy
        ("pins", np.uint16),  # holds and lookup leases: may not be dropped
        ("flags", np.uint8),
        ("priority", np.uint8),
        ("pad", np.uint8, 6),
    ]
)
_PACKED: Final = struct.Struct("<QQQQqqIiIIIHHBB6x")
assert _PACKED.size == _ROW.itemsize
_USE: Final = struct.Struct("<16xQ8xq20xIIH2xB")  # the columns that `Use` has
_TOUCH_READERS: Final = struct.Struct("<IH")
_TOUCH_AT: Final = struct.calcsize("<QQQQqqIiII")  # behind the columns before it


def rising(values: NDArray[Any]) -> bool:
    """Whether each value is larger than the one before it."""
    above = int(np.count_nonzero(values[1:] > values[:-1]))  # cheaper than `all`
    return above == len(values) - 1


def span(places: NDArray[np.int64]) -> Places:
    """The same places as a slice, if they are neighbours in rising order: it is far cheaper."""
    n = len(places)
    if n > 1:
        first = places.item(0)
        if places.item(n - 1) - first == n - 1 and rising(places):
            return slice(first, first + n)
    return places


class Use(NamedTuple):
    """The columns that matter to a reader of one row."""

    checksum: int
    dram: int
    valid: int
    touch: int
    readers: int
    flags: int


class BlockTable:
    """Columns of all blocks of all tenants: views of one array, so that a row is 80 bytes in place.

    `add` gives unused rows whose columns hold stale values: the caller sets every one of them.
    Columns are replaced when the table grows, so take them from the table at each use.
    """

    owner0: NDArray[np.uint64]
    owner1: NDArray[np.uint64]
    checksum: NDArray[np.uint64]
    seq: NDArray[np.uint64]
    dram: NDArray[np.int64]
    nvme: NDArray[np.int64]
    pool: NDArray[np.uint32]
    node: NDArray[np.int32]
    page: NDArray[np.uint32]
    valid: NDArray[np.uint32]
    touch: NDArray[np.uint32]
    readers: NDArray[np.uint16]
    pins: NDArray[np.uint16]
    flags: NDArray[np.uint8]
    priority: NDArray[np.uint8]

    def __init__(self, capacity: int = 1024) -> None:
        self.capacity = capacity
        self._use(np.zeros(capacity, _ROW))
        self._free = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        self._free_view = self._free.data
        self._n_free = capacity

    def _use(self, records: NDArray[np.void]) -> None:
        self._records = records
        self._words = records.view(np.uint64).reshape(-1, _ROW.itemsize // 8)
        self._bytes = records.view(np.uint8).data
        for name in _ROW.names or ():
            setattr(self, name, records[name])

    def fill_one(self, row: int, *values: int) -> None:
        """Set all columns of one row, in the order of `_ROW`; the short path of one commit."""
        _PACKED.pack_into(self._bytes, row * _PACKED.size, *values)

    def fill(self, rows: Places, common: tuple[int, ...], **columns: NDArray[Any]) -> None:
        """Set all columns of rows: to `common`, in the order of `_ROW`, but those of `columns`."""
        self._words[rows] = np.frombuffer(_PACKED.pack(*common), np.uint64)
        for name, values in columns.items():
            getattr(self, name)[rows] = values

    def use_of(self, row: int) -> Use:
        """Some columns of one row; the short path of one read."""
        return Use._make(_USE.unpack_from(self._bytes, row * _PACKED.size))

    def set_use(self, row: int, touch: int, readers: int) -> None:
        """Set two columns of one row."""
        _TOUCH_READERS.pack_into(self._bytes, row * _PACKED.size + _TOUCH_AT, touch, readers)

    @property
    def used(self) -> int:
        """Rows that stand for a block."""
        return self.capacity - self._n_free

    def add(self, n: int) -> Rows:
        """Take `n` unused rows."""
        while self._n_free < n:
            self._grow()
        self._n_free -= n
        return self._free[self._n_free : self._n_free + n][::-1].astype(np.int64)

    def add_one(self) -> int:
        """Take one unused row."""
        if not self._n_free:
            self._grow()
        self._n_free -= 1
        return self._free_view[self._n_free]

    def remove(self, rows: Rows) -> None:
        """Give rows back; each must be in use, and only once in `rows`."""
        n = len(rows)
        assert self._n_free + n <= self.capacity, "a row was removed twice"
        self._free[self._n_free : self._n_free + n] = rows[::-1]
        self._n_free += n

    def used_mask(self) -> NDArray[np.bool_]:
        """True for every row in use; O(capacity), for recounts."""
        mask = np.ones(self.capacity, np.bool_)
        mask[self._free[: self._n_free]] = False
        return mask

    def _grow(self) -> None:
        old, new = self.capacity, self.capacity * 2
        records = np.zeros(new, _ROW)
        records[:old] = self._records
        self._use(records)
        free = np.empty(new, np.int32)
        free[: new - old] = np.arange(new - 1, old - 1, -1, dtype=np.int32)
        free[new - old : new - old + self._n_free] = self._free[: self._n_free]
        self._free, self._free_view = free, free.data
        self._n_free, self.capacity = self._n_free + new - old, new


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
        self._free = list(range(63, -1, -1))

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
        if not self._free:
            size = len(self.node) - 1
            self._use(self.node[:-1], self.origin[:-1], self.tokens[:-1], 2 * size)
            self._free = list(range(2 * size - 1, size - 1, -1))
        index = self._free.pop()
        self.node[index], self.parent[index] = node, parent
        self.fork_tokens[index] = self.tokens[index] = fork_tokens
        return index

    def remove(self, index: int) -> None:
        """Give an index back."""
        self._free.append(index)
