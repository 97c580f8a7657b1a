"""Both shells behind one face, so that a promise is tested once and holds for each of them."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import uvloop

from kvtier_client.aio import AsyncClient, AsyncSession, AsyncTicket, Opening, _Ending
from kvtier_client.client import Client

CALL_TIMEOUT_S = 60.0
JOIN_S = 30.0
SHELLS = ["sync", "asyncio", "uvloop"]


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self, new: Callable[[], asyncio.AbstractEventLoop]) -> None:
        self.loop = new()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(CALL_TIMEOUT_S)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(CALL_TIMEOUT_S)
        self.loop.close()


class Blocking:
    """An async handle whose calls block until they are over."""

    def __init__(self, loop: Loop, handle: Any) -> None:
        self._loop, self._handle = loop, handle

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._handle, name)
        if not callable(found) or name.startswith("_"):
            return found

        def called(*args: Any, **kwargs: Any) -> Any:
            args = tuple(a._handle if isinstance(a, Blocking) else a for a in args)
            kwargs = {k: v._handle if isinstance(v, Blocking) else v for k, v in kwargs.items()}
            result = found(*args, **kwargs)
            if inspect.iscoroutine(result):
                result = self._loop.run(result)
            elif isinstance(result, Opening):
                result = self._loop.run(_awaited(result))
            if isinstance(result, AsyncSession | AsyncTicket | _Ending):
                return Blocking(self._loop, result)
            return result

        return called

    def __enter__(self) -> "Blocking":
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


async def _awaited(opening: "Opening[Any]") -> Any:
    return await opening


class Shells:
    """Opens clients of one kind, and closes them at the end of the test."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._loop = None if kind == "sync" else Loop(
            uvloop.new_event_loop if kind == "uvloop" else asyncio.new_event_loop
        )  # fmt: skip
        self._clients: list[Any] = []

    def open(self, path: Path, **options: Any) -> Any:
        options.setdefault("deadline_s", 30.0)
        client: Any = Client(path, **options)
        if self._loop is not None:
            client = Blocking(self._loop, AsyncClient(path, **options))
        self._clients.append(client)
        return client

    def close(self) -> None:
        for client in self._clients:
            client.close()
        if self._loop is not None:
            self._loop.close()


class Caller:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.problem: BaseException | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as problem:
            self.problem = problem

    def end(self) -> BaseException | None:
        """What it raised. Errors: AssertionError when it does not end."""
        self._thread.join(JOIN_S)
        assert not self._thread.is_alive()
        return self.problem
