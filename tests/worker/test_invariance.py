"""A row's bits depend on the row alone: neighbours, place, tile and thread count do not matter."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtier_worker.linear import TileLinear
from kvtier_worker.model import USUAL_ROWS, Llama
from kvtier_worker.pool import PagedPool
from kvtier_worker.tile import Row
from tests.worker.tiny import BLOCK_TOKENS, forward, slots_of, tiny_model, tiny_pool

LENGTH = 150
PAGES = -(-LENGTH // BLOCK_TOKENS)
TILE_ROWS = tiny_model().tile_sizes[-1]


def decode_alone(model: Llama, pool: PagedPool, tokens: list[int], pages: list[int]) -> Tensor:
    """One token a step, nobody else in the tile. Shapes: [len(tokens), vocab]."""
    return torch.stack(
        [
            forward(model, pool, [Row(token, at, slots_of(pages, at + 1))])[0]
            for at, token in enumerate(tokens)
        ]
    )


def kv_of(pool: PagedPool, pages: list[int], tokens: int) -> Tensor:
    """The KV of a sequence's first tokens. Shapes: [layers, 2, tokens, kv_heads, head_dim]."""
    slots = slots_of(pages, len(pages) * BLOCK_TOKENS)
    records = torch.from_numpy(pool.read_records(slots))
    return records.permute(1, 2, 0, 3, 4, 5).flatten(2, 3)[:, :, :tokens]


def row_anywhere(choice: random.Random, pool: PagedPool) -> Row:
    position = choice.randrange(0, 16 * 15)
    return Row(choice.randrange(256), position, slots_of(pool.take(15), position + 1))


class Reference:
    """A sequence decoded one by one, alone: what every other way must reproduce bit by bit."""

    def __init__(self, model: Llama) -> None:
        self.model = model
        self.tokens = [random.Random(7).randrange(256) for _ in range(LENGTH)]
        pool = tiny_pool(model, PAGES)
        pages = pool.take(PAGES)
        self.logits = decode_alone(model, pool, self.tokens, pages)
        self.kv = kv_of(pool, pages, LENGTH)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(tiny_model())


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(1, TILE_ROWS), min_size=20, max_size=150), seed=st.integers(0, 99))
def test_prefill_in_any_chunks_gives_the_bits_of_decode(
    reference: Reference, cuts: list[int], seed: int
) -> None:
    choice = random.Random(seed)
    pool = tiny_pool(reference.model, 4 * PAGES)
    pages = pool.take(4 * PAGES)
    choice.shuffle(pages)
    mine = pages[:PAGES]
    at = 0
    for cut in cuts:
        part = range(at, min(at + cut, LENGTH))
        if not part:
            break
        rows = [Row(reference.tokens[i], i, slots_of(mine, i + 1)) for i in part]
        logits = forward(reference.model, pool, rows)
        assert torch.equal(logits[: len(part)], reference.logits[part.start : part.stop])
        at = part.stop
    assert torch.equal(kv_of(pool, mine, at), reference.kv[:, :, :at])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_neighbours_and_place_in_the_tile_change_no_bit(
    reference: Reference, data: st.DataObject
) -> None:
    choice = random.Random(data.draw(st.integers(0, 10_000)))
    pool = tiny_pool(reference.model, 16 * TILE_ROWS)
    for layer in (*pool.k_pages, *pool.v_pages):
        layer.normal_(0, 30)  # neighbours have KV of any kind
    mine = pool.take(PAGES)
    at = data.draw(st.integers(0, LENGTH - 1))
    decode = [Row(reference.tokens[i], i, slots_of(mine, i + 1)) for i in range(at)]
    for start in range(0, at, TILE_ROWS):
        forward(reference.model, pool, decode[start : start + TILE_ROWS])

    neighbours = [
        row_anywhere(choice, pool) for _ in range(data.draw(st.integers(0, TILE_ROWS - 1)))
    ]
    place = choice.randrange(len(neighbours) + 1)
    rows = [
        *neighbours[:place],
        Row(reference.tokens[at], at, slots_of(mine, at + 1)),
        *neighbours[place:],
    ]
    logits = forward(reference.model, pool, rows)
    assert torch.equal(logits[place], reference.logits[at])
    assert torch.equal(kv_of(pool, mine, at + 1), reference.kv[:, :, : at + 1])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_thread_count_changes_no_bit(reference: Reference, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        pool = tiny_pool(reference.model, PAGES)
        logits = decode_alone(reference.model, pool, reference.tokens[:70], pool.take(PAGES))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(logits, reference.logits[:70])


def test_the_check_sees_a_change_of_one_bit(reference: Reference) -> None:
    """The comparison above is of bits, not of near values."""
    changed = reference.logits.clone()
    changed.view(torch.int32)[3, 5] ^= 1
    assert not torch.equal(changed, reference.logits)


def test_a_machine_whose_gemms_differ_by_size_has_one_size_of_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    multiply = TileLinear.__call__

    def by_size(self: TileLinear, x: Tensor) -> Tensor:
        return multiply(self, x) * (1 + len(x) * 2**-20)

    monkeypatch.setattr(TileLinear, "__call__", by_size)
    assert tiny_model().tile_sizes == (USUAL_ROWS,)
