"""Header files: what is written is found again, and nothing else is ever believed."""

import errno
import itertools
import os
import struct
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtierd.core.slabs import (
    CLEARING,
    FILLING,
    QUARANTINED,
    READY,
    STATES,
    WRITING,
    word,
)
from kvtierd.tiers import scan as scan_module
from kvtierd.tiers.errors import FormatError
from kvtierd.tiers.headers import HeaderFile, SpillHeaders, create, open_headers
from kvtierd.tiers.records import ClientRecord, SlabEntry
from kvtierd.tiers.scan import scan, scan_parts, word_owners, word_readers, word_states, word_tags
from kvtierd.tiers.superblock import (
    CLIENTS_MAX,
    PAGE_BYTES,
    Expected,
    Geometry,
    Kind,
    Superblock,
    parse,
)
from tests.header_files import (
    FINGERPRINT,
    GEOMETRY,
    INSTANCE,
    TENANT,
    contents,
    empty_fd,
    entry,
    fields,
    flip,
    make,
    publish,
    put_words,
    reopen,
    superblock,
)

KINDS = pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.name.lower())
MANY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture(params=list(Kind), ids=lambda kind: kind.name.lower())
def headers(request: pytest.FixtureRequest) -> Iterator[HeaderFile]:
    """A header file in which slab 1 (slots 16 to 31) is in use."""
    made = make(request.param)
    yield made
    made.close()


# ---------------------------------------------------------------- superblock


@given(
    st.integers(1, 1 << 20),
    st.integers(1, 1 << 12),
    st.integers(1, 1 << 8),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
)
def test_a_superblock_says_what_was_packed(
    slabs: int, pages: int, max_slots: int, generation: int, number: int
) -> None:
    geometry = Geometry(slabs, pages * PAGE_BYTES, min(max_slots, pages))
    packed = Superblock(Kind.SPILL, INSTANCE, generation, 0, number, geometry, 5, b"p" * 16)
    assert parse(packed.pack(), "a test") == packed
    assert len(packed.pack()) == PAGE_BYTES


def test_every_flipped_bit_of_a_superblock_is_noticed() -> None:
    page = superblock(Kind.ARENA).pack()
    for position in range(112 * 8):
        bad = bytearray(page)
        bad[position // 8] ^= 1 << position % 8
        with pytest.raises(FormatError):
            parse(bytes(bad), "a test")


def test_another_format_is_named_and_the_remedy_is_to_convert() -> None:
    page = bytearray(superblock(Kind.SPILL).pack())
    page[8] = 9
    with pytest.raises(FormatError, match=r"format 9.*format 1.*convert") as refused:
        parse(bytes(page), "a test")
    assert refused.value.reason == "version"


def test_sizes_that_make_no_sense_are_refused_even_when_their_checksum_is_right() -> None:
    page = superblock(Kind.SPILL).pack()
    for offset, value in [(48, 0), (48, 1 << 63), (56, 5000), (64, 0), (64, 1 << 40), (72, 4096)]:
        head = bytearray(page[:104])
        head[offset : offset + 8] = struct.pack("<Q", value)
        bad = bytes(head) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(head)))
        with pytest.raises(FormatError) as refused:
            parse(bad, "a test")
        assert refused.value.reason == "geometry"


@pytest.mark.parametrize(
    ("expected", "reason"),
    [
        (Expected(Kind.ARENA), "kind"),
        (Expected(Kind.SPILL, instance=b"somebody else's."), "instance"),
        (Expected(Kind.SPILL, geometry=replace(GEOMETRY, slabs=5)), "geometry"),
        (Expected(Kind.SPILL, tenant=1), "tenant"),
        (Expected(Kind.SPILL, file_index=1), "file_index"),
        (Expected(Kind.SPILL, payload_id=b"another payload."), "payload"),
    ],
)
def test_a_file_that_is_not_what_is_expected_is_refused(expected: Expected, reason: str) -> None:
    headers = make(Kind.SPILL)
    with pytest.raises(FormatError) as refused:
        open_headers(headers.fd, expected, "a test's headers")
    assert refused.value.reason == reason
    headers.close()


@KINDS
def test_a_cut_or_grown_file_is_refused_and_left_as_it_is(kind: Kind) -> None:
    headers = make(kind)
    for size in (0, 50, PAGE_BYTES, GEOMETRY.header_bytes - 1, GEOMETRY.header_bytes + PAGE_BYTES):
        fd = empty_fd(kind)
        os.pwrite(fd, contents(headers), 0)
        os.ftruncate(fd, size)
        before = os.pread(fd, 1 << 20, 0)
        with pytest.raises(FormatError) as refused:
            open_headers(fd, Expected(kind), "a test's headers")
        assert refused.value.reason == "size"
        assert os.pread(fd, 1 << 20, 0) == before
        os.close(fd)
    headers.close()


@KINDS
def test_a_file_with_contents_is_never_made_anew(kind: Kind) -> None:
    fd = empty_fd(kind)
    os.pwrite(fd, b"precious", 0)
    with pytest.raises(FormatError) as refused:
        create(fd, superblock(kind), "a test's headers")
    assert refused.value.reason == "not_empty"
    assert os.pread(fd, 100, 0) == b"precious"
    os.close(fd)


def test_opening_a_spill_file_needs_no_right_to_write_and_changes_nothing() -> None:
    headers = make(Kind.SPILL)
    publish(headers, [16, 17])
    before = contents(headers), os.fstat(headers.fd).st_mtime_ns
    read_only = os.open(f"/proc/self/fd/{headers.fd}", os.O_RDONLY)
    opened = open_headers(read_only, Expected(Kind.SPILL), "a test's headers")
    assert scan(opened).slots.tolist() == [16, 17]
    assert (contents(headers), os.fstat(headers.fd).st_mtime_ns) == before
    opened.close()
    headers.close()


def test_a_new_generation_is_found_again(headers: HeaderFile) -> None:
    headers.set_generation(12)
    assert reopen(headers).superblock == replace(headers.superblock, generation=12)


def test_regions_are_page_aligned_and_do_not_overlap() -> None:
    for slabs, max_slots in itertools.product((1, 63, 64, 65), (1, 3, 256)):
        geometry = Geometry(slabs, 1 << 20, max_slots)
        ends = [
            (geometry.directory_offset, 64 * slabs),
            (geometry.clients_offset, 64 * CLIENTS_MAX),
            (geometry.words_offset, 8 * slabs * max_slots),
            (geometry.bodies_offset, 128 * slabs * max_slots),
            (geometry.header_bytes, 0),
        ]
        assert all(offset % PAGE_BYTES == 0 for offset, _ in ends)
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(ends))


# ---------------------------------------------------------------- words and bodies


@MANY
@given(st.lists(st.tuples(st.integers(0, 63), st.integers(0, 2**64 - 1)), max_size=40))
def test_words_are_written_exactly_where_they_belong(
    headers: HeaderFile, writes: list[tuple[int, int]]
) -> None:
    before = bytearray(contents(headers))
    slots = np.array([slot for slot, _ in writes], np.int64)
    headers.write_words(slots, np.array([value for _, value in writes], np.uint64))
    for slot, value in writes:
        struct.pack_into("<Q", before, GEOMETRY.words_offset + 8 * slot, value)
    assert contents(headers) == before


def test_a_spill_files_mirror_belongs_to_the_core(headers: HeaderFile) -> None:
    headers.write_word(20, 123)
    headers.write_words(np.array([21]), np.array([7], np.uint64))
    shared = headers.superblock.kind is Kind.ARENA
    assert headers.words[[20, 21]].tolist() == ([123, 7] if shared else [0, 0])
    assert reopen(headers).words[[20, 21]].tolist() == [123, 7]


def test_words_can_be_read_into_a_part_of_a_larger_array() -> None:
    headers = make(Kind.SPILL)
    put_words(headers, np.arange(16, 32), np.arange(16, dtype=np.uint64))
    mirror = np.zeros(3 * GEOMETRY.total_slots, np.uint64)
    part = mirror[GEOMETRY.total_slots : 2 * GEOMETRY.total_slots]
    opened = open_headers(os.dup(headers.fd), Expected(Kind.SPILL), "a test's headers", part)
    assert opened.words.base is mirror
    assert part[16:32].tolist() == list(range(16))
    assert mirror.sum() == part.sum()


@MANY
@given(st.permutations(range(64)), st.integers(0, 64))
def test_bodies_are_written_exactly_where_they_belong(
    headers: HeaderFile, order: list[int], count: int
) -> None:
    slots = np.array(order[:count], np.int64)
    rows = np.random.default_rng(count).integers(0, 2**64, (count, 16), np.uint64)
    before = bytearray(contents(headers))
    headers.write_bodies(slots, rows)
    for slot, row in zip(slots.tolist(), rows, strict=True):
        start = GEOMETRY.bodies_offset + 128 * slot
        before[start : start + 128] = row.tobytes()
    assert contents(headers) == before
    assert np.array_equal(headers.read_bodies(slots), rows)


def test_one_body_is_written_like_a_batch(headers: HeaderFile) -> None:
    body = publish(headers, [17])[0].tobytes()
    headers.write_body(30, body)
    assert headers.read_bodies(np.array([30])).tobytes() == body


def test_bodies_that_the_disk_cannot_read_are_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = make(Kind.SPILL)
    publish(headers, [16, 17, 25])
    real = os.preadv
    bad = GEOMETRY.bodies_offset + 128 * 25

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset <= bad < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, "bad sector")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    found = scan(headers)
    assert found.slots.tolist() == [16, 17]
    assert found.damaged.tolist() == [25]


@MANY
@given(st.lists(st.integers(0, 299), unique=True, min_size=1))
def test_bodies_are_read_alike_however_they_are_scattered(slots: list[int]) -> None:
    whole = superblock(Kind.SPILL, Geometry(slabs=1, slab_bytes=300 << 12, max_slots=300))
    headers = create(empty_fd(Kind.SPILL), whole, "a test's headers")
    rows = np.random.default_rng(1).integers(0, 2**64, (300, 16), np.uint64)
    headers.write_bodies(np.arange(300), rows)
    assert np.array_equal(headers.read_bodies(np.array(slots, np.int64)), rows[slots])
    headers.close()


# ---------------------------------------------------------------- records


def test_slabs_are_found_again_as_they_were_given_out(headers: HeaderFile) -> None:
    other = SlabEntry(3, b"another layout!!", TENANT, 1 << 18, 4, 1)
    headers.assign_slab(other)
    assert list(reopen(headers).slab_table().entries()) == [entry(1), other]
    headers.free_slab(1)
    table = reopen(headers).slab_table()
    assert list(table.entries()) == [other]
    assert not table.damaged.any()


def test_every_flipped_bit_of_a_slab_entry_is_noticed(headers: HeaderFile) -> None:
    for position in range(64 * 8):
        offset = GEOMETRY.directory_offset + 64 + position // 8
        flip(headers, offset, position % 8)
        table = headers.slab_table()
        assert table.damaged.tolist() == [False, True, False, False]
        assert not table.in_use.any()
        flip(headers, offset, position % 8)
    assert list(headers.slab_table().entries()) == [entry(1)]


@pytest.mark.parametrize(
    "values",
    [
        {"slots": 0},
        {"slots": 17},
        {"slots": 2**32 - 1},
        {"slot_bytes": 0},
        {"slot_bytes": 65537},
        {"slot_bytes": 1 << 17},
        {"block_bytes": 0},
        {"block_bytes": 65537},
        {"state": 2},
    ],
    ids=str,
)
def test_slab_entries_out_of_range_are_damage_even_with_a_right_checksum(
    headers: HeaderFile, values: dict[str, int]
) -> None:
    good = {"tenant": TENANT, "slot_bytes": 65536, "slots": 16, "state": 1, "block_bytes": 60000}
    head = struct.pack("<16sIIIII20x", FINGERPRINT, *(good | values).values())
    record = head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head))
    os.pwrite(headers.fd, record, GEOMETRY.directory_offset + 64)
    assert reopen(headers).slab_table().damaged.tolist() == [False, True, False, False]


def test_an_arena_believes_only_slabs_of_its_own_tenant() -> None:
    headers = make(Kind.ARENA)
    head = struct.pack("<16sIIIII20x", FINGERPRINT, TENANT + 1, 65536, 16, 1, 60000)
    record = head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head))
    os.pwrite(headers.fd, record, GEOMETRY.directory_offset + 64)
    assert headers.slab_table().damaged[1]


def test_clients_are_found_again_until_they_are_cleared(headers: HeaderFile) -> None:
    some = [
        ClientRecord(i, 4000 + i, 1 << 40 | i, 1000, bytes([i]) * 16, b"s" * 16)
        for i in (0, 5, 255)
    ]
    for record in some:
        headers.write_client(record.index, record)
    headers.write_client(5, None)
    assert reopen(headers).clients() == [some[0], some[2]]


def test_every_flipped_bit_of_a_client_record_hides_it_and_no_other(headers: HeaderFile) -> None:
    some = [ClientRecord(i, 1, 2, 3, b"g" * 16, b"s" * 16) for i in range(2)]
    for record in some:
        headers.write_client(record.index, record)
    for position in range(64 * 8):
        flip(headers, GEOMETRY.clients_offset + position // 8, position % 8)
        assert headers.clients() == [some[1]]
        flip(headers, GEOMETRY.clients_offset + position // 8, position % 8)


# ---------------------------------------------------------------- scan


def test_a_restart_finds_blocks_leases_and_nothing_else(headers: HeaderFile) -> None:
    headers.assign_slab(entry(2, slots=3))
    bodies = publish(headers, [16, 31, 32, 34])
    publish(headers, [35, 50])  # beyond the slots of slab 2, and in a free slab
    headers.words[31] = headers.words[31] + np.uint64(2 << 8)
    states = {18: WRITING, 19: QUARANTINED, 20: FILLING, 21: CLEARING}
    busy = np.array([word(state, owner=7, tag=99) for state in states.values()], np.uint64)
    put_words(headers, np.array(list(states)), busy)
    headers.write_words(np.array([31]), headers.words[[31]])

    found = scan(reopen(headers))

    assert found.slots.tolist() == [16, 31, 32, 34]
    assert np.array_equal(found.bodies, bodies)
    assert word_readers(found.words).tolist() == [0, 2, 0, 0]
    assert word_states(found.words).tolist() == [READY] * 4
    assert found.busy_slots.tolist() == [18, 19, 20, 21]
    assert word_states(found.busy_words).tolist() == list(states.values())
    assert word_owners(found.busy_words).tolist() == [7] * 4
    assert word_tags(found.busy_words).tolist() == [99] * 4
    assert found.damaged.tolist() == []


def test_every_flipped_bit_of_a_body_makes_it_no_block(headers: HeaderFile) -> None:
    publish(headers, list(range(16, 32)))
    for first in range(0, 1024, 16):
        for slot in range(16, 32):
            position = first + slot - 16
            flip(headers, GEOMETRY.bodies_offset + 128 * slot + position // 8, position % 8)
        found = scan(headers)
        assert len(found.slots) == 0
        assert found.damaged.tolist() == list(range(16, 32))
        for slot in range(16, 32):
            position = first + slot - 16
            flip(headers, GEOMETRY.bodies_offset + 128 * slot + position // 8, position % 8)
    assert len(scan(headers).slots) == 16


@pytest.mark.parametrize(
    "changed",
    [
        {"slot": 17},
        {"layout0": 1},
        {"layout1": 1},
        {"tenant": TENANT + 1},
        {"valid_tokens": 0},
        {"length_bytes": 0},
        {"length_bytes": 60_001},
        {"block_kind": 3},
        {"retention": 0},
        {"checksum_kind": 3},
    ],
    ids=str,
)
def test_a_body_that_does_not_belong_there_is_no_block(
    headers: HeaderFile, changed: dict[str, int]
) -> None:
    publish(headers, [18])
    publish(headers, [20], **changed)
    found = scan(headers)
    assert (found.slots.tolist(), found.damaged.tolist()) == ([18], [20])


def test_a_word_with_another_bodys_tag_or_an_unknown_state_is_no_block(
    headers: HeaderFile,
) -> None:
    publish(headers, [18, 19, 20])
    put_words(headers, np.array([19]), headers.words[[18]])
    put_words(headers, np.array([20]), np.array([word(STATES, tag=20)], np.uint64))
    found = scan(headers)
    assert (found.slots.tolist(), found.damaged.tolist()) == ([18], [19, 20])


def test_an_encrypted_block_in_an_arena_is_no_block() -> None:
    headers = make(Kind.ARENA)
    publish(headers, [18], checksum_kind=2)
    assert scan(headers).slots.tolist() == []
    headers.close()


def test_a_spilled_block_without_a_checksum_is_no_block(headers: HeaderFile) -> None:
    publish(headers, [18], checksum_kind=0)
    in_arena = headers.superblock.kind is Kind.ARENA
    assert scan(headers).slots.tolist() == ([18] if in_arena else [])


@MANY
@given(st.integers(0, 2**32), st.integers(1, 60))
def test_garbage_is_never_believed_and_never_fatal(
    headers: HeaderFile, seed: int, damage_bytes: int
) -> None:
    publish(headers, list(range(16, 32)))
    kind, before = headers.superblock.kind, contents(headers)
    random = np.random.default_rng(seed)
    for offset in random.integers(PAGE_BYTES, len(before), damage_bytes).tolist():
        os.pwrite(headers.fd, random.bytes(8)[: len(before) - offset], offset)
    opened = reopen(headers)
    found = scan(opened)
    intact = [s for s in found.slots.tolist() if _body(contents(opened), s) == _body(before, s)]
    assert found.slots.tolist() == intact
    assert kind == opened.superblock.kind
    opened.clients()
    opened.close()
    os.pwrite(headers.fd, before, 0)


def _body(data: bytes, slot: int) -> bytes:
    start = GEOMETRY.bodies_offset + 128 * slot
    return data[start : start + 128]


def test_a_scan_in_parts_finds_the_same(
    headers: HeaderFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    for slab in (0, 2, 3):
        headers.assign_slab(entry(slab))
    publish(headers, [1, 15, 16, 40, 63])
    put_words(headers, np.array([2, 41]), np.array([word(WRITING)] * 2, np.uint64))
    whole = scan(headers)
    monkeypatch.setattr(scan_module, "CHUNK_SLOTS", 32)
    parts = list(scan_parts(headers))
    assert [len(part.slots) for part in parts] == [3, 2]
    assert np.array_equal(scan(headers).slots, whole.slots)
    assert np.array_equal(scan(headers).busy_slots, whole.busy_slots)


def test_fields_can_be_one_for_all_or_one_each() -> None:
    headers = make(Kind.SPILL)
    slots = np.array([16, 17], np.int64)
    publish(headers, [16, 17], node=np.array([8, 9], np.uint32), priority=np.array([1, 2]))
    assert isinstance(headers, SpillHeaders)
    assert headers.read_bodies(slots)[:, 3].tolist() == [8 | 16 << 32, 9 | 17 << 32]
    assert fields(Kind.SPILL, 16, 1).page == 16
    headers.close()
