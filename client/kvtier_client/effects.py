"""What an operation may ask of a shell, and the waits that all operations share.

An operation is a generator. It queues requests on the core and yields what it needs done: `Wait`
for answers, `Run` for a copy that may block, `Pause` for a while. The shell moves bytes before
each of these and at the end, and throws errors back in.
"""

from collections.abc import Callable, Generator
from typing import Any, TypeVar

from kvtier_client import wire
from kvtier_client.core import Core
from kvtier_client.errors import CapacityError, ProtocolError
from kvtier_client.protocol import Pending, R

T = TypeVar("T")


class Wait:
    """Return when all `pendings` have ended. Errors: Timeout or ConnectionLost after timeout_s."""

    __slots__ = ("pendings", "timeout_s")

    def __init__(self, pendings: tuple[Pending, ...], timeout_s: float) -> None:
        self.pendings = pendings
        self.timeout_s = timeout_s


class Run:
    """Call `work`, which copies about `size_bytes` and may block; returns only when it is over."""

    __slots__ = ("size_bytes", "work")

    def __init__(self, work: Callable[[], None], size_bytes: int) -> None:
        self.work = work
        self.size_bytes = size_bytes


class Pause:
    """Let `duration_s` pass."""

    __slots__ = ("duration_s",)

    def __init__(self, duration_s: float) -> None:
        self.duration_s = duration_s


Effect = Wait | Run | Pause
Op = Generator[Effect, None, T]


def reply_of(core: Core, pending: Pending, kind: type[R], extra_s: float = 0.0) -> Op[R]:
    """Wait for the reply to `pending`; on any error nobody waits for it any more."""
    if not pending.done:
        try:
            yield Wait((pending,), core.deadline_s + extra_s)
        except BaseException:
            core.abandon(pending)
            raise
    return pending.value(kind)


def call(
    core: Core, kind: type[R], request: type[wire.Request], *fields: Any, extra_s: float = 0.0
) -> Op[R]:
    """Send a request and wait for its reply."""
    pending = core.send(request, *fields)
    return (yield from reply_of(core, pending, kind, extra_s))


def patiently(
    core: Core, request: type[wire.Request], ask: Callable[[float], tuple[Any, ...]], wait_s: float
) -> Op[tuple[float, wire.Granted]]:
    """Ask for a lease with waits no longer than the daemon allows, until `wait_s` is over.

    Returns when it was asked, and the grant.
    """
    deadline_s = core.now_s() + wait_s
    while True:
        asked_s = core.now_s()
        left_s = max(0.0, deadline_s - asked_s)
        slice_s = min(left_s, core.limits().wait_max_s)
        pending = core.send(request, *ask(slice_s))
        try:
            granted = yield from reply_of(core, pending, wire.Granted, slice_s)
        except CapacityError:
            waited_s = core.now_s() - asked_s
            if slice_s >= left_s or waited_s < slice_s / 2:
                raise  # the whole wait is over, or the daemon knows that waiting will not help
        else:
            return asked_s, granted


def check_window(granted: wire.Granted, asked: int) -> wire.Granted:
    """Errors: ProtocolError when a window is empty or longer than what was asked."""
    if not 8 <= len(granted.offsets) <= 8 * asked:
        raise ProtocolError(f"{asked} pages were asked, {len(granted.offsets) // 8} granted")
    return granted
