"""Checksums of blocks under `integrity = "end_to_end"`: of what is swapped out, and again when it
is swapped in, so that whatever changes bytes on the way is seen by whoever uses them.
"""

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtier_client.errors import ChecksumMismatch
from kvtier_client.leases import Lease


def checksums(lease: Lease, places: NDArray[np.uint32]) -> bytes:
    """xxh3-64 of the slots about to be committed, under `end_to_end`; else nothing."""
    if lease.core.integrity != "end_to_end":
        return b""
    arena, size = lease.arena, lease.layout.block_bytes
    blocks = arena.blocks(lease.offsets[places], size)
    sums = [xxhash.xxh3_64_intdigest(block.data) for block in blocks]
    return np.array(sums, "<u8").tobytes()


def mismatches(lease: Lease) -> list[int]:
    """Which blocks of a window are not those of the checksums of their swap-out.

    Verified after the copy, so that what was changed before it or during it is seen. A checksum of
    0 is one that the daemon does not know: the block was stored before it was set to `end_to_end`.
    Errors: ChecksumMismatch when the daemon sent too few.
    """
    wanted = np.frombuffer(lease.checksums, "<u8")
    blocks = lease.arena.blocks(lease.offsets, lease.layout.block_bytes)
    have = np.array([xxhash.xxh3_64_intdigest(block.data) for block in blocks], "<u8")
    if len(wanted) != len(have):
        raise ChecksumMismatch(f"{len(have)} blocks came with {len(wanted)} checksums")
    bad: list[int] = np.flatnonzero((wanted != have) & (wanted != 0)).tolist()
    return bad


def refuse(lease: Lease, bad: list[int], page: int) -> None:
    """Give up a window, which begins at `page`, if blocks of it are bad.

    A lease that was lost meanwhile says nothing: its slots may be others' by now.
    Errors: ChecksumMismatch.
    """
    if bad and not lease.lost:
        pages = tuple(page + k for k in bad)
        raise ChecksumMismatch(
            f"{len(bad)} blocks are not what was swapped out, first of them page {pages[0]}: "
            "recompute them",
            pages,
        )
