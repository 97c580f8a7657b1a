"""Every kind of record reaches the arena and comes back, or is refused with the reason."""

import os
from typing import Any

import numpy as np
import pytest
import torch

from kvtier_client.arena import Arena
from kvtier_client.errors import InvalidArgument
from kvtier_client.records import MatrixCopier, RowsCopier, Slots, copier

SLOT, BLOCK = 8192, 4096


@pytest.fixture
def slots() -> Slots:
    fd = os.memfd_create("arena", os.MFD_CLOEXEC)
    os.ftruncate(fd, 8 * SLOT)
    arena = Arena(fd, b"a" * 16, 8 * SLOT)
    os.close(fd)
    return Slots(arena, np.array([2, 3, 6], np.uint64) * np.uint64(SLOT), BLOCK, SLOT)


def numbered(dtype: Any) -> Any:
    return np.arange(3 * BLOCK // np.dtype(dtype).itemsize, dtype=dtype).reshape(3, -1)


RECORDS = {
    "one array": (numbered(np.float32), np.zeros((3, BLOCK // 4), np.float32)),
    "array of blocks of any shape": (
        numbered(np.uint8).reshape(3, 4, -1), np.zeros((3, 4, BLOCK // 4), np.uint8),
    ),
    "every second row": (
        np.repeat(numbered(np.uint16), 2, axis=0)[::2], np.zeros((6, BLOCK // 2), np.uint16)[::2],
    ),
    "list of arrays": (list(numbered(np.int64)), list(np.zeros((3, BLOCK // 8), np.int64))),
    "list of buffers": (
        [bytes([k]) * BLOCK for k in range(3)], [bytearray(BLOCK) for _ in range(3)],
    ),
    "one buffer": (bytes(range(256)) * 48, bytearray(3 * BLOCK)),
    "one tensor": (
        torch.arange(3 * BLOCK // 2, dtype=torch.float32).to(torch.bfloat16).reshape(3, -1),
        torch.zeros((3, BLOCK // 2), dtype=torch.bfloat16),
    ),
    "list of tensors": (
        [torch.full((BLOCK // 4,), k, dtype=torch.float32) for k in range(3)],
        [torch.zeros(BLOCK // 4) for _ in range(3)],
    ),
    "one trainable tensor": (
        torch.ones((3, BLOCK // 4), requires_grad=True), torch.zeros((3, BLOCK // 4)),
    ),
}  # fmt: skip


def flat(records: Any) -> bytes:
    if isinstance(records, list):
        return b"".join(flat(one) for one in records)
    if isinstance(records, torch.Tensor):
        return records.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return bytes(records) if isinstance(records, bytes | bytearray) else records.tobytes()


@pytest.mark.parametrize("kind", RECORDS)
def test_records_make_the_round_trip(slots: Slots, kind: str) -> None:
    source, target = RECORDS[kind]
    copier(source, 3, BLOCK, writable=False).store(slots, 0)
    copier(target, 3, BLOCK, writable=True).load(slots, 0)
    assert flat(target) == flat(source)


def test_contiguous_records_are_copied_run_by_run() -> None:
    assert isinstance(copier(numbered(np.uint8), 3, BLOCK, False), MatrixCopier)
    assert isinstance(copier(list(numbered(np.uint8)), 3, BLOCK, False), RowsCopier)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (np.zeros((3, 100), np.uint8), "300 bytes for 3 blocks"),
        ([np.zeros(BLOCK, np.uint8)] * 2, "2 records for 3 pages"),
        ([np.zeros(10, np.uint8)] * 3, "10 bytes for a block"),
        (np.zeros((BLOCK, 3), np.uint8).T, "contiguous"),
        ([torch.zeros((64, 64)).T[:16]] * 3, "contiguous"),
        (torch.zeros((3, BLOCK // 4), device="meta"), "device meta"),
        ([b"x" * BLOCK] * 3, "read-only"),
        (b"x" * 3 * BLOCK, "read-only"),
        (object(), "is no record"),
    ],
)
def test_records_that_do_not_fit_are_refused(records: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        copier(records, 3, BLOCK, writable=True)
