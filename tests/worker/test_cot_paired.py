"""The interval of a paired difference, against published values and against its own promise."""

import numpy as np
import pytest

from kvtier_worker.cot.paired import Paired


def test_a_published_example() -> None:
    """Airway hyper-responsiveness before and after a transplantation, 21 children: -0.508 .. -0.013
    (Fagerland, Lydersen, Laake, "Recommended tests and confidence intervals for paired binomial
    proportions", Statistics in Medicine 33 (2014), Wald with Bonett-Price adjustment)."""
    paired = Paired(pairs=21, both=1, only_first=7, only_second=1)
    assert paired.delta_points == pytest.approx(-28.57, abs=0.01)
    low, high = paired.interval_points
    assert (low, high) == pytest.approx((-50.8, -1.3), abs=0.05)


def test_pairs_are_counted() -> None:
    outcomes = [(True, True)] * 5 + [(True, False)] * 3 + [(False, True)] + [(False, False)]
    paired = Paired.of(outcomes)
    assert paired == Paired(pairs=10, both=5, only_first=3, only_second=1)
    assert (paired.first_share, paired.second_share) == (0.8, 0.6)
    assert paired.delta_points == pytest.approx(-20)


def test_no_discordant_pair_is_no_proof_of_no_difference() -> None:
    paired = Paired(pairs=4000, both=4000, only_first=0, only_second=0)
    assert paired.delta_points == 0
    assert paired.interval_points == pytest.approx((-0.0693, 0.0693), abs=0.0001)


def test_without_pairs_anything_is_possible() -> None:
    assert Paired.of([]).interval_points == (-100, 100)


@pytest.mark.parametrize(("first", "second"), [(0, 0), (5, 5), (12, 3), (40, 60)])
def test_so_many_pairs_make_the_interval_so_narrow(first: int, second: int) -> None:
    """The sample size keeps its promise if the shares stay what they were in the pilot."""
    pilot = Paired(1000, 900, first, second)
    pairs = pilot.pairs_for(0.2)

    def half_width(pairs: int) -> float:
        low, high = scaled(pilot, pairs).interval_points
        return (high - low) / 2

    assert half_width(pairs) <= 0.2 * 1.03  # counts are whole numbers
    assert half_width(pairs * 9 // 10) > 0.2


def scaled(pilot: Paired, pairs: int) -> Paired:
    """As many pairs, of which as large a share is discordant, added problems included."""
    first, second = (
        round((n + 1) * (pairs + 2) / (pilot.pairs + 2)) - 1
        for n in (pilot.only_first, pilot.only_second)
    )
    return Paired(pairs, pairs - first - second, first, second)


def test_one_percent_of_discordance_takes_nearly_ten_thousand_pairs() -> None:
    pilot = Paired(100_000, 99_000, 500, 500)
    assert pilot.pairs_for(0.2) == pytest.approx(0.01 * (1.959964 / 0.002) ** 2, rel=0.01)


@pytest.mark.parametrize("rates", [(0.004, 0.004), (0.01, 0.005)])
def test_the_interval_covers_the_truth_as_often_as_it_says(rates: tuple[float, float]) -> None:
    random = np.random.default_rng(0)
    shares = [1 - sum(rates), *rates]
    truth = 100 * (rates[1] - rates[0])
    covered = 0
    for _ in range(2000):
        both, first, second = random.multinomial(2000, shares).tolist()
        low, high = Paired(2000, both, first, second).interval_points
        covered += low <= truth <= high
    assert 0.935 * 2000 <= covered <= 0.985 * 2000
