"""After every hostile request the daemon's books equal a recount of its tables."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.test_frames import attack, exchange, many, plausible
from tests.support.raw import RawClient
from tests.support.served import Served


@many
@given(st.lists(plausible, min_size=5, max_size=40))
def test_the_books_equal_a_recount(
    tmp_path_factory: pytest.TempPathFactory, requests: list[list[Any]]
) -> None:
    def scene(served: Served) -> None:
        recount = served.daemon.state.validate
        with RawClient(served.client_path) as client:
            attack(client)
            for request in requests:
                exchange(client, [request])
                served.on_loop(recount)
        served.on_loop(recount)

    Served(tmp_path_factory.mktemp("b")).play(scene)
