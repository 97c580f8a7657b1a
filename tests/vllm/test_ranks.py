"""Three ranks, each with a third of the heads, save and restore together."""

from pathlib import Path

import pytest

from tests.vllm.engine import connector, engine
from tests.vllm.stage import (
    AT_ONCE,
    POOL,
    Run,
    assert_nothing_held,
    prompts,
    small_daemon,
    speak,
    wait_until_connected,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
RANKS = 3
"""The model has 9 heads for queries and 3 for keys and values."""


def test_ranks_restore_what_they_saved(plain: Run, tmp_path: Path) -> None:
    daemon = small_daemon(tmp_path / "d")
    try:
        daemon.start()
        transfer = connector(daemon.client_path)
        with engine(tmp_path / "ranks", transfer, tensor_parallel_size=RANKS, **POOL) as ranks:
            wait_until_connected(daemon, RANKS + 1)
            run = speak(ranks, prompts(AT_ONCE))
            assert run.texts == plain.texts
            assert run.counts.preemptions > 0
            assert run.counts.recomputed_tokens <= run.counts.preemptions
            assert_nothing_held(daemon)
    finally:
        daemon.end()
    daemon.assert_no_faults()
