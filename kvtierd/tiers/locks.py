"""Directories that belong to one daemon alone: checked, opened by descriptor, locked.

The lock is a `flock` on the directory itself, so that taking it changes nothing on disk and a
killed daemon leaves nothing behind. Everything below is then opened relative to the descriptor
and without following links: once owner and mode are right, nobody else can put a link there.
"""

import contextlib
import fcntl
import os
import stat
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

        Errors: `FileNotFoundError`, `FileExistsError` (with O_EXCL); `StartError` for a link,
        another kind of file, or a file of somebody else.
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
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
            return fd
        os.close(fd)
        raise StartError(
            asked, f"it is not a regular file of uid {os.geteuid()}", "move it away or chown it"
        )

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
    no parent, or is locked by another daemon; nothing is changed then.
    """
    path = os.path.abspath(path)  # a trailing slash would make the kernel follow a link
    asked = f"cannot use directory {path}"
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
