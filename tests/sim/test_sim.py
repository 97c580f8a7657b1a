"""Histories of the whole daemon and its clients under faults; `make sim` runs many more.

After every step in which the core has run, its books balance. No reader sees what was not committed
under that name, no acknowledged HELD block is lost unless its medium lost it, every request has one
reply or a closed connection, and at the end all that was taken comes back.
"""

import pytest

from tests.sim.run import History

SEEDS = 24


@pytest.mark.parametrize("seed", range(SEEDS))
def test_nothing_is_lost_and_nothing_is_foreign(seed: int) -> None:
    print(f"replay with: python -m tests.sim {seed}")
    History(seed).run()


def test_a_seed_replays_exactly() -> None:
    runs = [History(99, 800), History(99, 800)]
    for run in runs:
        run.run()
    assert runs[0].sim.digest == runs[1].sim.digest
    assert runs[0].counts == runs[1].counts
