"""Encrypted spill files, on real files: nothing readable on the disk, nothing foreign accepted."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from kvtierd.tiers import bodies as b
from kvtierd.tiers import cipher
from kvtierd.tiers.blockio import RUN_BYTES_MAX
from kvtierd.tiers.records import RECORD_BYTES
from kvtierd.tiers.spill_files import SpillSettings
from kvtierd.tiers.spill_io import Status
from kvtierd.tiers.superblock import KEYS_MAX
from tests.spill_support import (
    BLOCK_BYTES,
    MIB,
    BadKernel,
    Rig,
    failing_at,
    flip,
    new_key,
    settings,
    stored_keys,
)

MISMATCH = int(Status.MISMATCH)


@pytest.fixture
def key(tmp_path: Path) -> str:
    return new_key(tmp_path / "key")


@pytest.fixture
def wanted(tmp_path: Path, key: str) -> SpillSettings:
    return settings(tmp_path / "a", encrypt=True, key=key)


# ------------------------------------------------------------ what goes in comes back


@pytest.mark.parametrize("direct_io", ["try", "off"])
@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("length", [BLOCK_BYTES, BLOCK_BYTES - 1000, BLOCK_BYTES - 10, 1])
def test_encrypted_blocks_come_back_as_they_were(
    tmp_path: Path, key: str, direct_io: str, durability: str, length: int
) -> None:
    wanted = settings(
        tmp_path / "a", encrypt=True, key=key, direct_io=direct_io, durability=durability
    )
    with Rig(wanted) as rig:
        slots = rig.assign(0)
        written = rig.write(slots, length)
        before = rig.in_arena(written)
        read = rig.read(slots, written.checksums, length)
        assert written.ok and read.ok
        assert np.array_equal(rig.in_arena(read), before)


def test_scattered_blocks_of_several_files_come_back_each_to_its_place(
    tmp_path: Path, key: str
) -> None:
    with Rig(settings(tmp_path / "a", tmp_path / "b", encrypt=True, key=key)) as rig:
        slots = np.concatenate([rig.assign(slab) for slab in (0, 3, 4, 6)])
        slots = np.random.default_rng(1).permutation(slots)[:100]
        written = rig.write(slots)
        before = rig.in_arena(written)
        read = rig.read(slots[::-1].copy(), written.checksums[::-1].copy())
        assert written.ok and read.ok
        assert np.array_equal(rig.in_arena(read), before[::-1])


def test_blocks_larger_than_a_run_come_back(tmp_path: Path, key: str) -> None:
    size = RUN_BYTES_MAX + MIB
    wanted = settings(tmp_path / "a", encrypt=True, key=key, slab_bytes=size, capacity_bytes=size)
    with Rig(wanted) as rig:
        slots = rig.assign(0, size)
        written = rig.write(slots, size)
        before = rig.in_arena(written)
        read = rig.read(slots, written.checksums, size)
        assert written.ok and read.ok and np.array_equal(rig.in_arena(read), before)


def test_jobs_of_many_threads_at_once_each_get_their_own_bytes(wanted: SpillSettings) -> None:
    with Rig(wanted) as rig:
        slots = np.concatenate([rig.assign(slab) for slab in range(4)])
        parts = [slots[start::8] for start in range(8)]
        jobs = [rig.write_job(part) for part in parts]
        before = [rig.arena[int(job.offsets[0]) :][: len(job.slots) * BLOCK_BYTES] for job in jobs]
        before = [part.copy() for part in before]
        results = [started.get(timeout=30) for started in [rig.start(job) for job in jobs]]
        for part, result, contents in zip(parts, results, before, strict=True):
            read = rig.read(part, result.checksums)
            assert read.ok and np.array_equal(rig.in_arena(read).reshape(-1), contents)


def test_nothing_of_a_block_and_no_sum_of_it_can_be_read_from_the_disk(
    tmp_path: Path, wanted: SpillSettings, key: str
) -> None:
    with Rig(wanted) as rig:
        slots = rig.assign(0)[:8]
        job = rig.write_job(slots)
        start = int(job.offsets[0])
        rig.arena[start : start + 8 * BLOCK_BYTES] = np.tile(np.arange(256, dtype=np.uint8), 512)
        result = rig.run(job)
        assert result.ok and len(set(result.checksums.tolist())) == 1
        sums = rig.files.files[0].headers.read_bodies(slots)[:, b.W_PAYLOAD_SUM]
        assert len(set(sums.tolist())) == 8  # equal blocks do not look equal
    payload = (tmp_path / "a" / "blocks.kv").read_bytes()
    headers = (tmp_path / "a" / "headers.kv").read_bytes()
    pages = {payload[at : at + 4096] for at in range(0, 8 * BLOCK_BYTES, 4096)}
    assert len(pages) == 8 * BLOCK_BYTES // 4096
    for secret in (bytes(range(64)), result.checksums[:1].tobytes(), Path(key).read_bytes()[:16]):
        assert secret not in payload and secret not in headers


def test_without_encryption_its_package_is_never_imported(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from tests.spill_support import Rig, settings
with Rig(settings(Path(sys.argv[1]))) as rig:
    slots = rig.assign(0)
    assert rig.read(slots, rig.write(slots).checksums).ok
assert not [name for name in sys.modules if name.startswith("cryptography")]
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a")],
        cwd=root, env=os.environ | {"PYTHONPATH": f"{root}:{root}/client"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0


# ------------------------------------------------------------ what is not accepted


@pytest.mark.parametrize("word", [b.W_PAYLOAD_SUM, b.W_TAG0, b.W_NONCE, b.W_TAG1])
def test_a_changed_word_of_the_header_is_found(wanted: SpillSettings, word: int) -> None:
    with Rig(wanted) as rig:
        slots = rig.assign(0)[:4]
        sums = rig.write(slots).checksums
        headers = rig.files.files[0].headers
        changed = headers.read_bodies(slots[:1])
        changed[0, word] ^= np.uint64(1)
        b.seal_bodies(changed)
        headers.write_bodies(slots[:1], changed)
        # the sum in memory is the truth: the one on the disk is for the next start
        expected = Status.OK if word == b.W_PAYLOAD_SUM else Status.MISMATCH
        assert rig.read(slots, sums).status.tolist() == [expected, 0, 0, 0]
        changed_sums = sums.copy()
        changed_sums[0] ^= np.uint64(1)
        assert rig.read(slots, changed_sums).status.tolist() == [MISMATCH, 0, 0, 0]


def test_a_flipped_bit_is_never_served_and_leaves_nothing_readable(
    tmp_path: Path, wanted: SpillSettings
) -> None:
    with Rig(wanted) as rig:
        slots = rig.assign(0)[:4]
        sums = rig.write(slots).checksums
        flip(tmp_path / "a" / "blocks.kv", 2 * BLOCK_BYTES + 77)
        read = rig.read(slots, sums)
        assert read.status.tolist() == [0, 0, MISMATCH, 0]
        assert not rig.in_arena(read)[2].any()


def test_swapped_blocks_are_refused_even_with_their_headers(
    tmp_path: Path, wanted: SpillSettings
) -> None:
    """Whoever swaps payloads and rewrites headers to fit still cannot serve one for the other."""
    with Rig(wanted) as rig:
        slots = rig.assign(0)[:2]
        sums = rig.write(slots).checksums
        headers = rig.files.files[0].headers
        bodies = headers.read_bodies(slots)[::-1].copy()
        bodies[:, b.W_PLACE] = bodies[::-1, b.W_PLACE].copy()
        b.seal_bodies(bodies)
        headers.write_bodies(slots, bodies)
        path = tmp_path / "a" / "blocks.kv"
        data = path.read_bytes()
        with path.open("r+b") as file:
            file.write(data[BLOCK_BYTES : 2 * BLOCK_BYTES] + data[:BLOCK_BYTES])
        assert rig.read(slots, sums).status.tolist() == [MISMATCH, MISMATCH]


def test_an_older_block_of_the_same_slot_is_refused_even_with_its_header(
    tmp_path: Path, wanted: SpillSettings
) -> None:
    path = tmp_path / "a" / "blocks.kv"
    with Rig(wanted) as rig:
        slots = rig.assign(0)[:1]
        rig.write(slots)
        headers = rig.files.files[0].headers
        old_body, old_data = headers.read_bodies(slots), path.read_bytes()[:BLOCK_BYTES]
        assert rig.clear(slots).ok
        sums = rig.write(slots).checksums
        headers.write_bodies(slots, old_body)
        with path.open("r+b") as file:
            file.write(old_data)
        assert rig.read(slots, sums).status.tolist() == [MISMATCH]


NAMES = [b.W_OWNER0, b.W_OWNER1, b.W_NODE_PAGE, b.W_VALID_LENGTH, b.W_SEQ, b.W_LAYOUT0,
         b.W_LAYOUT1, b.W_FLAGS]  # fmt: skip


@pytest.mark.parametrize("word", NAMES)
def test_a_block_is_given_out_under_its_own_name_only(wanted: SpillSettings, word: int) -> None:
    with Rig(wanted) as rig:
        slots = rig.assign(0)[:2]
        sums = rig.write(slots).checksums
        job = rig.read_job(slots, sums)
        assert job.bodies is not None
        job.bodies[1, word] ^= np.uint64(1)
        assert rig.run(job).status.tolist() == [0, MISMATCH]


def test_blocks_of_another_file_do_not_decrypt(tmp_path: Path, key: str) -> None:
    wanted = settings(tmp_path / "a", tmp_path / "b", encrypt=True, key=key)
    with Rig(wanted) as rig:
        slots = np.array([rig.assign(0)[0], rig.assign(4)[0]])
        sums = rig.write(slots).checksums
        first, second = (file.headers for file in rig.files.files)
        local = rig.files.local(slots)
        first.write_bodies(local[:1], second.read_bodies(local[1:]))
        data = (tmp_path / "b" / "blocks.kv").read_bytes()[:BLOCK_BYTES]
        with (tmp_path / "a" / "blocks.kv").open("r+b") as file:
            file.write(data)
        first.write_key_table(second.key_table()[: KEYS_MAX * RECORD_BYTES])
        assert rig.read(slots[::-1].copy(), sums[::-1].copy()).status.tolist() == [0, MISMATCH]


# ------------------------------------------------------------ nonces


def nonces(rig: Rig, slots: np.ndarray) -> list[int]:
    return rig.files.files[0].headers.read_bodies(slots)[:, b.W_NONCE].tolist()


def test_no_nonce_comes_twice_under_one_key(wanted: SpillSettings) -> None:
    """Also when a write failed and was repeated, and after a restart."""
    seen: list[int] = []
    kernel = BadKernel(failing_at("write", 5, 0, BLOCK_BYTES))
    with Rig(wanted, kernel=kernel) as rig:
        slots = rig.assign(0)[:8]
        job = rig.write_job(slots)
        kernel.on = True
        assert rig.run(job).status.tolist() == [int(Status.FAILED), *[0] * 7]
        seen += nonces(rig, slots[1:])
        kernel.on = False
        for _ in range(3):
            assert rig.run(job).ok  # the very same bytes
            seen += nonces(rig, slots)
    assert len(set(seen)) == len(seen) == 7 + 3 * 8
    with Rig(wanted, generation=1) as rig:
        more = rig.assign(1)[:8]
        assert rig.write(more).ok
        old, new = (
            {nonce >> cipher.NUMBER_SHIFT for nonce in nonces(rig, some)} for some in (slots, more)
        )
        assert old.isdisjoint(new)
        assert {*old, *new} == set(stored_keys(rig))


def test_threads_never_share_a_nonce() -> None:
    key = cipher.DataKey(3, 1, bytes(32))
    taken: list[int] = []

    def take() -> None:
        for _ in range(500):
            some = key.take(3)
            assert some is not None
            taken.extend(some.tolist())

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(taken)) == len(taken) == 8 * 500 * 3
    assert {nonce >> cipher.NUMBER_SHIFT for nonce in taken} == {3}


def test_a_used_up_counter_takes_no_more_blocks_and_still_reads(
    wanted: SpillSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cipher, "COUNTER_MAX", 7)
    with Rig(wanted) as rig:
        slots = rig.assign(0)[:12]
        first = rig.write(slots[:6])
        assert first.ok
        assert rig.write(slots[6:]).status.tolist() == [int(Status.FULL)] * 6
        assert rig.read(slots[:6], first.checksums).ok


def test_bodies_of_plain_blocks_keep_their_zero_word(tmp_path: Path) -> None:
    with Rig(settings(tmp_path / "a")) as rig:
        slots = rig.assign(0)[:2]
        headers = rig.files.files[0].headers
        assert rig.write(slots).ok
        changed = headers.read_bodies(slots[:1])
        changed[:, b.W_ZERO] = 1
        b.seal_bodies(changed)
        headers.write_bodies(slots[:1], changed)
    with Rig(settings(tmp_path / "a"), generation=1) as rig:
        assert rig.found().tolist() == slots[1:].tolist()
