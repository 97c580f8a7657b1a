"""The mapping over a real memfd: shared, bounded, not inherited, and seen as slots."""

import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from kvtier_client.arena import Arena, pack_u32, runs, unpack_offsets
from kvtier_client.errors import InvalidArgument, ProtocolError

SIZE = 16 * mmap.PAGESIZE


@pytest.fixture
def fd() -> Iterator[int]:
    memory = os.memfd_create("arena", os.MFD_CLOEXEC)
    os.ftruncate(memory, SIZE)
    yield memory
    os.close(memory)


def test_what_is_written_is_shared_with_the_daemon(fd: int) -> None:
    arena = Arena(fd, b"a" * 16, SIZE)
    arena.block(4096, 3)[:] = (1, 2, 3)
    assert os.pread(fd, 3, 4096) == b"\x01\x02\x03"
    os.pwrite(fd, b"\x09", 8192)
    assert arena.block(8192, 1)[0] == 9


def test_a_short_file_is_refused_and_not_touched(fd: int) -> None:
    with pytest.raises(ProtocolError, match=f"{SIZE + 1} bytes"):
        Arena(fd, b"a" * 16, SIZE + 1)


def test_populating_makes_every_page_resident(fd: int) -> None:
    arena = Arena(fd, b"a" * 16, SIZE)
    assert arena.populate()
    assert os.fstat(fd).st_blocks * 512 == SIZE


def test_slots_outside_the_mapping_are_a_protocol_error(fd: int) -> None:
    arena = Arena(fd, b"a" * 16, SIZE)
    arena.check(np.array([SIZE - 4096], np.uint64), 4096)
    with pytest.raises(ProtocolError, match="granted a slot"):
        arena.check(np.array([0, SIZE - 4095], np.uint64), 4096)


def test_neighbouring_slots_are_one_run() -> None:
    offsets = np.array([0, 10, 20, 50, 40, 50, 60], np.uint64)
    assert runs(offsets, 10) == [(0, 3, 0), (3, 1, 50), (4, 3, 40)]
    assert runs(offsets[:1], 10) == [(0, 1, 0)]


def test_a_run_of_slots_larger_than_their_blocks(fd: int) -> None:
    arena = Arena(fd, b"a" * 16, SIZE)
    arena.matrix(4096, 3, 100, 4096)[:] = np.arange(3)[:, None]
    assert [arena.block(4096 * (1 + k), 100).tolist() for k in range(3)] == [
        [k] * 100 for k in range(3)
    ]
    assert arena.block(4096 + 100, 1)[0] == 0


def test_packed_values() -> None:
    assert unpack_offsets((7).to_bytes(8, "little")).tolist() == [7]
    with pytest.raises(ProtocolError, match="cut off"):
        unpack_offsets(b"123")
    assert pack_u32(3, "valid", 2) == pack_u32([3, 3], "valid", 2) == pack_u32(np.int64(3), "v", 2)
    for wrong in (-1, 2**32, [2**32], [-1], [[1]], [1.5]):
        with pytest.raises(InvalidArgument):
            pack_u32(wrong, "valid")
