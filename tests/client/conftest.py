"""A scripted daemon on a socket of its own for every test that asks for one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier_client import ahead, aio, pool, wire
from kvtier_client import client as sync
from tests.client.scripted import ScriptedDaemon
from tests.client.shells import SHELLS, Shells

LAYOUT = wire.Layout(
    model="tiny",
    dtype="uint8",
    layers=1,
    kv_heads=2,
    head_dim=256,
    block_tokens=4,
    block_bytes=4096,
)


@pytest.fixture
def layout() -> wire.Layout:
    return LAYOUT


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ScriptedDaemon]:
    with ScriptedDaemon(tmp_path / "kv.sock") as scripted:
        yield scripted


@pytest.fixture(params=SHELLS)
def shells(request: pytest.FixtureRequest) -> Iterator[Shells]:
    if "daemon" in request.fixturenames:
        request.getfixturevalue("daemon")  # it outlives its clients
    opened = Shells(request.param)
    yield opened
    opened.close()


@pytest.fixture
def client(
    shells: Shells, daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """A client of which nothing is too old or idle, however slow the machine is."""
    monkeypatch.setattr(ahead, "AHEAD_LIFE_S", 60.0)
    monkeypatch.setattr(pool, "POOL_IDLE_S", 60.0)
    opened = shells.open(daemon.path)
    yield opened
    opened.close()


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A close waits until the daemon has taken everything back, however slow it is."""
    for shell in (aio, sync):
        monkeypatch.setattr(shell, "CLOSE_TIMEOUT_S", 20.0)
