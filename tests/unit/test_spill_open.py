"""Opening spill directories: what is accepted, what is refused, and that a refusal is a no-op."""

import fcntl
import logging
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvtierd.tiers.errors import FormatError, StartError
from kvtierd.tiers.locks import lock_directory
from kvtierd.tiers.spill_files import SpillSettings
from kvtierd.tiers.spill_open import open_spill
from tests.spill_support import INSTANCE, MIB, RefusingKernel, Rig, settings

OTHER_INSTANCE = bytes(16)


def picture(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """All that an outsider can see of a directory: modes, sizes, contents."""
    found = {}
    for path in sorted([root, *root.rglob("*")]):
        status = path.lstat()
        data = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        found[str(path)] = (status.st_mode, status.st_size, data)
    return found


@pytest.fixture
def unchanged(tmp_path: Path) -> Iterator[None]:
    """The test must leave everything as it is when the fixture is asked for it."""
    before = picture(tmp_path)
    yield
    assert picture(tmp_path) == before


@pytest.fixture
def used(tmp_path: Path) -> SpillSettings:
    """Settings of a spill directory with blocks in it."""
    wanted = settings(tmp_path / "a")
    with Rig(wanted) as rig:
        rig.write(rig.assign(0))
    return wanted


# ------------------------------------------------------------ what is accepted


def test_a_new_directory_and_its_files_are_the_daemons_alone(tmp_path: Path) -> None:
    with Rig(settings(tmp_path / "a")) as rig:
        assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700
        files = {path.name: path.stat() for path in (tmp_path / "a").iterdir()}
        assert set(files) == {"blocks.kv", "headers.kv"}
        assert {stat.S_IMODE(status.st_mode) for status in files.values()} == {0o600}
        assert files["blocks.kv"].st_size == rig.files.geometry.payload_bytes


def test_payload_is_sparse_unless_it_is_to_be_preallocated(tmp_path: Path) -> None:
    with Rig(settings(tmp_path / "a")), Rig(settings(tmp_path / "b", preallocate=True)):
        taken = {name: (tmp_path / name / "blocks.kv").stat().st_blocks * 512 for name in "ab"}
    assert taken["a"] == 0
    assert taken["b"] >= 4 * MIB


def test_capacity_is_whole_slabs_and_never_more_than_was_asked_for(tmp_path: Path) -> None:
    with Rig(settings(tmp_path / "a", capacity_bytes=4 * MIB - 1)) as rig:
        assert rig.files.geometry.slabs == 3
        assert len(rig.files.words) == 3 * rig.files.geometry.max_slots


def test_another_start_is_normal_and_an_older_copy_is_not(
    tmp_path: Path, used: SpillSettings
) -> None:
    for generation, usual in ((0, True), (1, True), (2, False), (5, False)):
        files = open_spill(used, INSTANCE, generation)
        assert (files.warnings == []) is usual
        files.close()


def test_a_directory_that_lost_everything_is_not_passed_over(
    tmp_path: Path, used: SpillSettings
) -> None:
    shutil.rmtree(tmp_path / "a")
    files = open_spill(used, INSTANCE, 1)
    assert "lost" in files.warnings[0]
    files.abandon()
    assert not (tmp_path / "a").exists()


def test_what_an_interrupted_first_start_left_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0o700)
    (tmp_path / "a" / "headers.kv.new").write_bytes(b"half")
    with Rig(settings(tmp_path / "a")) as rig:
        assert rig.write(rig.assign(0)).ok
        assert not (tmp_path / "a" / "headers.kv.new").exists()


def test_a_start_that_failed_elsewhere_leaves_no_files(tmp_path: Path) -> None:
    before = picture(tmp_path)
    open_spill(settings(tmp_path / "a", tmp_path / "b"), INSTANCE, 0).abandon()
    assert picture(tmp_path) == before


def test_a_start_that_failed_elsewhere_leaves_old_files_as_they_were(
    tmp_path: Path, used: SpillSettings
) -> None:
    before = picture(tmp_path)
    open_spill(used, INSTANCE, 1).abandon()
    assert picture(tmp_path) == before


# ------------------------------------------------------------ what is refused


def refused(wanted: SpillSettings, instance: bytes = INSTANCE) -> str:
    """The message with which an opening is refused."""
    with pytest.raises(StartError) as caught:
        open_spill(wanted, instance, 1)
    return str(caught.value)


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o777])
def test_a_directory_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a").chmod(mode)
    before = picture(tmp_path)
    assert f"chmod 0700 {tmp_path}/a" in refused(settings(tmp_path / "a"))
    assert picture(tmp_path) == before


def test_a_directory_of_somebody_else_is_refused(
    tmp_path: Path, used: SpillSettings, monkeypatch: pytest.MonkeyPatch, unchanged: None
) -> None:
    ours = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: ours + 1)
    assert "chown" in refused(used)


def test_a_link_to_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "a").symlink_to("real")
    before = picture(tmp_path)
    assert "not a link" in refused(settings(tmp_path / "a"))
    assert "not a link" in refused(settings(tmp_path / "a/"))
    assert picture(tmp_path) == before


@pytest.mark.parametrize("name", ["headers.kv", "blocks.kv"])
@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
def test_what_is_no_plain_file_is_refused(
    tmp_path: Path, used: SpillSettings, name: str, kind: str
) -> None:
    target = tmp_path / "a" / name
    target.rename(tmp_path / "elsewhere")
    if kind == "link":
        target.symlink_to(tmp_path / "elsewhere")
    elif kind == "fifo":
        os.mkfifo(target)
    else:
        target.mkdir()
    before = picture(tmp_path)
    assert str(target) in refused(used)
    assert picture(tmp_path) == before


def test_a_missing_parent_is_refused_and_not_made(tmp_path: Path, unchanged: None) -> None:
    assert f"create {tmp_path}/no" in refused(settings(tmp_path / "no" / "a"))


def test_a_second_daemon_is_refused_before_it_can_touch_anything(
    tmp_path: Path, used: SpillSettings
) -> None:
    with Rig(used, generation=1) as rig:
        slots = rig.assign(1)
        written = rig.write(slots)
        before = picture(tmp_path)
        other = f"from kvtierd.tiers.locks import lock_directory as lock; lock({used.paths[0]!r})"
        second = subprocess.run(
            [sys.executable, "-c", other], capture_output=True, text=True, timeout=60, check=False
        )
        assert second.returncode == 1
        assert f"process {os.getpid()}" in second.stderr
        assert f"process {os.getpid()}" in refused(used)
        assert picture(tmp_path) == before
        assert rig.read(slots, written.checksums).ok


def test_the_lock_goes_with_the_process_and_the_files_stay(tmp_path: Path) -> None:
    first = lock_directory(str(tmp_path / "a"))
    assert fcntl.fcntl(first.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    first.close()
    lock_directory(str(tmp_path / "a")).close()
    assert (tmp_path / "a").is_dir()


def test_a_refused_second_directory_leaves_the_first_untouched(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b").chmod(0o755)
    before = picture(tmp_path)
    refused(settings(tmp_path / "a", tmp_path / "b"))
    assert picture(tmp_path) == before


def test_files_of_another_daemon_are_refused(
    tmp_path: Path, used: SpillSettings, unchanged: None
) -> None:
    assert OTHER_INSTANCE.hex() in refused(used, OTHER_INSTANCE)


@pytest.mark.parametrize("change", [{"slab_bytes": 2 * MIB}, {"min_block_bytes": 8192}])
def test_other_sizes_than_those_of_the_files_are_refused(
    tmp_path: Path, used: SpillSettings, unchanged: None, change: dict[str, int]
) -> None:
    with pytest.raises(FormatError) as caught:
        open_spill(settings(tmp_path / "a", **change), INSTANCE, 1)
    assert caught.value.reason == "geometry"


@pytest.mark.parametrize("gone", ["files", "directory", "name"])
def test_a_directory_that_has_had_files_is_not_passed_over(tmp_path: Path, gone: str) -> None:
    both = settings(tmp_path / "a", tmp_path / "b")
    Rig(both).__exit__()
    wanted = settings(tmp_path / "a") if gone == "name" else both
    if gone != "name":
        (tmp_path / "b").rename(tmp_path / "aside")
    if gone == "files":  # as where its disk should be mounted
        (tmp_path / "b").mkdir(mode=0o700)
    before = picture(tmp_path)
    with pytest.raises(StartError, match=r"mount its disk|name all of them"):
        open_spill(wanted, INSTANCE, 1, known_files=2)
    assert picture(tmp_path) == before
    accepting = msgspec.structs.replace(wanted, missing="accept")
    open_spill(accepting, INSTANCE, 1, known_files=2).abandon()
    open_spill(settings(tmp_path / "a", tmp_path / "c"), INSTANCE, 1, known_files=1).abandon()


def test_directories_in_another_order_are_refused(tmp_path: Path) -> None:
    Rig(settings(tmp_path / "a", tmp_path / "b")).__exit__()
    before = picture(tmp_path)
    assert "order" in refused(settings(tmp_path / "b", tmp_path / "a"))
    assert picture(tmp_path) == before


def test_payload_without_headers_is_refused_and_kept(tmp_path: Path, used: SpillSettings) -> None:
    (tmp_path / "a" / "headers.kv").unlink()
    before = picture(tmp_path)
    assert "blocks.kv without the headers.kv" in refused(used)
    assert picture(tmp_path) == before


# ------------------------------------------------------------ O_DIRECT


def test_payload_is_opened_with_o_direct_exactly_when_that_was_chosen(tmp_path: Path) -> None:
    for name, wish in (("a", "try"), ("b", "off")):
        with Rig(settings(tmp_path / name, direct_io=wish)) as rig:
            (file,) = rig.files.files
            flags = fcntl.fcntl(file.payload_fd, fcntl.F_GETFL)
            assert bool(flags & os.O_DIRECT) is file.direct
            assert not file.direct or wish == "try"


def test_refused_o_direct_falls_back_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        Rig(settings(tmp_path / "a"), kernel=RefusingKernel()) as rig,
    ):
        slots = rig.assign(0)
        written = rig.write(slots)
        assert rig.read(slots, written.checksums).ok
    (said,) = [message for message in caplog.messages if "O_DIRECT" in message]
    assert "spill.paths[0] is on" in said and "(EINVAL)" in said
    assert 'spill.direct_io = "off"' in said


def test_refused_o_direct_that_is_required_refuses_the_start(tmp_path: Path) -> None:
    before = picture(tmp_path)
    wanted = settings(tmp_path / "a", direct_io="require")
    with pytest.raises(StartError, match=r"O_DIRECT refused \(EINVAL\)"):
        open_spill(wanted, INSTANCE, 0, RefusingKernel())
    assert picture(tmp_path) == before


def test_words_of_all_files_are_one_array(tmp_path: Path) -> None:
    wanted = settings(tmp_path / "a", tmp_path / "b")
    with Rig(wanted) as rig:
        slots = np.concatenate([rig.assign(0)[:2], rig.assign(7)[:2]])
        job = rig.write_job(slots)
        assert rig.run(job).ok
    with Rig(wanted, generation=1) as again:
        assert np.array_equal(again.files.words[slots], job.words)
        assert np.count_nonzero(again.files.words) == len(slots)
