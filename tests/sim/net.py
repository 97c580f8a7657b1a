"""Simulated Unix sockets: bytes are late, come in pieces, and stop when an end closes.

A `Talk` listens to each connection: every request has one reply, or its connection closes.
"""

import asyncio
import functools
import os
import socket
import struct
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from kvtier_client import admin_wire, errors, wire

if TYPE_CHECKING:
    from tests.sim.clock import Sim

CAPACITY_BYTES = 8192
"""What a socket holds before its sender must wait; small, so that it happens."""
SO_PEERPIDFD = 77


class Broken(AssertionError):
    """The daemon broke the rules of the conversation."""


@functools.cache
def _decoders(admin: bool) -> tuple[msgspec.msgpack.Decoder[Any], msgspec.msgpack.Decoder[Any]]:
    """Of requests and of replies."""
    asked: Any = admin_wire.AdminRequest if admin else wire.ClientRequest
    return msgspec.msgpack.Decoder(asked), msgspec.msgpack.Decoder(wire.AnyReply | wire.Push)


class Talk:
    """What was asked and answered on one connection."""

    def __init__(self, admin: bool, counts: Counter[str]) -> None:
        self.open: set[int] = set()
        self.counts = counts
        self._parts = {True: bytearray(), False: bytearray()}
        self._requests, self._replies = _decoders(admin)

    def hear(self, data: Any, from_client: bool) -> None:
        """Bytes were sent."""
        part = self._parts[from_client]
        part += data
        while len(part) >= 4:
            (length,) = wire.FRAME_HEADER.unpack_from(part)
            if len(part) - 4 < length:
                return
            body = bytes(part[4 : 4 + length])
            del part[: 4 + length]
            if from_client:
                request = self._requests.decode(body)
                self.counts["requests"] += 1
                if not getattr(request, "oneway", 0):
                    self.open.add(request.id)
            else:
                self._reply(self._replies.decode(body))

    def _reply(self, reply: wire.Reply) -> None:
        if isinstance(reply, wire.Push):
            return
        if reply.id not in self.open:
            raise Broken(f"a reply that nobody waits for, or the second one: {reply}")
        self.open.remove(reply.id)
        if isinstance(reply, wire.Error):
            self.counts[f"reply {errors.BY_CODE[reply.code].__name__}"] += 1


class Network:
    """All sockets that listen, and the conversations that are open."""

    def __init__(self, sim: "Sim") -> None:
        self.sim = sim
        self.listeners: dict[str, Listening] = {}
        self.talks: dict[SimSocket, Talk] = {}

    def listen(self, path: str, mode: int = 0) -> "Listening":
        """Stands for `server._bind`."""
        self.listeners[path] = Listening(self, path)
        return self.listeners[path]

    def new_socket(self) -> "SimSocket":
        """Stands for `link.new_socket`."""
        return SimSocket(self, asyncio.get_running_loop())


class Listening:
    """A socket at which clients arrive."""

    def __init__(self, network: Network, path: str) -> None:
        self.network, self.path = network, path
        self.admin = path.endswith("admin.sock")
        self.backlog: deque[SimSocket] = deque()
        self.waiting: list[Any] = []
        self.loop: Any = asyncio.get_running_loop()

    def arrive(self, sock: "SimSocket") -> None:
        """A connection is there to be accepted."""
        self.backlog.append(sock)
        for future in self.waiting:
            if not future.done():
                future.set_result(None)
        self.waiting.clear()

    def close(self) -> None:
        """Nobody arrives any more."""
        if self.network.listeners.get(self.path) is self:
            del self.network.listeners[self.path]
        while self.backlog:
            self.backlog.popleft().close()


class SimSocket:
    """One end of a connection."""

    def __init__(self, network: Network, loop: Any) -> None:
        self.network, self.sim, self.loop = network, network.sim, loop
        self.peer: SimSocket | None = None
        self.talk: Talk | None = None
        self.asks = False
        """Whether it is the client's end."""
        self.inbox = bytearray()
        self.fds: list[int] = []
        self.coming_bytes = 0
        self.last_s = 0.0
        self.ended = False
        self.closed = False
        self.reader: Any = None
        self.writer: Any = None
        loop.sockets.append(self)

    # --------------------------------------------------------- as a socket

    def setblocking(self, flag: bool) -> None:
        pass

    def connect(self, path: Any) -> None:
        listener = self.network.listeners.get(path)
        if listener is None or listener.loop.dead:
            raise ConnectionRefusedError(111, "Connection refused")
        other = SimSocket(self.network, listener.loop)
        self.peer, other.peer, self.asks = other, self, True
        self.talk = other.talk = Talk(listener.admin, self.sim.counts)
        self.network.talks[self] = self.talk
        listener.arrive(other)

    def send(self, data: Any) -> int:
        return self.sendmsg([data])

    def sendmsg(self, buffers: Any, ancillary: Any = ()) -> int:
        data = b"".join(bytes(buffer) for buffer in buffers)
        peer = self.peer
        if self.closed or peer is None or peer.closed:
            raise BrokenPipeError(32, "Broken pipe")
        room = CAPACITY_BYTES - peer.coming_bytes - len(peer.inbox)
        if room <= 0:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        count = min(len(data), room)
        if self.sim.chance(0.1) and not ancillary:
            count = self.sim.random.randint(1, count)
        assert self.talk is not None
        self.talk.hear(data[:count], from_client=self.asks)
        fds = [os.dup(fd) for _, _, packed in ancillary for fd in packed]
        peer.coming_bytes += count
        self._later(peer, peer._arrive, data[:count], fds)
        return count

    def recv(self, size: int) -> bytes:
        if self.closed:
            raise OSError(9, "Bad file descriptor")
        if not self.inbox:
            if self.ended:
                return b""
            raise BlockingIOError(11, "Resource temporarily unavailable")
        count = min(size, len(self.inbox))
        if self.sim.chance(0.1):
            count = self.sim.random.randint(1, count)
        data = bytes(self.inbox[:count])
        del self.inbox[:count]
        if self.peer is not None:
            self.peer.poke_writer()
        return data

    def recvmsg(self, size: int, *_: Any) -> Any:
        data = self.recv(size)
        fds, self.fds = self.fds, []
        packed = struct.pack(f"{len(fds)}i", *fds)
        return data, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)] if fds else [], 0, None

    def getsockopt(self, level: int, option: int, size: int = 0) -> Any:
        assert self.peer is not None
        process = self.peer.loop
        if option == SO_PEERPIDFD:
            if process.dead:
                raise ProcessLookupError(3, "No such process")
            return self.network.sim.pidfd(process)
        return struct.pack("3i", process.pid, process.uid, process.uid)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.reader = self.writer = None
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()
        self.network.talks.pop(self, None)
        if self in self.loop.sockets:
            self.loop.sockets.remove(self)
        if self.peer is not None and not self.peer.closed:
            self._later(self.peer, self.peer._end)
            self.peer.poke_writer()

    def cut(self) -> None:
        """The connection breaks: either end finds it closed."""
        assert self.peer is not None
        for end in (self, self.peer):
            end._later(end, end._end)

    # --------------------------------------------------------- deliveries

    def _later(self, peer: "SimSocket", call: Callable[..., None], *args: Any) -> None:
        """Bytes of one connection keep their order."""
        delay_s = self.sim.random.choice((1e-5, 1e-5, 1e-4, 1e-3, 0.03))
        peer.last_s = max(peer.last_s, self.sim.now_s + delay_s)
        self.sim.outside.call_at(peer.last_s, call, *args)

    def _arrive(self, data: bytes, fds: list[int]) -> None:
        self.coming_bytes -= len(data)
        if self.closed:
            for fd in fds:
                os.close(fd)
            return
        self.inbox += data
        self.fds += fds
        self.poke_reader()

    def _end(self) -> None:
        self.ended = True
        self.network.talks.pop(self, None)
        self.poke_reader()

    # ------------------------------------------------------------- watching

    def on_readable(self, loop: Any, call: Callable[..., Any], args: Any) -> None:
        self.reader = (loop, call, args)
        self.poke_reader()

    def on_writable(self, loop: Any, call: Callable[..., Any], args: Any) -> None:
        self.writer = (loop, call, args)
        self.poke_writer()

    def poke_reader(self) -> None:
        if self.reader is not None and (self.inbox or self.ended):
            self.reader[0].call_soon(self._read_now, self.reader)

    def _read_now(self, reader: Any) -> None:
        if self.reader is reader and (self.inbox or self.ended):
            reader[1](*reader[2])
            if self.reader is reader:
                self.poke_reader()

    def _writable(self) -> bool:
        peer = self.peer
        return peer is None or peer.closed or (
            peer.coming_bytes + len(peer.inbox) < CAPACITY_BYTES
        )  # fmt: skip

    def poke_writer(self) -> None:
        if self.writer is not None and self._writable():
            self.writer[0].call_soon(self._write_now, self.writer)

    def _write_now(self, writer: Any) -> None:
        if self.writer is writer and self._writable():
            writer[1](*writer[2])


class SimTransport(asyncio.Transport):
    """Between a `SimSocket` and an asyncio protocol."""

    def __init__(self, loop: Any, sock: SimSocket, protocol: Any) -> None:
        super().__init__()
        self._loop, self._sock, self._protocol = loop, sock, protocol
        self._out = bytearray()
        self._high = 65536
        self._full = self._closing = self._lost = False
        loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._protocol.connection_made(self)
        if not self._closing and self._sock.reader is None:
            self.resume_reading()

    def _readable(self) -> None:
        try:
            data = self._sock.recv(65536)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(error)
            return
        if data:
            self._protocol.data_received(data)
        else:
            self._end(None)

    def write(self, data: Any) -> None:
        if self._lost or self._closing:
            return
        self._out += data
        self._flush()
        if len(self._out) > self._high and not self._full:
            self._full = True
            self._protocol.pause_writing()

    def _flush(self) -> None:
        try:
            while self._out:
                del self._out[: self._sock.send(self._out)]
        except BlockingIOError:
            self._sock.on_writable(self._loop, self._flush, ())
            return
        except OSError as error:
            self._loop.call_soon(self._end, error)
            return
        self._sock.writer = None
        if self._full:
            self._full = False
            self._protocol.resume_writing()
        if self._closing:
            self._loop.call_soon(self._end, None)

    def _end(self, error: Exception | None) -> None:
        if not self._lost:
            self._lost = True
            self._sock.close()
            self._protocol.connection_lost(error)

    def pause_reading(self) -> None:
        self._sock.reader = None

    def resume_reading(self) -> None:
        if not self._lost:
            self._sock.on_readable(self._loop, self._readable, ())

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = high or 65536

    def get_write_buffer_size(self) -> int:
        return len(self._out)

    def is_closing(self) -> bool:
        return self._closing or self._lost

    def close(self) -> None:
        if not self._closing and not self._lost:
            self._closing = True
            self._sock.reader = None
            if not self._out:
                self._loop.call_soon(self._end, None)

    def abort(self) -> None:
        self._closing = True
        self._loop.call_soon(self._end, None)
