"""What only an event loop can do: cancel a call at any moment without losing or leaking a slot."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier_client import wire
from kvtier_client.aio import AsyncClient
from kvtier_client.errors import ConnectionLost, UnknownSession
from tests.client.scripted import ScriptedDaemon


def run(path: Path, scene: Callable[[AsyncClient], Any]) -> None:
    async def play() -> None:
        async with AsyncClient(path, deadline_s=30) as client:
            await scene(client)

    asyncio.run(asyncio.wait_for(play(), 60))


def test_leases_are_async_context_managers(daemon: ScriptedDaemon, layout: wire.Layout) -> None:
    async def scene(client: AsyncClient) -> None:
        session = await client.open_session([layout])
        async with client.reserve(layout, 3) as lease:
            lease.blocks[0][:] = 7
            await lease.commit(session, 0, [0], 4)
        async with session.acquire((0, 1)) as read:
            assert int(read.blocks[0][9]) == 7
            with pytest.raises(ValueError, match="read-only"):
                read.blocks[0][:] = 1
        assert daemon.slots - len(daemon.free) == 1

    run(daemon.path, scene)


def test_a_cancelled_reserve_gives_its_slots_back(
    daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    async def scene(client: AsyncClient) -> None:
        await client.register_layout(layout)
        for rounds in range(12):  # cancelled before, while and after the grant comes
            task = asyncio.ensure_future(client.reserve(layout, 4).__aenter__())
            for _ in range(rounds):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                await task.result().close()
        await client.flush()
        for _ in range(2):
            await client.lookup([], [])
        assert len(daemon.free) == daemon.slots
        assert client._core.protocol.held == {}

    run(daemon.path, scene)


def test_a_cancelled_copy_ends_before_its_slots_are_given_back(
    daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    copying, go_on = threading.Event(), threading.Event()

    async def scene(client: AsyncClient) -> None:
        session = await client.open_session([layout])
        client._driver.inline_copy_bytes = 0

        def fill(views: Any, i: int, j: int) -> None:
            copying.set()
            assert go_on.wait(30)

        task = asyncio.ensure_future(session.swap_out(fill, range(16), 4))
        await asyncio.to_thread(copying.wait, 30)
        task.cancel()
        await session.nodes()
        assert daemon.seen["Abort"] == 0
        go_on.set()
        await asyncio.wait([task])
        assert task.cancelled()
        await session.nodes()
        assert daemon.seen["Abort"] == 1
        assert daemon.blocks == {}

    run(daemon.path, scene)


def test_many_tasks_share_one_client(daemon: ScriptedDaemon, layout: wire.Layout) -> None:
    async def scene(client: AsyncClient) -> None:
        session = await client.open_session([layout])

        async def one(k: int) -> None:
            out = np.full((1, 4096), k, np.uint8)
            back = np.zeros_like(out)
            for _ in range(10):
                await session.swap_out(out, k, 4, ack=bool(k % 2))
                await session.swap_in(back, k)
                assert (back == out).all()

        await asyncio.gather(*(one(k) for k in range(8)))

    run(daemon.path, scene)


def test_a_client_belongs_to_one_loop(daemon: ScriptedDaemon) -> None:
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    client = AsyncClient(daemon.path)
    first.run_until_complete(client.connect())
    with pytest.raises(ConnectionLost, match="another event loop"):
        second.run_until_complete(client.connect())
    first.run_until_complete(client.close())
    first.close()
    second.close()


@pytest.mark.usefixtures("patience")
def test_slots_of_a_commit_that_fails_while_its_client_closes_are_given_back(
    daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    async def scene(client: AsyncClient) -> None:
        session = await client.open_session([layout])
        await client.flush()
        daemon.sessions.clear()
        await session.swap_out(np.zeros((16, 4096), np.uint8), range(16), 4, ack=False)

    with pytest.raises(UnknownSession):
        run(daemon.path, scene)
    assert daemon.leases == daemon.blocks == {}
    assert len(daemon.free) == daemon.slots
