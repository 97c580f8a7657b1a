"""Drives operations over a blocking socket, for any number of threads.

Whichever thread waits first reads the socket for all; the others wait until their replies are in.
A small background thread looks after the client while nobody calls it.
"""

import contextlib
import logging
import select
import socket
import threading
import weakref
from typing import Any, Final

from kvtier_client.core import Core
from kvtier_client.effects import Op, Run, T, Wait
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
from kvtier_client.single import Single, ask_one, copy_ahead, read_ahead, read_one, write_one

SEND_STALL_S: Final = 30.0
"""A daemon that takes no bytes for so long, or for `deadline_s`, is taken for gone."""
POLL_MAX_S: Final = 3600.0
"""Longest wait in one piece; a longer one, which may be endless, consists of several."""
log = logging.getLogger("kvtier_client")


class Driver:
    """The sync shell's engine."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.closed = threading.Event()
        self._changed = threading.Condition(core.lock)
        self._waiting = 0
        self._send_lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._poll = select.poll()
        self._reading = False
        self._connecting = False
        self._reason: object = "not connected yet"
        self._pace = Pace()
        self._keeper: threading.Thread | None = None

    # ----------------------------------------------------------- operations

    def run(self, op: Op[T]) -> T:
        """Carry an operation out and return its result. Errors: whatever it raises."""
        self._check()
        protocol = self.core.protocol
        try:
            effect = next(op)
            while True:
                try:
                    if type(effect) is Wait:
                        self.wait(effect.pendings, effect.timeout_s)
                    elif type(effect) is Run:
                        if protocol.urgent:
                            self.flush()
                        effect.work()
                    else:
                        self._pause(effect)
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
        if self.closed.is_set():
            raise ConnectionLost("this client is closed: open a new one")

    def out_now(self, single: Single, valid: int, retention: int) -> bool:
        """Swap one block out without waiting; False when the long way must be taken."""
        self._check()
        try:
            return write_one(single, valid, retention, False) is not None
        finally:
            if self.core.protocol.urgent:
                self.flush()

    def in_now(self, single: Single, wait_s: float) -> int | None:
        """As `single.in_one`, without the steps of an operation."""
        self._check()
        core = self.core
        ahead = core.ahead
        window = ahead.awaited(single)
        if window is not None:
            self.wait((window,), core.deadline_s)
        taken = ahead.take(single)
        if taken is not None:
            try:
                if core.protocol.urgent:
                    self.flush()
                copy_ahead(single, *taken)
            finally:
                ahead.leave(taken[0])
            tokens = read_ahead(single, taken[0])
            if tokens is not None:
                return tokens
        timeout_s = ask_one(single, wait_s)
        try:
            self.wait((single.pending,), timeout_s)
        except BaseException:
            core.abandon(single.pending)
            raise
        try:
            return read_one(single)
        finally:
            if core.protocol.urgent:
                self.flush()

    def _pause(self, effect: Any) -> None:
        self.flush()
        self.closed.wait(effect.duration_s)

    def wait(self, pendings: tuple[Pending, ...], timeout_s: float) -> None:
        """Send what is queued, and return when all have ended.

        Errors: Timeout, ConnectionLost, ProtocolError.
        """
        now_s = self.core.now_s
        deadline_s = now_s() + timeout_s
        self.flush()
        while True:
            with self._changed:
                if ended(pendings):
                    return
                left_s = min(deadline_s - now_s(), POLL_MAX_S)
                if left_s <= 0:
                    raise self._too_late(timeout_s)
                sock = self._sock
                busy = self._connecting if sock is None else self._reading
                if busy:
                    self._waiting += 1
                    self._changed.wait(left_s)
                    self._waiting -= 1
                    continue
                if sock is None:
                    self._connecting = True
                else:
                    self._reading = True
            if sock is None:
                self._connect(deadline_s, timeout_s)
            else:
                self._read(sock, left_s)

    def _too_late(self, timeout_s: float) -> KvtierError:
        if self._sock is None:
            return no_daemon(self.core.path, self._reason, timeout_s)
        return Timeout(
            f"the daemon did not answer within {timeout_s:.1f} s: it is busy or stuck; ask again, "
            "or allow more with deadline_s"
        )

    # ------------------------------------------------------------ the socket

    def flush(self) -> None:
        """Send what is queued, if there is a connection."""
        protocol = self.core.protocol
        if not protocol.sending or self._sock is None:
            return
        with self._send_lock:
            with self.core.lock:
                sock = self._sock
                data = b"" if sock is None else protocol.take_outbox()
            if sock is None or not data:
                return
            try:
                self._send(sock, data)
            except OSError as problem:
                self._drop(sock, problem)

    def _send(self, sock: socket.socket, data: bytes) -> None:
        try:
            sent = sock.send(data)
        except BlockingIOError:
            sent = 0
        view = memoryview(data)[sent:]
        if not view:
            return
        ready = select.poll()
        ready.register(sock, select.POLLOUT)
        stall_s = min(SEND_STALL_S, self.core.deadline_s)
        while view:
            if not ready.poll(stall_s * 1000):
                raise OSError(f"the daemon took no bytes for {stall_s} s")
            view = view[sock.send(view) :]

    def _read(self, sock: socket.socket, timeout_s: float) -> None:
        """Read once, for everybody who waits; the caller has set `_reading`."""
        try:
            if self._poll.poll(timeout_s * 1000):
                self._take(sock)
        finally:
            with self._changed:
                self._reading = False
                if self._sock is not sock:
                    sock.close()
                if self._waiting:
                    self._changed.notify_all()
        self.flush()

    def _take(self, sock: socket.socket) -> None:
        core = self.core
        try:
            data = receive(sock)
            with core.lock:
                core.protocol.receive(data)
                core.handle_events()
                leaving = core.protocol.leaving
            if leaving:
                raise ConnectionLost("the daemon is stopping")
        except BlockingIOError:
            return
        except (OSError, ConnectionLost) as problem:
            self._drop(sock, problem)
        except BaseException as problem:
            self._drop(sock, problem)
            raise

    def _drop(self, sock: socket.socket, reason: object) -> None:
        with self._changed:
            if self._sock is not sock:
                return
            self._sock = None
            self._reason = reason
            self.core.protocol.lost()
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes whoever reads it, who closes it then
            if not self._reading:
                sock.close()
            self._changed.notify_all()

    def _connect(self, deadline_s: float, timeout_s: float) -> None:
        """Connect until it works or the deadline passes; the caller has set `_connecting`."""
        pace = self._pace
        try:
            while self._sock is None:
                self._check()
                self._rest(pace.delay_s(self.core.now_s()), deadline_s)
                try:
                    self._greet(deadline_s)
                except BaseException as problem:
                    self._reason = problem
                    if is_final(problem):
                        raise
                    if self.core.now_s() >= deadline_s:
                        raise no_daemon(self.core.path, problem, timeout_s) from None
                else:
                    pace.connected(self.core.now_s())
        finally:
            with self._changed:
                self._connecting = False
                self._changed.notify_all()
        self.flush()
        self._start_keeper()

    def _rest(self, delay_s: float, deadline_s: float) -> None:
        delay_s = min(delay_s, deadline_s - self.core.now_s())
        if delay_s > 0:
            self.closed.wait(delay_s)

    def _greet(self, deadline_s: float) -> None:
        """One connection up to WELCOME."""
        core, protocol = self.core, self.core.protocol
        sock, greeting = new_socket(), Greeting(core)
        try:
            sock.connect(core.path)
            with core.lock:
                protocol.open()
                hello = protocol.take_outbox()
            with contextlib.suppress(BrokenPipeError):  # a daemon that refuses says why, and closes
                self._send(sock, hello)
            poll = select.poll()
            poll.register(sock, select.POLLIN)
            welcome = False
            while not welcome:
                self._check()
                left_s = deadline_s - core.now_s()
                if left_s <= 0:
                    raise ConnectionLost("the daemon accepted the connection but did not answer")
                if poll.poll(min(left_s, TEND_PERIOD_S) * 1000):
                    welcome = greeting.receive(sock)
            with self._changed:
                self._check()
                self._sock, self._poll = sock, poll
        except BaseException:
            with core.lock:
                if protocol.phase is not Phase.DOWN:
                    protocol.lost()
            sock.close()
            raise
        finally:
            greeting.close()

    # --------------------------------------------------------- while nobody calls

    def _start_keeper(self) -> None:
        if self._keeper is None:
            self._keeper = threading.Thread(
                target=_keep, args=(weakref.ref(self), self.closed), name="kvtier-keeper"
            )
            self._keeper.daemon = True
            self._keeper.start()

    def tend(self) -> None:
        """Read pushes, renew, give back what is idle; come back after a restart of the daemon."""
        core, protocol = self.core, self.core.protocol
        if self._sock is None:
            if protocol.unsettled or protocol.sessions or protocol.held:
                with self._changed:
                    if self._connecting or self._sock is not None:
                        return
                    self._connecting = True
                self._connect(core.now_s() + TEND_PERIOD_S, TEND_PERIOD_S)
            return
        core.tidy()
        self.flush()
        with self._changed:
            sock = self._sock
            if sock is None or self._reading:
                return
            self._reading = True
        self._read(sock, 0.0)

    def close(self) -> None:
        """Close the socket; whoever still waits gets ConnectionLost."""
        if self.core.is_child():
            if self._sock is not None:
                self._sock.close()
            return
        with self._changed:
            self.closed.set()
            sock = self._sock
        if sock is not None:
            self._drop(sock, "closed by its owner")
        with self._changed:
            self.core.fail_all(ConnectionLost("this client was closed"))
            self._changed.notify_all()
        self.core.crew.close()


def _keep(ref: "weakref.ref[Driver]", closed: threading.Event) -> None:
    while not closed.wait(TEND_PERIOD_S):
        driver = ref()
        if driver is None:
            return
        try:
            driver.tend()
        except KvtierError as problem:
            log.debug("kvtierd is away: %s", problem)
        except Exception:
            log.exception("looking after the connection to kvtierd failed")
        del driver
