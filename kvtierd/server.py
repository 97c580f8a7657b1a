"""Sockets, frames and peer credentials. It decides nothing about blocks.

A client's socket is accepted by hand, because the arena's descriptor must travel with the first
reply: HELLO is read and answered on the raw socket, and only then the connection becomes a
protocol on the event loop. Requests are answered in the call that delivers their bytes, unless
the core makes them wait or the catalog has to be written first.
"""

import asyncio
import contextlib
import logging
import os
import socket
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol, cast

import msgspec

from kvtier_client.admin_wire import AdminRequest
from kvtier_client.errors import (
    InvalidArgument,
    KvtierError,
    NotOwner,
    ProtocolError,
    QuotaExceeded,
)  # fmt: skip
from kvtier_client.wire import (
    FRAME_HEADER,
    PROTOCOL_VERSION,
    ClientRequest,
    Error,
    Hello,
    Reply,
    Request,
    frame,
)  # fmt: skip
from kvtierd.config import LimitsConfig

HELLO_TIMEOUT_S: Final = 5.0
"""How long a connection may take to say who it is."""
PARTIAL_FRAME_S: Final = 30.0
"""How long a frame may take to arrive as a whole."""
PILE_UP: Final = 4
"""A push that finds this many times `limits.output_buffer_bytes` unread ends the connection."""
TEXT_MAX: Final = 1000
"""Characters of an error's message on the wire."""
_SO_PEERPIDFD: Final = 77
_CRED: Final = struct.Struct("3i")

log = logging.getLogger(__name__)


class Credentials(msgspec.Struct, frozen=True):
    """Who is at the other end of a socket, as the kernel says."""

    pid: int
    uid: int
    start_time: int


class Desk(Protocol):
    """What the server needs of the daemon."""

    limits: LimitsConfig
    boot: int

    def admit(
        self, sock: socket.socket, who: Credentials, hello: Hello, conn: "Connection"
    ) -> None:
        """Let a client in and send its Welcome with the arena.

        Errors: any KvtierError, which becomes the reply.
        """
        ...

    def request(self, conn: "Connection", req: Any) -> Reply | None:
        """Carry out a request; None when the reply comes later through `conn.send`."""
        ...

    def admin(self, conn: "Connection", req: Any) -> Reply | None:
        """Carry out a request of the admin socket."""
        ...

    def gone(self, conn: "Connection") -> None:
        """The connection is closed."""
        ...


def process_start_time(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None when there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def credentials(sock: socket.socket) -> Credentials:
    """The peer's pid, uid and start time. Errors: NotOwner when its process cannot be seen."""
    pid, uid, _ = _CRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CRED.size))
    start_time = process_start_time(pid)
    if start_time is None:
        raise NotOwner(
            f"the peer's process (pid {pid}) cannot be seen from the daemon's pid namespace"
        )
    return Credentials(pid, uid, start_time)


def open_pidfd(sock: socket.socket, pid: int) -> int:
    """A descriptor that becomes readable when the peer's process ends. Errors: OSError."""
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return os.pidfd_open(pid)


class Connection(asyncio.Protocol):
    """One connection: cuts frames, checks them, and sends replies in any order."""

    def __init__(self, desk: Desk, decoder: msgspec.msgpack.Decoder[Any], *, admin: bool) -> None:
        self.desk, self._decode = desk, decoder.decode
        self._handle = desk.admin if admin else desk.request
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self.pending: set[int] = set()
        self._paused = False
        self.partial_since_s = 0.0
        self.peer: Any = None
        self._frame_bytes = desk.limits.frame_bytes

    # ------------------------------------------------------------ transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The loop has the socket now."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._transport.set_write_buffer_limits(high=self.desk.limits.output_buffer_bytes)
        self._cut()

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed."""
        self._transport = None
        self.desk.gone(self)

    def pause_writing(self) -> None:
        """The peer does not read: take no more requests from it."""
        self._paused = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """The peer reads again."""
        self._paused = False
        self._cut()
        if self._transport is not None and not self._paused:
            self._transport.resume_reading()

    def send(self, message: Reply) -> None:
        """Send the reply to a request; nothing happens on a closed connection."""
        self.pending.discard(message.id)
        self._write(message)

    def push(self, message: Reply) -> None:
        """Send what nobody asked for; a peer that lets it pile up is cut off."""
        self._write(message)
        transport, limit = self._transport, self.desk.limits.output_buffer_bytes
        if transport is not None and transport.get_write_buffer_size() > PILE_UP * limit:
            log.warning("a client does not read what it is sent: its connection is closed")
            transport.abort()

    def _write(self, message: Reply) -> None:
        if self._transport is not None:
            self._transport.write(frame(message, self._encoder))

    def behind_hello(self, data: bytes) -> None:
        """Bytes that came with HELLO, before the connection was on the loop."""
        self._buffer += data

    def close(self) -> None:
        """Close after what was sent."""
        if self._transport is not None:
            self._transport.close()

    # --------------------------------------------------------------- frames

    def data_received(self, data: bytes) -> None:
        """Bytes came: mostly whole frames, which are handled without a copy."""
        start, end = 0, len(data)
        if not self._buffer:
            view = memoryview(data)
            while end - start >= 4 and not self._paused and self._transport is not None:
                (length,) = FRAME_HEADER.unpack_from(data, start)
                if length > self._frame_bytes or length > end - start - 4:
                    break
                start += 4 + length
                self._one(view[start - length : start])
            if start == end:
                return
        self._buffer += data[start:]
        self._cut()

    def _cut(self) -> None:
        buffer = self._buffer
        start = 0
        while len(buffer) - start >= 4 and not self._paused and self._transport is not None:
            (length,) = FRAME_HEADER.unpack_from(buffer, start)
            if length > self._frame_bytes:
                self._refuse_frame(length)
                return
            if len(buffer) - start - 4 < length:
                break
            self._one(bytes(buffer[start + 4 : start + 4 + length]))
            start += 4 + length
        del buffer[:start]
        if not buffer or self._paused:
            self.partial_since_s = 0.0
        elif start or not self.partial_since_s:
            self.partial_since_s = asyncio.get_running_loop().time()

    def _refuse_frame(self, length: int) -> None:
        """Framing is lost with a frame that is too long to skip: say so and close."""
        self._buffer.clear()
        self._write(
            self.error(0, ProtocolError(
                f"a frame of {length} bytes; at most {self._frame_bytes} (limits.frame_bytes)"
            ))
        )  # fmt: skip
        self.close()

    def _one(self, payload: bytes | memoryview) -> None:
        try:
            req: Request = self._decode(payload)
        except (msgspec.MsgspecError, RecursionError) as error:
            self._write(self.error(*_explain(payload, error)))
            return
        if not getattr(req, "oneway", 0):
            refusal = self._refusal(req.id)
            if refusal is not None:
                self._write(self.error(req.id, refusal))
                return
            self.pending.add(req.id)
        reply = self._handle(self, req)
        if reply is not None:
            self.send(reply)

    def _refusal(self, request_id: int) -> KvtierError | None:
        """Why a request may not be taken beside those that wait for their replies."""
        if not 0 < request_id < 2**63:
            return InvalidArgument(f"request id {request_id} is outside 1..2^63-1")
        if request_id in self.pending:
            return InvalidArgument(f"a request of id {request_id} waits for its reply already")
        if len(self.pending) >= self.desk.limits.requests_in_flight:
            return QuotaExceeded(
                f"{len(self.pending)} requests in flight (limits.requests_in_flight)"
            )
        return None

    def error(self, request_id: int, error: KvtierError) -> Error:
        """An error as a reply."""
        return Error(request_id, self.desk.boot, 0, error.code, str(error)[:TEXT_MAX])


def _explain(payload: bytes | memoryview, error: Exception) -> tuple[int, KvtierError]:
    """The request id, as far as it can be read, and the error for a frame that is no request."""
    try:
        loose = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, RecursionError) as worse:
        return 0, ProtocolError(f"not a MessagePack value that could be a request: {worse}")
    request_id = 0
    if isinstance(loose, list) and len(loose) > 1 and isinstance(loose[1], int):
        request_id = loose[1] if 0 <= loose[1] < 2**63 else 0
    return request_id, InvalidArgument(f"not a request of this protocol: {error}")


class Listener:
    """A Unix socket at which clients or operators arrive."""

    def __init__(self, desk: Desk, path: str, mode: int, *, admin: bool) -> None:
        self._desk, self.path, self._admin = desk, path, admin
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
            AdminRequest if admin else ClientRequest
        )
        self._socket = _bind(path, mode)
        self._tasks: set[asyncio.Task[None]] = set()
        self._greeting = 0
        self.connections: set[Connection] = set()

    def start(self) -> None:
        """Begin to accept."""
        self._spawn(self._accept())

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._socket)
            except OSError as error:  # out of descriptors: those that close make room
                log.error("cannot accept on %s: %s", self.path, error)
                await asyncio.sleep(0.1)
                continue
            sock.setblocking(False)
            self._spawn(self._greet(sock))

    async def _greet(self, sock: socket.socket) -> None:
        """Learn who it is, let it in or turn it away, and hand the socket to the loop."""
        conn = Connection(self._desk, self._decoder, admin=self._admin)
        self._greeting += 1
        try:
            await self._let_in(sock, conn)
        except (KvtierError, TimeoutError, OSError) as error:
            if isinstance(error, KvtierError):
                await _say(sock, frame(conn.error(1, error), msgspec.msgpack.Encoder()))
            sock.close()
            return
        except Exception:
            log.exception("a connection failed")
            sock.close()
            return
        except BaseException:  # the listener closes
            sock.close()
            raise
        finally:
            self._greeting -= 1
        self.connections.add(conn)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: conn, sock)
        except OSError:  # it went away meanwhile
            sock.close()
            self._desk.gone(conn)

    async def _let_in(self, sock: socket.socket, conn: Connection) -> None:
        """Check who it is and what it says first. Errors: KvtierError, TimeoutError, OSError."""
        limit = self._desk.limits.connections
        if len(self.connections) + self._greeting > limit:
            raise QuotaExceeded(f"{limit} connections (limits.connections)")
        who = credentials(sock)
        if self._admin:
            if who.uid not in (0, os.geteuid()):
                raise NotOwner(f"uid {who.uid} may not use the admin socket")
            return
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            hello, rest = await self._read_hello(sock)
        self._desk.admit(sock, who, hello, conn)
        conn.behind_hello(rest)

    async def _read_hello(self, sock: socket.socket) -> tuple[Hello, bytes]:
        """Read the first frame; returns it and what came behind it."""
        loop = asyncio.get_running_loop()
        data = b""
        while len(data) < 4 or len(data) - 4 < FRAME_HEADER.unpack_from(data)[0]:
            if len(data) >= 4 and FRAME_HEADER.unpack_from(data)[0] > self._desk.limits.frame_bytes:
                raise ProtocolError("the first frame is longer than limits.frame_bytes")
            more = await loop.sock_recv(sock, 65536)
            if not more:
                raise ConnectionResetError
            data += more
        end = 4 + FRAME_HEADER.unpack_from(data)[0]
        try:
            hello = self._decoder.decode(data[4:end])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise _explain(data[4:end], error)[1] from None
        if not isinstance(hello, Hello):
            raise ProtocolError("the first message of a connection must be hello")
        if hello.version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"protocol version {hello.version}; this daemon speaks {PROTOCOL_VERSION}"
            )
        return hello, data[end:]

    def forget(self, conn: Connection) -> None:
        """A connection of this listener has closed."""
        self.connections.discard(conn)

    def close(self) -> None:
        """Stop to accept, close every connection, and take the socket's name away."""
        for task in list(self._tasks):
            task.cancel()
        self._socket.close()
        for conn in list(self.connections):
            conn.close()
        _unlink(self.path)

    def close_partial(self, now_s: float) -> None:
        """Close connections whose frame does not come to its end."""
        for conn in list(self.connections):
            if conn.partial_since_s and now_s - conn.partial_since_s > PARTIAL_FRAME_S:
                conn.close()


def _bind(path: str, mode: int) -> socket.socket:
    """A listening socket at `path`; the daemon's lock makes sure that an old one is dead."""
    _unlink(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        old = os.umask(0o777 & ~mode)
        try:
            sock.bind(path)
        finally:
            os.umask(old)
        sock.listen(128)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _unlink(path: str) -> None:
    try:
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
    except FileNotFoundError:
        pass


async def _say(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        await asyncio.get_running_loop().sock_sendall(sock, data)


WatchDone = Callable[[], None]


class ProcessWatch:
    """Tells when client processes end, by their pidfds."""

    def __init__(self) -> None:
        self._fds: dict[object, int] = {}

    def add(self, key: object, pidfd: int, ended: WatchDone) -> None:
        """Call `ended` once when the process behind `pidfd` (owned from now on) ends."""
        if key in self._fds:
            os.close(pidfd)
            return
        self._fds[key] = pidfd

        def fire() -> None:
            self.drop(key)
            ended()

        asyncio.get_running_loop().add_reader(pidfd, fire)

    def drop(self, key: object) -> None:
        """Stop to watch."""
        fd = self._fds.pop(key, None)
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    def close(self) -> None:
        """Stop to watch all."""
        for key in list(self._fds):
            self.drop(key)
