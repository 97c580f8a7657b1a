"""The spill files under faults: real files, through system calls that fail as the seed says.

Every call may be the one in which the daemon is killed; writes and reads may be short, or fail with
EIO, ENOSPC or EAGAIN. What was not synced is known sector by sector, so that a loss of power can
take any part of it. Whatever a fault may have destroyed is noted in `hurt`.
"""

import errno
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvtierd.tiers.superblock import BODY_BYTES, Geometry
from tests.sim.clock import Killed, Sim

SECTOR_BYTES = 512
PAGE_BYTES = 4096


class Medium:
    """What all spill files have in common: faults, and what is not durable yet."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.hurt: set[int] = set()
        """Values whose bytes the medium may have lost."""
        self.counts = sim.counts
        self.rate = 0.0
        """How likely a fault is in one call."""
        self.start_rate = 0.0
        """The same for a header that is read, as it is at a start only."""
        self.killed = False
        self.calls_left = -1
        """The daemon is killed in the call in which this becomes 0."""
        self.faulty_starts = 0
        """Reads of headers that failed: so often a start may have been refused."""
        self.geometry: Geometry | None = None
        """How the spill file is cut."""
        self._unsynced: dict[int, dict[int, bytes]] = {}  # inode -> sector -> what is durable
        self._plain: dict[int, int] = {}  # first word of an encrypted page -> of the page
        self._paths: dict[int, str | None] = {}

    def call(self) -> None:
        """One system call (or store into shared memory) begins. Errors: Killed."""
        if self.killed:
            raise Killed
        if self.calls_left > 0:
            self.calls_left -= 1
            if self.calls_left == 0:
                self.killed = True
                self.counts["killed inside a call"] += 1
                raise Killed

    def fails(self, kind: str, rate: float | None = None) -> bool:
        """Whether this call meets a fault."""
        rate = self.rate if rate is None else rate
        if not rate or not self.sim.chance(rate):
            return False
        self.counts[kind] += 1
        return True

    # ------------------------------------------------------------- durability

    def note(self, fd: int, offset: int, size: int) -> None:
        """Bytes are about to be written that are not durable until the file is synced."""
        inode = os.fstat(fd).st_ino
        if inode not in self._paths:
            path = os.readlink(f"/proc/self/fd/{fd}")
            self._paths[inode] = None if "memfd:" in path else path
        if self._paths[inode] is None:
            return
        old = self._unsynced.setdefault(inode, {})
        for sector in range(offset // SECTOR_BYTES, -(-(offset + size) // SECTOR_BYTES)):
            if sector not in old:
                old[sector] = os.pread(fd, SECTOR_BYTES, sector * SECTOR_BYTES)

    def synced(self, fd: int) -> None:
        """All of a file is durable."""
        self._unsynced.pop(os.fstat(fd).st_ino, None)

    def lose_power(self) -> None:
        """Any part of what was not synced is gone."""
        for inode, sectors in self._unsynced.items():
            fd = self._find(inode)
            if fd < 0:
                continue
            for sector, old in sectors.items():
                if self.sim.chance(0.5):
                    self.counts["unsynced sectors lost"] += 1
                    os.pwrite(fd, old, sector * SECTOR_BYTES)
            os.close(fd)
        self._unsynced.clear()

    def _find(self, inode: int) -> int:
        """Open a file, which may have got its final name meanwhile; -1 when it is gone."""
        path = self._paths[inode]
        assert path is not None
        for name in (path, path.removesuffix(".new")):
            if os.path.exists(name) and os.stat(name).st_ino == inode:
                return os.open(name, os.O_RDWR)
        return -1

    def values(self, fd: int, offset: int, size: int) -> set[int]:
        """The values of the blocks in a range of a payload."""
        data = os.pread(fd, size, offset)
        words = np.frombuffer(data[: len(data) // 8 * 8], np.uint64)
        return {self._plain.get(word, word) for word in words[:: PAGE_BYTES // 8].tolist()}

    def note_encrypted(self, plain: memoryview, encrypted: memoryview) -> None:
        """What is behind encrypted bytes that are about to be written."""
        words = [np.frombuffer(data, np.uint64)[:: PAGE_BYTES // 8] for data in (encrypted, plain)]
        self._plain.update(zip(*(each.tolist() for each in words), strict=True))

    def values_behind(self, fd: int, offset: int) -> set[int]:
        """The values of the slab whose headers are at an offset of a header file."""
        path = os.readlink(f"/proc/self/fd/{fd}")
        payload = os.open(path.replace("headers.kv", "blocks.kv"), os.O_RDONLY)
        cut = self.geometry
        assert cut is not None
        slab = (offset - cut.bodies_offset) // BODY_BYTES // cut.max_slots
        found = self.values(payload, slab * cut.slab_bytes, cut.slab_bytes)
        os.close(payload)
        return found

    # ---------------------------------------------------------------- payload

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        data = b"".join(buffers)
        size = len(data)
        problem: OSError | None = None
        if self.fails("short write"):
            size = self.sim.random.randint(1, size)
        elif self.fails("write ENOSPC"):
            raise OSError(errno.ENOSPC, "No space left on device")
        elif self.fails("write EAGAIN"):
            raise BlockingIOError(errno.EAGAIN, "Try again")
        elif self.fails("write EIO"):
            size, problem = self.sim.random.randint(0, size), OSError(errno.EIO, "I/O error")
        self.note(fd, offset, size)
        try:
            self.call()
        except Killed:
            if not self.sim.chance(0.5):
                os.pwrite(fd, data[: self.sim.random.randint(0, size)], offset)
            raise
        os.pwrite(fd, data[:size], offset)
        if problem is not None:
            raise problem
        return size

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.call()
        size = sum(len(buffer) for buffer in buffers)
        if self.fails("read EIO"):
            self.hurt |= self.values(fd, offset, size)
            raise OSError(errno.EIO, "I/O error")
        if self.fails("read EAGAIN"):
            raise BlockingIOError(errno.EAGAIN, "Try again")
        if self.fails("short read") and size > PAGE_BYTES:
            size = self.sim.random.randint(PAGE_BYTES, size)
        data = bytearray(os.pread(fd, size, offset))
        if self.fails("bit flip in a read"):
            self.hurt |= self.values(fd, offset, size)
            data[self.sim.random.randrange(len(data))] ^= 1 << self.sim.random.randrange(8)
        at = 0
        for buffer in buffers:
            part = data[at : at + len(buffer)]
            buffer[: len(part)] = part
            at += len(part)
        return len(data)

    def fdatasync(self, fd: int) -> None:
        self.call()
        if self.fails("sync EIO"):
            raise OSError(errno.EIO, "I/O error")
        self.synced(fd)

    def corrupt(self, fd: int, page: int) -> None:
        """A page of a payload changes behind the daemon's back."""
        offset = page * PAGE_BYTES
        self.hurt |= self.values(fd, offset, PAGE_BYTES)
        self.counts["page corrupted"] += 1
        byte = os.pread(fd, 1, offset + 77)
        os.pwrite(fd, bytes([byte[0] ^ 64]), offset + 77)


class HeaderCalls:
    """Stands for the module `os` where header files are written."""

    def __init__(self, medium: Medium) -> None:
        self._medium = medium

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        medium, size = self._medium, len(data)
        medium.call()
        if medium.fails("short header write"):
            size = medium.sim.random.randint(1, size)
        elif medium.fails("header EIO"):
            raise OSError(errno.EIO, "I/O error")
        medium.note(fd, offset, size)
        return os.pwrite(fd, bytes(data[:size]), offset)

    def preadv(self, fd: int, buffers: Any, offset: int) -> int:
        medium, [buffer] = self._medium, buffers
        medium.call()
        if medium.fails("header read EIO", medium.start_rate):
            medium.faulty_starts += 1
            if len(buffer) <= BODY_BYTES:  # nothing smaller is tried: its block is lost
                medium.hurt |= medium.values_behind(fd, offset)
            raise OSError(errno.EIO, "I/O error")
        if medium.fails("short header read", medium.start_rate):
            buffer = buffer[: medium.sim.random.randint(1, len(buffer))]
        return os.preadv(fd, [buffer], offset)

    def posix_fallocate(self, fd: int, offset: int, size: int) -> None:
        self._medium.call()
        if self._medium.fails("header ENOSPC"):
            raise OSError(errno.ENOSPC, "No space left on device")

    def fdatasync(self, fd: int) -> None:
        self._medium.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        self._medium.call()
        self._medium.synced(fd)
