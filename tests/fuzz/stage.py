"""What stands in for the kernel: an event loop on simulated time, sockets, and processes.

Everything happens in the order in which it was asked for, so that one input is one run.
"""

import asyncio
import heapq
import os
import struct
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any

SO_PEERPIDFD = 77
_CREDENTIALS = struct.Struct("3i")


class Loop(asyncio.AbstractEventLoop):
    """As much of asyncio as the daemon uses."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = 0
        self.readers: dict[int, Callable[[], None]] = {}
        self.problem: BaseException | None = None

    def run_ready(self) -> None:
        """Run until nothing is left to run now."""
        ready, timers = self.ready, self._timers
        while ready or (timers and timers[0][0] <= self.now_s):
            while timers and timers[0][0] <= self.now_s:
                ready.append(heapq.heappop(timers)[2])
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()
        if self.problem is not None:
            raise self.problem

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds
        self.run_ready()

    def time(self) -> float:
        return self.now_s

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self.ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:  # fmt: skip
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:  # fmt: skip
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._numbers += 1
        heapq.heappush(self._timers, (when, self._numbers, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **_: Any) -> "asyncio.Task[Any]":
        return asyncio.Task(coro, loop=self)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Whatever nobody catches is a finding."""
        self.problem = context.get("exception") or AssertionError(context.get("message"))

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        self.readers[fd] = lambda: callback(*args)

    def remove_reader(self, fd: Any) -> bool:
        return self.readers.pop(fd, None) is not None

    async def sock_recv(self, sock: Any, nbytes: int) -> bytes:
        while not sock.inbox and not sock.ended:
            sock.waiter = self.create_future()
            await sock.waiter
        data = bytes(sock.inbox[:nbytes])
        del sock.inbox[:nbytes]
        return data

    async def sock_sendall(self, sock: Any, data: Any) -> None:
        sock.sendmsg([data])

    async def connect_accepted_socket(self, protocol_factory: Any, sock: Any, **_: Any) -> Any:
        protocol = protocol_factory()
        sock.transport = Transport(self, sock, protocol)
        return sock.transport, protocol


class Processes:
    """Who is alive, as pids and start times."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self._alive: dict[int, int] = {}
        self._watched: dict[int, int] = {}
        self._next = 100

    def new(self) -> int:
        """A process is born."""
        self._next += 1
        self._alive[self._next] = self._next * 10
        return self._next

    def start_time(self, pid: int) -> int | None:
        """Stands for `process_start_time`."""
        return self._alive.get(pid)

    def pidfd(self, pid: int) -> int:
        """Stands for `os.pidfd_open`."""
        if pid not in self._alive:
            raise ProcessLookupError(3, "No such process")
        fd = os.open(os.devnull, os.O_RDONLY)
        self._watched[fd] = pid
        return fd

    def die(self, pid: int) -> None:
        """A process ends, and who watches it is told."""
        self._alive.pop(pid, None)
        for fd, watched in list(self._watched.items()):
            if watched == pid:
                del self._watched[fd]
                call = self.loop.readers.get(fd)
                if call is not None:
                    self.loop.call_soon(call)


class Socket:
    """The daemon's end of a connection; what it sends goes to `said`."""

    def __init__(
        self, processes: Processes, pid: int, uid: int, said: Callable[[bytes], None]
    ) -> None:
        self.processes, self.pid, self.uid, self.said = processes, pid, uid, said
        self.inbox = bytearray()
        self.ended = False
        self.closed = False
        self.waiter: asyncio.Future[None] | None = None
        self.transport: Transport | None = None

    def setblocking(self, flag: bool) -> None:
        pass

    def getsockopt(self, level: int, option: int, size: int = 0) -> Any:
        if option == SO_PEERPIDFD:
            return self.processes.pidfd(self.pid)
        return _CREDENTIALS.pack(self.pid, self.uid, self.uid)

    def sendmsg(self, buffers: Any, ancillary: Any = ()) -> int:
        if self.closed or self.ended:
            raise BrokenPipeError(32, "Broken pipe")
        data = b"".join(bytes(buffer) for buffer in buffers)
        self.said(data)
        return len(data)

    def close(self) -> None:
        self.closed = True

    # --------------------------------------------------------- the client's side

    def arrive(self, data: bytes) -> None:
        """The client has sent something."""
        if self.transport is not None:
            self.transport.arrive(data)
            return
        self.inbox += data
        self._wake()

    def end(self) -> None:
        """The client has closed its end."""
        self.ended = True
        if self.transport is not None:
            self.transport.lose()
        else:
            self._wake()

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class Transport(asyncio.Transport):
    """Between the socket and the daemon's `Connection`; its client may refuse to read."""

    def __init__(self, loop: Loop, sock: Socket, protocol: Any) -> None:
        super().__init__()
        self._loop, self._sock, self._protocol = loop, sock, protocol
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._high = 65536
        self.stalled = False
        self._paused = self._full = self._closing = self._lost = False
        protocol.connection_made(self)
        if sock.inbox:
            self.arrive(b"")
        if sock.ended:
            self.lose()

    def arrive(self, data: bytes) -> None:
        """Bytes from the client; they wait in the kernel while the daemon does not read."""
        sock = self._sock
        if self._paused or sock.inbox:
            sock.inbox += data
            data = b""
            if not self._paused:
                data = bytes(sock.inbox)
                sock.inbox.clear()
        if data and not self._closing:
            self._protocol.data_received(data)

    def read(self, stalled: bool) -> None:
        """The client begins or ceases to read."""
        self.stalled = stalled
        if stalled or self._lost:
            return
        unread, self._unread, self._unread_bytes = self._unread, [], 0
        for data in unread:
            self._sock.said(data)
        if self._full:
            self._full = False
            self._protocol.resume_writing()
        if self._closing:
            self._loop.call_soon(self.lose)

    def lose(self) -> None:
        """The connection has ended."""
        if not self._lost:
            self._lost = self._closing = True
            self._sock.closed = True
            self._protocol.connection_lost(None)

    # ------------------------------------------------------------- as a transport

    def write(self, data: Any) -> None:
        if self._lost or self._closing:
            return
        if not self.stalled:
            self._sock.said(bytes(data))
            return
        self._unread.append(bytes(data))
        self._unread_bytes += len(data)
        if self._unread_bytes > self._high and not self._full:
            self._full = True
            self._protocol.pause_writing()

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        if self._sock.inbox:
            self._loop.call_soon(self.arrive, b"")

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = high or 65536

    def get_write_buffer_size(self) -> int:
        return self._unread_bytes

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            if not self.stalled:
                self._loop.call_soon(self.lose)

    def abort(self) -> None:
        self._closing = True
        self._loop.call_soon(self.lose)
