"""Whether a directory's file system takes O_DIRECT: tried with a real write, never assumed."""

import errno
import logging
import mmap
import os
from typing import Final, Literal

from kvtierd.tiers.blockio import ALIGN_BYTES, Kernel
from kvtierd.tiers.errors import StartError
from kvtierd.tiers.locks import FILE_MODE, LockedDirectory

log = logging.getLogger(__name__)

DirectIO = Literal["try", "require", "off"]
_PROBE_NAME: Final = "probe.tmp"
_NO_TMPFILE: Final = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT})
_PATTERN: Final = bytes(range(256)) * (ALIGN_BYTES // 256)


def choose(wish: DirectIO, index: int, directory: LockedDirectory, kernel: Kernel) -> bool:
    """Whether to open the payload in this directory, `spill.paths[index]`, with O_DIRECT.

    Errors: `StartError` when it is required and refused.
    """
    if wish == "off":
        return False
    refusal = probe(directory, kernel)
    if refusal is None:
        return True
    name = errno.errorcode.get(refusal.errno or 0, str(refusal))
    asked = f"spill.paths[{index}] is on {file_system(directory.fd)}"
    obstacle = f"O_DIRECT refused ({name})"
    remedy = 'set spill.direct_io = "off" or move spill.paths'
    if wish == "require":
        raise StartError(asked, obstacle, remedy)
    log.warning("%s: %s; going on through the page cache (%s)", asked, obstacle, remedy)
    return False


def probe(directory: LockedDirectory, kernel: Kernel) -> OSError | None:
    """Write and read one aligned page with O_DIRECT in the directory; returns what refused it."""
    memory = mmap.mmap(-1, 2 * ALIGN_BYTES)
    view = memoryview(memory)
    written, read = view[:ALIGN_BYTES], view[ALIGN_BYTES:]
    written[:] = _PATTERN
    try:
        fd = _open_probe(directory)
        try:
            kernel.pwritev(fd, [written], 0)
            kernel.preadv(fd, [read], 0)
        finally:
            os.close(fd)
        if read != _PATTERN:
            return OSError(errno.EIO, "the page came back changed")
    except OSError as error:
        return error
    return None


def _open_probe(directory: LockedDirectory) -> int:
    """An unnamed file, so that a crash leaves nothing behind; a named one where that is unknown."""
    flags = os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC
    try:
        return os.open(".", flags | os.O_TMPFILE, FILE_MODE, dir_fd=directory.fd)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    flags |= os.O_CREAT | os.O_NOFOLLOW
    try:
        return os.open(_PROBE_NAME, flags, FILE_MODE, dir_fd=directory.fd)
    finally:
        directory.remove(_PROBE_NAME)


def file_system(fd: int) -> str:
    """The type of the file system under a descriptor, for messages."""
    device = os.fstat(fd).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            before, _, after = line.partition(" - ")
            if before.split()[2] == wanted:
                return after.split()[0]
    return "a file system"
