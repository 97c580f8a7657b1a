"""KeyIndex: from a content key and a tag (tenant and layout) to the row of its block.

A client chooses its keys, so the index must stay fast for keys chosen to hurt it, and it must
hold tens of millions of entries in a few bytes each. Hence:

- Buckets of 8 places. A key may lie in one of two buckets (the emptier one when it came), so a
  look-up reads two buckets and never walks a chain; a removed entry leaves nothing behind.
- A place is a one-byte print of the key (0 = empty) and a row id. The keys themselves are read
  from the caller's columns, and equality is exact.
- The hash is strongly universal (multiply-shift of 32-bit words) with secret factors: whatever
  keys are chosen without knowing them, two collide by chance alone.
- The table grows by linear hashing: a few hundred buckets are split at a time, each into itself
  and one new bucket, which takes entries at the same places and therefore always has room.
- Entries whose two buckets are full wait in a short list, the stash, that every miss compares
  with; a long stash makes the table grow, and at last choose another salt.
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

MIN_LOAD: Final = 0.15
"""A long stash makes the table grow down to this load, no further."""

FIRST_BUCKETS: Final = 256
SPLIT_BUCKETS: Final = 256
"""Buckets split in one go at least, so that growth costs little per insert and stalls none."""

STASH_ENTRIES: Final = 64
"""Stash length above which the table is relieved."""

CHUNK_KEYS: Final = 1 << 13
"""Keys hashed in one go, so that temporaries of large batches stay in the cache."""

_M32: Final = 0xFFFFFFFF
_M64: Final = 0xFFFFFFFFFFFFFFFF
_ONES: Final = 0x0101010101010101
_HIGHS: Final = 0x8080808080808080
_SHIFT: Final = np.uint64(32)
_WIDE: Final = 128
_CONSTANT: Final = np.uint64(1 << 32)
"""The sixth 32-bit word of a hashed key is 1, so that its factor is the constant term."""
_FIRST_MARK: Final = np.uint8(1)
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)
_NO_ROWS: Final = np.empty(0, np.int32)


def _splitmix(state: int, count: int) -> tuple[list[int], int]:
    """`count` 64-bit values of the splitmix64 generator, and its next state."""
    values = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & _M64
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _M64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _M64
        values.append(z ^ (z >> 31))
    return values, state


class KeyIndex:
    """Maps (key0, key1, tag) to the row that holds them in the caller's columns.

    A row must keep its key and tag unchanged in the columns while it is in the index.

    Shapes: `key0`, `key1` uint64 [rows], `tag` uint32 [rows].
    Units: memory is 5 B per place, about 9 B per entry in a table that has grown; address space
    for one entry per row is taken at once, and becomes memory as entries come.
    """

    def __init__(self, key0: U64, key1: U64, tag: U32, salt: int) -> None:
        self._count = 0
        self._stash = _NO_ROWS
        self._stash_limit = STASH_ENTRIES
        self._level = FIRST_BUCKETS
        self._buckets = FIRST_BUCKETS
        self._salt = salt
        self._new_secrets()
        self._prints = np.zeros(0, np.uint8)
        self._rows = np.zeros(0, np.int32)
        self.rebind(key0, key1, tag)

    def __len__(self) -> int:
        return self._count

    @property
    def memory_bytes(self) -> int:
        """Bytes of the buckets in use and the stash."""
        return self._buckets * PLACES * 5 + self._stash.nbytes

    @property
    def stashed(self) -> int:
        """Entries that wait in the stash."""
        return len(self._stash)

    def rebind(self, key0: U64, key1: U64, tag: U32) -> None:
        """Read the keys from other columns from now on; rows of the index are the same in both.

        Longer columns take address space for more entries (copies 5 B per place once).
        """
        if not len(key0) == len(key1) == len(tag) <= np.iinfo(np.int32).max:
            raise ValueError("key0, key1 and tag must have one length below 2**31")
        self._key0, self._key1, self._tag = key0, key1, tag
        self._ensure_places(max(self._buckets, int(len(key0) / (MAX_LOAD * PLACES)) + 1))
        self._views()

    # ------------------------------------------------------------- look-up

    def find(self, k0: U64, k1: U64, tag: int | U32) -> I32:
        """The row of each key, -1 where there is none.

        Shapes: `k0`, `k1` [n], `tag` [n] or one number for all; returns int32 [n].
        """
        n = len(k0)
        if n <= CHUNK_KEYS:
            return self._find(k0, k1, tag)
        found = np.empty(n, np.int32)
        for i in range(0, n, CHUNK_KEYS):
            part = slice(i, i + CHUNK_KEYS)
            tags = tag if isinstance(tag, int) else tag[part]
            found[part] = self._find(k0[part], k1[part], tags)
        return found

    def find_one(self, k0: int, k1: int, tag: int) -> int:
        """The row of one key, -1 when there is none; the short path for single blocks."""
        first, second, mark = self._homes_one(k0, k1, tag)
        marks = mark * _ONES
        for bucket in (first, second):
            # A byte of `odd` is 0 where the print is equal; the usual trick finds zero bytes
            # (and now and then one more above a real one, which the exact comparison drops).
            odd = self._words_view[bucket] ^ marks
            zero = (odd - _ONES) & ~odd & _HIGHS
            while zero:
                place = ((zero & -zero).bit_length() - 1) >> 3
                row = self._rows_view[bucket * PLACES + place]
                if (
                    self._key0_view[row] == k0
                    and self._key1_view[row] == k1
                    and self._tag_view[row] == tag
                ):
                    return row
                zero &= zero - 1
        if len(self._stash):
            return int(self._find_stashed(*_one(k0, k1), tag)[0])
        return -1

    def _find(self, k0: U64, k1: U64, tag: int | U32) -> I32:
        n = len(k0)
        found = np.full(n, -1, np.int32)
        homes, marks = self._homes(k0, k1, tag)
        words = self._words[homes]
        hit = np.flatnonzero(words.view(np.uint8).reshape(n, 2 * PLACES) == marks[:, None])
        key = hit >> 4
        rows = self._rows[homes.reshape(-1)[hit >> 3] * PLACES + (hit & (PLACES - 1))]
        same = self._key0[rows] == k0[key]
        same &= self._key1[rows] == k1[key]
        same &= self._tag[rows] == (tag if isinstance(tag, int) else tag[key])
        found[key[same]] = rows[same]
        if len(self._stash):
            missed = np.flatnonzero(found < 0)
            if len(missed):
                tags = tag if isinstance(tag, int) else tag[missed]
                found[missed] = self._find_stashed(k0[missed], k1[missed], tags)
        return found

    def _find_stashed(self, k0: U64, k1: U64, tag: int | U32) -> I32:
        stash = self._stash
        same = self._key0[stash] == k0[:, None]
        same &= self._key1[stash] == k1[:, None]
        same &= self._tag[stash] == (tag if isinstance(tag, int) else tag[:, None])
        found: I32 = stash[same.argmax(axis=1)]
        found[~same.any(axis=1)] = -1
        return found

    # ------------------------------------------------------------- changes

    def insert(self, rows: I32) -> I32:
        """Add rows under the keys that their columns hold; returns the rows that were not added.

        A row is not added when its key is in the index already or comes earlier in `rows`.
        """
        rows = np.asarray(rows, np.int32)
        if len(rows) == 0:
            return _NO_ROWS
        if len(rows) == 1:
            k0, k1, tag = self._key_of(int(rows[0]))
            refused = np.array([self.find_one(k0, k1, tag) >= 0])
        else:
            refused = self._repeated(rows)
            if self._count:
                refused |= self.find(*self._columns_of(rows)) >= 0
        fresh = rows[~refused]
        self._count += len(fresh)
        self._split_to(int(self._count / (MAX_LOAD * PLACES)) + 1)
        if len(fresh) == 1 and not len(self._stash):
            self._place_one(int(fresh[0]))
        else:
            self._place(np.concatenate((self._stash, fresh)))
        if len(self._stash) > self._stash_limit:
            self._relieve()
        left: I32 = rows[refused]
        return left

    def remove(self, rows: I32) -> None:
        """Take rows out; each must be in the index once, and its columns still hold its key."""
        rows = np.asarray(rows, np.int32)
        for i in range(0, len(rows), CHUNK_KEYS):
            self._remove(rows[i : i + CHUNK_KEYS])

    def _remove(self, rows: I32) -> None:
        n = len(rows)
        homes, marks = self._homes(*self._columns_of(rows))
        places = homes[:, :, None] * PLACES + np.arange(PLACES)
        mine = self._rows[places] == rows[:, None, None]
        mine &= self._prints[places] == marks[:, None, None]
        mine = mine.reshape(n, 2 * PLACES)
        there = mine.any(axis=1)
        stashed = np.isin(rows[~there], self._stash)
        place = places.reshape(n, -1)[there, mine.argmax(axis=1)[there]]
        assert stashed.all(), "remove: a row is not in the index"
        assert len(np.unique(rows)) == n, "remove: a row is named twice"
        self._prints[place] = 0
        if len(stashed):
            self._stash = self._stash[~np.isin(self._stash, rows)]
        self._count -= n

    def _repeated(self, rows: I32) -> npt.NDArray[np.bool_]:
        """Which rows have a key that an earlier one of them has."""
        k0, k1, tag = self._columns_of(rows)
        repeated = np.zeros(len(rows), np.bool_)
        mixed = np.sort(k0 + k1 * _MIX + tag * _MIX)
        if not (mixed[1:] == mixed[:-1]).any():
            return repeated
        order = np.lexsort((tag, k1, k0))
        before, after = order[:-1], order[1:]
        same = (k0[after] == k0[before]) & (k1[after] == k1[before]) & (tag[after] == tag[before])
        repeated[after[same]] = True
        return repeated

    def _place(self, rows: I32) -> None:
        """Give each row a place; what finds none becomes the stash."""
        left = []
        step = min(CHUNK_KEYS, max(self._buckets // 2, FIRST_BUCKETS))
        for i in range(0, len(rows), step):
            part = rows[i : i + step]
            homes, marks = self._homes(*self._columns_of(part))
            left.append(self._place_chunk(part, homes, marks))
        full = np.concatenate(left) if left else _NO_ROWS
        self._stash = full[[not self._displace(row) for row in full]]

    def _place_chunk(self, rows: I32, homes: I64, marks: U8) -> I32:
        full = []
        while len(rows):
            used = self._words[homes].view(np.uint8).reshape(len(rows), 2, PLACES) != 0
            load = used.sum(axis=2)
            side = (load[:, 1] < load[:, 0]).astype(np.int64)
            every = np.arange(len(rows))
            room = load[every, side] < PLACES
            if not room.all():
                full.append(rows[~room])
                rows, homes, marks = rows[room], homes[room], marks[room]
                used, side, every = used[room], side[room], np.arange(len(rows))
            place = homes[every, side] * PLACES + used[every, side].argmin(axis=1)
            # Several rows may want one place: the last write wins it, the others try again.
            self._rows[place] = rows
            won = self._rows[place] == rows
            self._prints[place[won]] = marks[won]
            lost = ~won
            rows, homes, marks = rows[lost], homes[lost], marks[lost]
        return np.concatenate(full) if full else _NO_ROWS

    def _place_one(self, row: int) -> None:
        first, second, mark = self._homes_one(*self._key_of(row))
        prints = self._prints
        used = [prints[b * PLACES : b * PLACES + PLACES].tobytes() for b in (first, second)]
        side = 1 if used[1].count(0) > used[0].count(0) else 0
        place = used[side].find(0)
        if place < 0:
            if not self._displace(row):
                self._stash = np.append(self._stash, np.int32(row))
            return
        at = (second if side else first) * PLACES + place
        self._rows[at] = row
        prints[at] = mark

    def _displace(self, row: int) -> bool:
        """Make room for a row whose buckets are full: move one entry to its other bucket."""
        homes, marks = self._homes(*self._columns_of(np.array([row])))
        place = (homes.reshape(2, 1) * PLACES + np.arange(PLACES)).reshape(-1)
        theirs, _ = self._homes(*self._columns_of(self._rows[place]))
        here = place // PLACES
        other = np.where(theirs[:, 0] == here, theirs[:, 1], theirs[:, 0])
        free = self._prints.reshape(-1, PLACES)[other] == 0
        movable = np.flatnonzero(free.any(axis=1))
        if not len(movable):
            return False
        one = movable[0]
        old, new = place[one], other[one] * PLACES + free[one].argmax()
        self._rows[new], self._prints[new] = self._rows[old], self._prints[old]
        self._rows[old], self._prints[old] = row, marks[0]
        return True

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

    def _relieve(self) -> None:
        """Shorten the stash: by more buckets while that is sane, else by another salt."""
        while len(self._stash) > self._stash_limit:
            if self._count <= MIN_LOAD * PLACES * self._buckets:
                self._reseed()
                # Keys that collide under any salt are impossible; whatever this is, do not
                # start over for it at every insert.
                self._stash_limit = max(STASH_ENTRIES, 2 * len(self._stash))
                return
            self._split_to(self._buckets + SPLIT_BUCKETS)
            self._place(self._stash)

    def _reseed(self) -> None:
        rows = self.rows()
        self._new_secrets()
        self._prints[: self._buckets * PLACES] = 0
        self._place(rows)

    def _new_secrets(self) -> None:
        values, self._salt = _splitmix(self._salt, 12)
        self._secrets = np.array(values, np.uint64).reshape(6, 2)
        # Both hashes in one sum of Python integers: the first needs less than _WIDE bits.
        pairs = zip(values[::2], values[1::2], strict=True)
        self._wide_secrets = [a | b << _WIDE for a, b in pairs]

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
        hashes = self._hash(k0, k1, tag)
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

    # ------------------------------------------------------------ validate

    def rows(self) -> I32:
        """All rows of the index, in no order."""
        at = np.flatnonzero(self._prints[: self._buckets * PLACES])
        return np.concatenate((self._rows[at], self._stash))

    def check(self) -> None:
        """Recount everything. Errors: AssertionError says what does not add up."""
        rows = self.rows()
        assert len(rows) == self._count, f"{len(rows)} entries found, {self._count} counted"
        assert not self._prints[self._buckets * PLACES :].any(), "entries beyond the last bucket"
        assert self._level <= self._buckets < 2 * self._level, "split pointer out of range"
        if not len(rows):
            return
        assert rows.min() >= 0 and rows.max() < len(self._key0), "a row is outside the columns"
        for i in range(0, len(rows), CHUNK_KEYS):
            part = rows[i : i + CHUNK_KEYS]
            found = self._find(*self._columns_of(part))
            # Also finds keys that are in twice: one of the two rows is not what comes back.
            assert (found == part).all(), "an entry is not where its key leads"


def _one(k0: int, k1: int) -> tuple[U64, U64]:
    return np.array([k0], np.uint64), np.array([k1], np.uint64)
