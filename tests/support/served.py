"""A whole daemon on the event loop of a test's own process, so that a test can break its parts."""

import asyncio
import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from kvtierd import config as configuration
from kvtierd.daemon import Daemon
from kvtierd.start import start
from tests.support.raw import RawClient
from tests.support.wait import until

T = TypeVar("T")
WAIT_S = 30.0


def small_config(place: Path, **sections: Any) -> configuration.Config:
    """Small media, and memory that ends with the daemon."""
    wanted: dict[str, Any] = {
        "runtime_dir": str(place / "run"), "state_dir": str(place / "state"),
        "arena": {"huge_pages": "off", "mlock": "off", "prefault": False,
                  "slab_bytes": 512 << 10, "min_block_bytes": 4096},
        "spill": {"capacity_bytes": 4 << 20, "slab_bytes": 1 << 20, "io_threads": 2},
        "recovery": {"memory": "off"},
        "tenants": [{"name": "t", "uids": ["self"], "arena_bytes": 2 << 20}],
    }  # fmt: skip
    for name, section in sections.items():
        known = wanted.get(name, {})
        wanted[name] = known | section if isinstance(section, dict) else section
    return configuration.parse(wanted)


class Served:
    """A daemon that serves while a scene plays in another thread."""

    def __init__(self, place: Path, **sections: Any) -> None:
        config = small_config(place, **sections)
        self.client_path, self.admin_path = config.socket.client_path, config.socket.admin_path
        self.daemon = Daemon(config, start(config), None, keep_memory=False)

    def play(self, scene: Callable[["Served"], None]) -> None:
        """Serve until the scene is over."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve(scene))

    async def _serve(self, scene: Callable[["Served"], None]) -> None:
        serving = asyncio.create_task(self.daemon.serve())
        self._loop = asyncio.get_running_loop()
        try:
            await asyncio.to_thread(self._begin, scene)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            await serving

    def _begin(self, scene: Callable[["Served"], None]) -> None:
        until(self._serves, "the daemon serves")
        scene(self)

    def _serves(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            return probe.connect_ex(self.admin_path) == 0

    def on_loop(self, call: Callable[[], T]) -> T:
        """What a call returns that is made on the daemon's own thread."""

        async def made() -> T:
            return call()

        return asyncio.run_coroutine_threadsafe(made(), self._loop).result(WAIT_S)

    def client(self, **options: bytes) -> RawClient:
        """A client that has said HELLO."""
        client = RawClient(self.client_path, **options)
        client.hello()
        return client

    def stats(self) -> dict[str, Any]:
        """What an operator sees."""
        with RawClient(self.admin_path) as operator:
            report: dict[str, Any] = operator.ask("stats")[4]
        return report

    def tenant(self) -> dict[str, Any]:
        """The gauges of the only tenant."""
        gauges: dict[str, Any] = self.stats()["tenants"]["t"]
        return gauges

    def reasons(self) -> list[str]:
        """Why the daemon is not well."""
        reasons: list[str] = self.stats()["health"]["reasons"]
        return reasons

    def told(self, beginning: str) -> list[str]:
        """Those reasons that begin like this; a busy host may give others."""
        return [reason for reason in self.reasons() if reason.startswith(beginning)]

    def faults(self) -> int:
        """How many faults it has noticed inside itself."""
        told = self.told("faults inside")
        return int(re.findall(r"\d+", told[0])[0]) if told else 0
