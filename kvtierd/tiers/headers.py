"""A header file: what lies in each slot of one payload, kept where a restart finds it.

    superblock | slab directory | clients or keys | words | bodies     (offsets: `Geometry`)

`ArenaHeaders` maps a memfd: every store is at once what the next life of the daemon will find.
`SpillHeaders` is a regular file written with exact byte ranges; the words' mirror in memory
belongs to the core, which changes it first and has it written afterwards.

A block is published by writing its body, then its word.
"""

import abc
import contextlib
import errno
import itertools
import mmap
import os
import secrets
import stat
import time
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtierd.tiers import memory
from kvtierd.tiers import superblock as sb
from kvtierd.tiers.bodies import BODY_WORDS, Bodies
from kvtierd.tiers.errors import FormatError
from kvtierd.tiers.records import (
    FREE_RECORD,
    ClientRecord,
    SlabEntry,
    SlabTable,
    pack_client,
    pack_slab,
    parse_clients,
    parse_slabs,
)
from kvtierd.tiers.superblock import (
    BODY_BYTES,
    CLIENTS_MAX,
    KEY_COPIES,
    PAGE_BYTES,
    RECORD_BYTES,
    WORD_BYTES,
    Geometry,
    Kind,
    Superblock,
)

Words = NDArray[np.uint64]
"""State words. Shapes: [n]."""
SlotArray = NDArray[np.int64]
"""Slot numbers within one header file. Shapes: [n]."""


GAP_SLOTS: Final = 31
"""Bodies read in vain between two that are wanted: less than a page, cheaper than another call."""


class HeaderFile(abc.ABC):
    """What both kinds of header file share; owns its descriptor."""

    words: Words
    """The word of every slot. Shapes: [slabs * max_slots]."""

    def __init__(self, fd: int, superblock: Superblock, name: str) -> None:
        self.fd = fd
        self.name = name
        """Names the file in errors."""
        self.superblock = superblock
        self.geometry = superblock.geometry
        self._directory_offset = self.geometry.directory_offset
        self._words_offset = self.geometry.words_offset
        self._bodies_offset = self.geometry.bodies_offset

    @abc.abstractmethod
    def _read(self, offset: int, size: int) -> bytes: ...

    @abc.abstractmethod
    def _write(self, offset: int, data: bytes | bytearray) -> None: ...

    @abc.abstractmethod
    def _reserve(self, slab: int, slots: int) -> None:
        """Make sure that the headers of the slab's slots can be written later on."""

    @abc.abstractmethod
    def write_word(self, slot: int, value: int) -> None:
        """Store one word (aligned 8 bytes, so never half)."""

    @abc.abstractmethod
    def write_words(self, slots: SlotArray, values: Words) -> None:
        """Store words; of a slot that is named twice the last one. Shapes: [n], [n]."""

    @abc.abstractmethod
    def write_body(self, slot: int, body: bytes | bytearray) -> None:
        """Store one sealed body of 128 bytes (`compose_one`)."""

    @abc.abstractmethod
    def write_bodies(self, slots: SlotArray, bodies: Bodies) -> None:
        """Store sealed bodies. Shapes: [n], [n, 16]."""

    @abc.abstractmethod
    def read_bodies(self, slots: SlotArray) -> Bodies:
        """Bodies as they lie there; zeros where the medium cannot read. Shapes: [n] → [n, 16]."""

    @abc.abstractmethod
    def sync(self) -> None:
        """Durability: after this, what was written before survives a loss of power (files only)."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the descriptor and let go of the mapping."""

    def set_generation(self, generation: int) -> None:
        """Note which start of the daemon writes from now on."""
        self.superblock = Superblock(
            self.superblock.kind,
            self.superblock.instance,
            generation,
            self.superblock.tenant,
            self.superblock.file_index,
            self.geometry,
            self.superblock.created_s,
            self.superblock.payload_id,
        )
        self._write(0, self.superblock.pack())

    def assign_slab(self, entry: SlabEntry) -> None:
        """Give a free slab, whose words are all FREE, to one layout of one tenant.

        Errors: OSError (ENOSPC) when the file system has no room for the slab's headers; the
        slab is free then as before.
        """
        record = pack_slab(entry, self.superblock)
        self._reserve(entry.slab, entry.slots)
        self._write(self._directory_offset + entry.slab * RECORD_BYTES, record)

    def free_slab(self, slab: int) -> None:
        """Take a slab, whose words are all FREE, back from its layout."""
        assert 0 <= slab < self.geometry.slabs
        self._write(self._directory_offset + slab * RECORD_BYTES, FREE_RECORD)

    def slab_table(self) -> SlabTable:
        """Read the slab directory, believing only entries that make sense."""
        region = self._read(self._directory_offset, self.geometry.slabs * RECORD_BYTES)
        return parse_slabs(region, self.superblock)

    def write_client(self, index: int, record: ClientRecord | None) -> None:
        """Store a client's record at its index, or clear the place (None)."""
        assert 0 <= index < CLIENTS_MAX
        assert record is None or record.index == index
        data = FREE_RECORD if record is None else pack_client(record)
        self._write(self.geometry.clients_offset + index * RECORD_BYTES, data)

    def clients(self) -> list[ClientRecord]:
        """The live clients whose records check out."""
        return parse_clients(self._read(self.geometry.clients_offset, CLIENTS_MAX * RECORD_BYTES))


# ---------------------------------------------------------------- arena


class ArenaHeaders(HeaderFile):
    """Headers in a memfd of the daemon, mapped: a store is all it takes."""

    def __init__(self, fd: int, superblock: Superblock, name: str) -> None:
        super().__init__(fd, superblock, name)
        geometry = self.geometry
        self._map = mmap.mmap(fd, geometry.header_bytes)
        count = geometry.total_slots
        self.words = np.frombuffer(self._map, np.uint64, count, self._words_offset)
        flat = np.frombuffer(self._map, np.uint64, count * BODY_WORDS, self._bodies_offset)
        self._bodies = flat.reshape(count, BODY_WORDS)

    def _read(self, offset: int, size: int) -> bytes:
        return self._map[offset : offset + size]

    def _write(self, offset: int, data: bytes | bytearray) -> None:
        self._map[offset : offset + len(data)] = data

    def prefault(self) -> None:
        """Have the kernel give every page now, so that no commit waits for one. Errors: OSError."""
        self._map.madvise(memory.MADV_POPULATE_WRITE)

    def write_word(self, slot: int, value: int) -> None:
        """Store a word in the mapping."""
        self.words[slot] = value

    def write_words(self, slots: SlotArray, values: Words) -> None:
        """Store words in the mapping."""
        self.words[slots] = values

    def write_body(self, slot: int, body: bytes | bytearray) -> None:
        """Store one body in the mapping."""
        assert slot >= 0
        start = self._bodies_offset + slot * BODY_BYTES
        self._map[start : start + BODY_BYTES] = body

    def write_bodies(self, slots: SlotArray, bodies: Bodies) -> None:
        """Store bodies in the mapping."""
        n, first = len(slots), int(slots[0]) if len(slots) else 0
        if n > 1 and int(slots[-1]) - first == n - 1 and (slots[1:] > slots[:-1]).all():
            self._bodies[first : first + n] = bodies  # neighbours, as nearly always
        else:
            self._bodies[slots] = bodies

    def read_bodies(self, slots: SlotArray) -> Bodies:
        """Copy bodies out of the mapping."""
        bodies: Bodies = self._bodies[slots]
        return bodies

    def sync(self) -> None:
        """A memfd has no disk behind it."""

    def _reserve(self, slab: int, slots: int) -> None:
        """Memory for headers was counted when the arena was made."""

    def close(self) -> None:
        """Close the memfd; the mapping goes when nobody holds its words any more."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        del self.words, self._bodies
        with contextlib.suppress(BufferError):  # the core still holds the words
            self._map.close()


# ---------------------------------------------------------------- spill


class SpillHeaders(HeaderFile):
    """Headers in a regular file: exact byte ranges are written, and read once at the start."""

    def __init__(self, fd: int, superblock: Superblock, name: str, words: Words | None) -> None:
        super().__init__(fd, superblock, name)
        count = self.geometry.total_slots
        self.words = np.zeros(count, np.uint64) if words is None else words
        assert self.words.shape == (count,)

    def _read(self, offset: int, size: int) -> bytes:
        data = bytearray(size)
        _read_into(self.fd, memoryview(data), offset, self.name)
        return bytes(data)

    def _write(self, offset: int, data: bytes | bytearray) -> None:
        _write_all(self.fd, memoryview(data), offset)

    def load_words(self) -> None:
        """Fill the mirror with the words of all slabs in use."""
        table = self.slab_table()
        slabs = np.flatnonzero(table.in_use)
        firsts = slabs * self.geometry.max_slots
        ends = firsts + table.columns["slots"][slabs]
        whole = np.flatnonzero(firsts[1:] != ends[:-1])  # full slabs beside each other: one read
        starts, stops = np.append(firsts[:1], firsts[whole + 1]), np.append(ends[whole], ends[-1:])
        for first, end in zip(starts.tolist(), stops.tolist(), strict=True):
            offset = self._words_offset + first * WORD_BYTES
            _read_into(self.fd, self.words[first:end].data.cast("B"), offset, self.name)

    def key_table(self) -> bytes:
        """All copies of the key table as they lie there."""
        return self._read(self.geometry.clients_offset, CLIENTS_MAX * RECORD_BYTES)

    def write_key_table(self, table: bytes) -> None:
        """Replace the key table, one copy after the other, so that a crash leaves one whole.

        Durability: all of it is on the disk when this returns.
        """
        for copy in range(KEY_COPIES):
            self._write(self.geometry.clients_offset + copy * len(table), table)
            self.sync()

    def write_word(self, slot: int, value: int) -> None:
        """Write one word to the file; the mirror stays as it is."""
        self._write(self._words_offset + slot * WORD_BYTES, value.to_bytes(WORD_BYTES, "little"))

    def write_words(self, slots: SlotArray, values: Words) -> None:
        """Write words to the file, one call per run; the mirror stays as it is."""
        self._write_runs(self._words_offset, WORD_BYTES, slots, values)

    def write_body(self, slot: int, body: bytes | bytearray) -> None:
        """Write one body to the file."""
        self._write(self._bodies_offset + slot * BODY_BYTES, body)

    def write_bodies(self, slots: SlotArray, bodies: Bodies) -> None:
        """Write bodies to the file, one call per run."""
        self._write_runs(self._bodies_offset, BODY_BYTES, slots, bodies)

    def read_bodies(self, slots: SlotArray) -> Bodies:
        """Read bodies from the file, one call per run; what lies in short gaps is read as well."""
        bodies = np.empty((len(slots), BODY_WORDS), np.uint64)
        if not len(slots):
            return bodies
        order, sorted_slots = _sorted(slots)
        target = bodies if order is None else np.empty_like(bodies)
        for start, end in _runs(sorted_slots, GAP_SLOTS):
            some = sorted_slots[start:end]
            first, count = int(some[0]), int(some[-1]) - int(some[0]) + 1
            if count == len(some):
                self._read_run(first, target[start:end])
            else:
                wide = np.empty((count, BODY_WORDS), np.uint64)
                self._read_run(first, wide)
                target[start:end] = wide[some - first]
        if order is not None:
            bodies[order] = target
        return bodies

    def _read_run(self, first: int, target: Bodies) -> None:
        """Read the bodies of neighbouring slots; of each half alone where the disk cannot."""
        try:
            offset = self._bodies_offset + first * BODY_BYTES
            _read_into(self.fd, target.data.cast("B"), offset, self.name)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            half = len(target) // 2
            if half:
                self._read_run(first, target[:half])
                self._read_run(first + half, target[half:])
            else:
                target[:] = 0

    def copy_into(self, other: "SpillHeaders") -> None:
        """Copy all that is in use into a new file of more or fewer slabs; numbers stay the same.

        Every slab that is in use or damaged must be one of the new file's, too.
        Errors: OSError (ENOSPC; EIO where this file cannot be read).
        """
        mine, its = self.geometry, other.geometry
        directory = self._read(self._directory_offset, min(mine.slabs, its.slabs) * RECORD_BYTES)
        other._write(other._directory_offset, directory)
        other._write(its.clients_offset, self.key_table())
        for entry in self.slab_table().entries():
            other._reserve(entry.slab, entry.slots)
            first = entry.slab * mine.max_slots
            for source, target, size in (
                (self._words_offset, other._words_offset, WORD_BYTES),
                (self._bodies_offset, other._bodies_offset, BODY_BYTES),
            ):
                data = self._read(source + first * size, entry.slots * size)
                other._write(target + first * size, data)

    def sync(self) -> None:
        """Have the disk take what was written."""
        os.fdatasync(self.fd)

    def close(self) -> None:
        """Close the file."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _reserve(self, slab: int, slots: int) -> None:
        first = slab * self.geometry.max_slots
        for offset, size in ((self._words_offset, WORD_BYTES), (self._bodies_offset, BODY_BYTES)):
            os.posix_fallocate(self.fd, offset + first * size, slots * size)

    def _write_runs(self, base: int, size: int, slots: SlotArray, rows: NDArray[Any]) -> None:
        if not len(slots):
            return
        order, sorted_slots = _sorted(slots)
        ordered = np.ascontiguousarray(rows if order is None else rows[order])
        data = ordered.data.cast("B")
        for start, end in _runs(sorted_slots):
            offset = base + int(sorted_slots[start]) * size
            _write_all(self.fd, data[start * size : end * size], offset)


def _sorted(slots: SlotArray) -> tuple[NDArray[np.intp] | None, SlotArray]:
    """The order that sorts the slots (None: they are sorted), and the sorted slots."""
    if len(slots) < 2 or bool((slots[1:] > slots[:-1]).all()):
        return None, slots
    order = np.argsort(slots, kind="stable")
    return order, slots[order]


def _runs(slots: SlotArray, gap: int = 0) -> list[tuple[int, int]]:
    """Index ranges of sorted slots that follow each other with at most `gap` others between."""
    step = slots[1:] - slots[:-1]
    breaks = (np.flatnonzero((step < 1) | (step > gap + 1)) + 1).tolist()
    return list(itertools.pairwise([0, *breaks, len(slots)]))


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


def _read_into(fd: int, target: memoryview, offset: int, name: str) -> None:
    while target:
        done = os.preadv(fd, [target], offset)
        if done == 0:
            raise FormatError(
                "size",
                f"read {name}",
                f"it ends at byte {offset}, where headers should be",
                "it was cut while the daemon used it; its blocks are lost",
            )
        target, offset = target[done:], offset + done


# ---------------------------------------------------------------- create and open


def new_superblock(
    kind: Kind,
    geometry: Geometry,
    *,
    instance: bytes,
    generation: int,
    tenant: int = 0,
    file_index: int = 0,
) -> Superblock:
    """The superblock of a new header file, with a payload id of its own."""
    return Superblock(
        kind,
        instance,
        generation,
        tenant,
        file_index,
        geometry,
        int(time.time()),
        secrets.token_bytes(16),
    )


def create(
    fd: int, superblock: Superblock, name: str, words: Words | None = None
) -> ArenaHeaders | SpillHeaders:
    """Make a header file of an empty memfd (arena) or file (spill); all slots are FREE.

    `words` is where the mirror of a spill file lives (default: an array of its own).
    Durability: a spill file is synced; give it its final name only afterwards, so that a crash
    leaves no half-made file under it.
    Errors: `FormatError` (not_empty); OSError.
    """
    if os.fstat(fd).st_size:
        raise FormatError(
            "not_empty", f"create {name}", "the file has contents", "existing state is never cut"
        )
    os.ftruncate(fd, superblock.geometry.header_bytes)
    _write_all(fd, memoryview(superblock.pack()), 0)
    if superblock.kind is Kind.ARENA:
        return ArenaHeaders(fd, superblock, name)
    os.fsync(fd)
    return SpillHeaders(fd, superblock, name, words)


def open_headers(
    fd: int, expected: sb.Expected, name: str, words: Words | None = None
) -> ArenaHeaders | SpillHeaders:
    """Open an existing header file; changes nothing, so a spill file may be read-only.

    `words` as in `create`; the words of slabs in use are read into it.
    Errors: `FormatError`; its reason says what was wrong.
    """
    asked = f"open {name}"
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise FormatError("size", asked, "it is not a regular file", "move it away")
    try:
        page = os.pread(fd, PAGE_BYTES, 0)
        found = sb.parse(page, asked)
        sb.check(found, expected, asked)
        if status.st_size != found.geometry.header_bytes:
            raise FormatError(
                "size",
                asked,
                f"it has {status.st_size} bytes instead of {found.geometry.header_bytes}: "
                "it was resized or cut",
                "restore it from a copy, or move it away; its blocks are lost",
            )
        if found.kind is Kind.ARENA:
            return ArenaHeaders(fd, found, name)
        headers = SpillHeaders(fd, found, name, words)
        headers.load_words()
        return headers
    except OSError as error:
        raise FormatError(
            "unreadable", asked, f"reading failed ({error.strerror})", "check the disk"
        ) from error
