"""kill -9 of daemon and clients at random moments, also in the middle of a first start.

`KVTIERD_FAULT_CYCLES` sets the number of kills; `python -m tests.fault` does the same and counts.
"""

import os
import random
import time
from pathlib import Path

import pytest

from tests.fault.checker import Promises
from tests.fault.cycles import HOUSE_CYCLES, START_S, Totals, run
from tests.support.fixtures import MakeDaemon
from tests.support.seeds import drawn_seed

CYCLES = int(os.environ.get("KVTIERD_FAULT_CYCLES", "12"))
HOUSES = 4
FIRST_STARTS = 3


@pytest.mark.timeout(120 + 20 * CYCLES)
def test_random_kills_lose_nothing_and_show_nobody_what_is_not_his(tmp_path: Path) -> None:
    seed = drawn_seed("KVTIERD_FAULT_CYCLES")
    totals = Totals()
    run(tmp_path, CYCLES, seed, totals, min(HOUSE_CYCLES, -(-CYCLES // HOUSES)))
    print(*totals.lines(), sep="\n")
    assert totals.cycles.total() == CYCLES


def test_a_first_start_that_is_killed_leaves_nothing_in_the_way(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    for _ in range(FIRST_STARTS):
        daemon.launch()
        time.sleep(random.uniform(0.0, START_S))
        daemon.kill()
    daemon.start()
    promises = Promises()
    with daemon.client() as client:
        promises.swap_out(client, promises.open(client), 8)
        daemon.restart()
        client.come_back()
        promises.check(client)
    assert len(daemon.holders()) == 1
