"""Header files for tests: made on real memfds and real files, and filled with blocks."""

import os
import tempfile

import numpy as np

from kvtierd.core.slabs import ready_words
from kvtierd.tiers.bodies import BLOCK_SESSION, CHECKSUM_XXH3, Bodies, BodyFields, Column, compose
from kvtierd.tiers.headers import HeaderFile, create, new_superblock, open_headers
from kvtierd.tiers.records import SlabEntry
from kvtierd.tiers.superblock import Expected, Geometry, Kind, Superblock

GEOMETRY = Geometry(slabs=4, slab_bytes=1 << 20, max_slots=16)
INSTANCE = b"instance of test"
FINGERPRINT = b"layout of a test"
TENANT = 77
BLOCK_BYTES = 60_000


def superblock(kind: Kind, geometry: Geometry = GEOMETRY) -> Superblock:
    tenant = TENANT if kind is Kind.ARENA else 0
    return new_superblock(kind, geometry, instance=INSTANCE, generation=1, tenant=tenant)


def empty_fd(kind: Kind) -> int:
    if kind is Kind.ARENA:
        return os.memfd_create("headers of a test", os.MFD_CLOEXEC)
    fd, path = tempfile.mkstemp()
    os.unlink(path)
    return fd


def make(kind: Kind, geometry: Geometry = GEOMETRY) -> HeaderFile:
    """A new header file in which slab 1 is in use."""
    headers = create(empty_fd(kind), superblock(kind, geometry), "a test's headers")
    headers.assign_slab(entry(1))
    return headers


def reopen(headers: HeaderFile) -> HeaderFile:
    """The same file as another life of the daemon finds it."""
    return open_headers(os.dup(headers.fd), Expected(headers.superblock.kind), "a test's headers")


def entry(slab: int, slots: int = 16, fingerprint: bytes = FINGERPRINT) -> SlabEntry:
    return SlabEntry(slab, fingerprint, TENANT, 1 << 16, slots, BLOCK_BYTES)


def fields(kind: Kind, slots: Column, seqs: Column, **changed: Column) -> BodyFields:
    """What bodies of valid blocks in slabs made by `entry` say."""
    values: dict[str, Column] = {
        "slot": slots,
        "owner0": 0xFEDC_BA98_7654_3210,
        "owner1": 7,
        "node": 3,
        "page": slots,
        "valid_tokens": 16,
        "length_bytes": BLOCK_BYTES,
        "payload_sum": 0x0123_4567_89AB_CDEF,
        "seq": seqs,
        "layout0": int.from_bytes(FINGERPRINT[:8], "little"),
        "layout1": int.from_bytes(FINGERPRINT[8:], "little"),
        "lease": 5 << 32 | 9,
        "parent": 2,
        "fork_tokens": 100,
        "tenant": TENANT,
        "block_kind": BLOCK_SESSION,
        "retention": 1,
        "checksum_kind": CHECKSUM_XXH3,
        "priority": 200,
        "created_s": 1_700_000_000,
        "generation": 3,
    }
    assert changed.keys() <= values.keys()
    return BodyFields(kind=kind, **(values | changed))


def publish(headers: HeaderFile, slots: list[int], **changed: Column) -> Bodies:
    """Write blocks as a commit does: bodies, then words."""
    where = np.array(slots, np.int64)
    seqs = where.astype(np.uint64) + np.uint64(1 << 33)
    bodies = compose(len(where), fields(headers.superblock.kind, where, seqs, **changed))
    headers.write_bodies(where, bodies)
    put_words(headers, where, ready_words(seqs))
    return bodies


def put_words(headers: HeaderFile, slots: np.ndarray, values: np.ndarray) -> None:
    """Change words as the core does: in the array, then on the medium."""
    headers.words[slots] = values
    headers.write_words(slots, values)


def contents(headers: HeaderFile) -> bytes:
    return os.pread(headers.fd, headers.geometry.header_bytes, 0)


def flip(headers: HeaderFile, offset: int, bit: int) -> None:
    """Turn one bit of the medium around."""
    (byte,) = os.pread(headers.fd, 1, offset)
    os.pwrite(headers.fd, bytes([byte ^ 1 << bit]), offset)
