"""Fold operators: what stays, how far attention is from the whole step, and the same bits."""

import pytest
import torch

from kvtier_worker.engine import Engine, block_shape
from kvtier_worker.folding import FoldPolicy
from kvtier_worker.folds import (
    AttentionMatching,
    Folded,
    FoldOperator,
    Selection,
    StepKv,
    Tail,
    relative_error,
)
from kvtier_worker.pool import PagedPool
from kvtier_worker.store import RecomputeStore
from kvtier_worker.tile import Row
from tests.worker.test_fold import KEEP, MODEL, NEW_TOKENS, RULES, submit_all
from tests.worker.tiny import BLOCK_TOKENS, CPU, forward, slots_of

SHAPE = block_shape(MODEL, BLOCK_TOKENS)
LAYERS, ENTRIES, KV_HEADS, HEADS, HEAD_DIM, QUERIES = 2, 96, 2, 4, 16, 40


def a_step(seed: int = 0) -> StepKv:
    """Keys in a few clusters, as attention finds them, and queries that look for some."""
    random = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(LAYERS, 1, 8, KV_HEADS, HEAD_DIM, generator=random)
    which = torch.randint(0, 8, (ENTRIES,), generator=random)
    noise = 0.3 * torch.randn(LAYERS, 1, ENTRIES, KV_HEADS, HEAD_DIM, generator=random)
    keys = centres[:, :, which] + noise
    values = torch.randn(LAYERS, 1, ENTRIES, KV_HEADS, HEAD_DIM, generator=random)
    queries = torch.randn(LAYERS, QUERIES, HEADS, HEAD_DIM, generator=random)
    return StepKv(torch.cat([keys, values], dim=1), queries)


def test_the_tail_is_a_copy_of_the_last_entries() -> None:
    step = a_step()
    folded = Tail().fold(step, 5)
    assert torch.equal(folded.kv, step.kv[:, :, -5:])
    assert folded.bias is None


def test_a_selection_keeps_entries_of_the_step_for_each_head() -> None:
    step = a_step()
    folded = Selection().fold(step, 8)
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            kept = folded.kv[layer, :, :, head]
            whole = step.kv[layer, :, :, head]
            matches = (kept[0][:, None] == whole[0][None]).all(-1)
            places = matches.int().argmax(1)
            assert matches.any(1).all()
            assert torch.equal(kept[1], whole[1][places])
            assert torch.equal(places, places.unique())


def test_matching_attention_is_nearer_than_selecting_and_that_than_the_tail() -> None:
    errors = {
        type(operator).__name__: sum(
            relative_error(step, operator.fold(step, 16)) for step in map(a_step, range(4))
        )
        / 4
        for operator in (Tail(), Selection(), AttentionMatching())
    }
    assert errors["AttentionMatching"] < 0.7 * errors["Selection"]
    assert errors["Selection"] < errors["Tail"]


def test_keeping_everything_loses_nothing() -> None:
    step = a_step()
    assert relative_error(step, Folded(step.kv)) < 1e-5
    assert relative_error(step, Selection().fold(step, ENTRIES)) < 1e-5


@pytest.mark.parametrize("operator", [Tail(), Selection(), AttentionMatching()])
def test_the_same_step_gives_the_same_bits(operator: FoldOperator) -> None:
    one, other = (operator.fold(a_step(), 7) for _ in range(2))
    assert torch.equal(one.kv, other.kv)
    assert (one.bias is None) == (other.bias is None) == (not operator.biased)
    if one.bias is not None and other.bias is not None:
        assert torch.equal(one.bias, other.bias)


def biased_engine(pages: int, operator: FoldOperator) -> Engine:
    bytes_ = (pages + 1) * (SHAPE.block_bytes + SHAPE.bias_bytes)
    pool = PagedPool(SHAPE, bytes_, CPU, biased=True)
    folding = FoldPolicy(RULES, keep=KEEP, operator=operator, measure=True)
    return Engine(MODEL, pool, RecomputeStore(), folding=folding)


@pytest.mark.parametrize("operator", [Tail(), Selection(), AttentionMatching()])
def test_every_operator_gives_the_same_tokens_under_pressure(operator: FoldOperator) -> None:
    outputs = []
    for pages in (200, 10):
        engine = biased_engine(pages, operator)
        sequences = submit_all(engine)
        engine.run()
        outputs.append([s.generated for s in sequences])
        figures = engine.figures("fold").folding
        assert figures.measured == figures.folds > 0
        assert 0 < figures.mean_error < 2
    assert outputs[0] == outputs[1]
    assert engine.scheduler.counters.preemptions > 0
    assert len(outputs[0][0]) == NEW_TOKENS


def test_a_bias_adds_to_its_entry_s_logit_and_to_no_neighbour_s_bits() -> None:
    pool = PagedPool(SHAPE, 40 * SHAPE.block_bytes, CPU, biased=True)
    plain = PagedPool(SHAPE, 40 * SHAPE.block_bytes, CPU)
    pages, others = pool.take(5), pool.take(5)
    entries = torch.randn(SHAPE.layers, 2, 70, SHAPE.kv_heads, SHAPE.head_dim)
    slots, twice = slots_of(pages, 71), slots_of(others, 72)
    kv = entries.clone()
    pool.write_entries(slots[:70], kv, torch.zeros(SHAPE.layers, 70, SHAPE.kv_heads))
    doubled = torch.cat([kv[:, :, :1], kv], dim=2)
    pool.write_entries(twice[:71], doubled)
    plain.write_entries(slots_of(plain.take(5), 71)[:70], kv)
    row = Row(5, 90, slots, biased=True)
    unbiased = forward(MODEL, pool, [row])[0]
    assert torch.equal(unbiased, forward(MODEL, plain, [Row(5, 90, slots)])[0])
    twofold = forward(MODEL, pool, [Row(5, 90, twice)])[0]
    bias = torch.zeros(SHAPE.layers, 1, SHAPE.kv_heads) + 2.0**0.5
    pool.write_bias(slots[:1], bias.log() * 2)  # the logarithm of two: as if it stood there twice
    biased = forward(MODEL, pool, [row, Row(5, 90, twice)])
    torch.testing.assert_close(biased[0], twofold, rtol=1e-3, atol=1e-3)
    assert not torch.equal(biased[0], unbiased)
    assert torch.equal(biased[1], twofold)
