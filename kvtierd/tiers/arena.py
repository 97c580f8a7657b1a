"""The DRAM arena of one tenant: payload and headers in sealed memfds.

The payload is shared with clients, so it is sealed against shrinking, growing and further seals:
nobody who holds the descriptor can make the daemon fault. The headers stay with the daemon.
Memory is asked for in the order of what can be refused: limits first, then the descriptors, then
page after page with a system call that returns an error instead of raising a signal.

Source: memfd_create(2), fcntl(2) F_ADD_SEALS, madvise(2) MADV_POPULATE_WRITE, mlock2(2).
"""

import concurrent.futures as futures
import contextlib
import dataclasses
import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from kvtierd.tiers import memory
from kvtierd.tiers.errors import FormatError, StartError
from kvtierd.tiers.headers import ArenaHeaders, create, open_headers
from kvtierd.tiers.memory import HUGE_BYTES
from kvtierd.tiers.superblock import Expected, Geometry, Kind, Superblock

Effort = Literal["try", "require", "off"]
Pages = Literal["hugetlb", "transparent", "small"]
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in total; what it raises ends the work."""

PREFAULT_CHUNK_BYTES: Final = 64 << 20
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MFD_NOEXEC_SEAL: Final = 8  # Linux 6.3; some hosts refuse memfds that could be executed


@dataclass(frozen=True, slots=True)
class ArenaSettings:
    """How hard to try for what makes an arena fast."""

    huge_pages: Effort = "try"
    """`require` means the pool of 2 MiB pages; `try` takes transparent huge pages as well."""
    mlock: Effort = "try"
    prefault: bool = True
    prefault_threads: int = 4


@dataclass(frozen=True, slots=True)
class Obtained:
    """What the host gave."""

    pages: Pages
    locked: bool
    notes: tuple[str, ...]
    """What was tried in vain, for the log."""


class Arena:
    """A tenant's payload, mapped, and its headers; owns both descriptors."""

    payload: NDArray[np.uint8]
    """The payload's bytes. Shapes: [payload_bytes]."""

    def __init__(
        self,
        name: str,
        payload_fd: int,
        mapped: mmap.mmap,
        headers: ArenaHeaders,
        settings: ArenaSettings,
        obtained: Obtained,
    ) -> None:
        self.name = name
        self.payload_fd = payload_fd
        self.headers = headers
        self.settings = settings
        self.obtained = obtained
        self._map = mapped
        self.payload = np.frombuffer(mapped, np.uint8)

    @property
    def arena_id(self) -> bytes:
        """16 bytes that name this payload for as long as its memfd lives."""
        return self.headers.superblock.payload_id

    def prefault(self, progress: Progress | None = None) -> None:
        """Have the kernel give and map every page now, in parallel; contents stay as they are.

        May run beside everything else. Errors: StartError; whatever `progress` raises.
        """
        total = len(self.payload)
        address = self.payload.ctypes.data
        done = 0
        try:
            self.headers.prefault()
        except OSError as error:
            raise _prefault_refused(self.name, error) from error
        with futures.ThreadPoolExecutor(self.settings.prefault_threads, "prefault") as pool:
            chunks = {
                pool.submit(_populate, address + start, min(PREFAULT_CHUNK_BYTES, total - start)):
                min(PREFAULT_CHUNK_BYTES, total - start)
                for start in range(0, total, PREFAULT_CHUNK_BYTES)
            }  # fmt: skip
            try:
                for chunk in futures.as_completed(chunks):
                    chunk.result()
                    done += chunks[chunk]
                    if progress is not None:
                        progress(done, total)
            except OSError as error:
                raise _prefault_refused(self.name, error) from error
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def lock(self, on_fault: bool) -> None:
        """Keep the payload in memory; `on_fault` leaves pages alone until they are touched.

        Errors: StartError under `require`; under `try` a note says why it was refused.
        """
        if self.settings.mlock == "off":
            return
        if self.obtained.pages == "hugetlb":  # never swapped
            self._note(locked=True)
            return
        obstacle = memory.allow_memlock(len(self.payload))
        if obstacle is None:
            try:
                memory.lock(self.payload.ctypes.data, len(self.payload), on_fault)
            except OSError as error:
                obstacle = f"mlock refused: {memory.explain(error)}"
        if obstacle is not None and self.settings.mlock == "require":
            raise _mlock_refused(self.name, obstacle)
        self._note(locked=obstacle is None, note=obstacle)

    def huge_bytes(self) -> int:
        """How much of the payload this process maps by huge pages."""
        if self.obtained.pages == "hugetlb":
            return len(self.payload)
        return _huge_mapped_bytes(self.payload.ctypes.data, len(self.payload))

    def close(self) -> None:
        """Close both descriptors; the memory goes with its last holder."""
        if self.payload_fd < 0:
            return
        os.close(self.payload_fd)
        self.payload_fd = -1
        self.headers.close()
        del self.payload
        with contextlib.suppress(BufferError):  # views are still about; the mapping goes with them
            self._map.close()

    def _note(self, locked: bool, note: str | None = None) -> None:
        notes = self.obtained.notes if note is None else (*self.obtained.notes, note)
        self.obtained = Obtained(self.obtained.pages, locked, notes)


# ---------------------------------------------------------------- make


def create_arena(
    name: str, superblock: Superblock, settings: ArenaSettings, progress: Progress | None = None
) -> Arena:
    """Make an empty arena; with `settings.prefault`, all its pages are there afterwards.

    `name` names the tenant in errors; identity and sizes are the superblock's.
    Errors: StartError, and nothing is left behind.
    """
    assert superblock.kind is Kind.ARENA
    geometry = superblock.geometry
    asked = _asked(name, geometry)
    memfd_name = _memfd_name(superblock.payload_id)
    with contextlib.ExitStack() as undo:
        payload_fd, mapped, obtained = _make_payload(asked, memfd_name, geometry, settings, undo)
        if settings.mlock == "require" and obtained.pages != "hugetlb":
            obstacle = memory.allow_memlock(geometry.payload_bytes)
            if obstacle is not None:  # known now, not after minutes of prefaulting
                raise _mlock_refused(asked, obstacle)
        headers = _make_headers(asked, memfd_name, superblock)
        undo.callback(headers.close)
        arena = Arena(asked, payload_fd, mapped, headers, settings, obtained)
        undo.pop_all()
        undo.callback(arena.close)
        if settings.prefault:
            arena.prefault(progress)
        arena.lock(on_fault=not settings.prefault)
        undo.pop_all()
        return arena


def _make_headers(asked: str, memfd_name: str, superblock: Superblock) -> ArenaHeaders:
    try:
        fd = _memfd(f"{memfd_name}-headers", 0)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, fd)
            headers = create(fd, superblock, f"headers of the {asked}")
            undo.pop_all()
            undo.callback(headers.close)
            assert isinstance(headers, ArenaHeaders)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            undo.pop_all()
            return headers
    except OSError as error:
        raise StartError(asked, memory.explain(error), "free memory on the host") from error


def _make_payload(
    asked: str,
    memfd_name: str,
    geometry: Geometry,
    settings: ArenaSettings,
    undo: contextlib.ExitStack,
) -> tuple[int, mmap.mmap, Obtained]:
    need = geometry.payload_bytes
    notes: tuple[str, ...] = ()
    if settings.huge_pages != "off":
        obstacle = _huge_obstacle(geometry)
        if obstacle is None:
            memory.require_memory(asked, geometry.header_bytes)
            try:
                fd, mapped = _sealed(memfd_name, need, os.MFD_HUGETLB | os.MFD_HUGE_2MB, undo)
            except OSError as error:
                obstacle = f"huge pages refused: {memory.explain(error)}"
            else:
                return fd, mapped, Obtained("hugetlb", False, ())
        if settings.huge_pages == "require":
            raise StartError(
                asked,
                obstacle,
                f"set vm.nr_hugepages to at least {-(-need // HUGE_BYTES)} more than now, or "
                'arena.huge_pages = "try"',
            )
        notes = (obstacle,)
    memory.require_memory(asked, need + geometry.header_bytes)
    try:
        fd, mapped = _sealed(memfd_name, need, 0, undo)
    except OSError as error:
        raise StartError(asked, memory.explain(error), "free memory, or lower it") from error
    if settings.huge_pages == "off":
        return fd, mapped, Obtained("small", False, notes)
    obstacle = _advise_huge(mapped)
    pages: Pages = "transparent" if obstacle is None else "small"
    return fd, mapped, Obtained(pages, False, notes if obstacle is None else (*notes, obstacle))


def _huge_obstacle(geometry: Geometry) -> str | None:
    if geometry.slab_bytes % HUGE_BYTES:
        return f"slabs of {geometry.slab_bytes} bytes are not a multiple of 2 MiB huge pages"
    for headroom in memory.huge_headrooms():
        if headroom.free_bytes < geometry.payload_bytes:
            return f"{headroom.limit} leaves {memory.size_text(max(0, headroom.free_bytes))}"
    return None


def _sealed(
    memfd_name: str, size_bytes: int, flags: int, undo: contextlib.ExitStack
) -> tuple[int, mmap.mmap]:
    fd = _memfd(memfd_name, flags)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        mapped = mmap.mmap(fd, size_bytes)
    except OSError:
        os.close(fd)
        raise
    undo.callback(os.close, fd)
    undo.callback(mapped.close)
    return fd, mapped


def _memfd(memfd_name: str, flags: int) -> int:
    flags |= os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(memfd_name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(memfd_name, flags)


def _advise_huge(mapped: mmap.mmap) -> str | None:
    """Ask for transparent huge pages; says what stands in the way, or None."""
    path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
    try:
        with open(path, encoding="ascii") as file:
            policy = file.read().partition("[")[2].partition("]")[0]
        if policy in ("never", "deny"):
            return f"transparent huge pages are off: {path} says {policy}"
        mapped.madvise(memory.MADV_HUGEPAGE)
    except OSError as error:
        return f"transparent huge pages refused: {memory.explain(error)}"
    return None


def _populate(address: int, length_bytes: int) -> None:
    memory.advise(address, length_bytes, memory.MADV_POPULATE_WRITE)


# ---------------------------------------------------------------- find again


def attach_arena(
    name: str, payload_fd: int, header_fd: int, expected: Expected, settings: ArenaSettings
) -> Arena:
    """Take over the memfds of an earlier life; every committed block is in them.

    Owns both descriptors from the call on, also when it fails.
    Errors: FormatError when they are not a sealed pair, or not what is expected.
    """
    asked = f"take over the arena of {name}"
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, payload_fd)
        with contextlib.ExitStack() as undo_headers:
            undo_headers.callback(os.close, header_fd)
            for fd in (payload_fd, header_fd):
                _check_seals(asked, fd)
            headers = open_headers(header_fd, expected, f"headers of the arena of {name}")
            undo_headers.pop_all()
        undo.callback(headers.close)
        assert isinstance(headers, ArenaHeaders), "what was expected is an arena"
        geometry = headers.geometry
        size = os.fstat(payload_fd).st_size
        if size != geometry.payload_bytes:
            raise FormatError(
                "size",
                asked,
                f"the payload has {size} bytes instead of {geometry.payload_bytes}",
                "start it without this memory; what was only in DRAM is lost",
            )
        found = os.readlink(f"/proc/self/fd/{payload_fd}")
        if _memfd_name(headers.superblock.payload_id) not in found:
            raise FormatError(
                "payload", asked, f"the headers describe another payload than {found}",
                "start it without this memory; what was only in DRAM is lost",
            )  # fmt: skip
        mapped = mmap.mmap(payload_fd, size)
        pages = _pages_of(payload_fd, mapped, settings)
        arena = Arena(name, payload_fd, mapped, headers, settings, Obtained(pages, False, ()))
        undo.pop_all()
        undo.callback(arena.close)
        arena.lock(on_fault=True)
        undo.pop_all()
        return arena


def is_outgrown(name: str, header_fd: int, expected: Expected) -> bool:
    """Whether the memfds of an earlier life are of another size than is expected, and empty: no
    block is in them, and nobody writes there. Errors: FormatError as of `attach_arena`."""
    asked = f"take over the arena of {name}"
    _check_seals(asked, header_fd)
    with contextlib.ExitStack() as undo:
        fd = os.dup(header_fd)
        undo.callback(os.close, fd)
        any_size = dataclasses.replace(expected, geometry=None)
        headers = open_headers(fd, any_size, f"headers of the arena of {name}")
        undo.pop_all()
    outgrown = headers.geometry != expected.geometry and not headers.words.any()
    headers.close()
    return bool(outgrown)


def _check_seals(asked: str, fd: int) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if seals & SEALS != SEALS:
        raise FormatError(
            "seals", asked, f"descriptor {fd} is not a memfd sealed against resizing",
            "start it without this memory; what was only in DRAM is lost",
        )  # fmt: skip


def _pages_of(fd: int, mapped: mmap.mmap, settings: ArenaSettings) -> Pages:
    if os.fstat(fd).st_blksize == HUGE_BYTES:
        return "hugetlb"
    if settings.huge_pages == "off" or _advise_huge(mapped) is not None:
        return "small"
    return "transparent"


# ---------------------------------------------------------------- words


def _asked(name: str, geometry: Geometry) -> str:
    return f"arena of {name} ({memory.size_text(geometry.payload_bytes)})"


def _memfd_name(payload_id: bytes) -> str:
    """Stays readable in /proc for as long as the memfd lives, and ties payload to headers."""
    return f"kvtierd-{payload_id.hex()}"


def _mlock_refused(asked: str, obstacle: str) -> StartError:
    return StartError(
        asked,
        f"it cannot be locked: {obstacle}",
        'set LimitMEMLOCK=infinity in the unit (or ulimit -l unlimited), or arena.mlock = "try"',
    )


def _prefault_refused(asked: str, error: OSError) -> StartError:
    if error.errno == errno.EINVAL:
        return StartError(
            asked,
            "this kernel cannot prefault (MADV_POPULATE_WRITE needs Linux 5.14)",
            "set arena.prefault = false",
        )
    return StartError(
        asked,
        f"the kernel has no page for it: {memory.explain(error)}",
        "free memory on the host, or lower arena_bytes",
    )


def _huge_mapped_bytes(address: int, length_bytes: int) -> int:
    total, inside = 0, False
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as file:
        for line in file:
            head = line.split(maxsplit=1)[0]
            if "-" in head and not head.endswith(":"):
                start, _, _ = head.partition("-")
                inside = address <= int(start, 16) < address + length_bytes
            elif inside and head in ("ShmemPmdMapped:", "FilePmdMapped:"):
                total += int(line.split()[1]) * 1024
    return total
