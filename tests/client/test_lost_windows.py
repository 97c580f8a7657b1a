"""A window whose lease is lost while it is copied: what was copied counts for nothing."""

from typing import Any

import numpy as np

from kvtier_client import wire
from kvtier_client.client import Client
from tests.client.scripted import ScriptedDaemon


def test_a_window_whose_lease_was_lost_is_read_again(
    daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    out = np.random.default_rng(1).integers(0, 256, (20, 4096), dtype=np.uint8)
    back = np.zeros_like(out)
    with Client(daemon.path, deadline_s=20.0) as client:
        session = client.open_session([layout])
        session.swap_out(out, range(20), 4)
        lives = ["kill"]

        def drain(views: Any, i: int, j: int) -> None:
            for k, view in zip(range(i, j), views, strict=True):
                back[k] = view
            if lives:  # the daemon loses the lease, and others write to the slots
                back[i:j] = 0
                daemon.lose_leases = True
                daemon.fault = lambda request: (
                    lives.pop() if lives and isinstance(request, wire.Describe) else ""
                )
                session.nodes()

        session.swap_in(drain, range(20))
        assert (back == out).all()
        assert client.stats.repeated_windows == 1
