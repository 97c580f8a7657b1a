"""Geometry and identity of a header file: its first page.

The superblock says which payload the file describes (kind, tenant or file index, payload id,
sizes), whose it is (instance) and which start of the daemon wrote it last (generation).
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Final

import xxhash

from kvtierd.tiers.errors import FormatError, Reason

PAGE_BYTES: Final = 4096
MAGIC: Final = b"KVTIERD\0"
FORMAT: Final = 1
CLIENTS_MAX: Final = 1024
KEY_COPIES: Final = 2
KEYS_MAX: Final = CLIENTS_MAX // KEY_COPIES
"""Data keys of a spill file. Their table has the place that the client table has in an arena."""
RECORD_BYTES: Final = 64
WORD_BYTES: Final = 8
BODY_BYTES: Final = 128
SLABS_MAX: Final = 1 << 24
SLOTS_MAX: Final = 1 << 40
BYTES_MAX: Final = 1 << 56
"""Larger payloads are refused: a slot's place keeps its upper byte for the kind."""

_LAYOUT: Final = struct.Struct("<8sII16sQIIQQQQQ16s")
_CHECKSUM: Final = struct.Struct("<Q")
_REMEDY_MOVE: Final = "move the file away, or point the configuration at the right one"
_REMEDY_ARENA: Final = (
    "restore the old size and empty it (kvtierctl evict --wait) before the next start, or let go "
    "of what is only in it (kvtierd --discard-dram; systemctl clean --what=fdstore kvtierd)"
)


class Kind(IntEnum):
    """What kind of payload a header file describes."""

    ARENA = 1
    SPILL = 2


def round_up(value: int, step: int) -> int:
    """The smallest multiple of `step` that is not below `value`."""
    return -(-value // step) * step


@dataclass(frozen=True)
class Geometry:
    """How a payload is cut, and from it where each region of its header file lies."""

    slabs: int
    slab_bytes: int
    max_slots: int
    """Header places per slab: the slab's size over the smallest slot."""

    def __post_init__(self) -> None:
        if not 0 < self.slabs <= SLABS_MAX:
            raise ValueError(f"slabs: {self.slabs} is not between 1 and {SLABS_MAX}")
        if self.slab_bytes <= 0 or self.slab_bytes % PAGE_BYTES:
            raise ValueError(f"slab_bytes: {self.slab_bytes} is not a multiple of {PAGE_BYTES}")
        if not 0 < self.max_slots <= self.slab_bytes // PAGE_BYTES:
            raise ValueError(
                f"max_slots: {self.max_slots} slots of at least {PAGE_BYTES} bytes do not fit "
                f"into a slab of {self.slab_bytes}"
            )
        if self.slabs * self.max_slots > SLOTS_MAX or self.slabs * self.slab_bytes > BYTES_MAX:
            raise ValueError(f"{self.slabs} slabs of {self.slab_bytes} bytes are too many")

    @cached_property
    def total_slots(self) -> int:
        """Header places of the whole file."""
        return self.slabs * self.max_slots

    @cached_property
    def payload_bytes(self) -> int:
        """Size of the payload."""
        return self.slabs * self.slab_bytes

    @cached_property
    def directory_offset(self) -> int:
        """Where the slab directory begins."""
        return PAGE_BYTES

    @cached_property
    def clients_offset(self) -> int:
        """Where the client table begins."""
        return self.directory_offset + round_up(self.slabs * RECORD_BYTES, PAGE_BYTES)

    @cached_property
    def words_offset(self) -> int:
        """Where the words begin."""
        return self.clients_offset + round_up(CLIENTS_MAX * RECORD_BYTES, PAGE_BYTES)

    @cached_property
    def bodies_offset(self) -> int:
        """Where the bodies begin."""
        return self.words_offset + round_up(self.total_slots * WORD_BYTES, PAGE_BYTES)

    @cached_property
    def header_bytes(self) -> int:
        """Size of the header file (sparse: what was never written takes no room)."""
        return self.bodies_offset + round_up(self.total_slots * BODY_BYTES, PAGE_BYTES)


@dataclass(frozen=True, slots=True)
class Superblock:
    """What the first page of a header file says."""

    kind: Kind
    instance: bytes
    """16 bytes, one per state directory."""
    generation: int
    """Counts the starts of the daemon."""
    tenant: int
    """Tenant id of an arena; 0 in a spill file, which serves all tenants."""
    file_index: int
    geometry: Geometry
    created_s: int
    payload_id: bytes
    """16 random bytes that name the payload which the file describes."""

    def pack(self) -> bytes:
        """The page as it is stored."""
        geometry = self.geometry
        head = _LAYOUT.pack(
            MAGIC,
            FORMAT,
            self.kind,
            self.instance,
            self.generation,
            self.tenant,
            self.file_index,
            geometry.slabs,
            geometry.slab_bytes,
            geometry.max_slots,
            geometry.payload_bytes,
            self.created_s,
            self.payload_id,
        )
        return (head + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head))).ljust(PAGE_BYTES, b"\0")


def parse(page: bytes, asked: str) -> Superblock:
    """Read a superblock; `asked` names the file in errors.

    Errors: `FormatError` with reason magic, version, checksum, kind, geometry or size.
    """

    def refuse(reason: Reason, obstacle: str, remedy: str = _REMEDY_MOVE) -> FormatError:
        return FormatError(reason, asked, obstacle, remedy)

    if len(page) < _LAYOUT.size + _CHECKSUM.size:
        raise refuse("size", f"it ends after {len(page)} bytes, inside its superblock")
    fields = _LAYOUT.unpack_from(page)
    magic, version, kind, instance, generation, tenant, file_index = fields[:7]
    slabs, slab_bytes, max_slots, payload_bytes, created_s, payload_id = fields[7:]
    if magic != MAGIC:
        raise refuse("magic", "it is not a header file of kvtierd (wrong magic)")
    if version != FORMAT:
        raise refuse(
            "version",
            f"it has format {version}, and this daemon reads and writes format {FORMAT}",
            "convert it, or run the release that wrote it; it is refused unchanged",
        )
    (checksum,) = _CHECKSUM.unpack_from(page, _LAYOUT.size)
    if checksum != xxhash.xxh3_64_intdigest(page[: _LAYOUT.size]):
        raise refuse("checksum", "its superblock is damaged (wrong checksum)")
    if kind not in (Kind.ARENA, Kind.SPILL):
        raise refuse("kind", f"it describes a payload of unknown kind {kind}")
    try:
        geometry = Geometry(slabs, slab_bytes, max_slots)
    except ValueError as error:
        raise refuse("geometry", f"its superblock makes no sense ({error})") from error
    if payload_bytes != geometry.payload_bytes:
        raise refuse("geometry", f"its superblock gives {payload_bytes} payload bytes, which is "
                     f"not {slabs} slabs of {slab_bytes}")  # fmt: skip
    return Superblock(
        Kind(kind), instance, generation, tenant, file_index, geometry, created_s, payload_id
    )


@dataclass(frozen=True, slots=True)
class Expected:
    """What the configuration says a header file must be; None leaves a field open."""

    kind: Kind
    instance: bytes | None = None
    geometry: Geometry | None = None
    tenant: int | None = None
    file_index: int | None = None
    payload_id: bytes | None = None


def check(found: Superblock, expected: Expected, asked: str) -> None:
    """Compare a superblock with what it must be.

    Errors: `FormatError` with reason kind, instance, geometry, tenant, file_index or payload.
    """
    if found.kind != expected.kind:
        raise FormatError(
            "kind",
            asked,
            f"it describes a {found.kind.name.lower()}, not a {expected.kind.name.lower()}",
            _REMEDY_MOVE,
        )
    if expected.instance not in (None, found.instance):
        raise FormatError(
            "instance",
            asked,
            f"it belongs to instance {found.instance.hex()}, not to {expected.instance.hex()}"
            if expected.instance
            else "it belongs to another instance",
            "point each daemon at directories of its own",
        )
    if expected.geometry not in (None, found.geometry):
        raise FormatError(
            "geometry",
            asked,
            f"it was made for {found.geometry}, and the configuration asks for {expected.geometry}",
            _REMEDY_ARENA if found.kind is Kind.ARENA else "restore the old sizes",
        )
    if expected.tenant not in (None, found.tenant):
        raise FormatError("tenant", asked, f"it belongs to tenant {found.tenant:08x}", _REMEDY_MOVE)
    if expected.file_index not in (None, found.file_index):
        raise FormatError(
            "file_index",
            asked,
            f"it is spill file {found.file_index}, and stands where {expected.file_index} belongs",
            "keep the order of spill.paths",
        )
    if expected.payload_id not in (None, found.payload_id):
        raise FormatError(
            "payload", asked, "it describes another payload", "keep both files of a pair together"
        )
