"""Who keeps the arenas' memfds while no daemon runs: systemd's fd store, or a holder process.

    open_keeper("auto") ─ systemd with an fd store? ─ yes ► SystemdKeeper
                                                    └ no ─► HolderKeeper ─► holder_process.py

A keeper stores descriptors by name. What an earlier life stored, `take_all` gives back; storing it
again under the same name changes nothing, so restarts leave nothing behind.
"""

import array
import contextlib
import fcntl
import logging
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Final, Literal, Protocol

from kvtierd import systemd
from kvtierd.tiers.errors import StartError
from kvtierd.tiers.locks import check_socket_place

Mode = Literal["auto", "systemd", "holder", "off"]
"""The configuration's `recovery.memory`."""

SOCKET_NAME: Final = "holder.sock"
DEADLINE_S: Final = 5.0
IDLE_S: Final = 10.0
"""A holder that holds nothing and serves nobody ends after this."""
NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")

_PACKET_BYTES: Final = 256
_FDS_MAX: Final = 4
_RETRY_S: Final = 0.02
_EXIT_TAKEN: Final = 3
_log = logging.getLogger(__name__)


class KeeperError(StartError):
    """Memory cannot be kept beyond the daemon's process."""


class MemoryKeeper(Protocol):
    """Keeps descriptors by name beyond the life of the process."""

    def put(self, name: str, fd: int) -> None:
        """Keep a descriptor (the caller's stays open); an earlier one of that name is dropped.

        Errors: KeeperError.
        """

    def take_all(self) -> dict[str, int]:
        """Descriptors that an earlier life put; the caller owns them, and they stay kept.

        Errors: KeeperError.
        """

    def drop(self, name: str) -> None:
        """Let go of a name, known or not. Errors: KeeperError."""

    def fileno(self) -> int | None:
        """Becomes readable when the keeper has ended, and everything must be put again."""

    def close(self) -> None:
        """End this life's use of the keeper; what is kept stays kept."""

    def abandon(self) -> None:
        """A start has failed: also undo what was begun for it, if nothing was kept before."""


def open_keeper(mode: Mode, runtime_dir: str) -> MemoryKeeper:
    """The keeper that the configuration asks for.

    What a holder process of an earlier configuration still holds moves to systemd, or is let go
    under `off`. Errors: KeeperError.
    """
    stored = systemd.has_fd_store()
    if mode == "systemd" and not stored:
        raise KeeperError(
            "keep memory in systemd's fd store",
            "the daemon was not started with one ($NOTIFY_SOCKET and $FDSTORE)",
            'set FileDescriptorStoreMax= in the unit, or recovery.memory = "auto"',
        )
    if mode == "holder" or (mode == "auto" and not stored):
        return HolderKeeper(runtime_dir)
    left = _retire_holder(runtime_dir)
    if mode == "off":
        for name, fd in left.items():
            _log.warning("memory %s of an earlier run is let go: recovery.memory is off", name)
            os.close(fd)
        return NoKeeper()
    keeper = SystemdKeeper(left)
    for name, fd in left.items():
        keeper.put(name, fd)
    return keeper


def _check_name(name: str) -> None:
    assert NAME.fullmatch(name), name


class NoKeeper:
    """Keeps nothing: the arena ends with the daemon."""

    def put(self, name: str, fd: int) -> None:
        """Does nothing."""
        _check_name(name)

    def take_all(self) -> dict[str, int]:
        """There is nothing."""
        return {}

    def drop(self, name: str) -> None:
        """Does nothing."""
        _check_name(name)

    def fileno(self) -> int | None:
        """It never ends."""
        return None

    def close(self) -> None:
        """Does nothing."""

    def abandon(self) -> None:
        """Does nothing."""


class SystemdKeeper:
    """systemd's file descriptor store."""

    def __init__(self, found: dict[str, int] | None = None) -> None:
        self._found = dict(found or {})
        for name, fd in systemd.listen_fds():
            if name in self._found:
                os.close(self._found[name])
            self._found[name] = fd
        self._stored = {name: _identity(fd) for name, fd in self._found.items()}

    def put(self, name: str, fd: int) -> None:
        """Store it; systemd ignores a descriptor that it has already."""
        _check_name(name)
        if self._stored.get(name, _identity(fd)) != _identity(fd):
            self.drop(name)
        self._notify(f"FDSTORE=1\nFDNAME={name}", [fd])
        self._stored[name] = _identity(fd)

    def take_all(self) -> dict[str, int]:
        """What systemd passed at the start of this process."""
        found, self._found = self._found, {}
        return found

    def drop(self, name: str) -> None:
        """Remove it from the store."""
        _check_name(name)
        self._notify(f"FDSTOREREMOVE=1\nFDNAME={name}", [])
        self._stored.pop(name, None)

    def fileno(self) -> int | None:
        """systemd does not end before us."""
        return None

    def close(self) -> None:
        """Close what was passed and not taken."""
        for fd in self.take_all().values():
            os.close(fd)

    def abandon(self) -> None:
        """The same."""
        self.close()

    def _notify(self, state: str, fds: list[int]) -> None:
        try:
            systemd.notify(state, fds)
        except OSError as error:
            raise KeeperError(
                "keep memory in systemd's fd store",
                f"the service manager does not take it ({error.strerror})",
                "see the journal of the unit",
            ) from error


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


class HolderKeeper:
    """A connection to the holder process behind `<runtime_dir>/holder.sock`, started if needed."""

    def __init__(
        self, runtime_dir: str, deadline_s: float = DEADLINE_S, idle_s: float = IDLE_S
    ) -> None:
        self._path = os.path.join(runtime_dir, SOCKET_NAME)
        check_socket_place(self._path, live=True)
        self._deadline_s = deadline_s
        self._idle_s = idle_s
        self._started = False
        self._socket = self._connect()

    def put(self, name: str, fd: int) -> None:
        """Give it to the holder; a holder that has ended is replaced by a new one."""
        _check_name(name)
        try:
            self._request(b"P" + name.encode(), [fd])
        except _Ended:
            self._socket.close()
            self._socket = self._connect()
            self._request(b"P" + name.encode(), [fd])

    def take_all(self) -> dict[str, int]:
        """Fetch a descriptor of each that is held."""
        found: dict[str, int] = {}
        try:
            self._send(b"G", [])
            while True:
                packet, fds = self._receive()
                if packet == b"." and not fds:
                    return found
                name = packet[1:].decode(errors="replace")
                good = packet[:1] == b"=" and len(fds) == 1 and NAME.fullmatch(name)
                if not good or name in found:
                    _close_all(fds)
                    raise self._error(f"the holder answered {packet[:40]!r}")
                found[name] = fds[0]
        except BaseException:
            _close_all(found.values())
            raise

    def drop(self, name: str) -> None:
        """Have the holder close it."""
        _check_name(name)
        self._request(b"D" + name.encode(), [])

    def fileno(self) -> int:
        """The connection: it ends with the holder."""
        return self._socket.fileno()

    def close(self) -> None:
        """Disconnect; the holder goes on for as long as it holds something."""
        self._socket.close()

    def abandon(self) -> None:
        """Disconnect; a holder that this object has started ends and leaves no file."""
        if not self._started:
            self.close()
            return
        with contextlib.suppress(KeeperError):
            self.stop()
        lock_path = f"{self._path}.lock"
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        end = time.monotonic() + self._deadline_s
        while time.monotonic() < end:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(lock_path)
                break
            time.sleep(_RETRY_S)
        os.close(lock)

    def stop(self) -> None:
        """End the holder; what it holds is freed once nobody else has it open."""
        self._request(b"S", [])
        self._socket.close()

    # ------------------------------------------------------------ connection

    def _connect(self) -> socket.socket:
        """Connect, and wait to be served: the holder serves one owner at a time."""
        end = time.monotonic() + self._deadline_s
        why = "it did not answer"
        while (left_s := end - time.monotonic()) > 0:
            with contextlib.ExitStack() as undo:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                undo.callback(connection.close)
                connection.settimeout(left_s)
                try:
                    connection.connect(self._path)
                    _check_peer(connection)
                    connection.send(b"H")
                    if connection.recv(_PACKET_BYTES) == b"ok":
                        connection.settimeout(self._deadline_s)
                        undo.pop_all()
                        return connection
                except TimeoutError:
                    why = "it did not answer; another daemon may be connected to it"
                    break
                except (FileNotFoundError, ConnectionRefusedError):
                    self._start(left_s)
                except (ConnectionError, BlockingIOError) as error:
                    why = str(error)  # it ended just then, or its backlog is full
                except OSError as error:
                    raise self._error(str(error)) from error
            time.sleep(_RETRY_S)
        raise self._error(why)

    def _start(self, timeout_s: float) -> None:
        """Start a holder; when this returns it listens, or another one does."""
        script = os.path.join(os.path.dirname(__file__), "holder_process.py")
        command = [sys.executable, "-I", "-S", script, self._path, str(self._idle_s)]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=timeout_s,
                start_new_session=True,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise self._error(f"it could not be started: {error}") from error
        if done.returncode not in (0, _EXIT_TAKEN):
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            reason = lines[-1] if lines else "it said nothing"
            raise self._error(f"it ended with exit code {done.returncode}: {reason}")
        self._started = done.returncode == 0

    def _request(self, packet: bytes, fds: list[int]) -> None:
        self._send(packet, fds)
        reply, passed = self._receive()
        _close_all(passed)
        if reply != b"ok":
            raise self._error(f"the holder answered {reply.decode(errors='replace')!r}")

    def _send(self, packet: bytes, fds: list[int]) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._socket.sendmsg([packet], ancillary)
        except TimeoutError as error:
            raise self._error("it does not take requests any more") from error
        except OSError as error:
            raise self._ended() from error

    def _receive(self) -> tuple[bytes, list[int]]:
        try:
            # socket.recv_fds of Python 3.11 forgets its flags, so close-on-exec needs this
            packet, ancillary, _, _ = self._socket.recvmsg(
                _PACKET_BYTES, socket.CMSG_LEN(_FDS_MAX * 4), socket.MSG_CMSG_CLOEXEC
            )
        except TimeoutError as error:
            raise self._error(f"it did not answer within {self._deadline_s:g} s") from error
        except OSError as error:
            raise self._ended() from error
        fds = array.array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        if not packet:
            raise self._ended()
        return packet, fds.tolist()

    def _error(self, obstacle: str) -> KeeperError:
        return KeeperError(f"keep memory in the holder behind {self._path}", obstacle, _REMEDY)

    def _ended(self) -> "_Ended":
        asked = f"keep memory in the holder behind {self._path}"
        return _Ended(asked, "the holder has ended", _REMEDY)


class _Ended(KeeperError):
    """The holder is gone; a new one can be started."""


_REMEDY: Final = 'look at the process that owns the socket, or set recovery.memory = "off"'


def _check_peer(connection: socket.socket) -> None:
    size = struct.calcsize("iII")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    uid = struct.unpack("iII", credentials)[1]
    if uid != os.geteuid():
        raise KeeperError(
            "keep memory in the holder", f"its socket belongs to uid {uid}",
            "give the daemon a runtime_dir of its own",
        )  # fmt: skip


def _retire_holder(runtime_dir: str) -> dict[str, int]:
    """Take what a holder of an earlier configuration holds, and end it."""
    if not os.path.exists(os.path.join(runtime_dir, SOCKET_NAME)):
        return {}
    holder = HolderKeeper(runtime_dir)
    found = holder.take_all()
    holder.stop()
    return found


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
