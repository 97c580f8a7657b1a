"""One connection: frames in, replies out. It decides nothing about blocks.

    bytes ──► frames ──► (its turn) ──► typed request ──► Desk ──► reply, at once or later

Whatever bytes arrive: each request has one reply, and what is no request is answered as an error.
"""

import asyncio
import contextlib
import logging
from typing import Any, Final, Protocol, cast

import msgspec

from kvtier_client.errors import InvalidArgument, KvtierError, ProtocolError, QuotaExceeded
from kvtier_client.wire import FRAME_HEADER, Error, Goodbye, Reply, Request, frame
from kvtierd.config import LimitsConfig
from kvtierd.fair import OWN_WORK, Flow
from kvtierd.turns import Served, Turns

READ_AHEAD_BYTES: Final = 256 << 10
"""Requests that a connection may have waiting for their turn; more stay in its socket."""
PILE_UP: Final = 4
"""A push that finds this many times `limits.output_buffer_bytes` unread ends the connection."""
TEXT_MAX: Final = 1000
"""Characters of an error's message on the wire."""
OPERATORS: Final[Flow] = (OWN_WORK, 0)

log = logging.getLogger(__name__)


class Desk(Protocol):
    """Who carries out requests."""

    limits: LimitsConfig
    boot: int
    turns: Turns

    def request(self, conn: "Connection", req: Any) -> Reply | None:
        """Carry out a request; None when the reply comes later through `conn.send`."""
        ...

    def admin(self, conn: "Connection", req: Any) -> Reply | None:
        """Carry out a request of the admin socket."""
        ...

    def gone(self, conn: "Connection") -> None:
        """The connection is closed."""
        ...


class Connection(asyncio.Protocol):
    """One connection: cuts frames, checks them, and sends replies in any order.

    Bytes that were read and not yet handled are in `_buffer` from `_start` on.
    """

    flow: Flow
    served: Served | None

    def __init__(
        self, desk: Desk, decoder: msgspec.msgpack.Decoder[Any], *, operator: bool
    ) -> None:
        self.desk, self._decode, self._turns = desk, decoder.decode, desk.turns
        self._handle = desk.admin if operator else desk.request
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray()
        self._start = 0
        self._came_s = 0.0
        """When the bytes in the buffer came, at the earliest."""
        self._waiting = False
        """Its turn comes by way of `Turns`."""
        self._transport: asyncio.Transport | None = None
        self._closing = False
        self.pending: set[int] = set()
        self._paused = False
        self.partial_since_s = 0.0
        self._reading = True
        self.peer: Any = None
        self._frame_bytes = desk.limits.frame_bytes
        self.flow, self.served = OPERATORS, None
        if operator:
            self.enter(OPERATORS)

    def enter(self, flow: Flow) -> None:
        """It is known now for whom requests are carried out."""
        self.flow, self.served = flow, self._turns.enter(flow)

    def leave(self) -> None:
        """It carries out no more requests; may be repeated."""
        if self.served is not None:
            self._turns.leave(self.flow)
            self.served = None

    # ------------------------------------------------------------ transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The loop has the socket now."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._transport.set_write_buffer_limits(high=self.desk.limits.output_buffer_bytes)
        if self._closing:  # since the welcome its process died, or a newer one took its place
            transport.close()
            return
        self._came_s = self._turns.begin()
        self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed."""
        self._transport = None
        if self.peer is not None:
            self._last_words()
        self.desk.gone(self)

    def _last_words(self) -> None:
        """Of what still waits for its turn a goodbye is carried out; the rest needs an answer."""
        data, end = memoryview(bytes(self._buffer)), self._start
        while len(data) - end >= 4:
            start = end + 4
            end = start + FRAME_HEADER.unpack_from(data, end)[0]
            with contextlib.suppress(msgspec.MsgspecError, RecursionError):
                req = self._decode(data[start:end])
                if isinstance(req, Goodbye):
                    self._handle(self, req)

    def pause_writing(self) -> None:
        """The peer does not read: take no more requests from it."""
        self._paused = True
        self._read_or_not()

    def resume_writing(self) -> None:
        """The peer reads again."""
        self._paused = False
        self._go_on()

    def _read_or_not(self) -> None:
        """Read from the socket only while there is room for what comes."""
        full = self._waiting and len(self._buffer) - self._start > READ_AHEAD_BYTES
        reading = not (self._paused or full)
        if self._transport is None or reading == self._reading:
            return
        self._reading = reading
        if reading:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

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
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    # --------------------------------------------------------------- frames

    def data_received(self, data: bytes) -> None:
        """Bytes came: mostly one whole frame, which is handled at once and without a copy."""
        turns = self._turns
        came_s = turns.begin()
        start, end = 0, len(data)
        if not self._buffer:
            self._came_s = came_s
            view = memoryview(data)
            while end - start >= 4 and turns.open and not self._paused and self._transport:
                (length,) = FRAME_HEADER.unpack_from(data, start)
                if length > self._frame_bytes or length > end - start - 4:
                    break
                start += 4 + length
                self._one(view[start - length : start])
            if start == end:
                return
        self._buffer += data[start:]
        self._go_on()

    def _whole(self) -> bool:
        """Whether a frame is there, or the beginning of one that is refused."""
        there = len(self._buffer) - self._start - 4
        if there < 0 or self._closing or self._transport is None:
            return False
        length: int = FRAME_HEADER.unpack_from(self._buffer, self._start)[0]
        return length <= there or length > self._frame_bytes

    def _go_on(self) -> None:
        """Wait for a turn if there is a whole frame; else wait for the rest of it."""
        if self._whole():
            self.partial_since_s = 0.0
            if not self._waiting and not self._paused:
                self._waiting = True
                self._turns.wait(self)
        elif len(self._buffer) == self._start:
            self._buffer.clear()
            self._start = 0
            self.partial_since_s = 0.0
        elif not self.partial_since_s:
            self.partial_since_s = asyncio.get_running_loop().time()
        self._read_or_not()

    def serve_one(self) -> bool:
        """Handle the first frame in the buffer; whether another one waits for its turn."""
        if not self._paused and self._whole():
            (length,) = FRAME_HEADER.unpack_from(self._buffer, self._start)
            if length > self._frame_bytes:
                self._refuse_frame(length)
            else:
                self._start += 4 + length
                with memoryview(self._buffer)[self._start - length : self._start] as payload:
                    self._one(payload)
        if not self._paused and self._whole():
            if self._start > READ_AHEAD_BYTES:
                del self._buffer[: self._start]
                self._start = 0
                self._read_or_not()
            return True
        self._waiting = False
        self._go_on()
        return False

    def _refuse_frame(self, length: int) -> None:
        """Framing is lost with a frame that is too long to skip: say so and close."""
        self._start = len(self._buffer)
        self._write(
            self.error(0, ProtocolError(
                f"a frame of {length} bytes; at most {self._frame_bytes} (limits.frame_bytes)"
            ))
        )  # fmt: skip
        self.close()

    def _one(self, payload: memoryview) -> None:
        began_s = self._turns.now_s()
        try:
            answered = self._answer(payload)
        except Exception:  # of the connection itself: the desk answers its own
            log.exception("a connection failed")
            if self._transport is not None:
                self._transport.abort()
            answered = False
        self._turns.did(self, began_s, self._came_s, answered=answered)

    def _answer(self, payload: memoryview) -> bool:
        """Carry out what a frame asks for; whether it was answered, or wanted no answer."""
        try:
            req: Request = self._decode(payload)
        except (msgspec.MsgspecError, RecursionError) as error:
            self._write(self.error(*explain(payload, error)))
            return True
        oneway: int = getattr(req, "oneway", 0)
        if oneway <= 0:
            refusal = self._refusal(req.id)
            if refusal is not None:
                self._write(self.error(req.id, refusal))
                return True
            self.pending.add(req.id)
        reply = self._handle(self, req)
        if reply is not None:
            self.send(reply)
        return oneway > 0 or reply is not None

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


def explain(payload: bytes | memoryview, error: Exception) -> tuple[int, KvtierError]:
    """The request id, as far as it can be read, and the error for a frame that is no request."""
    try:
        loose = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, RecursionError) as worse:
        return 0, ProtocolError(f"not a MessagePack value that could be a request: {worse}")
    request_id = 0
    if isinstance(loose, list) and len(loose) > 1 and type(loose[1]) is int:
        request_id = loose[1] if 0 <= loose[1] < 2**63 else 0
    return request_id, InvalidArgument(f"not a request of this protocol: {error}")
