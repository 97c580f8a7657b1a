"""The service manager's side of the daemon: notifications, the file descriptor store, the journal.

Source: sd_notify(3), sd_pid_notify_with_fds(3), sd_listen_fds(3), systemd.exec(5) $FDSTORE and
$JOURNAL_STREAM, sd-daemon(3).
"""

import logging
import os
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Final

STDERR_FD: Final = 2
FIRST_FD: Final = 3
SEND_TIMEOUT_S: Final = 5.0
"""A service manager that does not read is an error, not a reason to hang."""
_PRIORITIES: Final = {
    logging.CRITICAL: 2, logging.ERROR: 3, logging.WARNING: 4, logging.INFO: 6, logging.DEBUG: 7,
}  # fmt: skip


def prefix(level: int, environ: Mapping[str, str] | None = None) -> str:
    """What gives a line on stderr its priority in the journal; empty when stderr is not that."""
    stream = (os.environ if environ is None else environ).get("JOURNAL_STREAM", "")
    found = os.fstat(STDERR_FD)
    return f"<{_PRIORITIES[level]}>" if stream == f"{found.st_dev}:{found.st_ino}" else ""


class LineFormatter(logging.Formatter):
    """Log records as lines on stderr, with their priorities in the journal."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")
        self._prefixes = {level: prefix(level) for level in _PRIORITIES}

    def format(self, record: logging.LogRecord) -> str:
        """The record's lines, each with its priority."""
        start = self._prefixes.get(record.levelno, "")
        return start + super().format(record).replace("\n", "\n" + start)


def notify(state: str, fds: Sequence[int] = (), environ: Mapping[str, str] | None = None) -> bool:
    """Tell the service manager, e.g. "READY=1", "STATUS=…", "WATCHDOG=1", with descriptors.

    Returns whether there is one ($NOTIFY_SOCKET). Errors: OSError.
    """
    path = (os.environ if environ is None else environ).get("NOTIFY_SOCKET", "")
    if not path:
        return False
    address = "\0" + path[1:] if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.settimeout(SEND_TIMEOUT_S)
        sender.connect(address)
        socket.send_fds(sender, [state.encode()], list(fds))
    return True


def has_fd_store(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the service manager keeps descriptors for us.

    Since version 254 it says so ($FDSTORE); an older one is taken to follow the unit that ships.
    """
    environ = os.environ if environ is None else environ
    if not environ.get("NOTIFY_SOCKET"):
        return False
    return environ.get("FDSTORE", "1" if "INVOCATION_ID" in environ else "0") != "0"


def listen_fds(environ: MutableMapping[str, str] | None = None) -> list[tuple[str, int]]:
    """Take the descriptors that the service manager passed, with their names.

    They are made close-on-exec, and the variables are removed, so that no child takes them.
    """
    environ = os.environ if environ is None else environ
    pid, count, names = (environ.pop(f"LISTEN_{key}", "") for key in ("PID", "FDS", "FDNAMES"))
    if pid != str(os.getpid()) or not count.isdigit():
        return []
    fds = range(FIRST_FD, FIRST_FD + int(count))
    for fd in fds:
        os.set_inheritable(fd, False)
    named = names.split(":") if names else []
    return [(named[i] if i < len(named) else "unknown", fd) for i, fd in enumerate(fds)]
