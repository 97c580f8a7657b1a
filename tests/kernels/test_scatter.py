"""scatter.cu, run on the emulated grid, moves exactly the bytes that the reference moves."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import kvtier_kernels
from kvtier_kernels.geometry import describe
from kvtier_kernels.plans import Launch
from tests.kernels.emulation import Emulator, Outcome

GUARD_BYTES = 64
GRIDS = [(1, 1), (1, 32), (3, 7), (16, 256)]


@dataclass(frozen=True)
class Shape:
    """Pools and records of one test case; `slack` elements lie between pages, tokens or heads."""

    layers: int
    pool_pages: int
    tokens: int
    heads: int
    width: int
    dtype: torch.dtype
    page_slack: int = 0
    token_slack: int = 0
    head_slack: int = 0
    record_slack: int = 0
    shift: int = 0


SHAPES = {
    "whole pages": Shape(3, 9, 16, 3, 64, torch.float32),
    "one of everything": Shape(1, 1, 1, 1, 1, torch.float32),
    "odd width, two-byte elements": Shape(2, 7, 5, 3, 7, torch.bfloat16),
    "odd width, one-byte elements": Shape(2, 5, 3, 1, 13, torch.float8_e4m3fn),
    "sixteen bytes and a tail": Shape(1, 6, 1, 1, 19, torch.uint8),
    "gaps between pages": Shape(2, 6, 4, 2, 16, torch.float16, page_slack=24),
    "gaps between tokens": Shape(2, 6, 4, 2, 16, torch.float16, token_slack=8),
    "gaps between heads": Shape(2, 6, 4, 2, 10, torch.float16, head_slack=3),
    "gaps between records": Shape(2, 6, 4, 2, 16, torch.float16, record_slack=40),
    "pools off alignment": Shape(2, 6, 4, 2, 16, torch.uint8, shift=1),
    "pools on four bytes": Shape(2, 6, 4, 2, 16, torch.float32, shift=1),
}


@dataclass(frozen=True)
class Case:
    """Memory of one case: the views, and the whole buffers (guards included) under them."""

    layers_k: list[Tensor]
    layers_v: list[Tensor]
    pages: Tensor
    records: Tensor
    buffers: list[Tensor]


def random_bytes(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


def make_view(
    shape: tuple[int, ...], strides: tuple[int, ...], source: Shape, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """A strided view of random bytes with guard bytes at both ends, and the bytes under it."""
    size = source.dtype.itemsize
    span = 1 + sum((extent - 1) * step for extent, step in zip(shape, strides, strict=True))
    start = GUARD_BYTES + source.shift * size
    buffer = random_bytes(start + span * size + GUARD_BYTES, generator)
    elements = buffer[start : start + span * size].view(source.dtype)
    return torch.as_strided(elements, shape, strides), buffer


def make_case(source: Shape, seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)
    head = source.width + source.head_slack
    token = source.heads * head + source.token_slack
    page = source.tokens * token + source.page_slack
    pool_shape = (source.pool_pages, source.tokens, source.heads, source.width)
    count = max(1, source.pool_pages - 1)
    record_shape = (count, source.layers, 2, *pool_shape[1:])
    inner = [source.tokens * source.heads * source.width, source.heads * source.width]
    steps = [2 * source.layers * inner[0] + source.record_slack, 2 * inner[0], *inner]
    made = [
        make_view(pool_shape, (page, token, head, 1), source, generator)
        for _ in range(2 * source.layers)
    ]
    record_strides = (*steps, source.width, 1)
    made.append(make_view(record_shape, record_strides, source, generator))
    views = [view for view, _ in made]
    pages = torch.randperm(source.pool_pages, generator=generator)[:count]
    return Case(views[0:-1:2], views[1:-1:2], pages, views[-1], [buffer for _, buffer in made])


def emulate(emulator: Emulator, case: Case, grid: tuple[int, int]) -> Outcome:
    geometry = describe(case.layers_k, case.layers_v, case.pages, case.records)
    words = torch.tensor(geometry.words(), dtype=torch.int64)
    blocks, threads = grid
    return emulator.launch(Launch("scatter_blocks", (blocks, 1, 1), threads, (words.data_ptr(),)))


def scatter(case: Case) -> None:
    kvtier_kernels.scatter_blocks(case.layers_k, case.layers_v, case.pages, case.records)


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid[0]}x{grid[1]}")
@pytest.mark.parametrize("name", SHAPES)
def test_kernel_moves_what_the_reference_moves(
    name: str, grid: tuple[int, int], emulator: Emulator
) -> None:
    kernel, reference = make_case(SHAPES[name], seed=1), make_case(SHAPES[name], seed=1)
    assert emulate(emulator, kernel, grid) is Outcome.DONE
    scatter(reference)
    untouched = make_case(SHAPES[name], seed=1)
    pairs = zip(kernel.buffers, untouched.buffers, strict=True)
    assert any(not torch.equal(after, before) for after, before in pairs)
    for moved, expected in zip(kernel.buffers, reference.buffers, strict=True):
        assert torch.equal(moved, expected)


@pytest.mark.parametrize("name", SHAPES)
def test_the_reference_puts_each_record_into_its_page_and_changes_nothing_else(name: str) -> None:
    case, untouched = make_case(SHAPES[name], seed=2), make_case(SHAPES[name], seed=2)
    scatter(case)
    pages, records = case.pages.tolist(), case.records
    for part, (pools, before) in enumerate(
        [(case.layers_k, untouched.layers_k), (case.layers_v, untouched.layers_v)]
    ):
        for layer, (pool, was) in enumerate(zip(pools, before, strict=True)):
            for page in range(len(pool)):
                due = records[pages.index(page), layer, part] if page in pages else was[page]
                assert torch.equal(pool[page].view(torch.uint8), due.view(torch.uint8))


@pytest.mark.parametrize("page", [-1, 9, 2**62])
def test_a_page_outside_the_pool_traps(page: int, emulator: Emulator) -> None:
    case = make_case(SHAPES["whole pages"], seed=3)
    case.pages[0] = page
    assert emulate(emulator, case, (1, 1)) is Outcome.TRAPPED


def test_no_records_move_nothing(emulator: Emulator) -> None:
    case = make_case(SHAPES["whole pages"], seed=4)
    before = [buffer.clone() for buffer in case.buffers]
    empty = Case(case.layers_k, case.layers_v, case.pages[:0], case.records[:0], case.buffers)
    assert emulate(emulator, empty, (4, 32)) is Outcome.DONE
    scatter(empty)
    for now, then in zip(case.buffers, before, strict=True):
        assert torch.equal(now, then)


def test_pools_may_be_larger_than_32_bits_count(emulator: Emulator) -> None:
    sparse = torch.empty(2**32 + 4096, dtype=torch.uint8)  # memory is taken only where touched
    pools = [torch.as_strided(sparse[shift:], (3, 1, 2, 8), (2**31, 1, 8, 1)) for shift in (0, 64)]
    generator = torch.Generator().manual_seed(7)
    records = random_bytes(3 * 2 * 16, generator).view(3, 1, 2, 1, 2, 8)
    case = Case(pools[:1], pools[1:], torch.tensor([2, 0, 1]), records, [])
    assert emulate(emulator, case, (2, 4)) is Outcome.DONE
    for pool, part in zip(pools, (0, 1), strict=True):
        assert torch.equal(pool[case.pages], records[:, 0, part])


def test_whole_pages_are_one_run() -> None:
    case = make_case(SHAPES["whole pages"], seed=5)
    geometry = describe(case.layers_k, case.layers_v, case.pages, case.records)
    assert (geometry.outer_runs, geometry.inner_runs) == (1, 1)
    assert geometry.run_bytes == 16 * 3 * 64 * 4


def wrong_inputs() -> dict[str, Case]:
    good = make_case(SHAPES["whole pages"], seed=6)
    keys, values, pages, records = good.layers_k, good.layers_v, good.pages, good.records
    swapped = records.transpose(1, 2)
    return {
        "no pools": Case([], [], pages, records, []),
        "K without V": Case(keys, values[:-1], pages, records, []),
        "pools differ": Case(keys, [*values[:-1], values[0][1:]], pages, records, []),
        "dtypes differ": Case(keys, values, pages, records.view(torch.int32), []),
        "pool not 4-d": Case([keys[0][0]], [values[0][0]], pages, records, []),
        "head_dim strided": Case([keys[0].mT], [values[0].mT], pages, records, []),
        "pages not int64": Case(keys, values, pages.int(), records, []),
        "pages strided": Case(keys, values, torch.stack([pages, pages], 1)[:, 0], records, []),
        "records too few": Case(keys, values, pages, records[1:], []),
        "records strided": Case(keys, values, pages, swapped.contiguous().transpose(1, 2), []),
    }


@pytest.mark.parametrize("name", wrong_inputs())
def test_tensors_that_do_not_fit_are_refused(name: str) -> None:
    case = wrong_inputs()[name]
    with pytest.raises(ValueError, match=r"pool|pages|record"):
        scatter(case)
