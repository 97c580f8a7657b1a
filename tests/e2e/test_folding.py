"""Folded pages of a real daemon: kept over kill -9 within their grace period, seen by operators."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvtier_client import wire
from tests.client.shells import SHELLS, Shells
from tests.support.daemon import DaemonProcess

BLOCK = 64 << 10


@pytest.fixture(params=SHELLS)
def client(request: pytest.FixtureRequest, daemon: DaemonProcess) -> Iterator[Any]:
    shells = Shells(request.param)
    yield shells.open(daemon.client_path)
    shells.close()


def test_a_step_is_folded_and_comes_back_as_it_was_after_a_kill(
    client: Any, daemon: DaemonProcess
) -> None:
    layout = wire.Layout("tiny", "uint8", 1, 8, 256, 16, BLOCK)
    session = client.open_session([layout], name="thought")
    out = np.random.default_rng(0).integers(0, 256, (12, BLOCK), dtype=np.uint8)
    session.swap_out(out, range(12), 16, ack=False)
    session.fold(0, (0, 4), 0.0, kept=4, ack=False)
    session.fold(0, (4, 12), 3600.0, kept=4)
    client.flush()
    daemon.kill()
    daemon.start()
    [root] = session.nodes()
    folds = [(x.pages, x.kept, 0.0 < x.grace_left_s <= 3600.0) for x in root.folds]
    assert folds == [((0, 4), 4, False), ((4, 12), 4, True)]
    shown = subprocess.run(
        [sys.executable, "-m", "kvtierd.ctl.main", "--socket", str(daemon.admin_path), "tree",
         "thought", "--json"], capture_output=True, check=True, text=True,
    )  # fmt: skip
    [node] = json.loads(shown.stdout)["nodes"]
    assert [fold["pages"] for fold in node["folds"]] == [4, 8]
    found = session.unfold(0, (4, 12))
    assert (found.leading, found.gone) == (8, ())
    back = np.zeros_like(out[4:])
    session.swap_in(back, range(4, 12))
    assert (back == out[4:]).all()
    counters = daemon.admin("stats")["counters"]
    assert (counters["unfolds"], counters["unfold_misses"]) == (1, 0)


def test_steps_that_were_on_their_way_at_a_kill_come_back_as_they_were(
    client: Any, daemon: DaemonProcess
) -> None:
    layout = wire.Layout("tiny", "uint8", 1, 8, 256, 16, BLOCK)
    session = client.open_session([layout])
    out = np.random.default_rng(1).integers(0, 256, (12, BLOCK), dtype=np.uint8)
    for first in range(0, 12, 2):
        pages = (first, first + 2)
        session.swap_out(out[first : first + 2], pages, 16, ack=False)
        session.fold(0, pages, 3600.0, kept=4, ack=False)
        if first == 6:
            daemon.kill()
            daemon.start()
    for first in range(0, 12, 2):
        assert session.unfold(0, (first, first + 2)).gone == ()
    client.flush()
    back = np.zeros_like(out)
    session.swap_in(back, range(12))
    assert (back == out).all()
