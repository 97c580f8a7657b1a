"""Directories that belong to one daemon alone: checked, opened by descriptor, locked.

The lock is a `flock` on the directory itself, so that taking it changes nothing on disk and a
killed daemon leaves nothing behind. Everything below is then opened relative to the descriptor
and without following links: once owner and mode are right, nobody else can put a link there.
"""

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvtierd.tiers.errors import StartError

FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700


@dataclass(frozen=True, slots=True)
class LockedDirectory:
    """A directory of ours, held open and locked until `close` or the end of the process."""

    path: str
    fd: int
    created: bool
    """This call made the directory, so a start that fails should remove it again."""

    def open_file(self, name: str, flags: int) -> int:
        """Open a regular file of this directory, following no link.

        Errors: `FileNotFoundError`, `FileExistsError` (with O_EXCL); `StartError` for a link, a
        file with another name elsewhere, another kind of file, or a file of somebody else.
        """
        asked = f"cannot open {self.path}/{name}"
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a planted FIFO must not block
        try:
            fd = os.open(name, flags, FILE_MODE, dir_fd=self.fd)
        except (FileNotFoundError, FileExistsError):
            raise
        except OSError as error:
            raise StartError(
                asked, f"{error.strerror}", f"it must be a regular file of uid {os.geteuid()}"
            ) from error
        found = os.fstat(fd)
        if not (stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()):
            os.close(fd)
            raise StartError(
                asked, f"it is not a regular file of uid {os.geteuid()}", "move it away or chown it"
            )
        if found.st_nlink != 1:
            os.close(fd)
            raise StartError(
                asked,
                f"it has {found.st_nlink} names (hard links); what is written to it would change "
                "them all",
                "replace it by a copy of its own",
            )
        return fd

    def exists(self, name: str) -> bool:
        """Whether the directory has an entry of this name, of whatever kind."""
        try:
            os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def remove(self, name: str) -> None:
        """Remove a file of this directory if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def close(self) -> None:
        """Let go of the lock."""
        os.close(self.fd)

    def discard(self) -> None:
        """Close, and remove the directory if this start has made it and it is empty."""
        if self.created:
            with contextlib.suppress(OSError):
                os.rmdir(self.path)
        os.close(self.fd)


def lock_directory(path: str) -> LockedDirectory:
    """Open a directory for this process alone; it is created (0700) when only it is missing.

    Errors: `StartError` when it is a link, belongs to another user, lets group or others in, has
    no parent, lies where others can exchange it, or is locked by another daemon; nothing is
    changed then.
    """
    path = os.path.abspath(path)  # a trailing slash would make the kernel follow a link
    asked = f"cannot use directory {path}"
    check_way(path, asked)
    created = False
    try:
        os.mkdir(path, DIRECTORY_MODE)
        created = True
    except FileExistsError:
        pass
    except OSError as error:
        parent = os.path.dirname(path)
        raise StartError(
            asked,
            f"it does not exist and cannot be created ({error.strerror})",
            f"create {parent} for uid {os.geteuid()}, or choose another place",
        ) from error
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise StartError(
            asked,
            f"it cannot be opened as a directory ({error.strerror})",
            "it must be a directory itself, not a link to one, that the daemon's user can read",
        ) from error
    directory = LockedDirectory(path, fd, created)
    try:
        _check_private(directory, asked)
        _lock(directory, asked)
    except StartError:
        directory.discard()
        raise
    return directory


def check_way(path: str, asked: str) -> None:
    """Nobody else may decide where a path leads: no link of another user lies on it, and no
    directory that lets everybody exchange what is in it. Errors: `StartError`."""
    for step in _steps(os.path.dirname(path)):
        try:
            found = os.lstat(step)
        except OSError:
            return  # what is missing, or cannot be reached, is refused where it is opened
        if stat.S_ISLNK(found.st_mode) and found.st_uid not in (0, os.geteuid()):
            raise StartError(
                asked,
                f"{step} on the way to it is a link of uid {found.st_uid}",
                "name the directory that is meant",
            )
        open_to_all = found.st_mode & 0o002 and not found.st_mode & stat.S_ISVTX
        if stat.S_ISDIR(found.st_mode) and open_to_all:
            raise StartError(
                asked,
                f"everybody may exchange what is in {step}, on the way to it",
                f"chmod o-w {step}, or choose another place",
            )


def _steps(path: str) -> Iterator[str]:
    """Every directory and link on the way to a path, and where the links lead."""
    for way in dict.fromkeys((path, os.path.realpath(path))):
        for end in range(1, len(way) + 1):
            if end == len(way) or way[end] == "/":
                yield way[:end]


def check_socket_place(path: str, *, live: bool = False) -> None:
    """Make sure that a socket can be bound to a path once its old one, of a dead daemon, is gone.

    `live`: one that somebody listens at is fine as well.
    Errors: `StartError` when something else lies there, it is another user's, or (not `live`)
    another daemon serves there; nothing is changed.
    """
    asked = f"cannot listen at {path}"
    check_way(path, asked)
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        parent = os.path.dirname(path)
        if os.access(parent, os.W_OK | os.X_OK):
            return
        raise StartError(
            asked,
            f"{parent} is not there, or uid {os.geteuid()} may not write to it",
            "make it, or choose another place",
        ) from None
    except OSError as error:
        raise StartError(asked, str(error.strerror), "choose another place for it") from error
    if not stat.S_ISSOCK(found.st_mode):
        raise StartError(asked, "something lies there that is no socket", "move it away")
    if found.st_uid not in (0, os.geteuid()):
        raise StartError(asked, f"uid {found.st_uid} has a socket there", "remove that one")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        answer = 0 if live else probe.connect_ex(path)
    if not live and answer in (0, errno.EAGAIN):
        raise StartError(
            asked, "another daemon serves there", "stop that one, or choose another place"
        )


def _check_private(directory: LockedDirectory, asked: str) -> None:
    found = os.fstat(directory.fd)
    if found.st_uid != os.geteuid():
        raise StartError(
            asked,
            f"it belongs to uid {found.st_uid} and the daemon runs as uid {os.geteuid()}",
            "chown it, or choose another directory",
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise StartError(
            asked, f"its mode {mode:04o} lets other users in", f"chmod 0700 {directory.path}"
        )


def _lock(directory: LockedDirectory, asked: str) -> None:
    try:
        fcntl.flock(directory.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StartError(
            asked,
            f"another daemon has locked it{_holder(directory.fd)}",
            "stop that one, or give this one a directory of its own",
        ) from error
    except OSError as error:
        raise StartError(
            asked, f"it cannot be locked ({error.strerror})", "use a local file system"
        ) from error


def _holder(fd: int) -> str:
    """Who holds the lock, as far as the kernel tells (`/proc/locks`)."""
    found = os.fstat(fd)
    inode = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    with contextlib.suppress(OSError), open("/proc/locks", encoding="ascii") as locks:
        for line in locks:
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5] == inode:
                return f" (process {fields[4]})"
    return ""
