"""One connection from its client's side, and the judge of what the daemon says on it.

Every request has one reply, one-way requests have none, and no error is one of the daemon's own.
"""

import logging
import struct
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from kvtier_client import wire
from kvtier_client.admin_wire import AdminRequest
from kvtier_client.errors import from_code
from tests.fuzz.stage import Socket

if TYPE_CHECKING:
    from tests.fuzz.machine import Machine

INTERNAL = 502
FRAME_BYTES = 65536
MEMBERS = 8
"""Processes of clients; the last one is an operator, the last but one a stranger."""
OPERATOR, OUTSIDER = MEMBERS - 1, MEMBERS - 2


class Finding(AssertionError):
    """The daemon broke a promise."""


class Traces(logging.Handler):
    """Keeps what the daemon has logged about its last fault."""

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.last = logging.Formatter().format(record)


TRACES = Traces(logging.ERROR)


REQUESTS: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(wire.ClientRequest)
ORDERS: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AdminRequest)
REPLIES: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(wire.AnyReply | wire.Push)
PUSHES = (wire.Ready, wire.Failed, wire.Pressure, wire.Revoke)
_U32 = struct.Struct("<I")


def frame(body: bytes) -> bytes:
    """A body with its length before it."""
    return _U32.pack(len(body)) + body


def request_id(body: bytes) -> tuple[int, int]:
    """The id that the one reply to a frame must carry, and its one-way number (then none comes)."""
    try:
        loose = msgspec.msgpack.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return 0, 0
    if isinstance(loose, list) and len(loose) > 1 and type(loose[1]) is int:
        return (loose[1] if 0 <= loose[1] < 2**63 else 0), 0
    return 0, 0


class Line:
    """One connection, from its client's side."""

    def __init__(self, machine: "Machine", who: int) -> None:
        self.machine, self.who = machine, who
        self.sock = Socket(machine.processes, machine.pids[who], machine.uid(who), self.hear)
        self.owed: Counter[int] = Counter()
        self.oneway: set[int] = set()
        self.given: dict[str, list[Any]] = {}
        self.greeted = who == OPERATOR
        self.frames = 0
        self._requests = ORDERS if who == OPERATOR else REQUESTS
        self._sent = bytearray()
        self._heard = bytearray()
        self._broken = False

    # ------------------------------------------------------------------- saying

    def say(self, data: bytes) -> None:
        """Send bytes; what they ask for is noted before the daemon sees them."""
        if self.sock.closed:
            return
        self._sent += data
        self._note()
        self.sock.arrive(data)
        self.machine.loop.run_ready()

    def _note(self) -> None:
        sent = self._sent
        while len(sent) >= 4 and not self._broken:
            (length,) = _U32.unpack_from(sent)
            if length > FRAME_BYTES:
                self.owed[0 if self.greeted else 1] += 1
                self._broken = True
                return
            if len(sent) - 4 < length:
                return
            body = bytes(sent[4 : 4 + length])
            del sent[: 4 + length]
            self.frames += 1
            self._owe(body)

    def _owe(self, body: bytes) -> None:
        try:
            request = self._requests.decode(body)
        except (msgspec.MsgspecError, RecursionError):
            self.owed[request_id(body)[0] if self.greeted else 1] += 1
            self._broken |= not self.greeted
            return
        if not self.greeted:
            self.greeted = True
            good = isinstance(request, wire.Hello) and request.version == wire.PROTOCOL_VERSION
            self.owed[request.id] += good
            self.owed[1] += 1  # a refusal says so; only one of the two comes
            self._first = True
        elif getattr(request, "oneway", 0):
            self.oneway.add(request.id)
        else:
            self.owed[request.id] += 1

    _first = False

    # ------------------------------------------------------------------ hearing

    def hear(self, data: bytes) -> None:
        """The daemon has said something."""
        heard = self._heard
        heard += data
        while len(heard) >= 4:
            (length,) = _U32.unpack_from(heard)
            if len(heard) - 4 < length:
                return
            body = bytes(heard[4 : 4 + length])
            del heard[: 4 + length]
            self._judge(REPLIES.decode(body))

    def _judge(self, reply: Any) -> None:
        kind = type(reply)
        code = reply.code if kind is wire.Error or kind is wire.Failed else 0
        self.machine.kinds[str(code) if code else kind.__struct_config__.tag] += 1
        if code == INTERNAL or (code and type(from_code(code, "")).code != code):
            raise Finding(f"an error that no client can cause: {reply}\n{TRACES.last}")
        if kind in PUSHES:
            if kind is wire.Failed and reply.id not in self.oneway:
                raise Finding(f"a failure of what was not sent one-way: {reply}")
            return
        if not self.greeted and kind is wire.Error:  # turned away at the door
            self._broken = True
            return
        if not self.owed[reply.id]:
            raise Finding(f"a reply that nobody waits for, or the second one: {reply}")
        self.owed[reply.id] -= 1
        if self._first:
            self._first = False
            self._welcomed(reply)
        elif kind is wire.Granted and reply.lease:
            self._gave("lease", reply.lease)
            self._gave("offsets", reply.offsets)
        elif kind is wire.SessionReply:
            self._gave("session", reply.session)
        elif kind is wire.Hits and reply.lease:
            self._gave("lease", reply.lease)

    def _welcomed(self, reply: Any) -> None:
        if isinstance(reply, wire.Welcome):
            if reply.tenant != ("a" if self.who < 4 else "b") or self.who >= OUTSIDER:
                raise Finding(f"process {self.who} is welcome as {reply.tenant}")
            self._gave("member", reply.member)
            self.owed[1] -= 1
        else:
            self.owed.clear()
            self._broken = True

    def _gave(self, kind: str, value: Any) -> None:
        self.machine.given.setdefault(kind, []).append(value)
        self.given.setdefault(kind, []).append(value)

    def stall(self, stalled: bool) -> None:
        """The client ceases to read, or reads again."""
        if self.sock.transport is not None:
            self.sock.transport.read(stalled)

    def settle(self) -> None:
        """In the end, an open connection has all its replies."""
        left = +self.owed
        if left and self.greeted and not self.sock.closed and not self._sent and not self._broken:
            raise Finding(f"requests without a reply: {dict(left)}")
