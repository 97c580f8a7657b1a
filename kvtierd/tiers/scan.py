"""What a header file says after a restart, believed only where it checks out.

Nothing read back is trusted: a READY word names a block only when its body's checksum, sequence,
place, layout, tenant and sizes all agree with the word and with the slab's entry.
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtierd.core.slabs import CLEARING, FILLING, FREE, QUARANTINED, READY, WRITING
from kvtierd.tiers import bodies as b
from kvtierd.tiers.headers import HeaderFile, SlotArray, Words
from kvtierd.tiers.records import SlabTable
from kvtierd.tiers.superblock import Kind

CHUNK_SLOTS: Final = 1 << 13
"""Slots looked at in one pass, so that memory stays bounded (a single slab may have more)."""
RETENTIONS: Final = (1, 2)

_CHECKSUMS: Final = {
    Kind.ARENA: (b.CHECKSUM_NONE, b.CHECKSUM_XXH3),
    Kind.SPILL: (b.CHECKSUM_XXH3, b.CHECKSUM_AES_GCM),
}

_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_BUSY_STATES: Final = (WRITING, FILLING, QUARANTINED, CLEARING)


class Scan(msgspec.Struct, frozen=True):
    """What was found; slots are numbers within the header file, in ascending order.

    Shapes: slots, words and busy_* are [n] alike; bodies [n, 16].
    """

    slots: SlotArray
    """Valid READY blocks."""
    words: Words
    bodies: b.Bodies
    busy_slots: SlotArray
    """Slots that are WRITING, FILLING, QUARANTINED or CLEARING."""
    busy_words: Words
    damaged: SlotArray
    """Slots with a READY word and a body that is not its block's, or with an unknown state."""


def word_states(words: Words) -> NDArray[np.uint8]:
    """State of each word."""
    return words.astype(np.uint8)


def word_readers(words: Words) -> NDArray[np.uint8]:
    """Number of read leases (255: that many or more)."""
    return (words >> np.uint64(8)).astype(np.uint8)


def word_owners(words: Words) -> NDArray[np.uint16]:
    """Index of the owner in the client table; 0xFFFF for none or several."""
    return (words >> np.uint64(16)).astype(np.uint16)


def word_tags(words: Words) -> NDArray[np.uint32]:
    """Lease counter (WRITING, QUARANTINED) or low half of the seq (READY)."""
    return (words >> _32).astype(np.uint32)


def scan_parts(headers: HeaderFile, table: SlabTable | None = None) -> Iterator[Scan]:
    """Scan the slabs in use, part by part, so that memory stays bounded.

    The words are those of `headers.words`; bodies come from the medium.
    """
    table = headers.slab_table() if table is None else table
    slabs = np.flatnonzero(table.in_use)
    counts = table.columns["slots"][slabs].astype(np.int64)
    ends = np.cumsum(counts)
    first = 0
    while first < len(slabs):
        done = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, done + CHUNK_SLOTS, side="right")))
        yield _scan_slabs(headers, table.columns[slabs[first:last]], slabs[first:last])
        first = last


def scan(headers: HeaderFile) -> Scan:
    """Scan the whole file at once (for files of moderate size; see `scan_parts`)."""
    parts = [_EMPTY, *scan_parts(headers)]
    return Scan(*(np.concatenate(columns) for columns in zip(*map(_columns, parts), strict=True)))


def _columns(part: Scan) -> tuple[NDArray[Any], ...]:
    return msgspec.structs.astuple(part)


def _empty() -> Scan:
    slots, words = np.zeros(0, np.int64), np.zeros(0, np.uint64)
    return Scan(slots, words, np.zeros((0, b.BODY_WORDS), np.uint64), slots, words, slots)


_EMPTY: Final = _empty()


def _scan_slabs(headers: HeaderFile, entries: NDArray[Any], slabs: SlotArray) -> Scan:
    counts = entries["slots"].astype(np.int64)
    starts = np.cumsum(counts) - counts
    slots = np.repeat(slabs * headers.geometry.max_slots - starts, counts)
    slots += np.arange(len(slots))
    words = headers.words[slots]
    states = word_states(words)
    is_ready = states == READY
    if is_ready.all():
        busy = unknown = _EMPTY.slots
        ready, ready_words, entry = slots, words, np.repeat(np.arange(len(slabs)), counts)
    else:
        is_busy = _is_in(states, _BUSY_STATES)
        busy = np.flatnonzero(is_busy)
        unknown = slots[~(is_ready | is_busy | (states == FREE))]
        ready, ready_words = slots[is_ready], words[is_ready]
        entry = np.repeat(np.arange(len(slabs)), counts)[is_ready]
    bodies = headers.read_bodies(ready)
    valid = _valid(headers, entries, entry, ready, ready_words, bodies)
    if not valid.all():
        unknown = np.union1d(unknown, ready[~valid])
        ready, ready_words, bodies = ready[valid], ready_words[valid], bodies[valid]
    return Scan(ready, ready_words, bodies, slots[busy], words[busy], unknown)


def _valid(
    headers: HeaderFile,
    entries: NDArray[Any],
    entry: NDArray[np.int64],
    slots: SlotArray,
    words: Words,
    bodies: b.Bodies,
) -> NDArray[np.bool_]:
    """Which bodies are the blocks of their slots; `entry` is each slot's slab in `entries`."""
    kind = headers.superblock.kind
    flags, sizes = bodies[:, b.W_FLAGS], bodies[:, b.W_VALID_LENGTH]
    length = sizes >> _32
    valid = b.verify_bodies(bodies)
    valid &= (bodies[:, b.W_ZERO] == 0) | (b.checksum_kinds(bodies) == b.CHECKSUM_AES_GCM)
    valid &= bodies[:, b.W_SEQ] & _LOW == words >> _32
    valid &= bodies[:, b.W_PLACE] == b.places(kind, slots)
    for word, name in ((b.W_LAYOUT0, "layout0"), (b.W_LAYOUT1, "layout1")):
        valid &= bodies[:, word] == np.ascontiguousarray(entries[name])[entry]
    valid &= flags & _LOW == entries["tenant"].astype(np.uint64)[entry]
    valid &= sizes & _LOW > 0
    valid &= (length > 0) & (length <= entries["block_bytes"].astype(np.uint64)[entry])
    valid &= _one_of(flags, 32, (b.BLOCK_SESSION, b.BLOCK_KEYED))
    valid &= _one_of(flags, 40, RETENTIONS)
    valid &= _is_in(b.checksum_kinds(bodies), _CHECKSUMS[kind])
    return valid


def _one_of(flags: NDArray[np.uint64], shift: int, values: tuple[int, ...]) -> NDArray[np.bool_]:
    return _is_in((flags >> np.uint64(shift)).astype(np.uint8), values)


def _is_in(column: NDArray[np.uint8], values: tuple[int, ...]) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = column == values[0]
    for value in values[1:]:
        found |= column == value
    return found
