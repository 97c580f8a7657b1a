"""Random histories of clients, media faults and crashes, checked against the simple model.

After every step the books balance, every reader still sees what was committed under its names,
every HELD block is there with its bytes, and nothing is there that nobody committed. At the end of
every history all that was taken comes back.
"""

import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.machine import Machine
from tests.model.walk import history, replay

LONG = int(os.environ.get("KVTIERD_MODEL_EXAMPLES", "0"))
"""Histories of the longer profile; 0 is the short one of `make test`."""
SEEDS = range(LONG or 24)


@pytest.mark.timeout(3600 if LONG else 120)
def test_histories_agree_with_the_model() -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=LONG or 40,
            stateful_step_count=80 if LONG else 40,
            deadline=None,
            derandomize=not LONG,
            phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_long_walks_agree_with_the_model(seed: int) -> None:
    replay(history(seed, 200))
