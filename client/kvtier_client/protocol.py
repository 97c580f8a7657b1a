"""The connection to the daemon without sockets, threads or a clock.

Bytes come in through `receive`, bytes to send come out of `take_outbox`. It numbers requests,
matches replies, keeps what is unanswered or unacknowledged, and after a new connection says
HELLO again, resumes sessions, registers layouts and repeats the rest in its old order.

    DOWN ──open()──▶ GREETING ──Welcome──▶ RESTORING ──all resumed──▶ READY
     ▲                                                                  │
     └──────────────────────────── lost() ◀────────────────────────────┘
"""

import enum
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeVar
from typing import Protocol as Interface

import msgspec

from kvtier_client import wire
from kvtier_client.errors import (
    ConnectionLost,
    InvalidArgument,
    KvtierError,
    ProtocolError,
    ShuttingDown,
    from_code,
)

FRAME_LIMIT_BYTES: Final = 64 << 20
"""Longest reply that is read; a longer one is taken for a broken stream."""
LAZY_LIMIT: Final = 16
"""Frames that may wait for company; one more and all of them are sent."""
ABANDONED_LIMIT: Final = 4096
"""Requests without a caller whose late grant would still be given back."""
DEFAULT_IN_FLIGHT: Final = 64
"""Requests in flight until the daemon has told its own limit."""
_GRANTED: Final = (
    wire.Reserve | wire.ReserveKeys | wire.Acquire | wire.AcquireKeys | wire.Lookup
)  # fmt: skip
"""Requests that get a lease."""
_GIVING: Final = wire.Abort | wire.Release | wire.CloseSession
"""Requests that give something back."""
R = TypeVar("R", bound=wire.Reply)


class Phase(enum.Enum):
    """Where the connection stands; see the diagram above."""

    DOWN = 0
    GREETING = 1
    RESTORING = 2
    READY = 3


class Settled(Interface):
    """Who wants to know when a request has ended (a lease counts what still refers to it)."""

    def settled(self, pending: "Pending") -> None:
        """`pending` has ended."""


class Pending:
    """One request and what became of it; `watchers` are called once when it ends."""

    __slots__ = ("done", "error", "number", "owner", "reply", "request", "sent", "watchers")

    def __init__(self, request: wire.Request | None, owner: Settled | None = None) -> None:
        self.request = request
        self.owner = owner
        self.number = 0
        """Its one-way number on the present connection; 0 for a request that has a reply."""
        self.sent = False
        """On some connection, so the daemon may have carried it out."""
        self.done = False
        self.reply: wire.Reply | None = None
        self.error: KvtierError | None = None
        self.watchers: list[Callable[[], None]] = []

    def end(self, reply: wire.Reply | None, error: KvtierError | None = None) -> None:
        """Record the outcome and tell who waits."""
        self.reply, self.error, self.done = reply, error, True
        if self.owner is not None:
            self.owner.settled(self)
        for watcher in self.watchers:
            watcher()

    def value(self, kind: type[R]) -> R:
        """The reply as `kind`. Errors: the daemon's typed error; ProtocolError for another kind."""
        if self.error is not None:
            raise self.error
        if type(self.reply) is kind:
            return self.reply
        raise ProtocolError(
            f"{type(self.request).__name__} was answered by {type(self.reply).__name__}, "
            f"not {kind.__name__}: daemon and client do not speak the same protocol"
        )


def ended(pendings: tuple[Pending, ...]) -> bool:
    """Whether all of them have ended."""
    for one in pendings:  # noqa: SIM110 - all() takes three times as long on the hottest wait
        if not one.done:
            return False
    return True


def _plain(value: Any) -> Any:
    """A number of numpy's or torch's as Python's own. Errors: TypeError for anything else."""
    if getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"a {type(value).__name__} is neither a number nor a string nor bytes")


Event = wire.Welcome | wire.Ready | wire.Pressure | wire.Revoke


class Protocol:
    """One client's side of the protocol, over as many connections as it takes."""

    def __init__(self, name: str, group: bytes, secret: bytes) -> None:
        self.name = name
        self.group = group
        self.secret = secret
        self.phase = Phase.DOWN
        self.boot = 0
        self.member = -1
        self.limits: wire.Limits | None = None
        self.leaving = False
        """The daemon said that it is stopping: drop the connection and come back later."""
        self.events: deque[Event] = deque()
        """Pushes and Welcomes, in order, for the owner to handle after each `receive`."""
        self.sessions: dict[int, bytes] = {}
        self.layouts: dict[bytes, wire.Layout] = {}
        self.held: dict[int, wire.HeldLease] = {}
        """Granted leases, from their grant on until their owner lets go; HELLO lists them."""
        self.urgent = False
        """Whether something is to be sent that should not wait for company."""
        self._ids = itertools.count(1)
        self._last_id = 0
        self._unsettled: dict[int, Pending] = {}
        self._abandoned: dict[int, Pending] = {}
        self._backlog: deque[Pending] = deque()
        self._unacked: deque[Pending] = deque()
        self._oneway = 0
        self._in_flight = 0
        self._restoring: dict[int, wire.Request] = {}
        self._to_restore: deque[wire.Request] = deque()
        self._outbox: list[bytes] = []
        self._inbox = b""
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
        self._decoder = msgspec.msgpack.Decoder(wire.AnyReply | wire.Push)

    # ------------------------------------------------------------ going out

    def next_id(self) -> int:
        """A request id that was never used before."""
        return next(self._ids)

    def submit(
        self,
        request: wire.Request,
        owner: Settled | None = None,
        oneway: bool = False,
        lazily: bool = False,
    ) -> Pending:
        """Queue a request; it is sent now or as soon as the connection is READY.

        `lazily`: it may wait for the next request, so that both go in one write.
        Errors: InvalidArgument when its frame is longer than the daemon accepts, or when a value
        has no place in a frame.
        """
        pending = Pending(request, owner)
        if oneway:
            pending.number = -1
        if self.phase is Phase.READY:
            urgent = self.urgent
            self._send(pending)
            if lazily and len(self._outbox) <= LAZY_LIMIT:
                self.urgent = urgent
        self._last_id = max(self._last_id, request.id)
        self._unsettled[request.id] = pending
        return pending

    def abandon(self, pending: Pending) -> None:
        """Nobody waits for it any more: its reply is dropped, and a late grant is given back.

        What gives a lease or a session back is carried out all the same: nobody would do it again.
        """
        request = pending.request
        if pending.done or request is None or isinstance(request, _GIVING):
            return
        if self._unsettled.pop(request.id, None) is not None and pending.sent:
            self._abandoned[request.id] = pending
            while len(self._abandoned) > ABANDONED_LIMIT:
                del self._abandoned[next(iter(self._abandoned))]
        elif pending in self._backlog:
            self._backlog.remove(pending)
        pending.end(None, ConnectionLost(f"{type(request).__name__} was given up by its caller"))

    def take_outbox(self) -> bytes:
        """All bytes to send now; empty when there are none."""
        self.urgent = False
        if not self._outbox:
            return b""
        if len(self._outbox) == 1:
            return self._outbox.pop()
        data = b"".join(self._outbox)
        self._outbox.clear()
        return data

    @property
    def sending(self) -> bool:
        """Whether `take_outbox` has something."""
        return bool(self._outbox)

    @property
    def unsettled(self) -> int:
        """Requests that were neither answered nor acknowledged."""
        return len(self._unsettled)

    @property
    def owing(self) -> bool:
        """Whether the daemon may keep something for this client: leases, or what was asked."""
        return bool(self.held or self._unsettled or self._abandoned)

    @property
    def unacked(self) -> list[Pending]:
        """One-way requests that are not acknowledged yet, oldest first."""
        return [p for p in self._unsettled.values() if p.number]

    # ------------------------------------------------------- the connection

    def open(self) -> None:
        """A new connection exists: say HELLO with all that this client still holds."""
        assert self.phase is Phase.DOWN, "open() needs the old connection to be lost() first"
        self.phase = Phase.GREETING
        self.leaving = False
        hello = wire.Hello(
            self.next_id(),
            wire.PROTOCOL_VERSION,
            self.name,
            self.group,
            self.secret,
            self.member,
            list(self.held.values()),
        )
        self._restoring = {}
        self._restore(hello)

    def lost(self) -> None:
        """The connection is gone; what is unsettled waits for the next one."""
        self.phase = Phase.DOWN
        self.events.clear()
        self._outbox.clear()
        self._inbox = b""
        self._backlog.clear()
        self._unacked.clear()
        self._restoring.clear()
        self._oneway = self._in_flight = 0

    def fail_all(self, error: KvtierError) -> None:
        """End everything that is unsettled with `error` (the client closes)."""
        unsettled = list(self._unsettled.values())
        self._unsettled.clear()
        for pending in unsettled:
            pending.end(None, error)

    # ------------------------------------------------------------- coming in

    def receive(self, data: bytes) -> None:
        """Take bytes of the daemon; ends requests and fills `events`.

        Errors: ProtocolError when they are not the protocol; ConnectionLost when another life of
        the daemon answers; the daemon's own error when it refuses HELLO. After any of
        these the connection is of no more use.
        """
        if self._inbox:
            data = self._inbox + data
        start, end = 0, len(data)
        view = memoryview(data)
        while end - start >= 4:
            body = start + 4
            (length,) = wire.FRAME_HEADER.unpack_from(data, start)
            if length > FRAME_LIMIT_BYTES:
                raise ProtocolError(
                    f"a reply of {length} bytes is above the limit of {FRAME_LIMIT_BYTES}: "
                    "the stream is not kvtierd's protocol"
                )
            if end - body < length:
                break
            start = body + length
            try:
                reply = self._decoder.decode(view[body:start])
            except msgspec.DecodeError as problem:
                raise ProtocolError(f"a reply could not be decoded: {problem}") from None
            self._dispatch(reply)
        self._inbox = data[start:] if start < end else b""

    def _dispatch(self, reply: wire.Reply) -> None:
        plain = type(reply) is wire.Granted or type(reply) is wire.Done
        if plain and self.phase is Phase.READY and reply.boot == self.boot:
            self._settle(reply.id, reply, None)  # what nearly all replies are, without detours
            if self._unacked and reply.acked:
                self._acknowledge(reply.acked)
            return
        if self.phase is Phase.GREETING:
            self._greeted(reply)
            return
        if reply.boot != self.boot:
            raise ConnectionLost(
                f"a reply of boot {reply.boot:#x} came on a connection of boot {self.boot:#x}"
            )
        if isinstance(reply, wire.Ready | wire.Pressure | wire.Revoke):
            self.events.append(reply)
        elif isinstance(reply, wire.Failed):
            self._settle(reply.id, None, from_code(reply.code, reply.message))
        elif reply.id in self._restoring:
            self._restored(reply)
        elif isinstance(reply, wire.Error):
            if len(reply.pages) % 4:
                raise ProtocolError(f"an error names pages in {len(reply.pages)} bytes, not u32s")
            pages = tuple(memoryview(reply.pages).cast("I")) if reply.pages else ()
            self._settle(reply.id, None, from_code(reply.code, reply.message, pages))
        else:
            self._settle(reply.id, reply, None)
        if self._unacked and reply.acked:
            self._acknowledge(reply.acked)

    def _settle(self, id: int, reply: wire.Reply | None, error: KvtierError | None) -> None:
        pending = self._unsettled.get(id)
        if pending is None:
            self._late(id, reply)
            return
        if isinstance(error, ShuttingDown):
            self.leaving = True  # stays unsettled: it is repeated to the daemon's next life
            if pending.number and pending in self._unacked:
                self._unacked.remove(pending)
            return
        del self._unsettled[id]
        if type(reply) is wire.Granted and reply.lease:
            write = isinstance(pending.request, wire.Reserve | wire.ReserveKeys)
            self.held[reply.lease] = wire.HeldLease(reply.lease, write, reply.offsets)
        if pending.number:
            if pending in self._unacked:
                self._unacked.remove(pending)
        else:
            self._answered()
        pending.end(reply, error)

    def _answered(self) -> None:
        self._in_flight -= 1
        while self._backlog:
            pending = self._backlog.popleft()
            if not pending.done:
                self._send(pending)
                return
            if pending.request is not None and pending.request.id in self._abandoned:
                self._give_back(pending)  # an earlier connection may have brought it
                return

    def _late(self, id: int, reply: wire.Reply | None) -> None:
        if id > self._last_id:
            raise ProtocolError(f"a reply to request {id}, which was never sent")
        pending = self._abandoned.pop(id, None)
        if pending is None:
            return
        if not pending.number:
            self._answered()
        if isinstance(reply, wire.Granted | wire.Hits) and reply.lease:
            self._end_lease(pending.request, reply.lease)

    def _give_back(self, pending: Pending) -> None:
        """What a request may have been granted whose reply went down with its connection."""
        request = pending.request
        assert request is not None
        del self._abandoned[request.id]
        if isinstance(request, _GRANTED) and request.lease:
            self._end_lease(request, self.member << 32 | request.lease)

    def _end_lease(self, request: wire.Request | None, lease: int) -> None:
        write = isinstance(request, wire.Reserve | wire.ReserveKeys)
        self.submit((wire.Abort if write else wire.Release)(self.next_id(), lease))

    def _acknowledge(self, acked: int) -> None:
        while self._unacked and self._unacked[0].number <= acked:
            pending = self._unacked.popleft()
            assert pending.request is not None
            if self._unsettled.pop(pending.request.id, None) is not None:
                pending.end(None)

    def _greeted(self, reply: wire.Reply) -> None:
        if isinstance(reply, wire.Error):
            raise from_code(reply.code, reply.message)
        if not isinstance(reply, wire.Welcome) or reply.id not in self._restoring:
            raise ProtocolError(f"HELLO was answered by {type(reply).__name__}")
        if reply.version != wire.PROTOCOL_VERSION:
            raise ProtocolError(
                f"the daemon speaks protocol version {reply.version}, this client "
                f"{wire.PROTOCOL_VERSION}: install matching versions"
            )
        if (reply.boot, reply.member) != (self.boot, self.member):
            self._abandoned.clear()  # HELLO has ended what it did not list
        self.boot = reply.boot
        self.member = reply.member
        self.limits = reply.limits
        for lease in reply.lost_leases:
            self.held.pop(lease, None)
        self.events.append(reply)
        self._restoring = {}
        self._to_restore = deque(
            wire.ResumeSession(self.next_id(), token) for token in self.sessions.values()
        )
        self._to_restore.extend(
            wire.RegisterLayout(self.next_id(), layout) for layout in self.layouts.values()
        )
        self.phase = Phase.RESTORING
        self._restore_more()

    def _restore_more(self) -> None:
        """Restore as much at a time as may be in flight, and repeat the rest when all is there."""
        assert self.limits is not None
        while self._to_restore and len(self._restoring) < self.limits.requests_in_flight:
            self._restore(self._to_restore.popleft())
        if not self._restoring:
            self._repeat()

    def _restore(self, request: wire.Request) -> None:
        self._last_id = max(self._last_id, request.id)
        self._restoring[request.id] = request
        self._outbox.append(wire.frame(request, self._encoder))
        self.urgent = True

    def _restored(self, reply: wire.Reply) -> None:
        if isinstance(reply, wire.Error) and reply.code == ShuttingDown.code:
            self.leaving = True
            return
        del self._restoring[reply.id]  # what is not there any more is told to who asks for it
        if self.phase is Phase.RESTORING:
            self._restore_more()

    def _repeat(self) -> None:
        self.phase = Phase.READY
        unsettled = list(self._unsettled.values())
        for pending in list(self._abandoned.values()):
            self._give_back(pending)
        for pending in unsettled:
            try:
                self._send(pending)
            except InvalidArgument as problem:
                assert pending.request is not None
                del self._unsettled[pending.request.id]
                pending.end(None, problem)

    def _send(self, pending: Pending) -> None:
        request = pending.request
        assert request is not None
        limits = self.limits
        number = self._oneway + 1
        if pending.number:
            request = msgspec.structs.replace(request, oneway=number)
        try:
            body = self._encoder.encode(request)
        except (TypeError, ValueError, OverflowError) as problem:
            raise InvalidArgument(
                f"{type(request).__name__} has a value that cannot be sent: {problem}"
            ) from None
        if limits is not None and len(body) > limits.frame_bytes:
            raise InvalidArgument(
                f"{type(request).__name__} needs a frame of {len(body)} bytes; the daemon accepts "
                f"{limits.frame_bytes}: send less at once, or raise limits.frame_bytes"
            )
        in_flight_limit = limits.requests_in_flight if limits else DEFAULT_IN_FLIGHT
        if not pending.number and self._in_flight >= in_flight_limit:
            self._backlog.append(pending)
            return
        if pending.number:
            self._oneway = pending.number = number
            self._unacked.append(pending)
        else:
            self._in_flight += 1
        pending.sent = self.urgent = True
        self._outbox.append(wire.FRAME_HEADER.pack(len(body)) + body)
