"""Drives operations on an asyncio event loop (uvloop too), for any number of tasks.

The loop watches the raw socket; replies wake the tasks that wait for them. Large copies run in
the loop's thread pool, and a cancelled task still waits until its copy is over, since the slots
may not be given back before.
"""

import asyncio
import contextlib
import logging
import socket
from typing import Any, Final

from kvtier_client.core import Core
from kvtier_client.effects import Op, Pause, Run, T, Wait
from kvtier_client.errors import ConnectionLost, KvtierError, Timeout
from kvtier_client.link import (
    TEND_PERIOD_S,
    Greeting,
    Pace,
    is_final,
    new_socket,
    no_daemon,
    receive,
)
from kvtier_client.protocol import Pending, Phase, ended

INLINE_COPY_BYTES: Final = 1 << 20
"""Copies up to this size are not worth a hop to a thread."""
GREETING_TIMEOUT_S: Final = 10.0
"""A daemon that accepts but does not answer HELLO for so long is tried again."""
log = logging.getLogger("kvtier_client")


class AsyncDriver:
    """The async shell's engine; belongs to the loop of its first call."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.closed = False
        self.inline_copy_bytes = INLINE_COPY_BYTES
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sock: socket.socket | None = None
        self._unsent = b""
        self._waits: set[asyncio.Future[None]] = set()
        self._connector: asyncio.Task[None] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._reason: object = "not connected yet"
        self._pace = Pace()

    # ----------------------------------------------------------- operations

    async def run(self, op: Op[T]) -> T:
        """Carry an operation out and return its result. Errors: whatever it raises."""
        self._check()
        protocol = self.core.protocol
        try:
            effect = next(op)
            while True:
                if protocol.urgent or type(effect) is not Run:
                    self.flush()
                try:
                    if type(effect) is Wait:
                        await self._wait(effect.pendings, effect.timeout_s)
                    elif type(effect) is Run:
                        await self._run(effect)
                    elif type(effect) is Pause:
                        await asyncio.sleep(effect.duration_s)
                except BaseException as problem:
                    effect = op.throw(problem)
                else:
                    effect = op.send(None)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            if protocol.urgent:
                self.flush()

    def _check(self) -> None:
        self.core.check_process()
        if self.closed:
            raise ConnectionLost("this client is closed: open a new one")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise ConnectionLost(
                "this client belongs to another event loop: open one client for each loop"
            )

    async def _run(self, effect: Run) -> None:
        if effect.size_bytes <= self.inline_copy_bytes:
            effect.work()
            return
        assert self._loop is not None
        copy = self._loop.run_in_executor(None, effect.work)
        cancelled: asyncio.CancelledError | None = None
        while not copy.done():
            try:
                await asyncio.shield(copy)
            except asyncio.CancelledError as problem:
                cancelled = problem
            except BaseException:
                break
        if cancelled is not None:
            copy.exception()  # seen here, so that it is not reported as never retrieved
            raise cancelled
        copy.result()

    async def _wait(self, pendings: tuple[Pending, ...], timeout_s: float) -> None:
        assert self._loop is not None
        if ended(pendings):
            return
        self._check()
        done: asyncio.Future[None] = self._loop.create_future()

        def check() -> None:
            if not done.done() and ended(pendings):
                done.set_result(None)

        for one in pendings:
            one.watchers.append(check)
        timer = self._loop.call_later(timeout_s, self._too_late, done, timeout_s)
        self._waits.add(done)
        try:
            self._ensure_connecting()
            await done
        finally:
            timer.cancel()
            self._waits.discard(done)
            for one in pendings:
                with contextlib.suppress(ValueError):
                    one.watchers.remove(check)

    def _too_late(self, done: "asyncio.Future[None]", timeout_s: float) -> None:
        if done.done():
            return
        if self._sock is None:
            done.set_exception(no_daemon(self.core.path, self._reason, timeout_s))
            return
        done.set_exception(
            Timeout(
                f"the daemon did not answer within {timeout_s:.1f} s: it is busy or stuck; ask "
                "again, or allow more with deadline_s"
            )
        )

    # ------------------------------------------------------------ the socket

    def flush(self) -> None:
        """Send what is queued, if there is a connection; the rest goes when there is room."""
        protocol, sock = self.core.protocol, self._sock
        if sock is None or not protocol.sending:
            return
        data = self._unsent + protocol.take_outbox()
        waiting = bool(self._unsent)
        self._unsent = data
        if not waiting:
            self._writable(sock)

    def _writable(self, sock: socket.socket) -> None:
        assert self._loop is not None
        try:
            sent = sock.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError as problem:
            self._drop(sock, problem)
            return
        self._unsent = self._unsent[sent:]
        if self._unsent:
            self._loop.add_writer(sock, self._writable, sock)
        else:
            self._loop.remove_writer(sock)

    def _readable(self, sock: socket.socket) -> None:
        core = self.core
        try:
            core.protocol.receive(receive(sock))
            core.handle_events()
            if core.protocol.leaving:
                raise ConnectionLost("the daemon is stopping")
        except BlockingIOError:
            return
        except (OSError, ConnectionLost) as problem:
            self._drop(sock, problem)
        except Exception as problem:
            self._drop(sock, problem)
            self._fail_waits(problem)
        self.flush()

    def _drop(self, sock: socket.socket, reason: object) -> None:
        if self._sock is not sock:
            return
        assert self._loop is not None
        self._loop.remove_reader(sock)
        self._loop.remove_writer(sock)
        self._sock, self._unsent, self._reason = None, b"", reason
        self.core.protocol.lost()
        sock.close()
        if self._waits:
            self._ensure_connecting()

    def _fail_waits(self, problem: Exception) -> None:
        for done in list(self._waits):
            if not done.done():
                done.set_exception(problem)

    def _ensure_connecting(self) -> None:
        if self._sock is None and self._connector is None and not self.closed:
            assert self._loop is not None
            self._connector = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        """Connect for as long as anybody waits or something is to be kept alive."""
        assert self._loop is not None
        try:
            while self._sock is None and (self._waits or self._needed()) and not self.closed:
                await asyncio.sleep(self._pace.delay_s(self.core.now_s()))
                try:
                    await asyncio.wait_for(self._greet(), GREETING_TIMEOUT_S)
                except Exception as problem:
                    self._reason = problem
                    if is_final(problem) and not isinstance(problem, TimeoutError):
                        self._fail_waits(problem)
                        return
                else:
                    self._pace.connected(self.core.now_s())
        finally:
            self._connector = None
        self.flush()
        if self._keeper is None and not self.closed:
            self._keeper = self._loop.create_task(self._keep())

    def _needed(self) -> bool:
        protocol = self.core.protocol
        return bool(protocol.unsettled or protocol.sessions or protocol.held)

    async def _greet(self) -> None:
        """One connection up to WELCOME."""
        assert self._loop is not None
        core, protocol = self.core, self.core.protocol
        sock, greeting = new_socket(), Greeting(core)
        try:
            await self._loop.sock_connect(sock, core.path)
            protocol.open()
            with contextlib.suppress(BrokenPipeError):  # a daemon that refuses says why, and closes
                await self._loop.sock_sendall(sock, protocol.take_outbox())
            while True:
                await self._until_readable(sock)
                if greeting.receive(sock):
                    break
            self._sock = sock
            self._loop.add_reader(sock, self._readable, sock)
        except BaseException:
            if protocol.phase is not Phase.DOWN:
                protocol.lost()
            sock.close()
            raise
        finally:
            greeting.close()

    async def _until_readable(self, sock: socket.socket) -> None:
        assert self._loop is not None
        ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(sock, _set, ready)
        try:
            await ready
        finally:
            self._loop.remove_reader(sock)

    # --------------------------------------------------------- while nobody calls

    async def _keep(self) -> None:
        """Renew, give back what is idle, and come back after a restart of the daemon."""
        while not self.closed:
            await asyncio.sleep(TEND_PERIOD_S)
            try:
                if self._sock is not None:
                    self.core.tidy()
                    self.flush()
                elif self._needed():
                    self._ensure_connecting()
            except KvtierError as problem:
                log.debug("kvtierd is away: %s", problem)
            except Exception:
                log.exception("looking after the connection to kvtierd failed")

    async def close(self) -> None:
        """Close the socket; whoever still waits gets ConnectionLost."""
        if self.closed:
            return
        self.closed = True
        if self.core.is_child():
            return
        sock = self._sock
        if sock is not None:
            self._drop(sock, "closed by its owner")
        closed = ConnectionLost("this client was closed")
        self.core.fail_all(closed)
        self._fail_waits(closed)
        for task in (self._connector, self._keeper):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        self._connector = self._keeper = None
        await asyncio.to_thread(self.core.crew.close)


def _set(ready: "asyncio.Future[Any]") -> None:
    if not ready.done():
        ready.set_result(None)
