"""The arena: sealed, found again after a restart, and refused cleanly when memory is short."""

import fcntl
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtierd.tiers import memory
from kvtierd.tiers.arena import Arena, ArenaSettings, attach_arena, create_arena
from kvtierd.tiers.errors import FormatError, StartError
from kvtierd.tiers.scan import scan
from kvtierd.tiers.superblock import Expected, Geometry, Kind
from tests.header_files import INSTANCE, TENANT, entry, publish, superblock

GEOMETRY = Geometry(slabs=4, slab_bytes=2 << 20, max_slots=32)
SMALL = Geometry(slabs=8, slab_bytes=4096, max_slots=1)
HUGE = Geometry(slabs=1 << 20, slab_bytes=1 << 30, max_slots=1)
PLAIN = ArenaSettings(huge_pages="off", mlock="off", prefault=False)
EXPECTED = Expected(Kind.ARENA, INSTANCE, GEOMETRY, TENANT)
ROOT = Path(__file__).parents[2]


def make(settings: ArenaSettings = PLAIN, geometry: Geometry = GEOMETRY) -> Arena:
    return create_arena("test", superblock(Kind.ARENA, geometry), settings)


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = make()
    yield made
    made.close()


def run_python(code: str, *arguments: str) -> "subprocess.CompletedProcess[bytes]":
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/client"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, check=False, timeout=60
    )


def left_behind() -> tuple[list[str], int]:
    """Open descriptors, and mappings of arenas, of this process."""
    gc.collect()  # what earlier tests have left is not ours
    mapped = Path("/proc/self/maps").read_text().count("memfd:kvtierd")
    return sorted(os.listdir("/proc/self/fd")), mapped


# ---------------------------------------------------------------- seals


def test_nobody_with_the_descriptor_can_resize_the_arena(arena: Arena) -> None:
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        _, (fd,), _, _ = socket.recv_fds(theirs, 1, 1)
        refused = 0
        for size in (0, 4096, GEOMETRY.payload_bytes + 4096):
            try:
                os.ftruncate(fd, size)
            except PermissionError:
                refused += 1
        os._exit(refused)
    socket.send_fds(ours, [b"x"], [arena.payload_fd])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert os.fstat(arena.payload_fd).st_size == GEOMETRY.payload_bytes
    ours.close()
    theirs.close()


def test_no_seal_can_be_added_that_would_stop_writers(arena: Arena) -> None:
    for fd in (arena.payload_fd, arena.headers.fd):
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert not os.get_inheritable(fd)


# ---------------------------------------------------------------- restart


def attach(arena: Arena, expected: Expected = EXPECTED) -> Arena:
    return attach_arena("test", os.dup(arena.payload_fd), os.dup(arena.headers.fd), expected, PLAIN)


def test_the_next_life_finds_bytes_blocks_and_identity(arena: Arena) -> None:
    arena.headers.assign_slab(entry(1))
    publish(arena.headers, [32, 33])
    arena.payload[-5:] = 7
    again = attach(arena)
    assert again.arena_id == arena.arena_id
    assert scan(again.headers).slots.tolist() == [32, 33]
    assert again.payload[-6:].tolist() == [0, 7, 7, 7, 7, 7]
    again.payload[0] = 9
    assert arena.payload[0] == 9
    again.close()


@pytest.mark.parametrize(
    ("expected", "reason"),
    [
        (replace(EXPECTED, instance=b"somebody else's."), "instance"),
        (replace(EXPECTED, tenant=TENANT + 1), "tenant"),
        (replace(EXPECTED, geometry=replace(GEOMETRY, slabs=5)), "geometry"),
    ],
)
def test_memory_of_somebody_else_is_not_taken_over(
    arena: Arena, expected: Expected, reason: str
) -> None:
    before = left_behind()
    with pytest.raises(FormatError) as refused:
        attach(arena, expected)
    assert refused.value.reason == reason
    assert left_behind() == before


def test_payload_and_headers_must_be_a_pair(arena: Arena) -> None:
    other = make()
    before = left_behind()
    with pytest.raises(FormatError) as refused:
        attach_arena("test", os.dup(other.payload_fd), os.dup(arena.headers.fd), EXPECTED, PLAIN)
    assert refused.value.reason == "payload"
    assert left_behind() == before
    other.close()


def test_descriptors_that_anybody_could_cut_are_not_taken_over(arena: Arena) -> None:
    unsealed = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, GEOMETRY.payload_bytes)
    before = left_behind()
    with pytest.raises(FormatError) as refused:
        attach_arena("test", os.dup(unsealed), os.dup(arena.headers.fd), EXPECTED, PLAIN)
    assert refused.value.reason == "seals"
    assert left_behind() == before
    os.close(unsealed)


# ---------------------------------------------------------------- prefault and lock


def resident_bytes(arena: Arena) -> int:
    return os.fstat(arena.payload_fd).st_blocks * 512


def test_without_prefault_no_memory_is_taken(arena: Arena) -> None:
    assert resident_bytes(arena) == 0


def test_prefault_takes_all_memory_and_tells_how_far_it_is() -> None:
    geometry = Geometry(slabs=5, slab_bytes=32 << 20, max_slots=1)
    seen: list[tuple[int, int]] = []
    made = create_arena(
        "test",
        superblock(Kind.ARENA, geometry),
        ArenaSettings("off", "off", prefault=True, prefault_threads=2),
        lambda done, total: seen.append((done, total)),
    )
    assert resident_bytes(made) == geometry.payload_bytes
    assert [total for _, total in seen] == [geometry.payload_bytes] * 3
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1][0] == geometry.payload_bytes
    made.close()


def test_prefault_of_an_arena_in_use_changes_no_byte(arena: Arena) -> None:
    arena.payload[:] = np.arange(GEOMETRY.payload_bytes, dtype=np.uint8)
    arena.prefault()
    assert np.array_equal(arena.payload, np.arange(GEOMETRY.payload_bytes, dtype=np.uint8))


def test_a_start_that_is_broken_off_leaves_nothing() -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    before = left_behind()
    with pytest.raises(KeyboardInterrupt):
        create_arena("test", superblock(Kind.ARENA, GEOMETRY), replace(PLAIN, prefault=True), stop)
    assert left_behind() == before


LIMITED = """
    import json, os, resource, sys
    from dataclasses import replace
    from kvtierd.tiers.errors import StartError
    from tests.unit.test_arena import PLAIN, SMALL, make
    soft, hard, effort = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    if os.geteuid() == 0:
        os.setuid(65534)  # root may lock beyond any limit
    try:
        arena = make(replace(PLAIN, mlock=effort), SMALL)
        found = {"locked": arena.obtained.locked, "notes": list(arena.obtained.notes)}
    except StartError as error:
        found = {"error": str(error), "fds": len(os.listdir("/proc/self/fd"))}
    found["soft"] = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    print(json.dumps(found))
"""


def locked_under(soft_bytes: int, hard_bytes: int, effort: str) -> dict[str, object]:
    command = [sys.executable, "-c", textwrap.dedent(LIMITED), str(soft_bytes), str(hard_bytes)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/client"}
    done = subprocess.run(
        [*command, effort],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
    )
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_a_memlock_limit_that_is_too_small_is_a_clear_error() -> None:
    found = locked_under(16384, 16384, "require")
    assert "RLIMIT_MEMLOCK allows 16 KiB" in str(found["error"])
    assert "LimitMEMLOCK=infinity" in str(found["error"])
    assert found["fds"] == 4  # the standard ones, and the listing itself


def test_under_try_a_memlock_limit_that_is_too_small_is_noted() -> None:
    found = locked_under(16384, 16384, "try")
    assert found["locked"] is False
    assert "RLIMIT_MEMLOCK allows 16 KiB" in str(found["notes"])


def test_the_soft_memlock_limit_is_raised_as_far_as_allowed() -> None:
    found = locked_under(4096, 65536, "require")
    assert found == {"locked": True, "notes": [], "soft": 65536}


# ---------------------------------------------------------------- memory that cannot be had


def test_an_arena_larger_than_the_host_is_refused_and_leaves_nothing() -> None:
    before = left_behind()
    with pytest.raises(StartError, match=r"arena of test .*MemAvailable leaves .*arena_bytes"):
        make(geometry=HUGE)
    assert left_behind() == before


def test_huge_pages_that_are_required_and_missing_are_a_clear_error() -> None:
    before = left_behind()
    with pytest.raises(StartError, match=r"huge pages leaves .*vm\.nr_hugepages"):
        make(replace(PLAIN, huge_pages="require"), HUGE)
    assert left_behind() == before


def test_under_try_an_arena_takes_the_pages_that_there_are() -> None:
    made = make(replace(PLAIN, huge_pages="try"))
    assert made.obtained.pages in ("hugetlb", "transparent", "small")
    assert made.obtained.notes or made.obtained.pages == "hugetlb"
    made.payload[-1] = 1
    made.close()


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def host(root: Path, cgroup: str, mountinfo: str, available_mib: int = 4096) -> str:
    """A tree of /proc and /sys as a host shows it."""
    write(root / "proc/self/cgroup", cgroup)
    write(root / "proc/self/mountinfo", mountinfo)
    write(root / "proc/meminfo", f"MemTotal: 9 kB\nMemAvailable: {available_mib * 1024} kB")
    return str(root)


V2 = "30 23 0:26 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:32 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"


def limits(root: str) -> list[tuple[str, int]]:
    found = memory.headrooms(root)
    return [(room.limit.rpartition("/")[2], room.free_bytes >> 20) for room in found]


def test_every_cgroup_up_to_the_root_limits_us(tmp_path: Path) -> None:
    root = host(tmp_path, "0::/kv.slice/kv.service", V2)
    top = tmp_path / "sys/fs/cgroup"
    write(top / "kv.slice/memory.max", 300 << 20)
    write(top / "kv.slice/memory.current", 100 << 20)
    write(top / "kv.slice/kv.service/memory.max", "max")
    write(top / "kv.slice/kv.service/memory.high", 800 << 20)
    write(top / "kv.slice/kv.service/memory.current", 100 << 20)
    write(top / "kv.slice/kv.service/memory.stat", f"inactive_file {30 << 20}\nanon 5")
    assert limits(root) == [("MemAvailable", 4096), ("kv.service", 730), ("kv.slice", 200)]
    with pytest.raises(StartError, match=r"kv\.slice leaves 200 MiB; raise its memory limit"):
        memory.require_memory("arena", 190 << 20, root)
    memory.require_memory("arena", 130 << 20, root)


def test_cgroups_of_version_1_limit_us(tmp_path: Path) -> None:
    root = host(tmp_path, "4:cpu:/x\n5:memory:/docker/abc", V1.format(top="/"))
    top = tmp_path / "sys/fs/cgroup/memory"
    write(top / "memory.limit_in_bytes", 0x7FFFFFFFFFFFF000)
    write(top / "memory.usage_in_bytes", 5)
    write(top / "docker/abc/memory.limit_in_bytes", 500 << 20)
    write(top / "docker/abc/memory.usage_in_bytes", 400 << 20)
    stat = f"inactive_file 1\ntotal_inactive_file {40 << 20}\ntotal_active_file {10 << 20}"
    write(top / "docker/abc/memory.stat", stat)
    assert limits(root) == [("MemAvailable", 4096), ("abc", 150)]


def test_a_container_that_sees_only_its_own_part_is_limited_by_it(tmp_path: Path) -> None:
    root = host(tmp_path, "5:memory:/docker/abc", V1.format(top="/docker/abc"))
    top = tmp_path / "sys/fs/cgroup/memory"
    write(top / "memory.limit_in_bytes", 64 << 20)
    write(top / "memory.usage_in_bytes", 0)
    assert limits(root) == [("MemAvailable", 4096), ("memory", 64)]


def test_a_host_that_hides_its_limits_sets_none(tmp_path: Path) -> None:
    assert memory.headrooms(str(tmp_path)) == []


def test_the_pool_of_huge_pages_and_its_cgroup_are_counted(tmp_path: Path) -> None:
    root = host(tmp_path, "0::/kv", V2)
    pool = tmp_path / "sys/kernel/mm/hugepages/hugepages-2048kB"
    counts = {"free": 10, "resv": 4, "surplus": 1, "nr_overcommit": 3}
    for name, pages in counts.items():
        write(pool / f"{name}_hugepages", pages)
    write(tmp_path / "sys/fs/cgroup/kv/hugetlb.2MB.max", 6 << 20)
    write(tmp_path / "sys/fs/cgroup/kv/hugetlb.2MB.current", 2 << 20)
    assert [room.free_bytes >> 20 for room in memory.huge_headrooms(root)] == [16, 4]


def test_this_host_says_how_much_memory_there_is() -> None:
    found = memory.headrooms()
    assert found[0].limit == "MemAvailable"
    assert all(room.free_bytes > 0 for room in found)


def test_no_signal_ends_a_process_that_asked_for_too_much() -> None:
    code = "from tests.unit.test_arena import HUGE, make; make(geometry=HUGE)"
    done = run_python(code)
    assert done.returncode not in (-signal.SIGBUS, -signal.SIGKILL)
    assert b"StartError" in done.stderr
