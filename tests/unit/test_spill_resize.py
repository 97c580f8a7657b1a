"""Spill files follow a changed capacity at the next start, with every block where it was."""

import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvtierd.tiers.errors import FormatError, StartError
from kvtierd.tiers.spill_files import SpillSettings
from kvtierd.tiers.spill_open import open_spill
from tests.spill_support import INSTANCE, MIB, Rig, contents, new_key, settings
from tests.unit.test_spill_open import picture

NEW = "headers.kv.new"


def fill(rig: Rig, *slabs: int) -> None:
    """Blocks in slabs of a tier."""
    for slab in slabs:
        assert rig.write(rig.assign(slab)).ok


def holds(rig: Rig, blocks: int) -> bool:
    """Whether all blocks of an earlier life are there, as they were."""
    slots = rig.found()
    result = rig.read(slots, rig.sums_found())
    seqs = np.concatenate([part.found.bodies[:, 6] for part in rig.scans])
    there = np.array_equal(rig.in_arena(result), contents(seqs, result.job.length_bytes))
    return result.ok and there and len(slots) == blocks and not len(rig.lost())


@pytest.fixture
def two(tmp_path: Path) -> SpillSettings:
    """Two directories of four slabs each, with blocks in the first and last slab of both."""
    wanted = settings(tmp_path / "a", tmp_path / "b")
    with Rig(wanted) as rig:
        fill(rig, 0, 3, 4, 7)
    return wanted


def test_more_capacity_keeps_every_block_and_gives_room(
    tmp_path: Path, two: SpillSettings, caplog: pytest.LogCaptureFixture
) -> None:
    larger = settings(tmp_path / "a", tmp_path / "b", capacity_bytes=6 * MIB)
    caplog.set_level(logging.INFO)
    with Rig(larger, 1) as rig:
        assert "6 slabs, there were 4" in caplog.text
        assert not rig.files.warnings
        assert rig.files.geometry.slabs == 6
        assert [entry.slab for entry in rig.files.slabs()] == [0, 3, 6, 9]
        assert holds(rig, 4 * 64)
        fill(rig, 5, 11)
    assert {path.stat().st_size for path in tmp_path.glob("*/blocks.kv")} == {6 * MIB}
    assert not list(tmp_path.glob(f"*/{NEW}"))
    with Rig(larger, 2) as rig:
        assert not rig.files.warnings
        assert holds(rig, 6 * 64)


def test_less_capacity_gives_back_what_no_block_uses(tmp_path: Path) -> None:
    with Rig(settings(tmp_path / "a")) as rig:
        fill(rig, 0, 1)
    with Rig(settings(tmp_path / "a", capacity_bytes=2 * MIB), 1) as rig:
        assert holds(rig, 2 * 64)
    assert (tmp_path / "a" / "blocks.kv").stat().st_size == 2 * MIB
    with Rig(settings(tmp_path / "a", capacity_bytes=2 * MIB), 2) as rig:
        assert not rig.files.warnings
        assert holds(rig, 2 * 64)


def test_less_than_the_blocks_need_is_refused_with_what_they_need(
    tmp_path: Path, two: SpillSettings
) -> None:
    before = picture(tmp_path)
    with pytest.raises(StartError, match=rf"slab 3 is in use.*{4 * MIB} or more"):
        open_spill(settings(tmp_path / "a", tmp_path / "b", capacity_bytes=3 * MIB), INSTANCE, 1)
    assert picture(tmp_path) == before


def test_a_slab_whose_entry_is_damaged_counts_as_used(tmp_path: Path, two: SpillSettings) -> None:
    headers = tmp_path / "a" / "headers.kv"
    with headers.open("r+b") as file:
        file.seek(4096 + 3 * 64)
        file.write(b"\xff")
    with pytest.raises(StartError, match="slab 3 is in use"):
        open_spill(settings(tmp_path / "a", tmp_path / "b", capacity_bytes=3 * MIB), INSTANCE, 1)
    larger = settings(tmp_path / "a", tmp_path / "b", capacity_bytes=6 * MIB)
    with Rig(larger, 1) as rig:
        assert rig.files.damaged_slabs == [3]
        assert holds(rig, 3 * 64)


@pytest.mark.parametrize("slabs", [2, 6])
def test_a_start_that_fails_elsewhere_changes_no_size(tmp_path: Path, slabs: int) -> None:
    with Rig(settings(tmp_path / "a")) as rig:
        fill(rig, 0)
    before = picture(tmp_path)
    open_spill(settings(tmp_path / "a", capacity_bytes=slabs * MIB), INSTANCE, 1).abandon()
    assert picture(tmp_path) == before


def test_another_daemons_files_are_refused_before_they_are_copied(
    tmp_path: Path, two: SpillSettings
) -> None:
    before = picture(tmp_path)
    with pytest.raises(FormatError, match=r"order of spill\.paths"):
        open_spill(settings(tmp_path / "b", tmp_path / "a", capacity_bytes=6 * MIB), INSTANCE, 1)
    with pytest.raises(FormatError, match="belongs to instance"):
        open_spill(settings(tmp_path / "a", tmp_path / "b", capacity_bytes=6 * MIB), bytes(16), 1)
    assert picture(tmp_path) == before


@contextmanager
def no_file_above(size_bytes: int) -> Iterator[None]:
    """Files of this process cannot grow beyond a size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def begin(wanted: SpillSettings) -> None:
    """What a start does with its spill files, up to where it may fail."""
    files = open_spill(wanted, INSTANCE, 1)
    try:
        files.begin(2)
    finally:
        files.abandon()


@pytest.mark.parametrize("limit_bytes", [5 * MIB, 64 << 10], ids=["payload", "headers"])
def test_no_room_for_the_new_size_is_told_and_nothing_is_changed(
    tmp_path: Path, two: SpillSettings, limit_bytes: int
) -> None:
    before = picture(tmp_path)
    larger = settings(tmp_path / "a", tmp_path / "b", capacity_bytes=6 * MIB, preallocate=True)
    with no_file_above(limit_bytes), pytest.raises(StartError, match="make room"):
        begin(larger)
    assert picture(tmp_path) == before


@pytest.mark.parametrize("capacity", [4, 6])
def test_what_a_start_left_that_was_killed_at_it_is_no_obstacle(
    tmp_path: Path, two: SpillSettings, capacity: int
) -> None:
    larger = settings(tmp_path / "a", tmp_path / "b", capacity_bytes=6 * MIB)
    killed = open_spill(larger, INSTANCE, 1)
    assert (tmp_path / "a" / NEW).exists()
    for file in killed.files:
        file.close()  # no abandon: its copies stay
    wanted = settings(tmp_path / "a", tmp_path / "b", capacity_bytes=capacity * MIB)
    with Rig(wanted, 1) as rig:
        assert holds(rig, 4 * 64)
    assert not list(tmp_path.glob(f"*/{NEW}"))


def test_encrypted_blocks_are_read_after_a_change_of_size(tmp_path: Path) -> None:
    key = new_key(tmp_path / "key")
    with Rig(settings(tmp_path / "a", encrypt=True, key=key)) as rig:
        fill(rig, 0, 2)
    larger = settings(tmp_path / "a", capacity_bytes=9 * MIB, encrypt=True, key=key)
    for generation in (1, 2):
        with Rig(larger, generation) as rig:
            assert holds(rig, 2 * 64)
