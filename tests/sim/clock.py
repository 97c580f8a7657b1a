"""Simulated time, and one event loop per simulated process; who runs next is drawn from the seed.

`Sim` has the clock and all loops. A `SimLoop` is as much of asyncio as daemon and client use. When
its process is killed, `kill` drops what it had to run: nothing of it happens any more.
"""

import asyncio
import contextlib
import heapq
import os
import random
import zlib
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from contextvars import Context
from typing import Any

from tests.sim import net


class Failure(AssertionError):
    """A promise was broken."""


class Sim:
    """The clock, the loops of all processes, and the seed's dice."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 1000.0
        self.stuck_until_s = 0.0
        """The disk ends nothing before then."""
        self.wall_s = 1.7e9
        """What the wall clock shows beyond `now_s`; it may jump."""
        self.steps = 0
        self.digest = 0
        """Sums up what ran when: the same for two runs of one seed."""
        self.counts: Counter[str] = Counter()
        """What has happened, by kind."""
        self.loops: list[SimLoop] = []
        self.timers: list[tuple[float, int, SimLoop, asyncio.TimerHandle]] = []
        self.failure: BaseException | None = None
        self.pidfds: dict[int, SimLoop] = {}
        """Open descriptors that stand for processes."""
        self._numbers = 0
        self.outside = SimLoop(self, "outside")
        """Runs what no process does: bytes that are on their way, and fate."""

    def add_timer(self, loop: "SimLoop", handle: asyncio.TimerHandle) -> None:
        """Run a handle when its time has come."""
        self._numbers += 1
        heapq.heappush(self.timers, (handle.when(), self._numbers, loop, handle))

    def pidfd(self, process: "SimLoop") -> int:
        """A descriptor that stands for a process; a SimLoop can wait for its end."""
        fd = os.open(os.devnull, os.O_RDONLY)
        self.pidfds[fd] = process
        return fd

    def chance(self, p: float) -> bool:
        """True with probability `p`."""
        return self.random.random() < p

    def step(self) -> "SimLoop | None":
        """Run one callback of one process; None when nothing is left to run."""
        while True:
            while self.timers and self.timers[0][0] <= self.now_s:
                _, _, loop, handle = heapq.heappop(self.timers)
                if not loop.dead and not handle.cancelled():
                    loop.ready.append(handle)
            ready = [x for x in self.loops if x.ready and x.stopped_until_s <= self.now_s]
            if ready:
                break
            ahead = [x.stopped_until_s for x in self.loops if x.ready]
            if self.timers:
                ahead.append(self.timers[0][0])
            if not ahead:
                return None
            self.now_s = max(self.now_s, min(ahead))
        loop = ready[0] if len(ready) == 1 else self.random.choice(ready)
        loop.run_one()
        self.now_s += self.random.uniform(1e-6, 2e-5)
        self.steps += 1
        return loop

    def run_until(
        self, done: Callable[[], bool], limit_s: float, after: Callable[..., None]
    ) -> None:
        """Take steps until `done`. Errors: Failure when that takes `limit_s` simulated seconds."""
        end_s = self.now_s + limit_s
        while not done():
            if self.now_s > end_s:
                raise Failure(f"not over after {limit_s:.0f} simulated seconds")
            loop = self.step()
            if self.failure is not None:
                raise self.failure
            if loop is None:
                raise Failure("nothing is left to run, and it is not over")
            after(loop)


class SimLoop(asyncio.AbstractEventLoop):
    """The event loop of one process."""

    def __init__(self, sim: Sim, name: str, pid: int = 0, uid: int = 0) -> None:
        self.sim, self.name, self.pid, self.uid = sim, name, pid, uid
        self.ready: deque[asyncio.Handle] = deque()
        self.dead = False
        self.stopped_until_s = 0.0
        """A SIGSTOP lasts until then."""
        self.watchers: dict[int, tuple[SimLoop, Callable[[], None]]] = {}
        self.sockets: list[net.SimSocket] = []
        self.seen: set[str] = set()
        """Kinds of callbacks that have run."""
        self.last = ""
        self._tasks: list[asyncio.Task[Any]] = []
        sim.loops.append(self)

    def run_one(self) -> None:
        """Run the callback that is first in line."""
        handle = self.ready.popleft()
        if handle.cancelled():
            return
        sim, call = self.sim, handle._callback  # type: ignore[attr-defined]
        self.last = last = getattr(call, "__qualname__", "a task goes on")
        self.seen.add(last)
        sim.digest = zlib.crc32(f"{self.name} {sim.now_s:.6f} {last}".encode(), sim.digest)
        asyncio._set_running_loop(self)
        try:
            handle._run()
        finally:
            asyncio._set_running_loop(None)

    def awaiting(self) -> Iterator[str]:
        """Where its tasks wait: function, and line within it."""
        for task in self._tasks:
            if task.done():
                continue
            coro: Any = task.get_coro()
            while getattr(coro.cr_await, "cr_frame", None) is not None:
                coro = coro.cr_await
            if coro.cr_frame is not None:
                code = coro.cr_code
                yield f"{code.co_qualname}+{coro.cr_frame.f_lineno - code.co_firstlineno}"

    def kill(self) -> None:
        """The process ends at once: nothing of it runs any more, its sockets close."""
        self.dead = True
        self.ready.clear()
        self.sim.loops.remove(self)
        for sock in list(self.sockets):
            sock.close()
        for loop, call in list(self.watchers.values()):
            if not loop.dead:
                loop.call_soon(call)
        self.watchers.clear()
        running = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        for task in self._tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            with contextlib.suppress(BaseException):  # it ends here, whatever it would still do
                task.get_coro().close()  # type: ignore[union-attr]
        asyncio._set_running_loop(running)
        self._tasks.clear()

    # ------------------------------------------------------------- asyncio

    def time(self) -> float:
        return self.sim.now_s

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self.dead

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if not self.dead:
            self.ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:  # fmt: skip
        return self.call_at(self.sim.now_s + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:  # fmt: skip
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        if not self.dead:
            self.sim.add_timer(self, handle)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def create_future(self) -> "asyncio.Future[Any]":
        return _Future(loop=self)

    def create_task(self, coro: Any, **_: Any) -> "asyncio.Task[Any]":
        if self.dead:
            coro.close()
        if len(self._tasks) > 50:
            self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(_Task(coro, loop=self))
        return self._tasks[-1]

    def set_exception_handler(self, handler: Callable[..., object] | None) -> None:
        """The daemon counts what escapes its callbacks; here it ends the history."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Whatever nobody catches is a failure, unless the process was killed meanwhile."""
        problem = context.get("exception")
        if not self.dead and not isinstance(problem, Killed) and self.sim.failure is None:
            self.sim.failure = problem or Failure(f"{self.name}: {context.get('message')}")

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """A thread's work happens at one moment, a while from now."""
        done = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except BaseException as problem:
                if not done.cancelled():
                    done.set_exception(problem)
            else:
                if not done.cancelled():
                    done.set_result(result)

        self.call_later(self.sim.random.choice(THREAD_DELAYS_S), work)
        return done

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: Any) -> None:
        pass

    # ------------------------------------------------------------- sockets

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        if isinstance(fd, int):
            process = self.sim.pidfds[fd]
            if process.dead:
                self.call_soon(callback, *args)
            else:
                process.watchers[fd] = (self, lambda: callback(*args))
        else:
            fd.on_readable(self, callback, args)

    def remove_reader(self, fd: Any) -> bool:
        if isinstance(fd, int):
            self.sim.pidfds.pop(fd).watchers.pop(fd, None)
        else:
            fd.reader = None
        return True

    def add_writer(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        fd.on_writable(self, callback, args)

    def remove_writer(self, fd: Any) -> bool:
        fd.writer = None
        return True

    async def sock_accept(self, sock: Any) -> tuple["net.SimSocket", bytes]:
        while not sock.backlog:
            await _Until(self, sock.waiting)
        return sock.backlog.popleft(), b""

    async def sock_connect(self, sock: Any, address: Any) -> None:
        await asyncio.sleep(self.sim.random.uniform(0, 0.001))
        sock.connect(address)

    async def sock_recv(self, sock: Any, nbytes: int) -> bytes:
        while True:
            try:
                return sock.recv(nbytes)
            except BlockingIOError:
                await self._ready_to(sock.on_readable, sock, "reader")

    async def sock_sendall(self, sock: Any, data: Any) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[sock.send(view) :]
            except BlockingIOError:
                await self._ready_to(sock.on_writable, sock, "writer")

    async def _ready_to(self, watch: Callable[..., None], sock: Any, kind: str) -> None:
        ready = self.create_future()
        watch(self, lambda: ready.done() or ready.set_result(None), ())
        try:
            await ready
        finally:
            setattr(sock, kind, None)

    async def connect_accepted_socket(self, protocol_factory: Any, sock: Any, **_: Any) -> Any:
        protocol = protocol_factory()
        return net.SimTransport(self, sock, protocol), protocol


THREAD_DELAYS_S = [*[0.0001] * 6, *[0.001] * 4, 0.02, 0.02, 0.3]


_ages: dict[int, tuple[object, int]] = {}  # by address; keeps what it knows


def forget_ages() -> None:
    """A run is over: nothing that it had is asked for its hash any more."""
    _ages.clear()


def hash_by_age(thing: object) -> int:
    """In place of the address, so that sets have one order in all runs of a seed."""
    return _ages.setdefault(id(thing), (thing, len(_ages)))[1]


class _Task(asyncio.Task[Any]):
    __hash__ = hash_by_age  # type: ignore[assignment]


class _Future(asyncio.Future[Any]):
    __hash__ = hash_by_age  # type: ignore[assignment]


class Killed(BaseException):
    """Ends the callback in which the daemon is killed."""


class _Until:
    """Waits for its turn in a list of futures."""

    def __init__(self, loop: SimLoop, waiting: list[Any]) -> None:
        self._future = loop.create_future()
        waiting.append(self._future)

    def __await__(self) -> Generator[Any, None, None]:
        yield from self._future.__await__()


class Times:
    """Stands for the module `time` in daemon and client."""

    def __init__(self, sim: Sim) -> None:
        self._sim = sim

    def time(self) -> float:
        return self._sim.wall_s + self._sim.now_s

    def monotonic(self) -> float:
        return self._sim.now_s

    def monotonic_ns(self) -> int:
        return int(self._sim.now_s * 1e9)

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        """A thread's pause takes no simulated time."""


class Secrets:
    """Stands for the module `secrets`."""

    def __init__(self, sim: Sim) -> None:
        self._random = sim.random

    def randbits(self, k: int) -> int:
        return self._random.getrandbits(k)

    def token_bytes(self, n: int) -> bytes:
        return self._random.randbytes(n)
