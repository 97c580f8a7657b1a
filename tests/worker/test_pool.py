"""Pages come and go without being shared, and a block record is exactly a page's KV."""

import numpy as np
import pytest
import torch

from kvtier_worker.errors import PoolTooSmall
from kvtier_worker.model import Llama
from kvtier_worker.pool import BlockShape, PagedPool
from tests.worker.tiny import BLOCK_TOKENS, CPU, slots_of, tiny_pool


def test_the_block_of_the_default_model_has_its_known_size() -> None:
    assert BlockShape(layers=30, block_tokens=16, kv_heads=3, head_dim=64).block_bytes == 737_280


def test_the_pool_stays_within_its_budget() -> None:
    shape = BlockShape(layers=2, block_tokens=16, kv_heads=2, head_dim=8)
    pool = PagedPool(shape, 10 * shape.block_bytes + 1, CPU)
    tensors = (*pool.k_pages, *pool.v_pages)
    assert sum(t.numel() * t.element_size() for t in tensors) <= 10 * shape.block_bytes
    assert pool.free_pages == pool.pages == 9


def test_a_page_has_one_owner_until_it_is_given_back(tiny: Llama) -> None:
    pool = tiny_pool(tiny, 10)
    first, second = pool.take(4), pool.take(6)
    assert sorted(first + second) == list(range(10))
    assert pool.free_pages == 0
    assert pool.used_bytes == 10 * pool.shape.block_bytes
    pool.give_back(first)
    assert sorted(pool.take(4)) == sorted(first)


def test_giving_a_page_back_twice_is_caught(tiny: Llama) -> None:
    pool = tiny_pool(tiny, 3)
    pages = pool.take(2)
    pool.give_back(pages)
    with pytest.raises(AssertionError):
        pool.give_back(pages)


def test_blocks_leave_and_come_back_to_other_pages_bit_by_bit(tiny: Llama) -> None:
    pool = tiny_pool(tiny, 12)
    for tensor in (*pool.k_pages, *pool.v_pages):
        tensor.normal_()
    records = torch.from_numpy(pool.read_records(slots_of([7, 2, 9], 3 * BLOCK_TOKENS)))
    assert torch.equal(records[1, 2, 0], pool.k_pages[2][2])
    assert torch.equal(records[2, 0, 1], pool.v_pages[0][9])
    pool.write_blocks([1, 11, 4], records)
    again = pool.read_records(slots_of([1, 11, 4], 3 * BLOCK_TOKENS))
    assert torch.equal(torch.from_numpy(again), records)


def test_a_record_of_single_entries_has_each_at_its_place_and_nothing_of_others(
    tiny: Llama,
) -> None:
    pool = tiny_pool(tiny, 12)
    for tensor in (*pool.k_pages, *pool.v_pages):
        tensor.normal_()
    slots = np.random.default_rng(1).permutation(12 * BLOCK_TOKENS)[: 2 * BLOCK_TOKENS + 3]
    records = torch.from_numpy(pool.read_records(slots))
    assert records.shape == (3, *pool.shape.record)
    entries = records.permute(1, 2, 0, 3, 4, 5).flatten(2, 3)
    assert torch.equal(entries[:, :, : len(slots)], pool.read_entries(slots))
    behind = entries[:, :, len(slots) :]
    assert torch.equal(behind, pool.read_entries(slots[-1:]).expand_as(behind))


def test_entries_move_with_their_biases_to_slots_that_are_sources_too() -> None:
    shape = BlockShape(layers=2, block_tokens=8, kv_heads=2, head_dim=8)
    pool = PagedPool(shape, 5 * (shape.block_bytes + shape.bias_bytes), CPU, biased=True)
    layers = (*pool.k_pages, *pool.v_pages, *pool.bias_pages)
    assert len(pool.bias_pages) == pool.shape.layers
    for tensor in layers:
        tensor.normal_()
    before = [tensor.flatten(0, 1).clone() for tensor in layers]
    sources, targets = np.array([5, 6, 7, 20]), np.array([4, 5, 6, 7])
    pool.move_entries(sources, targets)
    for tensor, old in zip(layers, before, strict=True):
        old[targets] = old[sources]
        assert torch.equal(tensor.flatten(0, 1), old)


def test_a_budget_that_holds_no_page_is_refused() -> None:
    shape = BlockShape(layers=2, block_tokens=16, kv_heads=2, head_dim=8)
    with pytest.raises(PoolTooSmall, match="raise the budget"):
        PagedPool(shape, 2 * shape.block_bytes - 1, CPU)
