"""Sockets, peer credentials, and who is let in. It decides nothing about blocks.

A client's socket is accepted by hand, because the arena's descriptor must travel with the first
reply: HELLO is read and answered on the raw socket, and only then the connection becomes a
protocol on the event loop. Requests are answered in the call that delivers their bytes, unless
it is another client's turn, the core makes them wait, or the catalog has to be written first.
"""

import asyncio
import contextlib
import logging
import os
import socket
import stat
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from kvtier_client.admin_wire import AdminRequest
from kvtier_client.errors import KvtierError, NotOwner, ProtocolError, QuotaExceeded
from kvtier_client.wire import FRAME_HEADER, PROTOCOL_VERSION, ClientRequest, Hello, frame
from kvtierd.connection import Connection, Desk, explain

HELLO_TIMEOUT_S: Final = 5.0
"""How long a connection may take to say who it is."""
PARTIAL_FRAME_S: Final = 30.0
"""How long a frame may take to arrive as a whole."""
_SO_PEERPIDFD: Final = 77
_CRED: Final = struct.Struct("3i")

log = logging.getLogger(__name__)


class Credentials(msgspec.Struct, frozen=True):
    """Who is at the other end of a socket, as the kernel says."""

    pid: int
    uid: int
    start_time: int


class Door(Desk, Protocol):
    """What the server needs of the daemon."""

    def admit(self, sock: socket.socket, who: Credentials, hello: Hello, conn: Connection) -> None:
        """Let a client in, tell `conn` whose it is, and send its Welcome with the arena.

        Errors: any KvtierError, which becomes the reply.
        """
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


def _keys(who: Credentials) -> tuple[tuple[str, int], ...]:
    return ("uid", who.uid), ("pid", who.pid)


class Listener:
    """A Unix socket at which clients or operators arrive."""

    def __init__(self, desk: Door, path: str, mode: int, *, admin: bool) -> None:
        self._desk, self.path, self._admin = desk, path, admin
        self._letting_in = asyncio.Lock()
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
            AdminRequest if admin else ClientRequest
        )
        self._socket = _bind(path, mode)
        self._tasks: set[asyncio.Task[None]] = set()
        self._arrivals: dict[Connection, Credentials] = {}
        """Everybody who is here, with those that have not said HELLO."""
        self._count: Counter[tuple[str, int]] = Counter()
        """How many are of each uid and process."""
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
        conn = Connection(self._desk, self._decoder, operator=self._admin)
        try:
            await self._let_in(sock, conn)
        except (KvtierError, TimeoutError, OSError) as error:
            self.forget(conn)
            if isinstance(error, KvtierError):
                await _say(sock, frame(conn.error(1, error), msgspec.msgpack.Encoder()))
            sock.close()
            return
        except Exception:
            log.exception("a connection failed")
            self.forget(conn)
            sock.close()
            return
        except BaseException:  # the listener closes
            self.forget(conn)
            sock.close()
            raise
        self.connections.add(conn)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: conn, sock)
        except OSError:  # it went away meanwhile
            sock.close()
            self._desk.gone(conn)

    async def _let_in(self, sock: socket.socket, conn: Connection) -> None:
        """Check who it is and what it says first. Errors: KvtierError, TimeoutError, OSError."""
        who = credentials(sock)
        self._admit_one_more(who)
        self._arrivals[conn] = who
        self._count.update(_keys(who))
        if self._admin:
            if who.uid not in (0, os.geteuid()):
                raise NotOwner(f"uid {who.uid} may not use the admin socket")
            return
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            hello, rest = await self._read_hello(sock)
            async with self._letting_in:  # one in a turn of the loop, however many arrive
                await asyncio.sleep(0)
        self._desk.admit(sock, who, hello, conn)
        conn.behind_hello(rest)

    def _admit_one_more(self, who: Credentials) -> None:
        """Keep room for others: a uid gets at most half of the connections that are there, and a
        process a third. Errors: QuotaExceeded."""
        here = len(self._arrivals)
        left = self._desk.limits.connections - here
        of_uid, of_pid = self._count["uid", who.uid], self._count["pid", who.pid]
        if of_uid >= left or of_pid >= max(left // 2, 1):
            raise QuotaExceeded(
                f"{here} connections, {of_uid} of uid {who.uid}, {of_pid} of process "
                f"{who.pid}; there may be {self._desk.limits.connections} (limits.connections), "
                "and some stay free for others"
            )

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
            raise explain(data[4:end], error)[1] from None
        if not isinstance(hello, Hello):
            raise ProtocolError("the first message of a connection must be hello")
        if hello.version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"protocol version {hello.version}; this daemon speaks {PROTOCOL_VERSION}"
            )
        return hello, data[end:]

    def forget(self, conn: Connection) -> None:
        """A connection of this listener has closed, or was turned away."""
        conn.leave()
        who = self._arrivals.pop(conn, None)
        if who is not None:
            for key in _keys(who):
                self._count[key] -= 1
                if not self._count[key]:
                    del self._count[key]
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
        sock.listen(socket.SOMAXCONN)
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
