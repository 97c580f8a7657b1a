"""Attention to a folded step brings it back, and hysteresis keeps that from thrashing."""

from itertools import pairwise

import numpy as np
import pytest
import torch

import kvtier_client as kv
from kvtier_worker.engine import Engine
from kvtier_worker.folding import AttentionTrigger, FoldPolicy
from kvtier_worker.model import Watch
from kvtier_worker.swap import DaemonStore
from kvtier_worker.thoughts import Form
from kvtier_worker.tile import Row, build_tile
from tests.worker.test_fold import KEEP, MODEL, RULES, submit_all
from tests.worker.tiny import CPU, WAIT_S, forward, slots_of, tiny_pool


def trigger_engine(client: kv.Client, pages: int, trigger: AttentionTrigger) -> Engine:
    pool = tiny_pool(MODEL, pages)
    store = DaemonStore(client, pool, MODEL.config.name, WAIT_S)
    folding = FoldPolicy(RULES, keep=KEEP, attention=trigger)
    return Engine(MODEL, pool, store, folding=folding)


def test_masses_are_shares_of_all_attention_and_change_no_bit() -> None:
    pool = tiny_pool(MODEL, 12)
    slots = slots_of(pool.take(6), 90)
    entries = torch.randn(3, 2, 90, 2, 16)
    pool.write_entries(slots, entries)
    groups = np.repeat([1, 0, 2], 30)
    rows = [Row(7, 120, slots, groups=groups), Row(9, 50, slots[:40])]
    tile = build_tile(rows, MODEL.tile_sizes, pool.scratch_slot, CPU)
    masses = torch.zeros(2, tile.group_count)
    watched = MODEL.logits(MODEL.forward(tile, pool.kv, Watch(masses=masses)))
    pool.write_entries(slots, entries)
    plain = forward(MODEL, pool, [Row(7, 120, slots), Row(9, 50, slots[:40])])
    assert torch.equal(watched, plain)
    assert masses.shape == (2, 3)
    assert (masses[0] > 0).all() and (masses <= 1 + 1e-6).all()
    assert torch.allclose(masses[1], torch.tensor([1.0, 0.0, 0.0]))


def test_attention_unfolds_and_idleness_folds_again(client: kv.Client) -> None:
    eager = AttentionTrigger(0.02, 0.01, 0.005, idle_tokens=3, rest_tokens=10)
    outputs = []
    for pages in (200, 14):
        engine = trigger_engine(client, pages, eager)
        sequences = submit_all(engine)
        engine.run()
        figures = engine.figures("fold").folding
        assert figures.unfolds > 0
        assert figures.misses == 0
        assert {note.cause for note in engine.folder.notes} == {"attention"}
        assert engine.pool.free_pages == engine.pool.pages
        outputs.append([s.generated for s in sequences])
        for s in sequences:
            unfolds = [e for e in s.thoughts.events if e.form is Form.UNFOLDED]
            for step in {event.step for event in unfolds}:
                times = [event.at for event in unfolds if event.step == step]
                assert all(b - a >= eager.rest_tokens for a, b in pairwise(times))
    assert outputs[0] == outputs[1]


def test_without_attention_nothing_is_unfolded(client: kv.Client) -> None:
    engine = trigger_engine(client, 200, AttentionTrigger(1.0, 1.0, 0.5))
    submit_all(engine)
    engine.run()
    assert engine.figures("fold").folding.unfolds == 0


@pytest.mark.parametrize("shares", [(0.5, 0.6, 0.1), (0.5, 0.2, 0.3), (1.5, 0.2, 0.1)])
def test_thresholds_that_would_thrash_are_refused(shares: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="shares"):
        AttentionTrigger(*shares)
