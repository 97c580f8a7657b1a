"""After every hostile request the daemon's books equal a recount of its tables."""

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from kvtierd import config as configuration
from kvtierd.daemon import Daemon
from kvtierd.start import start
from tests.fuzz.test_frames import attack, exchange, many, plausible
from tests.support.raw import RawClient
from tests.support.wait import until


def small_config(place: Path) -> configuration.Config:
    return configuration.parse(
        {
            "runtime_dir": str(place / "run"), "state_dir": str(place / "state"),
            "arena": {"huge_pages": "off", "mlock": "off", "prefault": False,
                      "slab_bytes": 512 << 10, "min_block_bytes": 4096},
            "spill": {"capacity_bytes": 4 << 20, "slab_bytes": 1 << 20, "io_threads": 2},
            "recovery": {"memory": "off"},
            "tenants": [{"name": "t", "uids": ["self"], "arena_bytes": 2 << 20}],
        }
    )  # fmt: skip


class Books:
    """A daemon on this thread's loop, and a recount that another thread may ask for."""

    def __init__(self, place: Path) -> None:
        config = small_config(place)
        self.path = config.socket.client_path
        self.daemon = Daemon(config, start(config), None, keep_memory=False)

    async def run(self, requests: list[list[Any]]) -> None:
        serving = asyncio.create_task(self.daemon.serve())
        self._loop = asyncio.get_running_loop()
        try:
            await asyncio.to_thread(self._attack, requests)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            await serving

    def _attack(self, requests: list[list[Any]]) -> None:
        until(self._serves, "the daemon serves")
        with RawClient(self.path) as client:
            attack(client)
            for request in requests:
                exchange(client, [request])
                self.recount()
        self.recount()

    def _serves(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            return probe.connect_ex(self.path) == 0

    def recount(self) -> None:
        async def validate() -> None:
            self.daemon.state.validate()

        asyncio.run_coroutine_threadsafe(validate(), self._loop).result(10.0)


@many
@given(st.lists(plausible, min_size=5, max_size=40))
def test_the_books_equal_a_recount(
    tmp_path_factory: pytest.TempPathFactory, requests: list[list[Any]]
) -> None:
    books = Books(tmp_path_factory.mktemp("b"))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(books.run(requests))
