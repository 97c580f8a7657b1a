"""The buckets of the KeyIndex: hashing, storage and growth; what an entry is, keys.py knows.

- A place of a bucket is a one-byte print of a key (0 = empty) and a row id. The keys themselves are
  read from the caller's columns.
- The hash is strongly universal (multiply-shift of 32-bit words) with secret factors: whatever
  keys are chosen without knowing them, two collide by chance alone.
- The table grows by linear hashing: a few hundred buckets are split at a time, each into itself
  and one new bucket, which takes entries at the same places and therefore always has room.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]
U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]

PLACES: Final = 8
"""Places of one bucket: their prints fill one aligned 64-bit word."""

MAX_LOAD: Final = 0.55
"""Entries per place above which buckets are split."""

FIRST_BUCKETS: Final = 256
SPLIT_BUCKETS: Final = 256
"""Buckets split in one go at least, so that growth costs little per insert and stalls none."""

CHUNK_KEYS: Final = 1 << 13
"""Keys hashed in one go, so that temporaries of large batches stay in the cache."""

_M32: Final = 0xFFFFFFFF
_M64: Final = 0xFFFFFFFFFFFFFFFF
_SHIFT: Final = np.uint64(32)
_WIDE: Final = 128
_CONSTANT: Final = np.uint64(1 << 32)
"""The sixth 32-bit word of a hashed key is 1, so that its factor is the constant term."""
_FIRST_MARK: Final = np.uint8(1)


def _splitmix(state: int, count: int) -> tuple[list[int], int]:
    """`count` 64-bit values of the splitmix64 generator, and its next state."""
    values = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & _M64
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _M64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _M64
        values.append(z ^ (z >> 31))
    return values, state


class Buckets:
    """Buckets of prints and rows, each key at home in two of them.

    Shapes: `key0`, `key1` uint64 [rows], `tag` uint32 [rows].
    Units: memory is 5 B per place; address space for one entry per row is taken at once, and
    becomes memory as entries come.
    """

    def __init__(self, key0: U64, key1: U64, tag: U32, salt: int) -> None:
        self._level = FIRST_BUCKETS
        self._buckets = FIRST_BUCKETS
        self._salt = salt
        self._new_secrets()
        self._prints = np.zeros(0, np.uint8)
        self._rows = np.zeros(0, np.int32)
        self.rebind(key0, key1, tag)

    def rebind(self, key0: U64, key1: U64, tag: U32) -> None:
        """Read the keys from other columns from now on; rows of the index are the same in both.

        Longer columns take address space for more entries (copies 5 B per place once).
        """
        if not len(key0) == len(key1) == len(tag) <= np.iinfo(np.int32).max:
            raise ValueError("key0, key1 and tag must have one length below 2**31")
        self._key0, self._key1, self._tag = key0, key1, tag
        self._ensure_places(max(self._buckets, int(len(key0) / (MAX_LOAD * PLACES)) + 1))
        self._views()

    # -------------------------------------------------------------- growth

    def _split_to(self, buckets: int) -> None:
        if buckets <= self._buckets:
            return
        buckets = max(buckets, self._buckets + SPLIT_BUCKETS)
        self._ensure_places(buckets)
        while self._buckets < buckets:
            first = self._buckets - self._level
            last = min(first + buckets - self._buckets, self._level, first + CHUNK_KEYS // PLACES)
            self._split(first, last)
            if self._buckets == 2 * self._level:
                self._level = self._buckets

    def _split(self, first: int, last: int) -> None:
        """Split buckets first..last: each entry stays, or moves up to the same place of the new
        bucket, by the next bit of that one of its two hashes that led it here."""
        at = np.flatnonzero(self._prints[first * PLACES : last * PLACES]) + first * PLACES
        rows = self._rows[at]
        hashes = self._hash(*self._columns_of(rows))
        bucket = (at // PLACES).astype(np.uint64)
        level = np.uint64(self._level)
        led = hashes[:, 0] & (level - np.uint64(1)) == bucket
        goes = (np.where(led, hashes[:, 0], hashes[:, 1]) & level) != 0
        old = at[goes]
        new = old + self._level * PLACES
        self._rows[new] = rows[goes]
        self._prints[new] = self._prints[old]
        self._prints[old] = 0
        self._buckets += last - first

    def _ensure_places(self, buckets: int) -> None:
        if buckets * PLACES <= len(self._prints):
            return
        kept = self._buckets * PLACES
        places = max(buckets, self._buckets + self._buckets // 2) * PLACES
        # zeros() is lazy: pages become memory when a bucket in them is first split into.
        prints, rows = np.zeros(places, np.uint8), np.zeros(places, np.int32)
        if len(self._prints):
            prints[:kept], rows[:kept] = self._prints[:kept], self._rows[:kept]
        self._prints, self._rows, self._words = prints, rows, prints.view(np.uint64)
        self._views()

    def _views(self) -> None:
        # Indexing a memoryview costs a third of indexing an array.
        self._words_view, self._rows_view = self._words.data, self._rows.data
        self._key0_view, self._key1_view = self._key0.data, self._key1.data
        self._tag_view = self._tag.data

    # ------------------------------------------------------------- hashing

    def _new_secrets(self) -> None:
        values, self._salt = _splitmix(self._salt, 12)
        self._secrets = np.array(values, np.uint64).reshape(6, 2)
        # Both hashes in one sum of Python integers: the first needs less than _WIDE bits.
        pairs = zip(values[::2], values[1::2], strict=True)
        self._wide_secrets = [a | b << _WIDE for a, b in pairs]

    def _hash(self, k0: U64, k1: U64, tag: int | U32) -> U64:
        """Two 32-bit hashes of each key, as uint64 [n, 2]."""
        words = np.empty((len(k0), 3), np.uint64)
        words[:, 0] = k0
        words[:, 1] = k1
        words[:, 2] = tag
        words[:, 2] |= _CONSTANT
        hashes: U64 = words.view(np.uint32).astype(np.uint64) @ self._secrets
        hashes >>= _SHIFT
        return hashes

    def _homes(self, k0: U64, k1: U64, tag: int | U32) -> tuple[I64, U8]:
        """The two buckets of each key [n, 2] and its print [n]."""
        return self._homes_of(self._hash(k0, k1, tag))

    def _homes_of(self, hashes: U64) -> tuple[I64, U8]:
        """The same from their hashes, which are used up."""
        marks = np.maximum(hashes.view(np.uint8)[:, 3], _FIRST_MARK)
        homes = hashes.view(np.int64)
        homes &= 2 * self._level - 1
        homes -= (homes >= self._buckets) * self._level
        return homes, marks

    def _homes_one(self, k0: int, k1: int, tag: int) -> tuple[int, int, int]:
        a, b, c, d, e, f = self._wide_secrets
        total = a * (k0 & _M32) + b * (k0 >> 32) + c * (k1 & _M32) + d * (k1 >> 32) + e * tag + f
        first = (total >> 32) & _M32
        mark = first >> 24 or 1
        level = self._level
        first &= 2 * level - 1
        if first >= self._buckets:
            first -= level
        second = (total >> (_WIDE + 32)) & (2 * level - 1)
        if second >= self._buckets:
            second -= level
        return first, second, mark

    def _columns_of(self, rows: npt.NDArray[np.integer[Any]]) -> tuple[U64, U64, U32]:
        return self._key0[rows], self._key1[rows], self._tag[rows]

    def _key_of(self, row: int) -> tuple[int, int, int]:
        return self._key0_view[row], self._key1_view[row], self._tag_view[row]
