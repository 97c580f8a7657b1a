"""The body of a slot: 128 bytes that say which block lies in it, and their checksum.

A body is 16 little-endian u64 words, so a batch is an array of shape [n, 16] and everything here
is arithmetic on its columns. `docs/FORMATS.md` lists the words.
"""

import hashlib
import struct
import threading
from functools import cached_property
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

Bodies = NDArray[np.uint64]
"""Bodies of a batch. Shapes: [n, 16]."""
Column = NDArray[Any] | int
"""One value per block, or one value for the whole batch."""

BODY_WORDS: Final = 16
BLOCK_SESSION: Final = 1
BLOCK_KEYED: Final = 2
CHECKSUM_NONE: Final = 0
CHECKSUM_XXH3: Final = 1
CHECKSUM_AES_GCM: Final = 2
"""The payload is encrypted (cipher.py); only in spill files."""

W_SUM, W_OWNER0, W_OWNER1, W_NODE_PAGE, W_VALID_LENGTH, W_PAYLOAD_SUM, W_SEQ = range(7)
W_LAYOUT0, W_LAYOUT1, W_LEASE, W_PARENT_FORK, W_PLACE, W_FLAGS, W_CREATED, W_GENERATION = range(
    7, 15
)
W_ZERO: Final = 15
W_TAG0, W_NONCE, W_TAG1 = W_LEASE, W_GENERATION, W_ZERO
"""What these words are in the body of an encrypted block."""
PLACE_KIND_SHIFT: Final = 56

_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def _constant(index: int) -> int:
    digest = hashlib.sha256(b"kvtierd-body-%d" % index).digest()
    return int.from_bytes(digest[:8], "little") | 1


_SEED = np.uint64(_constant(0))
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_WEIGHTS: NDArray[np.uint64] = np.array([0] + [_constant(i) for i in range(1, 16)], np.uint64)
"""One odd factor per word; 0 for the checksum itself, so that whole rows can be multiplied."""
_CHUNK_ROWS: Final = 4096
"""Rows per pass, so that intermediate values stay in the L2 cache."""


class BodyFields(msgspec.Struct, frozen=True, kw_only=True):
    """What bodies say, field by field; each is one value per block or one for all.

    `slot` is the slot number within its header file. `node`, `page`, `parent`, `fork_tokens`,
    `valid_tokens`, `length_bytes` and `tenant` are u32; `block_kind`, `retention`,
    `checksum_kind` and `priority` are u8; the rest is u64.
    """

    kind: int
    slot: Column
    owner0: Column
    owner1: Column
    node: Column
    page: Column
    valid_tokens: Column
    length_bytes: Column
    payload_sum: Column
    seq: Column
    layout0: Column
    layout1: Column
    lease: Column
    parent: Column
    fork_tokens: Column
    tenant: Column
    block_kind: Column
    retention: Column
    checksum_kind: Column
    priority: Column
    created_s: Column
    generation: Column


_FIELD_PLACES: Final[dict[str, tuple[int, int]]] = {
    "owner0": (8, 8 * W_OWNER0),
    "owner1": (8, 8 * W_OWNER1),
    "node": (4, 8 * W_NODE_PAGE),
    "page": (4, 8 * W_NODE_PAGE + 4),
    "valid_tokens": (4, 8 * W_VALID_LENGTH),
    "length_bytes": (4, 8 * W_VALID_LENGTH + 4),
    "payload_sum": (8, 8 * W_PAYLOAD_SUM),
    "seq": (8, 8 * W_SEQ),
    "layout0": (8, 8 * W_LAYOUT0),
    "layout1": (8, 8 * W_LAYOUT1),
    "lease": (8, 8 * W_LEASE),
    "parent": (4, 8 * W_PARENT_FORK),
    "fork_tokens": (4, 8 * W_PARENT_FORK + 4),
    "tenant": (4, 8 * W_FLAGS),
    "block_kind": (1, 8 * W_FLAGS + 4),
    "retention": (1, 8 * W_FLAGS + 5),
    "checksum_kind": (1, 8 * W_FLAGS + 6),
    "priority": (1, 8 * W_FLAGS + 7),
    "created_s": (8, 8 * W_CREATED),
    "generation": (8, 8 * W_GENERATION),
}
"""Size and offset in bytes of every field but slot and kind, which share a word."""


def compose(count: int, fields: BodyFields) -> Bodies:
    """Build `count` sealed bodies. Shapes: array fields are [count]; the result is [count, 16].

    Most fields are one value for all: those go in as one row.
    """
    bodies = np.empty((count, BODY_WORDS), np.uint64)
    views = {8: bodies, 4: bodies.view("<u4"), 1: bodies.view(np.uint8)}
    row = np.zeros(BODY_WORDS, np.uint64)
    parts = {8: row, 4: row.view("<u4"), 1: row.view(np.uint8)}
    columns = []
    for name, (size, offset) in _FIELD_PLACES.items():
        value = getattr(fields, name)
        if isinstance(value, int):
            parts[size][offset // size] = value
        else:
            columns.append((views[size][:, offset // size], value))
    row[W_PLACE] = fields.kind << PLACE_KIND_SHIFT
    bodies[:] = row
    for column, values in columns:
        column[:] = values
    bodies[:, W_PLACE] |= np.asarray(fields.slot, np.uint64)
    seal_bodies(bodies)
    return bodies


_ONE: Final = struct.Struct("<15Q")
_ONE_SEALED: Final = struct.Struct("<16Q")
_Q: Final = struct.Struct("<Q")
_QQ: Final = struct.Struct("<2Q")


def compose_one(fields: BodyFields) -> bytes:
    """The same as `compose` for one block, without the cost of a batch: 128 sealed bytes.

    All fields must be plain ints.
    """
    words = _words(fields)
    return _ONE_SEALED.pack(sum_one(words), *words)


def _words(fields: BodyFields) -> tuple[int, ...]:
    """Words 1 to 15 of a body whose fields are plain ints."""
    f: Any = fields  # ints all; Column would need a check per field
    flags = f.block_kind | f.retention << 8 | f.checksum_kind << 16 | f.priority << 24
    return (
        f.owner0,
        f.owner1,
        f.node | f.page << 32,
        f.valid_tokens | f.length_bytes << 32,
        f.payload_sum,
        f.seq,
        f.layout0,
        f.layout1,
        f.lease,
        f.parent | f.fork_tokens << 32,
        f.kind << PLACE_KIND_SHIFT | f.slot,
        f.tenant | flags << 32,
        f.created_s,
        f.generation,
        0,
    )


def split(bodies: Bodies, kind: int) -> BodyFields:
    """The fields of bodies of one kind of file, as u64 arrays; the inverse of `compose`."""
    place = bodies[:, W_PLACE]
    flags = bodies[:, W_FLAGS]

    def byte(shift: int) -> NDArray[np.uint64]:
        part: NDArray[np.uint64] = flags >> np.uint64(shift) & np.uint64(0xFF)
        return part

    return BodyFields(
        kind=kind,
        slot=place & np.uint64((1 << PLACE_KIND_SHIFT) - 1),
        owner0=bodies[:, W_OWNER0],
        owner1=bodies[:, W_OWNER1],
        node=bodies[:, W_NODE_PAGE] & _LOW,
        page=bodies[:, W_NODE_PAGE] >> _32,
        valid_tokens=bodies[:, W_VALID_LENGTH] & _LOW,
        length_bytes=bodies[:, W_VALID_LENGTH] >> _32,
        payload_sum=bodies[:, W_PAYLOAD_SUM],
        seq=bodies[:, W_SEQ],
        layout0=bodies[:, W_LAYOUT0],
        layout1=bodies[:, W_LAYOUT1],
        lease=bodies[:, W_LEASE],
        parent=bodies[:, W_PARENT_FORK] & _LOW,
        fork_tokens=bodies[:, W_PARENT_FORK] >> _32,
        tenant=flags & _LOW,
        block_kind=byte(32),
        retention=byte(40),
        checksum_kind=byte(48),
        priority=byte(56),
        created_s=bodies[:, W_CREATED],
        generation=bodies[:, W_GENERATION],
    )


def checksum_kinds(bodies: Bodies) -> NDArray[np.uint8]:
    """How the payload of each body is checked. Shapes: [n, 16] → [n]."""
    return (bodies[:, W_FLAGS] >> np.uint64(48)).astype(np.uint8)


def places(kind: int, slots: NDArray[Any]) -> NDArray[np.uint64]:
    """Where bodies say they lie: the kind of file and the slot within it."""
    numbers = slots.astype(np.uint64)
    return numbers | np.uint64(kind << PLACE_KIND_SHIFT)


# ---------------------------------------------------------------- the checksum


def body_sums(bodies: Bodies) -> NDArray[np.uint64]:
    """The checksum of each body's words 1 to 15. Shapes: [n, 16] → [n].

    sum = seed + Σ weight[i] · (y ⊕ y >> 32), y = word[i] · spread, everything modulo 2^64.
    Each term is a bijection of its word, so a change within one word is always seen; the seed
    keeps zeros from being valid.
    """
    sums = np.empty(len(bodies), np.uint64)
    for start in range(0, len(bodies), _CHUNK_ROWS):
        rows = slice(start, start + _CHUNK_ROWS)
        mixed = bodies[rows] * _SPREAD
        mixed ^= mixed >> _32
        np.vecdot(mixed, _WEIGHTS, out=sums[rows])
    sums += _SEED
    return sums


class _Scratch(threading.local):
    """Buffers of the one-body checksum; per thread, because it runs in several."""

    def __init__(self) -> None:
        self.words = np.zeros(BODY_WORDS - 1, np.uint64)
        self.bytes = self.words.data.cast("B")
        self.shifted = np.zeros(BODY_WORDS - 1, np.uint64)


_scratch = _Scratch()
# numpy takes an array operand in half the time of a scalar one
_WEIGHTS_ONE: Final = _WEIGHTS[1:].copy()
_SPREAD_ONE: Final = np.full(BODY_WORDS - 1, _SPREAD)
_32_ONE: Final = np.full(BODY_WORDS - 1, _32)
_SEED_INT: Final = int(_SEED)


def sum_one(words: tuple[int, ...]) -> int:
    """The checksum of one body, given its words 1 to 15."""
    scratch = _scratch
    mixed, shifted = scratch.words, scratch.shifted
    _ONE.pack_into(scratch.bytes, 0, *words)
    np.multiply(mixed, _SPREAD_ONE, mixed)
    np.right_shift(mixed, _32_ONE, shifted)
    np.bitwise_xor(mixed, shifted, mixed)
    return (int(np.dot(mixed, _WEIGHTS_ONE)) + _SEED_INT) & 0xFFFFFFFFFFFFFFFF


_WEIGHT_INTS: Final = [int(weight) for weight in _WEIGHTS]
_W3, _W4, _W6, _W9, _W11 = (_WEIGHT_INTS[i] for i in (3, 4, 6, W_LEASE, W_PLACE))
_SPREAD_INT: Final = int(_SPREAD)
_M64: Final = 0xFFFFFFFFFFFFFFFF


def _term(word: int, index: int) -> int:
    """What one word adds to the checksum."""
    mixed = word * _SPREAD_INT & _M64
    return (mixed ^ mixed >> 32) * _WEIGHT_INTS[index]


class BodyTemplate:
    """Makes bodies that differ in slot, page, valid tokens, seq and lease only.

    The checksum is a sum of terms, one per word: those of the other words are added up once.
    """

    def __init__(self, fields: BodyFields) -> None:
        """`fields`: plain ints; slot, page, valid_tokens, seq and lease are 0."""
        self._words = words = (0, *_words(fields))
        self._bytes = bytearray(_ONE_SEALED.pack(*words))
        self._row = np.frombuffer(bytes(self._bytes), np.uint64)
        self._node, self._length, self._place = words[3], words[4], words[W_PLACE]

    @cached_property
    def _sum(self) -> int:
        """What the words that never vary add to the checksum."""
        varying = (3, 4, 6, W_LEASE, W_PLACE)
        terms = sum(_term(self._words[index], index) for index in varying)
        return sum_one(self._words[1:]) - terms

    def seal_many(
        self,
        slots: NDArray[Any],
        pages: NDArray[Any],
        valid_tokens: NDArray[Any],
        seqs: NDArray[np.uint64],
        lease: int,
    ) -> Bodies:
        """The bodies of several blocks. Shapes: [n] each → [n, 16]."""
        bodies = np.empty((len(slots), BODY_WORDS), np.uint64)
        bodies[:] = self._row
        halves = bodies.view("<u4")
        halves[:, 2 * W_NODE_PAGE + 1] = pages
        halves[:, 2 * W_VALID_LENGTH] = valid_tokens
        bodies[:, W_SEQ] = seqs
        bodies[:, W_LEASE] = lease
        bodies[:, W_PLACE] += slots.astype(np.uint64)
        seal_bodies(bodies)
        return bodies

    def seal(self, slot: int, page: int, valid_tokens: int, seq: int, lease: int) -> bytearray:
        """The body of one block; the buffer is used again by the next call."""
        node, length = self._node | page << 32, self._length | valid_tokens
        place = self._place | slot
        # `_term` of each varying word, without its calls: this is on the way of every commit
        a, b = node * _SPREAD_INT & _M64, length * _SPREAD_INT & _M64
        c, d, e = seq * _SPREAD_INT & _M64, lease * _SPREAD_INT & _M64, place * _SPREAD_INT & _M64
        total = (
            self._sum + (a ^ a >> 32) * _W3 + (b ^ b >> 32) * _W4 + (c ^ c >> 32) * _W6
            + (d ^ d >> 32) * _W9 + (e ^ e >> 32) * _W11
        )  # fmt: skip
        into = self._bytes
        _Q.pack_into(into, 0, total & _M64)
        _QQ.pack_into(into, 24, node, length)
        _Q.pack_into(into, 48, seq)
        _Q.pack_into(into, 72, lease)
        _Q.pack_into(into, 88, place)
        return into


def seal_bodies(bodies: Bodies) -> None:
    """Fill in the checksums, in place."""
    bodies[:, W_SUM] = body_sums(bodies)


def verify_bodies(bodies: Bodies) -> NDArray[np.bool_]:
    """Which bodies carry the right checksum. Shapes: [n, 16] → [n]."""
    right: NDArray[np.bool_] = body_sums(bodies) == bodies[:, W_SUM]
    return right
