"""KeyIndex answers like a dict, whatever keys a client chooses, at any size."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtierd.core import keys
from kvtierd.core.keys import KeyIndex

U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1
SALT = 0x5EED

# Few values, and values that differ in one bit or one half, so that equality must be exact.
halves = st.one_of(
    st.sampled_from([0, 1, 2, 1 << 32, 1 << 63, U64_MAX]), st.integers(min_value=0, max_value=3)
)
tags = st.sampled_from([0, 1, 7, U32_MAX])
triples = st.tuples(halves, halves, tags)

Key = tuple[int, int, int]


class Columns:
    """The columns an index reads, and the index."""

    def __init__(self, rows: int, kind: type[KeyIndex] = KeyIndex, salt: int = SALT) -> None:
        self.key0 = np.zeros(rows, np.uint64)
        self.key1 = np.zeros(rows, np.uint64)
        self.tag = np.zeros(rows, np.uint32)
        self.index = kind(self.key0, self.key1, self.tag, salt)

    def write(self, row: int, key: Key) -> None:
        self.key0[row], self.key1[row], self.tag[row] = key

    def grow(self, rows: int) -> None:
        for name in ("key0", "key1", "tag"):
            old = getattr(self, name)
            new = np.zeros(rows, old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)
        self.index.rebind(self.key0, self.key1, self.tag)

    def find(self, asked: list[Key]) -> list[int]:
        k0, k1, tag = (list(part) for part in zip(*asked, strict=True))
        found = self.index.find(
            np.array(k0, np.uint64), np.array(k1, np.uint64), np.array(tag, np.uint32)
        )
        assert found.dtype == np.int32
        rows: list[int] = found.tolist()
        return rows


class SameHash(KeyIndex):
    """An index whose every key hashes alike: what an attacker would wish for."""

    def _hash(self, k0: Any, k1: Any, tag: Any) -> Any:
        return np.full((len(k0), 2), 0xABCD1234, np.uint64)

    def _homes_one(self, k0: int, k1: int, tag: int) -> tuple[int, int, int]:
        homes, marks = self._homes(*keys._one(k0, k1), tag)
        return int(homes[0, 0]), int(homes[0, 1]), int(marks[0])


class IndexLikeDict(RuleBasedStateMachine):
    """Any sequence of inserts, removals, growth and look-ups answers as a dict would."""

    kind: type[KeyIndex] = KeyIndex

    @initialize()
    def start(self) -> None:
        self.columns = Columns(8, self.kind)
        self.model: dict[Key, int] = {}
        self.next_row = 0

    @rule(batch=st.lists(triples, min_size=1, max_size=24))
    def insert(self, batch: list[Key]) -> None:
        rows = list(range(self.next_row, self.next_row + len(batch)))
        self.next_row += len(batch)
        if self.next_row > len(self.columns.key0):
            self.columns.grow(2 * self.next_row)
        refused = []
        for row, key in zip(rows, batch, strict=True):
            self.columns.write(row, key)
            if key in self.model:
                refused.append(row)
            else:
                self.model[key] = row
        assert self.columns.index.insert(np.array(rows, np.int32)).tolist() == refused

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.model:
            gone = data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True))
            rows = [self.model.pop(key) for key in gone]
            self.columns.index.remove(np.array(rows, np.int32))

    @rule(asked=st.lists(triples, min_size=1, max_size=12))
    def find(self, asked: list[Key]) -> None:
        expected = [self.model.get(key, -1) for key in asked]
        assert self.columns.find(asked) == expected
        assert [self.columns.index.find_one(*key) for key in asked] == expected

    @invariant()
    def counts(self) -> None:
        assert len(self.columns.index) == len(self.model)
        assert sorted(self.columns.index.rows().tolist()) == sorted(self.model.values())
        for tag in (0, 1, 7, U32_MAX):
            assert self.columns.index.count(tag) == sum(key[2] == tag for key in self.model)
        self.columns.index.check()


class CollidingIndexLikeDict(IndexLikeDict):
    """The same when every key collides with every other."""

    kind = SameHash


IndexLikeDict.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
CollidingIndexLikeDict.TestCase.settings = IndexLikeDict.TestCase.settings
TestIndexLikeDict = IndexLikeDict.TestCase
TestCollidingIndexLikeDict = CollidingIndexLikeDict.TestCase


def random_columns(rows: int, tag: int = 3) -> Columns:
    rng = np.random.default_rng(rows)
    columns = Columns(rows)
    columns.key0[:] = rng.integers(0, 2**64, rows, dtype=np.uint64)
    columns.key1[:] = rng.integers(0, 2**64, rows, dtype=np.uint64)
    columns.tag[:] = tag
    return columns


def test_a_million_entries_come_and_go_in_a_few_bytes_each() -> None:
    n = 1_000_000
    columns = random_columns(n)
    index = columns.index
    for first in range(0, n, 50_000):
        assert not len(index.insert(np.arange(first, first + 50_000, dtype=np.int32)))
    index.check()
    assert index.memory_bytes <= 12 * n
    assert index.stashed <= keys.STASH_ENTRIES
    every = np.arange(n)
    assert (index.find(columns.key0, columns.key1, 3) == every).all()
    assert (index.find(columns.key0, columns.key1, 4) == -1).all()
    index.remove(every[::2].astype(np.int32))
    found = index.find(columns.key0, columns.key1, columns.tag)
    assert (found[::2] == -1).all() and (found[1::2] == every[1::2]).all()
    index.check()


@settings(max_examples=30, deadline=None)
@given(st.lists(triples, min_size=1, max_size=40), st.integers(0, 2**32))
def test_a_table_built_at_once_answers_like_one_filled_bit_by_bit(
    repeated: list[Key], seed: int
) -> None:
    """Keys that come twice or more are refused alike, the others are found alike."""
    n = keys.BUILD_KEYS + len(repeated)
    rng = np.random.default_rng(seed)
    built, filled = Columns(n), Columns(n)
    built.key0[:] = rng.integers(0, 2**64, n, dtype=np.uint64)
    built.key1[:] = rng.integers(0, 4, n, dtype=np.uint64)
    built.tag[:] = rng.integers(0, 2, n, dtype=np.uint32)
    places = rng.choice(n, 3 * len(repeated), replace=False)
    for place, key in zip(places.tolist(), 3 * repeated, strict=True):
        built.write(place, key)
    for name in ("key0", "key1", "tag"):
        getattr(filled, name)[:] = getattr(built, name)
    order = rng.permutation(n).astype(np.int32)
    refused = built.index.insert(order)
    some = np.array_split(order, 7)
    assert max(map(len, some)) < keys.BUILD_KEYS
    assert np.array_equal(refused, np.concatenate([filled.index.insert(part) for part in some]))
    assert len(refused) >= 2 * len(set(repeated))
    assert sorted(built.index.rows().tolist()) == sorted(filled.index.rows().tolist())
    for columns in (built, filled):
        columns.index.check()


def test_a_table_built_at_once_goes_on_growing() -> None:
    columns = random_columns(4 * keys.BUILD_KEYS)
    index = columns.index
    rows = np.arange(4 * keys.BUILD_KEYS, dtype=np.int32)
    index.insert(rows[: keys.BUILD_KEYS])
    assert index.stashed <= keys.STASH_ENTRIES
    for first in range(keys.BUILD_KEYS, len(rows), 1000):
        assert not len(index.insert(rows[first : first + 1000]))
    assert (index.find(columns.key0, columns.key1, 3) == rows).all()
    assert index.memory_bytes <= 12 * len(rows)
    index.check()


def test_removed_entries_leave_no_trace() -> None:
    columns = random_columns(40_000)
    index = columns.index
    index.insert(np.arange(10_000, dtype=np.int32))
    grown = index.memory_bytes
    for turn in range(30):
        out = np.arange(10_000, dtype=np.int32) + 10_000 * (turn % 4)
        index.insert((out + 10_000) % 40_000)
        index.remove(out)
    assert len(index) == 10_000
    # Twice as many entries at most were in at one time, however many passed through.
    assert index.memory_bytes <= 2 * grown + keys.SPLIT_BUCKETS * keys.PLACES * 5
    index.check()


def test_growth_is_spread_over_inserts(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = random_columns(200_000)
    index = columns.index
    steps: list[int] = []
    split = index._split

    def counted(first: int, last: int) -> None:
        steps.append(last - first)
        split(first, last)

    monkeypatch.setattr(index, "_split", counted)
    for first in range(0, 200_000, 100):
        steps.clear()
        index.insert(np.arange(first, first + 100, dtype=np.int32))
        assert sum(steps) <= 2 * keys.SPLIT_BUCKETS
    index.check()


@pytest.mark.parametrize("step", [1, 2**32, 2**33 + 1, 2**63 // 1_000_000])
def test_regular_keys_spread(step: int) -> None:
    """Counters in either half, in any stride, and one key under many tags, need no long stash."""
    n = 100_000
    columns = Columns(3 * n)
    counter = np.arange(n, dtype=np.uint64) * np.uint64(step)
    columns.key0[:n] = counter
    columns.key1[n : 2 * n] = counter
    columns.key0[:n] += np.uint64(1)
    columns.key0[2 * n :] = U64_MAX
    columns.tag[2 * n :] = np.arange(n)
    assert not len(columns.index.insert(np.arange(3 * n, dtype=np.int32)))
    assert columns.index.memory_bytes <= 12 * 3 * n
    assert columns.index.stashed <= keys.STASH_ENTRIES
    columns.index.check()


def test_keys_that_collide_under_one_salt_do_not_under_another() -> None:
    """Keys picked to crowd 16 buckets of a table whose salt is known: the known table relieves
    itself and stays right; a table with another salt does not notice."""
    rng = np.random.default_rng(5)
    pool = Columns(200_000)
    pool.key0[:] = rng.integers(0, 2**64, len(pool.key0), dtype=np.uint64)
    homes, _ = pool.index._homes(pool.key0, pool.key1, pool.tag)
    crowd = np.flatnonzero((homes < 16).all(axis=1))[: 3 * 16 * keys.PLACES]
    assert len(crowd) == 3 * 16 * keys.PLACES < keys.FIRST_BUCKETS * keys.PLACES * keys.MAX_LOAD
    for salt, crowded in ((SALT, True), (SALT + 1, False)):
        columns = Columns(len(crowd), salt=salt)
        columns.key0[:] = pool.key0[crowd]
        buckets = columns.index.memory_bytes
        assert not len(columns.index.insert(np.arange(len(crowd), dtype=np.int32)))
        assert (columns.index.memory_bytes > buckets) == crowded
        assert columns.index.stashed <= keys.STASH_ENTRIES
        columns.index.check()


def test_crowding_that_growth_cannot_relieve_changes_the_salt() -> None:
    columns = random_columns(300)
    reseeded: list[int] = []

    class Weak(SameHash):
        def _reseed(self) -> None:
            reseeded.append(len(self))
            super()._reseed()

    index = Weak(columns.key0, columns.key1, columns.tag, SALT)
    for first in range(0, 300, 10):
        index.insert(np.arange(first, first + 10, dtype=np.int32))
    assert (index.find(columns.key0, columns.key1, 3) == np.arange(300)).all()
    assert 1 <= len(reseeded) <= 6, "starts over only when the stash has doubled"
    index.check()


@given(st.lists(triples, min_size=1, max_size=50), st.integers(0, U64_MAX))
def test_scalar_and_vector_hashes_agree(asked: list[Key], salt: int) -> None:
    columns = Columns(4, salt=salt)
    k0, k1, tag = (list(part) for part in zip(*asked, strict=True))
    homes, marks = columns.index._homes(
        np.array(k0, np.uint64), np.array(k1, np.uint64), np.array(tag, np.uint32)
    )
    for key, home, mark in zip(asked, homes.tolist(), marks.tolist(), strict=True):
        assert columns.index._homes_one(*key) == (*home, mark)


def test_the_first_of_equal_keys_in_a_batch_wins() -> None:
    columns = Columns(6)
    for row, key in enumerate([(1, 1, 1), (2, 2, 2), (1, 1, 1), (1, 1, 2), (2, 2, 2), (1, 1, 1)]):
        columns.write(row, key)
    refused = columns.index.insert(np.array([5, 0, 1, 2, 3, 4], np.int32))
    assert refused.tolist() == [0, 2, 4]
    assert columns.index.find_one(1, 1, 1) == 5


@pytest.mark.parametrize("kind", [KeyIndex, SameHash])
@pytest.mark.parametrize("crowd", [0, 40], ids=["in buckets", "in the stash"])
def test_a_key_is_found_by_all_of_its_bits_and_its_tag(kind: type[KeyIndex], crowd: int) -> None:
    columns = Columns(crowd + 1, kind)
    for row in range(crowd):
        columns.write(row, (row, 77, 5))
    columns.write(crowd, (1 << 40, 2, 3))
    columns.index.insert(np.arange(crowd + 1, dtype=np.int32))
    others = [(1 << 40 | 1, 2, 3), (1, 2, 3), (1 << 40, 3, 3), (1 << 40, 2, 4), (2, 1 << 40, 3)]
    for asked, row in (((1 << 40, 2, 3), crowd), *((other, -1) for other in others)):
        assert columns.find([asked]) == [row]
        assert columns.index.find_one(*asked) == row


@pytest.mark.parametrize("rows", [[0, 1], [0, 0]])
def test_removing_what_is_not_there_is_a_programming_error_and_changes_nothing(
    rows: list[int],
) -> None:
    columns = Columns(2)
    columns.write(1, (9, 9, 9))
    columns.index.insert(np.array([0], np.int32))
    with pytest.raises(AssertionError, match="remove"):
        columns.index.remove(np.array(rows, np.int32))
    assert columns.index.find_one(0, 0, 0) == 0
    columns.index.check()


def test_check_notices_a_key_that_changed_under_the_index() -> None:
    columns = Columns(2)
    columns.index.insert(np.array([0], np.int32))
    columns.key0[0] = 5
    with pytest.raises(AssertionError, match="where its key leads"):
        columns.index.check()


def test_columns_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="one length"):
        KeyIndex(np.zeros(2, np.uint64), np.zeros(3, np.uint64), np.zeros(2, np.uint32), SALT)
