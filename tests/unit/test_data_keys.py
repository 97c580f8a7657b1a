"""Keys of encrypted spill files: data keys over restarts, and the master key that opens them."""

from pathlib import Path

import numpy as np
import pytest

from kvtierd.tiers import bodies as b
from kvtierd.tiers import cipher
from kvtierd.tiers.errors import StartError
from kvtierd.tiers.master_key import MasterKey, load_master_keys
from kvtierd.tiers.records import RECORD_BYTES
from kvtierd.tiers.spill_files import SpillSettings
from kvtierd.tiers.spill_io import Status
from kvtierd.tiers.superblock import KEY_COPIES, KEYS_MAX
from tests.spill_support import Rig, flip, new_key, settings, stored_keys


@pytest.fixture
def key(tmp_path: Path) -> str:
    return new_key(tmp_path / "key")


@pytest.fixture
def wanted(tmp_path: Path, key: str) -> SpillSettings:
    return settings(tmp_path / "a", encrypt=True, key=key)


# ------------------------------------------------------------ restart and keys


def test_blocks_of_earlier_starts_stay_readable_with_their_sums(wanted: SpillSettings) -> None:
    with Rig(wanted) as rig:
        slots = rig.assign(0)
        written = rig.write(slots)
        before = rig.in_arena(written)
    with Rig(wanted, generation=1) as again:
        assert np.array_equal(again.found(), slots) and len(again.lost()) == 0
        assert np.array_equal(again.sums_found(), written.checksums)
        read = again.read(slots, again.sums_found())
        assert read.ok and np.array_equal(again.in_arena(read), before)


def test_data_keys_that_no_block_uses_are_dropped(wanted: SpillSettings) -> None:
    for generation in range(4):
        with Rig(wanted, generation=generation) as rig:
            assert len(stored_keys(rig)) == KEY_COPIES  # its own only
    with Rig(wanted, generation=4) as rig:
        slots = rig.assign(0)[:4]
        assert rig.write(slots).ok
    with Rig(wanted, generation=5) as rig:
        assert len(set(stored_keys(rig))) == 2
        assert rig.clear(slots).ok
    with Rig(wanted, generation=6) as rig:
        assert len(set(stored_keys(rig))) == 1


def test_a_full_key_table_takes_no_more_blocks_and_reads_all(
    tmp_path: Path, wanted: SpillSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cipher, "KEYS_MAX", 3)
    sums, slots = [], []
    for generation in range(4):
        with Rig(wanted, generation=generation) as rig:
            some = rig.assign(generation)[:2]
            written = rig.write(some)
            assert written.ok == (generation < 3)
            if generation < 3:
                slots.append(some)
                sums.append(written.checksums)
                assert not rig.files.warnings
            else:
                assert written.status.tolist() == [int(Status.FULL)] * 2
                assert "only read" in rig.files.warnings[0]
                assert rig.read(np.concatenate(slots), np.concatenate(sums)).ok


def test_a_master_key_is_changed_by_giving_both_once(tmp_path: Path, wanted: SpillSettings) -> None:
    new = new_key(tmp_path / "new")
    both = settings(tmp_path / "a", encrypt=True, key=new, old_key=wanted.key)
    only_new = settings(tmp_path / "a", encrypt=True, key=new)
    with Rig(wanted) as rig:
        slots = rig.assign(0)[:4]
        written = rig.write(slots)
        before = rig.in_arena(written)
    for generation, given in ((1, both), (2, only_new)):
        with Rig(given, generation=generation) as rig:
            read = rig.read(slots, rig.sums_found())
            assert read.ok and np.array_equal(rig.in_arena(read), before)
    with pytest.raises(StartError, match="another master key"):
        Rig(wanted, generation=3)


@pytest.mark.parametrize("copy", range(KEY_COPIES))
def test_a_change_of_the_master_key_may_be_cut_anywhere(
    tmp_path: Path, wanted: SpillSettings, copy: int
) -> None:
    """Each copy of the table may be the old, the new or a torn one."""
    new = new_key(tmp_path / "new")
    both = settings(tmp_path / "a", encrypt=True, key=new, old_key=wanted.key)
    with Rig(wanted) as rig:
        slots = rig.assign(0)[:4]
        sums = rig.write(slots).checksums
        table = rig.files.files[0].headers.key_table()
        offset = rig.files.geometry.clients_offset
    with Rig(both, generation=1) as rig:
        pass
    half = KEYS_MAX * RECORD_BYTES
    with (tmp_path / "a" / "headers.kv").open("r+b") as file:
        file.seek(offset + copy * half)
        file.write(table[copy * half : copy * half + 40])  # torn inside the first record
    with Rig(both, generation=2) as rig:
        assert rig.read(slots, sums).ok
    with Rig(settings(tmp_path / "a", encrypt=True, key=new), generation=3) as rig:
        assert rig.read(slots, sums).ok


def test_blocks_of_a_damaged_data_key_are_lost_and_others_are_not(
    tmp_path: Path, wanted: SpillSettings
) -> None:
    with Rig(wanted) as rig:
        old = rig.assign(0)[:4]
        rig.write(old)
        (number,) = set(stored_keys(rig))
        offset = rig.files.geometry.clients_offset + number * RECORD_BYTES + 20
    with Rig(wanted, generation=1) as rig:
        new = rig.assign(1)[:4]
        rig.write(new)
    for copy in range(KEY_COPIES):
        flip(tmp_path / "a" / "headers.kv", offset + copy * KEYS_MAX * RECORD_BYTES)
    with Rig(wanted, generation=2) as rig:
        assert np.array_equal(rig.lost(), old)
        assert "data keys are damaged" in rig.files.warnings[0]
        sums = rig.sums_found()[np.isin(rig.found(), new)]
        assert rig.read(new, sums).ok


def test_turned_on_over_plain_files_and_off_again_every_block_stays_readable(
    tmp_path: Path, key: str
) -> None:
    slots, contents = [], []
    for generation, (encrypt, given) in enumerate([(False, ""), (True, key), (False, key)]):
        wanted = settings(tmp_path / "a", encrypt=encrypt, key=given)
        with Rig(wanted, generation=generation) as rig:
            if not generation:
                rig.assign(0)
            slots.append(np.arange(generation, 24, 3))  # neighbours of each other
            written = rig.write(slots[-1])
            contents.append(rig.in_arena(written))
            kinds = b.checksum_kinds(rig.files.files[0].headers.read_bodies(slots[-1]))
            assert set(kinds.tolist()) == {b.CHECKSUM_AES_GCM if encrypt else b.CHECKSUM_XXH3}
    with Rig(settings(tmp_path / "a", key=key), generation=3) as rig:
        order = np.argsort(np.concatenate(slots))
        read = rig.read(rig.found(), rig.sums_found())
        assert read.ok
        assert np.array_equal(rig.in_arena(read), np.concatenate(contents)[order])


def test_the_key_is_not_needed_once_no_block_is_encrypted(
    tmp_path: Path, wanted: SpillSettings
) -> None:
    with Rig(wanted) as rig:
        slots = rig.assign(0)
        rig.write(slots)
        assert rig.clear(slots).ok
    with Rig(settings(tmp_path / "a"), generation=1) as rig:
        assert stored_keys(rig) == [] and not rig.tier.encrypted


# ------------------------------------------------------------ refusals


def picture(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("given", ["none", "wrong", "wrong_pair"])
def test_a_start_without_the_right_key_is_refused_and_changes_nothing(
    tmp_path: Path, wanted: SpillSettings, given: str
) -> None:
    with Rig(wanted) as rig:
        rig.write(rig.assign(0))
    others = {
        "none": {},
        "wrong": {"key": new_key(tmp_path / "x"), "encrypt": True},
        "wrong_pair": {"key": new_key(tmp_path / "x"), "old_key": new_key(tmp_path / "y")},
    }
    before = picture(tmp_path / "a")
    reason = "no key is configured" if given == "none" else "another master key"
    with pytest.raises(StartError, match=reason):
        Rig(settings(tmp_path / "a", **others[given]), generation=1)
    assert picture(tmp_path / "a") == before


def test_a_key_that_cannot_be_used_is_refused_by_what_is_wrong_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    with pytest.raises(StartError, match=r"No such file.*/dev/urandom"):
        load_master_keys(str(path), "")
    path.symlink_to(path)  # may not be read: nobody is told to write another one over it
    with pytest.raises(StartError, match=r"^((?!urandom).)*$"):
        load_master_keys(str(path), "")
    path.unlink()
    path.write_bytes(bytes(31))
    path.chmod(0o600)
    with pytest.raises(StartError, match=r"31 bytes instead of 32.*a new one does not open"):
        load_master_keys(str(path), "")
    path.write_bytes(bytes(33))
    with pytest.raises(StartError, match=r"more than 32 bytes.*a new one does not open"):
        load_master_keys(str(path), "")
    path.write_bytes(bytes(32))
    for mode in (0o604, 0o644, 0o620, 0o602):
        path.chmod(mode)
        with pytest.raises(StartError, match=f"mode {mode:04o} lets others in"):
            load_master_keys(str(path), "")
    with pytest.raises(StartError, match="not a regular file"):
        load_master_keys(str(tmp_path), "")
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    with pytest.raises(StartError, match=r"spill\.encryption\.old_key.*CREDENTIALS_DIRECTORY"):
        load_master_keys("", "credential:master")
    path.chmod(0o440)
    assert len(load_master_keys(str(path), "")) == 1


def test_a_key_comes_from_a_systemd_credential(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_key(tmp_path / "master")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    with Rig(settings(tmp_path / "a", encrypt=True, key="credential:master")) as rig:
        slots = rig.assign(0)
        assert rig.read(slots, rig.write(slots).checksums).ok


def test_a_master_key_shows_itself_nowhere() -> None:
    secret = b"not to be seen in any log or dump"[:32]
    master = MasterKey(secret)
    assert secret.decode() not in f"{master!r} {master}"
    assert master.unwrap(master.wrap(bytes(32))) == bytes(32)
    assert MasterKey(bytes(32)).unwrap(master.wrap(bytes(32))) is None
