"""Disks that fill up, fail, shrink and change: no wrong byte is served, no account goes wrong."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kvtierd.tiers.blockio import AGAIN_TRIES_MAX
from kvtierd.tiers.errors import StartError
from kvtierd.tiers.spill_io import Status
from kvtierd.tiers.spill_open import open_spill
from tests.spill_support import (
    BLOCK_BYTES,
    INSTANCE,
    KIB,
    MIB,
    WAIT_S,
    BadKernel,
    Rig,
    Slots,
    failing_at,
    settings,
)

OK, FULL, FAILED, UNSURE = Status.OK, Status.FULL, Status.FAILED, Status.UNSURE
LOST, MISMATCH = Status.LOST, Status.MISMATCH


def nothing_in_flight(rig: Rig) -> bool:
    counters = rig.tier.counters()
    return (counters.jobs_in_flight, counters.in_flight_bytes, counters.queued_tasks) == (0, 0, 0)


# ------------------------------------------------------------ no room


class SmallDisk:
    """A directory whose file system has little room: a loop-mounted ext4 where mounting is allowed.

    Elsewhere the kernel's limit on file sizes stands in for it.
    """

    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path / "disk"
        self.path.mkdir()
        image = tmp_path / "disk.img"
        with open(image, "wb") as file:
            file.truncate(24 * MIB)
        self.mounted = all(
            shutil.which(command[0]) is not None
            and subprocess.run(command, capture_output=True, timeout=60, check=False).returncode
            == 0
            for command in (
                ["mkfs.ext4", "-q", "-m", "0", "-b", "4096", "-O", "^has_journal", str(image)],
                ["mount", "-o", "loop", str(image), str(self.path)],
            )
        )
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self, room_bytes: int) -> None:
        """Leave about so much room."""
        if not self.mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, self._limits[1]))
            return
        free = os.statvfs(self.path)
        with open(self.path / "ballast", "wb") as ballast:
            os.posix_fallocate(ballast.fileno(), 0, free.f_bavail * free.f_frsize - room_bytes)

    def make_room(self) -> None:
        """The operator has deleted something."""
        if self.mounted:
            (self.path / "ballast").unlink()
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)

    def close(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)
        if self.mounted:
            subprocess.run(["umount", str(self.path)], check=True, timeout=60)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path)
    yield disk
    disk.close()


@pytest.mark.parametrize("durability", ["process", "power"])
def test_a_full_disk_costs_the_blocks_that_do_not_fit_and_nothing_else(
    small_disk: SmallDisk, durability: str
) -> None:
    wanted = settings(small_disk.path / "a", durability=durability, capacity_bytes=16 * MIB)
    with Rig(wanted) as rig:
        first, second = rig.assign(0), rig.assign(1)
        assert rig.write(first[:8]).ok
        small_disk.fill(MIB)
        slots = np.concatenate([first[8:], second])
        written = rig.write(slots)
        good, bad = slots[written.status == OK], slots[written.status == FULL]
        assert len(good) and len(bad) and len(good) + len(bad) == len(slots)
        assert set(written.errnos[written.status == FULL].tolist()) <= {errno.ENOSPC, errno.EFBIG}
        counters = rig.tier.counters()
        assert (counters.written_blocks, counters.full_blocks) == (8 + len(good), len(bad))
        assert nothing_in_flight(rig)
        assert rig.read(good, written.checksums[written.status == OK]).ok
        small_disk.make_room()
        retried = rig.write(bad)
        assert retried.ok
        assert rig.read(bad, retried.checksums).ok
    with Rig(wanted, generation=1) as again:
        assert np.array_equal(np.sort(again.found()), np.sort(np.concatenate([first, second])))
        assert again.read(again.found(), again.sums_found()).ok


def test_a_disk_too_full_for_a_slabs_headers_is_a_full_disk(small_disk: SmallDisk) -> None:
    wanted = settings(small_disk.path / "a", preallocate=True)
    with Rig(wanted) as rig:
        small_disk.fill(0 if small_disk.mounted else 4 * KIB)
        slots = rig.assign(0)
        assert set(rig.write(slots).status.tolist()) == {FULL}
        small_disk.make_room()
        assert rig.write(slots).ok
    with Rig(wanted, generation=1) as again:
        assert np.array_equal(again.found(), slots)


def test_preallocation_that_finds_no_room_takes_back_what_it_began(small_disk: SmallDisk) -> None:
    wanted = settings(small_disk.path / "a", preallocate=True, capacity_bytes=16 * MIB)
    files = open_spill(wanted, INSTANCE, 0)
    small_disk.fill(8 * MIB)
    with pytest.raises(StartError, match=r"spill\.preallocate"):
        files.begin(1)
    assert not (small_disk.path / "a" / "blocks.kv").exists()
    files.abandon()
    assert not (small_disk.path / "a").exists()


# ------------------------------------------------------------ errors of the device


def test_a_bad_sector_costs_a_write_one_block_only(tmp_path: Path) -> None:
    kernel = BadKernel(failing_at("write", errno.EIO, 5 * BLOCK_BYTES, 6 * BLOCK_BYTES))
    wanted = settings(tmp_path / "a", io_threads=1)
    with Rig(wanted, kernel=kernel) as rig:
        slots = rig.assign(0)
        kernel.on = True
        written = rig.write(slots)
        assert written.status.tolist() == [OK] * 5 + [FAILED] + [OK] * 58
        assert written.errnos[5] == errno.EIO
        assert nothing_in_flight(rig)
        kernel.on = False
        assert rig.write(slots[5:6]).ok
    with Rig(wanted, generation=1) as again:
        assert np.array_equal(again.found(), slots)
        assert again.read(slots, again.sums_found()).ok


def test_a_bad_sector_costs_a_read_one_block_only(tmp_path: Path) -> None:
    kernel = BadKernel(failing_at("read", errno.EIO, 5 * BLOCK_BYTES, 6 * BLOCK_BYTES))
    with Rig(settings(tmp_path / "a", io_threads=1), kernel=kernel) as rig:
        slots = rig.assign(0)
        written = rig.write(slots)
        before = rig.in_arena(written)
        kernel.on = True
        read = rig.read(slots, written.checksums)
        assert read.status.tolist() == [OK] * 5 + [LOST] + [OK] * 58
        good = read.status == OK
        assert np.array_equal(rig.in_arena(read)[good], before[good])
        assert rig.tier.counters().lost_blocks == 1


@pytest.mark.parametrize("step", [1, 3])
def test_a_device_that_moves_a_little_at_a_time_is_only_slow(tmp_path: Path, step: int) -> None:
    kernel = BadKernel(lambda _, __, size: min(size, step * 4096 + (100 if step > 1 else 0)))
    with Rig(settings(tmp_path / "a", direct_io="off"), kernel=kernel) as rig:
        slots = rig.assign(0)
        kernel.on = True
        written = rig.write(slots)
        before = rig.in_arena(written)
        read = rig.read(slots, written.checksums)
        assert written.ok and read.ok
        assert np.array_equal(rig.in_arena(read), before)


def test_a_device_that_moves_nothing_fails_instead_of_being_asked_for_ever(tmp_path: Path) -> None:
    kernel = BadKernel(lambda _, __, size: min(size, 512))
    with Rig(settings(tmp_path / "a", direct_io="off"), kernel=kernel) as rig:
        slots = rig.assign(0)[:3]
        sums = rig.write(slots).checksums
        kernel.on = True
        assert rig.read(slots, sums).status.tolist() == [LOST] * 3
        assert rig.write(slots).status.tolist() == [FULL] * 3


def test_a_busy_device_is_asked_again_a_bounded_number_of_times(tmp_path: Path) -> None:
    refusals = iter(range(AGAIN_TRIES_MAX))

    def briefly(_: str, __: int, size: int) -> int:
        if next(refusals, None) is not None:
            raise BlockingIOError(errno.EAGAIN, "busy")
        return size

    def always(*_: object) -> int:
        raise BlockingIOError(errno.EAGAIN, "busy")

    kernel = BadKernel(briefly)
    with Rig(settings(tmp_path / "a"), kernel=kernel) as rig:
        slots = rig.assign(0)[:1]
        kernel.on = True
        written = rig.write(slots)
        assert written.ok
        kernel.trouble = always
        assert rig.read(slots, written.checksums).status.tolist() == [FAILED]
        kernel.on = False
        assert rig.read(slots, written.checksums).ok


def test_payload_that_cannot_be_made_durable_is_not_published(tmp_path: Path) -> None:
    def no_sync(name: str, _: int, size: int) -> int:
        if name == "sync":
            raise OSError(errno.EIO, "sync")
        return size

    kernel = BadKernel(no_sync)
    wanted = settings(tmp_path / "a", durability="power")
    with Rig(wanted, kernel=kernel) as rig:
        slots = rig.assign(0)[:8]
        kernel.on = True
        assert set(rig.write(slots).status.tolist()) == {FAILED}
    with Rig(wanted, generation=1) as again:
        assert len(again.found()) == 0


def test_headers_that_cannot_be_written_leave_the_slot_to_be_cleared(tmp_path: Path) -> None:
    wanted = settings(tmp_path / "a")
    with Rig(wanted) as rig:
        slots = rig.assign(0)
        assert rig.write(slots[:4]).ok
        with broken_headers(rig):
            assert set(rig.write(slots[4:]).status.tolist()) == {UNSURE}
            assert set(rig.clear(slots[4:]).status.tolist()) == {FAILED}
        assert rig.clear(slots[4:]).ok
        assert nothing_in_flight(rig)
    with Rig(wanted, generation=1) as again:
        assert np.array_equal(again.found(), slots[:4])


class broken_headers:  # noqa: N801
    """While it lasts, every write to the header file fails with ENOSPC."""

    def __init__(self, rig: Rig) -> None:
        self.fd = rig.files.files[0].headers.fd

    def __enter__(self) -> None:
        self.kept = os.dup(self.fd)
        full = os.open("/dev/full", os.O_RDWR)
        os.dup2(full, self.fd, inheritable=False)
        os.close(full)

    def __exit__(self, *_: object) -> None:
        os.dup2(self.kept, self.fd, inheritable=False)
        os.close(self.kept)


def test_a_fault_of_our_own_is_a_failed_job_and_not_a_dead_thread(tmp_path: Path) -> None:
    def fault(*_: object) -> int:
        raise ZeroDivisionError

    kernel = BadKernel(fault)
    with Rig(settings(tmp_path / "a", io_threads=1), kernel=kernel) as rig:
        slots = rig.assign(0)[:4]
        sums = rig.write(slots).checksums
        kernel.on = True
        for _ in range(3):
            assert set(rig.write(slots).status.tolist()) == {FAILED}
            assert set(rig.read(slots, sums).status.tolist()) == {FAILED}
        kernel.on = False
        assert rig.write(slots).ok
        assert rig.tier.counters().crashes == 6
        assert nothing_in_flight(rig)


# ------------------------------------------------------------ media that changed


def cut(size: int) -> Callable[[Path], None]:
    return lambda payload: os.truncate(payload, size)


@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("size", [0, 10 * BLOCK_BYTES, 10 * BLOCK_BYTES + 5000, MIB // 2])
def test_a_file_cut_while_in_use_gives_lost_blocks_not_old_memory(
    tmp_path: Path, durability: str, size: int
) -> None:
    with Rig(settings(tmp_path / "a", durability=durability)) as rig:
        slots = rig.assign(0)
        written = rig.write(slots)
        before = rig.in_arena(written)
        cut(size)(tmp_path / "a" / "blocks.kv")
        read = rig.read(slots, written.checksums)
        whole = size // BLOCK_BYTES
        assert read.status.tolist() == [OK] * whole + [LOST] * (64 - whole)
        assert np.array_equal(rig.in_arena(read)[:whole], before[:whole])


@pytest.mark.parametrize("size", [0, 10 * BLOCK_BYTES, 10 * BLOCK_BYTES + 5000, None])
def test_a_file_cut_or_gone_before_the_start_is_reported_and_never_read_as_zeros(
    tmp_path: Path, size: int | None
) -> None:
    wanted = settings(tmp_path / "a")
    payload = tmp_path / "a" / "blocks.kv"
    with Rig(wanted) as rig:
        slots = rig.assign(0)
        rig.write(slots)
    if size is None:
        payload.unlink()
    else:
        os.truncate(payload, size)
    whole = (size or 0) // BLOCK_BYTES
    with Rig(wanted, generation=1) as again:
        assert np.array_equal(again.found(), slots)
        assert np.array_equal(again.lost(), slots[whole:])
        assert "lost" in again.files.warnings[0]
        read = again.read(slots, again.sums_found())
        assert read.status.tolist() == [OK] * whole + [MISMATCH] * (64 - whole)
        assert again.clear(again.lost()).ok
        assert again.write(again.lost()).ok
    with Rig(wanted, generation=2) as third:
        assert len(third.lost()) == 0
        assert third.read(slots, third.sums_found()).ok


def test_looking_at_a_cut_file_does_not_mend_it(tmp_path: Path) -> None:
    wanted = settings(tmp_path / "a")
    with Rig(wanted) as rig:
        rig.write(rig.assign(0))
    os.truncate(tmp_path / "a" / "blocks.kv", 0)
    for _ in range(2):
        files = open_spill(wanted, INSTANCE, 1)
        assert all(part.lost.all() for part in files.scan())
        files.abandon()
        assert (tmp_path / "a" / "blocks.kv").stat().st_size == 0


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Rig, Path, Slots]]:
    """A tier with one full slab, for many small damages one after another."""
    path = tmp_path_factory.mktemp("kept") / "a"
    with Rig(settings(path, direct_io="off")) as rig:
        yield rig, path / "blocks.kv", rig.assign(0)


@hypothesis_settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(block=st.integers(0, 7), byte=st.integers(0, BLOCK_BYTES - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_is_never_served(
    kept: tuple[Rig, Path, Slots], block: int, byte: int, bit: int
) -> None:
    rig, payload, slots = kept
    written = rig.write(slots[:8])
    with open(payload, "r+b") as file:
        file.seek(block * BLOCK_BYTES + byte)
        (old,) = file.read(1)
        file.seek(block * BLOCK_BYTES + byte)
        file.write(bytes([old ^ 1 << bit]))
    status = rig.read(slots[:8], written.checksums).status.tolist()
    assert status == [MISMATCH if index == block else OK for index in range(8)]


def test_another_blocks_bytes_and_an_older_copys_are_not_accepted(
    kept: tuple[Rig, Path, Slots],
) -> None:
    rig, payload, slots = kept
    older = rig.write(slots[:2])
    with open(payload, "r+b") as file:
        stale = file.read(BLOCK_BYTES)
        newer = rig.write(slots[:2])
        assert rig.read(slots[:2], newer.checksums).ok
        assert not rig.read(slots[:2], older.checksums).ok
        file.seek(0)
        file.write(stale)
    assert rig.read(slots[:2], newer.checksums).status.tolist() == [MISMATCH, OK]
    with open(payload, "r+b") as file:
        file.seek(BLOCK_BYTES)
        neighbour = file.read(BLOCK_BYTES)
        file.seek(0)
        file.write(neighbour)
    assert rig.read(slots[:2], newer.checksums).status.tolist() == [MISMATCH, OK]


# ------------------------------------------------------------ death


WRITER = """
import sys
from pathlib import Path
from tests.spill_support import Rig, settings

with Rig(settings(Path(sys.argv[1]), durability=sys.argv[2])) as rig:
    slots = rig.assign(0)
    for turn, _ in enumerate(sys.stdin):
        some = slots[turn * 8 % 64 :][:8]
        rig.clear(some)
        result = rig.write(some)
        assert result.ok
        for slot, checksum in zip(some.tolist(), result.checksums.tolist()):
            print("wrote", slot, checksum)
        print("done", turn, flush=True)
"""


@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("turns", [1, 3, 20])
def test_what_was_reported_written_survives_kill_9(
    tmp_path: Path, turns: int, durability: str
) -> None:
    root = Path(__file__).parents[2]
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "a"), durability],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(root / "client")])},
    )
    assert writer.stdin is not None and writer.stdout is not None
    writer.stdin.write("go\n" * (turns + 1))  # one turn more than is waited for
    writer.stdin.flush()
    reported: dict[int, int] = {}
    for line in writer.stdout:
        if line == f"done {turns - 1}\n":
            break
        if line.startswith("wrote"):
            slot, checksum = map(int, line.split()[1:])
            reported[slot] = checksum
    writer.kill()
    writer.stdout.close()
    assert writer.wait(WAIT_S) == -signal.SIGKILL
    writer.stdin.close()
    with Rig(settings(tmp_path / "a"), generation=1) as again:
        found = dict(zip(again.found().tolist(), again.sums_found().tolist(), strict=True))
        assert again.read(again.found(), again.sums_found()).ok
        killed_in = range(turns * 8 % 64, turns * 8 % 64 + 8)
        kept = {slot: checksum for slot, checksum in reported.items() if slot not in killed_in}
        assert {slot: found.get(slot) for slot in kept} == kept
        assert set(found) <= set(kept) | set(killed_in)
