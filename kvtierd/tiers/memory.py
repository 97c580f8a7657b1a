"""Whether the host lets us have memory, asked before any of it is touched.

Touching a page that cannot be had ends in SIGBUS or the OOM killer, so every limit is read first:
free memory, the cgroups from our own up to the root (v1 and v2), the pool of huge pages, and
RLIMIT_MEMLOCK.

Source: proc(5), cgroups(7), Documentation/admin-guide/cgroup-v2.rst, mlock(2), madvise(2).
"""

import ctypes
import errno
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvtierd.tiers.errors import StartError

HUGE_BYTES: Final = 2 << 20
SPARE_BYTES: Final = 64 << 20
"""Left free beyond what an arena needs, for the daemon itself."""

MADV_HUGEPAGE: Final = 14
MADV_POPULATE_WRITE: Final = 23
_MLOCK_ONFAULT: Final = 1
_CAP_IPC_LOCK: Final = 1 << 14
_UNLIMITED_BYTES: Final = 1 << 62
"""cgroup v1 writes a huge number for "no limit"."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mlock2.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def advise(address: int, length_bytes: int, advice: int) -> None:
    """madvise(2), without the interpreter lock. Errors: OSError."""
    _checked(_libc.madvise(address, length_bytes, advice))


def lock(address: int, length_bytes: int, on_fault: bool) -> None:
    """mlock(2), without the interpreter lock; `on_fault` locks pages as they are touched.

    Errors: OSError.
    """
    flags = _MLOCK_ONFAULT if on_fault else 0
    _checked(_libc.mlock2(address, length_bytes, flags))


def _checked(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


# ---------------------------------------------------------------- limits


@dataclass(frozen=True, slots=True)
class Headroom:
    """How much one limit leaves."""

    limit: str
    """Names the limit in errors."""
    free_bytes: int
    remedy: str


def require_memory(asked: str, need_bytes: int, root: str = "/") -> None:
    """Refuse when any limit leaves less than `need_bytes`. Errors: StartError."""
    for headroom in headrooms(root):
        if headroom.free_bytes < need_bytes + SPARE_BYTES:
            raise StartError(
                asked,
                f"it needs {size_text(need_bytes)} and {size_text(SPARE_BYTES)} to spare, and "
                f"{headroom.limit} leaves {size_text(max(0, headroom.free_bytes))}",
                f"{headroom.remedy}, or lower arena_bytes",
            )


def size_text(size_bytes: int) -> str:
    """A size for people."""
    if size_bytes < 1 << 20:
        return f"{size_bytes >> 10} KiB"
    return f"{size_bytes >> 20} MiB"


def headrooms(root: str = "/") -> list[Headroom]:
    """What each limit on this process's ordinary memory leaves.

    `root` is where /proc and the mounts that it names are looked for.
    """
    found = [Headroom(f"cgroup {name}", free, "raise its memory limit")
             for name, free in _cgroup_memory(root)]  # fmt: skip
    available = _meminfo(root).get("MemAvailable")
    if available is not None:
        found.insert(0, Headroom("MemAvailable", available, "free memory on the host"))
    return found


def _cgroup_memory(root: str) -> Iterator[tuple[str, int]]:
    for directory in _cgroup_directories(root, "memory"):
        used = _number(directory, "memory.current", "memory.usage_in_bytes")
        limits = [
            _number(directory, name)
            for name in ("memory.max", "memory.high", "memory.limit_in_bytes")
        ]
        known = [limit for limit in limits if limit is not None and limit < _UNLIMITED_BYTES]
        if used is not None and known:
            yield directory, min(known) - used + _reclaimable(directory)


def _reclaimable(directory: str) -> int:
    """Page cache of the cgroup, which makes way for us."""
    statistics = _pairs(os.path.join(directory, "memory.stat"))
    prefix = "total_" if "total_inactive_file" in statistics else ""
    return sum(statistics.get(prefix + name, 0) for name in ("inactive_file", "active_file"))


def huge_headrooms(root: str = "/") -> list[Headroom]:
    """What the pool of 2 MiB pages and the cgroups' limits on it leave."""
    pool = os.path.join(root, "sys/kernel/mm/hugepages/hugepages-2048kB")
    free, reserved, surplus, overcommit = (
        _number(pool, name) or 0
        for name in (
            "free_hugepages",
            "resv_hugepages",
            "surplus_hugepages",
            "nr_overcommit_hugepages",
        )
    )
    pages = free - reserved + max(0, overcommit - surplus)
    found = [Headroom("the pool of 2 MiB huge pages", pages * HUGE_BYTES, "raise vm.nr_hugepages")]
    for directory in _cgroup_directories(root, "hugetlb"):
        limit = _number(directory, "hugetlb.2MB.max", "hugetlb.2MB.limit_in_bytes")
        used = _number(directory, "hugetlb.2MB.current", "hugetlb.2MB.usage_in_bytes")
        if limit is not None and used is not None and limit < _UNLIMITED_BYTES:
            found.append(
                Headroom(f"cgroup {directory}", limit - used, "raise its limit on huge pages")
            )
    return found


def _cgroup_directories(root: str, controller: str) -> Iterator[str]:
    """Directories of our cgroups that this controller may limit, from our own up to the root."""
    proc = os.path.join(root, "proc/self")
    memberships: dict[str, str] = {}
    for line in _lines(os.path.join(proc, "cgroup")):
        _, controllers, member_of = line.split(":", 2)
        memberships[controllers] = member_of
    for line in _lines(os.path.join(proc, "mountinfo")):
        fields = line.split()
        kind, options = fields[fields.index("-") + 1], fields[-1].split(",")
        path: str | None = None
        if kind == "cgroup2":
            path = memberships.get("")
        elif kind == "cgroup" and controller in options:
            path = next((p for c, p in memberships.items() if controller in c.split(",")), None)
        if path is None:
            continue
        top = os.path.normpath(os.path.join(root, fields[4].lstrip("/")))
        within = _below(path, fields[3])
        while True:
            yield os.path.normpath(os.path.join(top, within))
            if not within:
                break
            within = os.path.dirname(within)


def _below(path: str, mounted: str) -> str:
    """Our cgroup relative to the part of the hierarchy that is mounted."""
    relative = os.path.relpath(path, mounted)
    return "" if relative == "." or relative.startswith("..") else relative


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().splitlines()
    except OSError:
        return []  # not mounted, or hidden: then it sets no limit that we could know


def _pairs(path: str) -> dict[str, int]:
    found = {}
    for line in _lines(path):
        name, _, rest = line.partition(" ")
        number = rest.split()[0] if rest.split() else ""
        if number.isdigit():
            found[name.rstrip(":")] = int(number)
    return found


def _meminfo(root: str) -> dict[str, int]:
    return {name: kib * 1024 for name, kib in _pairs(os.path.join(root, "proc/meminfo")).items()}


def _number(directory: str, *names: str) -> int | None:
    """The number in the first of these files that has one ("max" is none)."""
    for name in names:
        lines = _lines(os.path.join(directory, name))
        if lines and lines[0].strip().isdigit():
            return int(lines[0])
    return None


# ---------------------------------------------------------------- locked memory


def allow_memlock(need_bytes: int) -> str | None:
    """Raise the soft limit on locked memory if need be; says what stands in the way, or None."""
    status = dict(line.split(":\t", 1) for line in _lines("/proc/self/status") if ":\t" in line)
    if int(status.get("CapEff", "0"), 16) & _CAP_IPC_LOCK:
        return None
    locked = int(status.get("VmLck", "0").split()[0]) * 1024
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= locked + need_bytes:
        return None
    if hard != resource.RLIM_INFINITY and hard < locked + need_bytes:
        return f"RLIMIT_MEMLOCK allows {size_text(hard)}, of which {size_text(locked)} are used"
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    return None


def explain(error: OSError) -> str:
    """Names an error of the kernel in words that help."""
    name = errno.errorcode.get(error.errno or 0, "unknown")
    return f"{error.strerror} ({name})"
