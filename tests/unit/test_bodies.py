"""Bodies of slots: fields come back as they went in, and the checksum is the documented one."""

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.tiers.bodies import (
    W_SUM,
    BodyFields,
    body_sums,
    compose,
    compose_one,
    seal_bodies,
    split,
    sum_one,
    verify_bodies,
)
from kvtierd.tiers.superblock import Kind
from tests.header_files import fields

WIDTHS = {
    "slot": 40,
    "node": 32,
    "page": 32,
    "valid_tokens": 32,
    "length_bytes": 32,
    "parent": 32,
    "fork_tokens": 32,
    "tenant": 32,
    "block_kind": 8,
    "retention": 8,
    "checksum_kind": 8,
    "priority": 8,
}
NAMES = [name for name in BodyFields.__struct_fields__ if name != "kind"]


@st.composite
def values(draw: st.DrawFn) -> dict[str, int]:
    """Values of all fields, each as wide as the field is."""
    return {name: draw(st.integers(0, (1 << WIDTHS.get(name, 64)) - 1)) for name in NAMES}


def documented_sum(words: list[int]) -> int:
    """The checksum as docs/FORMATS.md defines it, word by word."""

    def constant(index: int) -> int:
        digest = hashlib.sha256(f"kvtierd-body-{index}".encode()).digest()
        return int.from_bytes(digest[:8], "little") | 1

    total = constant(0)
    for index in range(1, 16):
        mixed = words[index] * 0x9E3779B97F4A7C15 % 2**64
        total += constant(index) * (mixed ^ mixed >> 32)
    return total % 2**64


@given(st.lists(st.integers(0, 2**64 - 1), min_size=16, max_size=16))
def test_the_checksum_is_the_documented_one(words: list[int]) -> None:
    assert int(body_sums(np.array([words], np.uint64))[0]) == documented_sum(words)
    assert sum_one(tuple(words[1:])) == documented_sum(words)


def test_the_checksum_has_the_documented_values() -> None:
    assert sum_one(tuple(range(1, 16))) == 0xF5DB3BCAE36A9BF0
    assert sum_one((0,) * 15) == 0xC31E478622021F0B


def test_a_batch_of_any_size_has_each_bodys_checksum() -> None:
    rows = np.random.default_rng(1).integers(0, 2**64, (10_000, 16), np.uint64)
    sums = body_sums(rows)
    for row in (0, 1, 4095, 4096, 9999):
        assert int(sums[row]) == sum_one(tuple(rows[row, 1:].tolist()))
    assert body_sums(rows[:0]).shape == (0,)


@given(st.lists(values(), min_size=1, max_size=8), st.sampled_from(Kind))
def test_fields_come_back_as_they_went_in(rows: list[dict[str, int]], kind: Kind) -> None:
    columns = {name: np.array([row[name] for row in rows], np.uint64) for name in NAMES}
    bodies = compose(len(rows), BodyFields(kind=kind, **columns))
    assert verify_bodies(bodies).all()
    found = split(bodies, kind)
    for name in NAMES:
        assert getattr(found, name).tolist() == columns[name].tolist(), name


@given(values(), st.sampled_from(Kind))
def test_one_body_is_composed_like_a_batch(row: dict[str, int], kind: Kind) -> None:
    one = BodyFields(kind=kind, **row)
    assert compose_one(one) == compose(1, one).tobytes()


def test_no_flipped_bit_and_no_swapped_words_go_unnoticed() -> None:
    slots = np.arange(16, 32, dtype=np.int64)
    body = compose(16, fields(Kind.ARENA, slots, slots))[:1]
    flipped = np.repeat(body, 1024, axis=0)
    flat = np.arange(1024)
    flipped[flat, flat // 64] ^= np.uint64(1) << (flat % 64).astype(np.uint64)
    assert not verify_bodies(flipped).any()
    for i in range(16):
        for j in range(i):
            swapped = body.copy()
            swapped[0, [i, j]] = body[0, [j, i]]
            assert verify_bodies(swapped)[0] == (body[0, i] == body[0, j])


@given(st.integers(1, 15), st.integers(1, 15))
def test_a_body_that_is_half_another_one_is_noticed(first: int, count: int) -> None:
    slots = np.arange(16, 18, dtype=np.int64)
    old, new = compose(2, fields(Kind.SPILL, slots, slots))
    torn = old.copy()
    torn[first : first + count] = new[first : first + count]
    differs = bool((torn != old).any() and (torn != new).any())
    assert verify_bodies(torn[None])[0] == (not differs)


def test_zeros_are_not_valid_and_sealing_makes_anything_valid() -> None:
    rows = np.zeros((3, 16), np.uint64)
    assert not verify_bodies(rows).any()
    rows[1] = np.uint64(2**64 - 1)
    seal_bodies(rows)
    assert verify_bodies(rows).all()
    assert (rows[:, W_SUM] != 0).all()
