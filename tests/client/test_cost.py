"""Swap or recompute: the cheaper one by what was measured, with its prediction kept."""

import math

import pytest

from kvtier_client.cost import EWMA_WEIGHT, HISTORY_DECISIONS, Action, CostModel
from kvtier_client.errors import InvalidArgument

GB = 10**9


def test_the_cheaper_way_is_chosen() -> None:
    model = CostModel(prefill_tokens_per_s=1000)
    model.observe_swap("nvme", GB, 1.0)
    cheap = model.decide(tokens=2000, bytes=GB, tier="nvme")
    assert (cheap.action, cheap.predicted_swap_s, cheap.predicted_recompute_s) == (
        Action.SWAP, 1.0, 2.0,
    )  # fmt: skip
    assert model.decide(tokens=500, bytes=GB, tier="nvme").action is Action.RECOMPUTE
    assert model.decide(tokens=1000, bytes=GB, tier="nvme").action is Action.SWAP


def test_a_queue_makes_the_swap_dearer() -> None:
    model = CostModel(prefill_tokens_per_s=1000)
    model.observe_swap("nvme", GB, 1.0)
    assert model.decide(2000, GB, "nvme", queue_depth=1).action is Action.SWAP
    assert model.decide(2000, GB, "nvme", queue_depth=2).action is Action.RECOMPUTE


def test_the_first_observation_replaces_the_belief_and_later_ones_move_it() -> None:
    model = CostModel()
    assert not model.measured("dram")
    model.observe_swap("dram", 10 * GB, 1.0)
    assert model.bandwidth("dram") == 10 * GB
    model.observe_swap("dram", 5 * GB, 1.0)
    assert model.bandwidth("dram") == pytest.approx((10 - 5 * EWMA_WEIGHT) * GB)
    assert model.measured("dram")
    assert not model.measured("nvme")


def test_waiting_counts_even_for_small_transfers() -> None:
    model = CostModel(prefill_tokens_per_s=1000)
    model.observe_swap("nvme", GB, 1.0)
    model.observe_latency("nvme", 0.5)
    assert model.decide(100, 0, "nvme").predicted_swap_s == 0.5


@pytest.mark.parametrize(("size", "took_s"), [(0, 1.0), (100, 0.0), (100, math.inf), (-5, 1.0)])
def test_observations_that_say_nothing_are_left_out(size: int, took_s: float) -> None:
    model = CostModel()
    before = model.bandwidth("dram"), model.prefill_tokens_per_s
    model.observe_swap("dram", size, took_s)
    model.observe_prefill(size, took_s)
    assert (model.bandwidth("dram"), model.prefill_tokens_per_s) == before


def test_outcomes_are_kept_with_their_predictions_and_bounded() -> None:
    model = CostModel(prefill_tokens_per_s=1000)
    decision = model.decide(tokens=1000, bytes=10**12, tier="dram")
    assert decision.action is Action.RECOMPUTE
    for _ in range(HISTORY_DECISIONS + 5):
        model.record(decision, 2.0)
    assert len(model.history()) == HISTORY_DECISIONS
    assert model.history()[-1].error == 1.0
    assert model.mean_error(Action.RECOMPUTE) == 1.0
    assert model.mean_error(Action.SWAP) is None
    assert model.prefill_tokens_per_s == pytest.approx(500)


@pytest.mark.parametrize("outcome_s", [-1.0, math.nan, math.inf])
def test_an_outcome_that_is_no_duration_is_refused(outcome_s: float) -> None:
    model = CostModel()
    with pytest.raises(InvalidArgument, match="no duration"):
        model.record(model.decide(1, 1, "dram"), outcome_s)
    assert model.history() == []


def test_wrong_arguments_are_refused() -> None:
    model = CostModel()
    with pytest.raises(InvalidArgument, match="tiers are dram, nvme, remote"):
        model.decide(1, 1, "tape")
    with pytest.raises(InvalidArgument, match="tape"):
        model.observe_latency("tape", 1.0)
    with pytest.raises(InvalidArgument, match="negative"):
        model.decide(-1, 1, "dram")
    with pytest.raises(InvalidArgument, match="positive"):
        CostModel(prefill_tokens_per_s=0)
