"""Every kind of record reaches the arena and comes back, or is refused with the reason."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvtier_client.arena import Arena
from kvtier_client.crew import Crew
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
    "every second row of a tensor": (
        torch.arange(6 * BLOCK // 4, dtype=torch.int32).reshape(6, -1)[::2],
        torch.zeros((6, BLOCK // 4), dtype=torch.int32)[::2],
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


@pytest.fixture(params=[1, 3], ids=["alone", "three threads"])
def crew(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Crew]:
    """Copies of any size are shared, and cut at odd places."""
    monkeypatch.setattr("kvtier_client.crew.SHARED_BYTES", 0)
    monkeypatch.setattr("kvtier_client.records.ALONE_BYTES", 0)
    crew = Crew(request.param)
    yield crew
    crew.close()


@pytest.mark.parametrize("kind", RECORDS)
def test_records_make_the_round_trip(slots: Slots, kind: str, crew: Crew) -> None:
    source, target = RECORDS[kind]
    away, back = copier(source, 3, BLOCK, False), copier(target, 3, BLOCK, True)
    away.prepare()
    back.prepare()
    away.store(slots, 0, crew)
    back.load(slots, 0, crew)
    assert flat(target) == flat(source)


@pytest.mark.parametrize("piece_bytes", [1 << 20, 5000, 4097, 1000])
@pytest.mark.parametrize("block_bytes", [1, 999, 4096, 4099, 8192])
def test_blocks_of_odd_sizes_are_cut_without_a_gap(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, block_bytes: int, piece_bytes: int
) -> None:
    monkeypatch.setattr("kvtier_client.records.PIECE_BYTES", piece_bytes)
    fd = os.memfd_create("arena", os.MFD_CLOEXEC)
    os.ftruncate(fd, 64 * SLOT)
    arena = Arena(fd, b"a" * 16, 64 * SLOT)
    os.close(fd)
    places = np.array([*range(20), 30, 31, 40, *range(50, 60), 25], np.uint64)
    slots = Slots(arena, places * np.uint64(SLOT), block_bytes, SLOT)
    n = len(places)
    source = np.random.default_rng(0).integers(0, 256, (n + 2, block_bytes), dtype=np.uint8)
    for scattered in (False, True):
        arena.bytes[:] = 0
        target = np.zeros_like(source)
        away = copier(list(source) if scattered else source, n + 2, block_bytes, False)
        back = copier(list(target) if scattered else target, n + 2, block_bytes, True)
        away.prepare()
        back.prepare()
        away.store(slots, 2, crew)
        back.load(slots, 2, crew)
        assert (target[2:] == source[2:]).all()
        assert not target[:2].any()
        written = np.zeros_like(arena.bytes).reshape(64, SLOT)
        written[places, :block_bytes] = source[2:]
        assert (arena.bytes.reshape(64, SLOT) == written).all()


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
        copier(records, 3, BLOCK, writable=True).prepare()
