"""The daemon's arena as this process sees it: one shared mapping, and views of its slots.

The mapping is made once and kept over reconnects; only another `arena_id` replaces it. A forked
child does not inherit it, so that no child can write into slots that its parent leased.
"""

import ctypes
import errno
import mmap
import os
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier_client.errors import InvalidArgument, ProtocolError

Bytes = NDArray[np.uint8]
Offsets = NDArray[np.uint64]
_U32: Final = np.dtype("<u4")

MADV_POPULATE_WRITE: Final = 23
"""Not yet named by the mmap module; Linux 5.14."""
POPULATE_CHUNK_BYTES: Final = 64 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Arena:
    """The mapped payload of one tenant's arena.

    Source: mmap(2), madvise(2) MADV_DONTFORK, MADV_HUGEPAGE and MADV_POPULATE_WRITE.
    """

    def __init__(self, fd: int, arena_id: bytes, size_bytes: int) -> None:
        """Map `size_bytes` of `fd` (which stays the caller's to close).

        Errors: ProtocolError when the file is shorter than the daemon said, since touching what
        is missing would kill this process; OSError when the mapping is refused.
        """
        have_bytes = os.fstat(fd).st_size
        if size_bytes <= 0 or have_bytes < size_bytes:
            raise ProtocolError(
                f"the daemon announced an arena of {size_bytes} bytes, its descriptor has "
                f"{have_bytes}: not mapping it"
            )
        self.arena_id = arena_id
        self.size_bytes = size_bytes
        self._map = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._map.madvise(mmap.MADV_DONTFORK)
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except OSError as problem:  # a kernel without huge pages for shared memory
            if problem.errno != errno.EINVAL:
                raise
        self.bytes: Bytes = np.frombuffer(self._map, np.uint8)
        self.address: int = self.bytes.ctypes.data

    def populate(self) -> bool:
        """Enter every page into this process's page table, so that first copies do not fault.

        False where the kernel cannot (before 5.14). The daemon's memory becomes resident.
        """
        for start in range(0, self.size_bytes, POPULATE_CHUNK_BYTES):
            length = min(POPULATE_CHUNK_BYTES, self.size_bytes - start)
            while _libc.madvise(self.address + start, length, MADV_POPULATE_WRITE) != 0:
                code = ctypes.get_errno()
                if code == errno.EINVAL:
                    return False
                if code not in (errno.EAGAIN, errno.EINTR):
                    raise OSError(code, f"populating the arena: {os.strerror(code)}")
        return True

    def check(self, offsets: Offsets, block_bytes: int) -> None:
        """Errors: ProtocolError when a slot would end behind the mapping."""
        if len(offsets) == 0:
            return
        last = int(offsets[0] if len(offsets) == 1 else offsets.max())
        if last + block_bytes > self.size_bytes:
            raise ProtocolError(
                f"the daemon granted a slot at {last} of {block_bytes} bytes in an "
                f"arena of {self.size_bytes}"
            )

    def block(self, offset: int, block_bytes: int) -> Bytes:
        """A view of one block. Shapes: [block_bytes]."""
        return self.bytes[offset : offset + block_bytes]

    def blocks(self, offsets: Offsets, block_bytes: int) -> list[Bytes]:
        """A view of every block, in the order of `offsets`. Shapes: each [block_bytes]."""
        return [self.bytes[o : o + block_bytes] for o in offsets.tolist()]

    def matrix(self, offset: int, count: int, block_bytes: int, slot_bytes: int) -> Bytes:
        """A view of `count` neighbouring slots. Shapes: [count, block_bytes], rows slot_bytes
        apart."""
        return np.ndarray(
            (count, block_bytes), np.uint8, self.bytes, offset, strides=(slot_bytes, 1)
        )


def runs(offsets: Offsets, slot_bytes: int) -> list[tuple[int, int, int]]:
    """Cut slots into runs of neighbours: (first position, count, byte offset) of each."""
    if len(offsets) == 1:
        return [(0, 1, int(offsets[0]))]
    cuts = np.flatnonzero(np.diff(offsets.astype(np.int64)) != slot_bytes) + 1
    starts = np.concatenate(([0], cuts))
    counts = np.diff(np.append(starts, len(offsets)))
    return list(zip(starts.tolist(), counts.tolist(), offsets[starts].tolist(), strict=True))


def cut_runs(
    whole: list[tuple[int, int, int]], most: int, slot_bytes: int
) -> list[tuple[int, int, int]]:
    """The same runs, in pieces of at most `most` slots."""
    return [
        (first + k, min(most, count - k), offset + k * slot_bytes)
        for first, count, offset in whole
        for k in range(0, count, most)
    ]


def unpack_offsets(packed: bytes) -> Offsets:
    """Packed u64 as an array. Errors: ProtocolError when it is cut off."""
    if len(packed) % 8:
        raise ProtocolError(f"packed offsets of {len(packed)} bytes are cut off")
    return np.frombuffer(packed, "<u8")


def pack_u32(values: Any, name: str, count: int | None = None) -> bytes:
    """Pack one value (for `count` blocks) or a sequence of `count` as little-endian u32.

    Errors: InvalidArgument when a value does not fit or the number is wrong.
    """
    if isinstance(values, int):
        if not 0 <= values <= 0xFFFFFFFF:
            raise InvalidArgument(f"{name} {values} is not in 0..2**32-1")
        return values.to_bytes(4, "little") * (1 if count is None else count)
    array = np.asarray(values)
    if array.ndim == 0 and array.dtype.kind in "iu":
        return pack_u32(int(array), name, count)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidArgument(f"{name} must be integers in one dimension, not {array.dtype}")
    if count is not None and len(array) != count:
        raise InvalidArgument(f"{len(array)} {name} for {count} blocks: give one for each")
    if array.dtype == _U32:
        return array.tobytes()
    if len(array) and (int(array.min()) < 0 or int(array.max()) > 0xFFFFFFFF):
        raise InvalidArgument(f"{name} must be in 0..2**32-1")
    return array.astype("<u4").tobytes()
