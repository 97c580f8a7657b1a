"""The admin socket, for `kvtierctl` and scripts: one request at a time, no HELLO."""

import errno
import os
import socket
import time
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from kvtier_client import admin_wire, wire
from kvtier_client.errors import (
    ConnectionLost,
    InvalidArgument,
    ProtocolError,
    Timeout,
    from_code,
)

REPLY_LIMIT_BYTES: Final = 64 << 20
DEFAULT_TIMEOUT_S: Final = 10.0

_REMEDIES: Final = {
    errno.EACCES: "be root or the daemon's user",
    errno.ENOENT: "is kvtierd running? It makes the socket (socket.admin_path) when it is ready",
}

VERBS: Final[dict[str, type[wire.Request]]] = {
    "stats": admin_wire.Stats,
    "sessions": admin_wire.Sessions,
    "clients": admin_wire.Clients,
    "tree": admin_wire.Tree,
    "evict": admin_wire.Evict,
    "scrub": admin_wire.Scrub,
    "reload": admin_wire.Reload,
}


class AdminClient:
    """Asks the daemon about itself; needs the right to open the socket (mode 0600)."""

    def __init__(
        self, socket_path: str | os.PathLike[str], timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        self._path = os.fspath(socket_path)
        self._timeout_s = timeout_s
        self._sock: socket.socket | None = None
        self._id = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(wire.AnyReply)

    def call(self, verb: str, **fields: Any) -> dict[str, Any]:
        """Ask `verb` (one of VERBS) and return the report.

        Errors: InvalidArgument for an unknown verb or field; ConnectionLost; Timeout;
        ProtocolError; what the daemon answers. After a transport error the next call connects
        anew.
        """
        kind = VERBS.get(verb)
        if kind is None:
            raise InvalidArgument(f"admin verb {verb!r} is unknown; there are {', '.join(VERBS)}")
        self._id += 1
        try:
            request = kind(self._id, **fields)
        except TypeError as problem:
            raise InvalidArgument(f"admin verb {verb!r}: {problem}") from None
        deadline_s = time.monotonic() + self._timeout_s
        try:
            return self._exchange(request, deadline_s)
        except (TimeoutError, BlockingIOError):
            self.close()
            raise Timeout(
                f"the daemon did not answer {verb!r} on {self._path} within {self._timeout_s} s; "
                "if waiting longer does not help, it is stuck or stopped: see its log"
            ) from None
        except OSError as problem:
            self.close()
            remedy = _REMEDIES.get(problem.errno or 0, "is kvtierd running?")
            raise ConnectionLost(
                f"cannot ask {verb!r} on the admin socket {self._path}: "
                f"{problem.strerror or problem}; {remedy}"
            ) from None
        except ProtocolError:
            self.close()
            raise

    def _exchange(self, request: wire.Request, deadline_s: float) -> dict[str, Any]:
        sock = self._connected(deadline_s)
        sock.sendall(wire.frame(request, self._encoder))
        while True:
            (length,) = wire.FRAME_HEADER.unpack(self._exactly(4, deadline_s))
            if length > REPLY_LIMIT_BYTES:
                raise ProtocolError(f"an admin reply of {length} bytes is not kvtierd's protocol")
            try:
                reply = self._decoder.decode(self._exactly(length, deadline_s))
            except msgspec.DecodeError as problem:
                raise ProtocolError(f"an admin reply could not be decoded: {problem}") from None
            if reply.id != request.id:
                continue  # the late answer to a call that had timed out
            if isinstance(reply, wire.Error):
                raise from_code(reply.code, reply.message)
            if isinstance(reply, wire.Report):
                return reply.data
            return {"count": reply.count} if isinstance(reply, wire.Done) else {}

    def _connected(self, deadline_s: float) -> socket.socket:
        if self._sock is None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(max(0.001, deadline_s - time.monotonic()))
                sock.connect(self._path)
            except BaseException:
                sock.close()
                raise
            self._sock = sock
        return self._sock

    def _exactly(self, count: int, deadline_s: float) -> bytes:
        assert self._sock is not None
        parts = bytearray()
        while len(parts) < count:
            self._sock.settimeout(max(0.001, deadline_s - time.monotonic()))
            data = self._sock.recv(count - len(parts))
            if not data:
                raise ConnectionResetError("the daemon closed the connection")
            parts += data
        return bytes(parts)

    def close(self) -> None:
        """Close the connection; may be repeated."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
