"""Every error a caller of kvtierd can meet, as one tree.

    KvtierError
    ├── TransportError   the daemon could not be asked
    │   ├── ConnectionLost      no daemon behind the socket, or it went away
    │   ├── Timeout             the deadline passed first
    │   └── ProtocolError       the bytes were not the protocol
    ├── RequestError     asking again will not help
    │   ├── UnknownSession      no such session (for this tenant)
    │   ├── UnknownBranch       no such node, or it was pruned
    │   ├── LayoutMismatch      layout unknown, contradictory, or not the session's
    │   ├── InvalidArgument     a value outside what the verb allows
    │   ├── LeaseExpired        the lease ended (deadline, release, or an earlier life)
    │   ├── NotOwner            another group or tenant owns it, or the uid is not listed
    │   └── QuotaExceeded       a limit or a tenant's quota
    ├── CapacityError    there is no room now
    │   ├── ArenaFull
    │   ├── SpillFull
    │   └── RemoteFull
    ├── DataError        the bytes are gone
    │   ├── ChecksumMismatch
    │   └── BlockLost
    └── DaemonError      the daemon's own trouble
        ├── ShuttingDown
        └── Internal

A miss is a result, not an error. The numeric code travels on the wire, the exit code is what
`kvtierctl` returns, and `retryable` says whether the same request may succeed later.
"""

from typing import ClassVar


class KvtierError(Exception):
    """Base of every error of kvtierd."""

    code: ClassVar[int] = 0
    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, pages: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.pages = pages
        """Pages that the error speaks of (`BlockLost`, `ChecksumMismatch`), else empty."""


class TransportError(KvtierError):
    """The daemon could not be asked."""

    code, exit_code = 100, 10


class ConnectionLost(TransportError):
    """No daemon answers behind the socket, or it went away."""

    code, exit_code, retryable = 101, 11, True


class Timeout(TransportError):
    """The deadline passed before the answer came."""

    code, exit_code, retryable = 102, 12, True


class ProtocolError(TransportError):
    """The bytes on the socket were not the protocol."""

    code, exit_code = 103, 13


class RequestError(KvtierError):
    """The request cannot be met as it was asked."""

    code, exit_code = 200, 20


class UnknownSession(RequestError):
    """There is no such session for this tenant."""

    code, exit_code = 201, 21


class UnknownBranch(RequestError):
    """There is no such node in the session, or it was pruned."""

    code, exit_code = 202, 22


class LayoutMismatch(RequestError):
    """The layout is unknown, contradicts itself, or is not the session's."""

    code, exit_code = 203, 23


class InvalidArgument(RequestError):
    """A value is outside what the verb allows."""

    code, exit_code = 204, 24


class LeaseExpired(RequestError):
    """The lease has ended: by its deadline, by release, or with an earlier life of the daemon."""

    code, exit_code = 205, 25


class NotOwner(RequestError):
    """Another group or tenant owns it, or the peer's uid is not listed."""

    code, exit_code = 206, 26


class QuotaExceeded(RequestError):
    """A limit or a tenant's quota stands in the way."""

    code, exit_code = 207, 27


class CapacityError(KvtierError):
    """There is no room now."""

    code, exit_code, retryable = 300, 30, True


class ArenaFull(CapacityError):
    """The arena has no room, and eviction made none before the deadline."""

    code, exit_code, retryable = 301, 31, True


class SpillFull(CapacityError):
    """No tier can take the blocks: arena and spill files together are full of HELD blocks."""

    code, exit_code, retryable = 302, 32, True


class RemoteFull(CapacityError):
    """The remote pool has no room."""

    code, exit_code, retryable = 303, 33, True


class DataError(KvtierError):
    """Bytes that were stored cannot be given back."""

    code, exit_code = 400, 40


class ChecksumMismatch(DataError):
    """The bytes that came back are not the bytes that were stored."""

    code, exit_code = 401, 41


class BlockLost(DataError):
    """A HELD block is gone: its medium lost or changed it."""

    code, exit_code = 402, 42


class DaemonError(KvtierError):
    """The daemon could not do its work."""

    code, exit_code = 500, 50


class ShuttingDown(DaemonError):
    """The daemon is stopping; it comes back after its restart."""

    code, exit_code, retryable = 501, 51, True


class Internal(DaemonError):
    """A fault inside the daemon; its log has the trace."""

    code, exit_code = 502, 52


def _tree(cls: type[KvtierError]) -> list[type[KvtierError]]:
    return [cls] + [leaf for sub in cls.__subclasses__() for leaf in _tree(sub)]


BY_CODE: dict[int, type[KvtierError]] = {cls.code: cls for cls in _tree(KvtierError)}


def from_code(code: int, message: str, pages: tuple[int, ...] = ()) -> KvtierError:
    """Build the error that the wire's `code` names; an unknown code becomes `DaemonError`."""
    return BY_CODE.get(code, DaemonError)(message, pages)
