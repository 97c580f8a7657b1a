"""KeyIndex: from a content key and a tag (tenant and layout) to the row of its block.

A client chooses its keys, so the index must stay fast for keys chosen to hurt it, and it must
hold tens of millions of entries in a few bytes each. Hence, on secretly hashed buckets of 8 places
(key_buckets.py):

- A key may lie in one of two buckets (the emptier one when it came), so a look-up reads two
  buckets and never walks a chain; a removed entry leaves nothing behind. Equality is exact.
- Entries whose two buckets are full wait in a short list, the stash, that every miss compares
  with; a long stash makes the table grow, and at last choose another salt.
- A restart fills the empty table in the order of buckets, after one sort.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from kvtierd.core.key_buckets import (
    CHUNK_KEYS,
    FIRST_BUCKETS,
    I32,
    I64,
    MAX_LOAD,
    PLACES,
    SPLIT_BUCKETS,
    U8,
    U32,
    U64,
    Buckets,
)  # fmt: skip

MIN_LOAD: Final = 0.15
"""A long stash makes the table grow down to this load, no further."""

STASH_ENTRIES: Final = 64
"""Stash length above which the table is relieved."""

BUILD_KEYS: Final = 1 << 14
"""From so many keys on, an empty table is filled bucket by bucket instead of key by key."""

BUILD_KEYS_MAX: Final = 1 << 27
"""As many keys are filled in like that; more do not leave room for a hash beside their number."""

BUILD_BUCKETS: Final = 1 << 13
"""Buckets filled in one go."""

BUILD_PLACES: Final = PLACES - 2
"""Places of a bucket for the keys of which it is the first choice; two are left for the others."""

_ONES: Final = 0x0101010101010101
_HIGHS: Final = 0x8080808080808080
_MARK_BITS: Final = 8
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)
_NO_ROWS: Final = np.empty(0, np.int32)


class KeyIndex(Buckets):
    """Maps (key0, key1, tag) to the row that holds them in the caller's columns.

    A row must keep its key and tag unchanged in the columns while it is in the index.

    Units: memory is about 9 B per entry in a table that has grown.
    """

    def __init__(self, key0: U64, key1: U64, tag: U32, salt: int) -> None:
        super().__init__(key0, key1, tag, salt)
        self._count = 0
        self._stash = _NO_ROWS
        self._stash_limit = STASH_ENTRIES
        self._by_tag: dict[int, int] = {}

    def __len__(self) -> int:
        return self._count

    def count(self, tag: int) -> int:
        """Entries with this tag."""
        return self._by_tag.get(tag, 0)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the buckets in use and the stash."""
        return self._buckets * PLACES * 5 + self._stash.nbytes

    @property
    def stashed(self) -> int:
        """Entries that wait in the stash."""
        return len(self._stash)

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
        if not self._count and BUILD_KEYS <= len(rows) <= BUILD_KEYS_MAX:
            return self._build(rows)
        if len(rows) == 1:
            k0, k1, tag = self._key_of(int(rows[0]))
            refused = np.array([self.find_one(k0, k1, tag) >= 0])
        else:
            refused = self._repeated(rows)
            if self._count:
                refused |= self.find(*self._columns_of(rows)) >= 0
        fresh = rows[~refused]
        self._tally(fresh, 1)
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
        self._tally(rows, -1)

    def _tally(self, rows: I32, sign: int) -> None:
        """Count rows that come in or go out."""
        n = len(rows)
        self._count += sign * n
        if not n:
            return
        tags = self._tag[rows]
        first = int(tags[0])
        if n == 1 or bool((tags == first).all()):
            self._by_tag[first] = self._by_tag.get(first, 0) + sign * n
            return
        for tag, some in zip(*(part.tolist() for part in np.unique_counts(tags)), strict=True):
            self._by_tag[tag] = self._by_tag.get(tag, 0) + sign * some

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

    # --------------------------------------------------------------- build

    def _build(self, rows: I32) -> I32:
        """`insert` into an empty table, in the order of buckets.

        One sort by first bucket, print and a part of the second hash brings equal keys together,
        and lets the buckets be filled one after the other.
        """
        n = len(rows)
        self._split_to(int(n / (MAX_LOAD * PLACES)) + 1)
        place_bits = (n - 1).bit_length()
        low = np.uint64((1 << place_bits) - 1)
        packed = self._packed(rows, place_bits)
        packed.sort()
        alike = np.zeros(n, np.bool_)
        alike[1:] = packed[1:] ^ packed[:-1] <= low
        alike[:-1] |= alike[1:]
        places = np.sort((packed[alike] & low).astype(np.int64))
        refused = np.zeros(n, np.bool_)
        refused[places] = self._repeated(rows[places])
        if refused.any():
            packed = packed[~refused[(packed & low).astype(np.int64)]]
        self._tally(rows[~refused], 1)
        shift = np.uint64(64 - self._buckets.bit_length())
        firsts = np.arange(0, self._buckets, BUILD_BUCKETS, dtype=np.uint64)
        cuts = [*np.searchsorted(packed, firsts << shift).tolist(), len(packed)]
        over = [
            self._fill(rows, packed[cuts[i] : cuts[i + 1]], i * BUILD_BUCKETS, place_bits)
            for i in range(len(firsts))
        ]
        self._place(np.concatenate(over))
        if len(self._stash) > self._stash_limit:
            self._relieve()
        left: I32 = rows[refused]
        return left

    def _packed(self, rows: I32, place_bits: int) -> U64:
        """Of each row: first bucket | print | bits of the second hash | place in `rows`."""
        packed = np.empty(len(rows), np.uint64)
        bucket_shift = 64 - self._buckets.bit_length()
        mark_shift = bucket_shift - _MARK_BITS
        bits = min(mark_shift - place_bits, 32)
        for i in range(0, len(rows), CHUNK_KEYS):
            part = packed[i : i + CHUNK_KEYS]
            columns = self._columns_of(rows[i : i + CHUNK_KEYS])
            hashes = self._hash(*columns)
            second = hashes[:, 1] >> np.uint64(32 - bits)
            homes, marks = self._homes_of(hashes)
            part[:] = homes[:, 0].astype(np.uint64) << np.uint64(bucket_shift)
            part |= marks.astype(np.uint64) << np.uint64(mark_shift)
            part |= second << np.uint64(place_bits)
            part |= np.arange(i, i + len(part), dtype=np.uint64)
        return packed

    def _fill(self, rows: I32, packed: U64, first: int, place_bits: int) -> I32:
        """Fill some empty buckets from `first` on; returns the rows for which there is no room."""
        bucket_shift = 64 - self._buckets.bit_length()
        bucket = (packed >> np.uint64(bucket_shift)).astype(np.int64)
        counts = np.bincount(bucket - first, minlength=1)
        rank = np.arange(len(packed)) - np.repeat(np.cumsum(counts) - counts, counts)
        room = rank < BUILD_PLACES
        mine = rows[(packed & np.uint64((1 << place_bits) - 1)).astype(np.int64)]
        at = (bucket * PLACES + rank)[room]
        self._rows[at] = mine[room]
        self._prints[at] = (packed >> np.uint64(bucket_shift - _MARK_BITS)).astype(np.uint8)[room]
        over: I32 = mine[~room]
        return over

    # ---------------------------------------------------------------- relief

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

    # ------------------------------------------------------------ validate

    def rows(self) -> I32:
        """All rows of the index, in no order."""
        at = np.flatnonzero(self._prints[: self._buckets * PLACES])
        return np.concatenate((self._rows[at], self._stash))

    def check(self) -> None:
        """Recount everything. Errors: AssertionError says what does not add up."""
        rows = self.rows()
        assert len(rows) == self._count, f"{len(rows)} entries found, {self._count} counted"
        tags = zip(*(part.tolist() for part in np.unique_counts(self._tag[rows])), strict=True)
        assert dict(tags) == {tag: n for tag, n in self._by_tag.items() if n}, "counts by tag"
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
