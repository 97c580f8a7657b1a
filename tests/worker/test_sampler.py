"""Tokens are chosen greedily, or by draws that depend on seed and position only."""

import numpy as np
import pytest

from kvtier_worker.sampler import Sampling, choose

LOGITS = np.log(np.array([0.1, 0.6, 0.05, 0.25], np.float32))


def test_greedy_takes_the_first_of_the_largest() -> None:
    assert choose(np.array([1, 3, 3, 2], np.float32), Sampling(), 5) == 1


def test_a_draw_repeats_for_its_seed_and_position() -> None:
    sampling = Sampling(temperature=1.0, seed=3)
    draws = [choose(LOGITS, sampling, at) for at in range(64)]
    assert draws == [choose(LOGITS, sampling, at) for at in range(64)]
    assert draws != [choose(LOGITS, Sampling(temperature=1.0, seed=4), at) for at in range(64)]
    assert len(set(draws)) > 1


def test_draws_follow_the_distribution() -> None:
    counts = np.zeros(4)
    for at in range(4000):
        counts[choose(LOGITS, Sampling(temperature=1.0, seed=1), at)] += 1
    np.testing.assert_allclose(counts / 4000, np.exp(LOGITS), atol=0.03)


def test_a_low_temperature_draws_the_largest() -> None:
    assert {choose(LOGITS, Sampling(temperature=0.01, seed=1), at) for at in range(200)} == {1}


@pytest.mark.parametrize(("temperature", "seed"), [(-1.0, 0), (float("nan"), 0), (1.0, -1)])
def test_settings_that_mean_nothing_are_refused(temperature: float, seed: int) -> None:
    with pytest.raises(ValueError, match="temperature"):
        Sampling(temperature, seed)
