"""The 64-byte records of a header file: slabs in use, clients that own leases, and data keys."""

import struct
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtierd.tiers.superblock import (
    CLIENTS_MAX,
    KEYS_MAX,
    PAGE_BYTES,
    RECORD_BYTES,
    Kind,
    Superblock,
)

FREE_RECORD: Final = bytes(RECORD_BYTES)
"""A free slab, or a free place in the client table."""

_SUMMED_BYTES: Final = 56
_LIVE: Final = 1
_SLAB: Final = struct.Struct("<16sIIIII20x")
_SLAB_DTYPE: Final = np.dtype(
    [
        ("layout0", "<u8"),
        ("layout1", "<u8"),
        ("tenant", "<u4"),
        ("slot_bytes", "<u4"),
        ("slots", "<u4"),
        ("state", "<u4"),
        ("block_bytes", "<u4"),
        ("pad", "<u4", 5),
        ("checksum", "<u8"),
    ]
)
_CLIENT: Final = struct.Struct("<IIQII16s16s")
_KEY: Final = struct.Struct("<IIQ40s")
_CHECKSUM: Final = struct.Struct("<Q")


class SlabEntry(msgspec.Struct, frozen=True):
    """A slab in use: whose it is, and how it is cut."""

    slab: int
    fingerprint: bytes
    tenant: int
    slot_bytes: int
    slots: int
    block_bytes: int


class SlabTable(msgspec.Struct, frozen=True):
    """The slab directory as it was read. Shapes: one value per slab of the file."""

    in_use: NDArray[np.bool_]
    damaged: NDArray[np.bool_]
    """Entries that are neither free nor believable: their blocks are lost."""
    columns: NDArray[Any]
    """Structured, with layout0, layout1, tenant, slot_bytes, slots, block_bytes."""

    def entries(self) -> Iterator[SlabEntry]:
        """The slabs in use, in order."""
        rows = self.columns[self.in_use]
        fingerprints = np.stack([rows["layout0"], rows["layout1"]], axis=1).tobytes()
        cut = (rows[name].tolist() for name in ("tenant", "slot_bytes", "slots", "block_bytes"))
        for index, (slab, *fields) in enumerate(
            zip(np.flatnonzero(self.in_use).tolist(), *cut, strict=True)
        ):
            yield SlabEntry(slab, fingerprints[index * 16 : index * 16 + 16], *fields)


class ClientRecord(msgspec.Struct, frozen=True):
    """A member of a client group that owns leases; its index is the owner in words."""

    index: int
    pid: int
    start_time: int
    """Field 22 of /proc/PID/stat, so that a reused pid is not taken for the client."""
    uid: int
    group: bytes
    secret_hash: bytes


class KeyRecord(msgspec.Struct, frozen=True):
    """A data key of a spill file, wrapped by the master key; its number stands in bodies."""

    number: int
    generation: int
    """The start that made it."""
    wrapped: bytes


def pack_slab(entry: SlabEntry, superblock: Superblock) -> bytes:
    """The record of a slab in use."""
    geometry = superblock.geometry
    assert 0 <= entry.slab < geometry.slabs
    assert 0 < entry.slots <= geometry.max_slots
    assert entry.slot_bytes % PAGE_BYTES == 0
    assert entry.slots * entry.slot_bytes <= geometry.slab_bytes
    assert 0 < entry.block_bytes <= entry.slot_bytes
    assert len(entry.fingerprint) == 16
    assert superblock.kind is Kind.SPILL or entry.tenant == superblock.tenant
    head = _SLAB.pack(
        entry.fingerprint, entry.tenant, entry.slot_bytes, entry.slots, _LIVE, entry.block_bytes
    )
    return head + _checksum(head)


def parse_slabs(region: bytes, superblock: Superblock) -> SlabTable:
    """Read a slab directory, believing only entries that make sense."""
    geometry = superblock.geometry
    columns = np.frombuffer(region, _SLAB_DTYPE)
    slots, slot_bytes = columns["slots"].astype(np.int64), columns["slot_bytes"].astype(np.int64)
    sane = columns["state"] == _LIVE
    sane &= (slots > 0) & (slots <= geometry.max_slots)
    sane &= (slot_bytes > 0) & (slot_bytes % PAGE_BYTES == 0)
    sane &= slots * slot_bytes <= geometry.slab_bytes
    sane &= (columns["block_bytes"] > 0) & (columns["block_bytes"] <= slot_bytes)
    if superblock.kind is Kind.ARENA:
        sane &= columns["tenant"] == superblock.tenant
    written = np.zeros(len(columns), np.bool_)
    intact = np.zeros(len(columns), np.bool_)
    for slab, record in _written(region):
        written[slab], intact[slab] = True, _is_intact(record)
    in_use = intact & sane
    return SlabTable(in_use, written & ~in_use, columns)


def pack_client(record: ClientRecord) -> bytes:
    """The record of a live client."""
    assert 0 <= record.index < CLIENTS_MAX
    head = _CLIENT.pack(
        _LIVE,
        record.pid,
        record.start_time,
        record.uid,
        record.index,
        record.group,
        record.secret_hash,
    )
    return head + _checksum(head)


def parse_clients(region: bytes) -> list[ClientRecord]:
    """The live clients whose records check out."""
    found = []
    for index, record in _written(region):
        if not _is_intact(record):
            continue
        fields = _CLIENT.unpack(record[:_SUMMED_BYTES])
        state, pid, start_time, uid, member, group, secret_hash = fields
        if state == _LIVE and member == index:
            found.append(ClientRecord(index, pid, start_time, uid, group, secret_hash))
    return found


def pack_keys(records: list[KeyRecord]) -> bytes:
    """One copy of the key table; places without a key are free."""
    table = [FREE_RECORD] * KEYS_MAX
    for record in records:
        head = _KEY.pack(_LIVE, record.number, record.generation, record.wrapped)
        table[record.number] = head + _checksum(head)
    return b"".join(table)


def parse_keys(region: bytes) -> tuple[list[KeyRecord], set[int]]:
    """The data keys that check out, of all copies of the table (a number may come twice); and the
    numbers of which no copy does."""
    found, written = [], set()
    for place, record in _written(region):
        written.add(place % KEYS_MAX)
        state, number, generation, wrapped = _KEY.unpack(record[:_SUMMED_BYTES])
        if _is_intact(record) and state == _LIVE and number == place % KEYS_MAX:
            found.append(KeyRecord(number, generation, wrapped))
    return found, written - {record.number for record in found}


def _written(region: bytes) -> Iterator[tuple[int, bytes]]:
    """The records of a table that are not free, by their places."""
    words = np.frombuffer(region, np.uint64).reshape(-1, RECORD_BYTES // 8)
    for place in np.flatnonzero(words.any(axis=1)).tolist():
        yield place, region[place * RECORD_BYTES : (place + 1) * RECORD_BYTES]


def _checksum(head: bytes) -> bytes:
    assert len(head) == _SUMMED_BYTES
    return _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head))


def _is_intact(record: bytes) -> bool:
    return record[_SUMMED_BYTES:] == _checksum(record[:_SUMMED_BYTES])
