"""Bytes that changed in DRAM since their checksum was known never become a good block on NVMe."""

from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvtierd.tiers.bodies import W_PAYLOAD_SUM
from kvtierd.tiers.spill_io import Status
from tests.spill_support import BLOCK_BYTES, Rig, settings


@pytest.mark.parametrize("encrypt", [False, True])
@pytest.mark.parametrize("length", [BLOCK_BYTES, BLOCK_BYTES - 1000])
def test_a_block_that_is_not_what_its_checksum_says_is_found_and_is_never_good(
    tmp_path: Path, length: int, encrypt: bool
) -> None:
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_bytes(b"k" * 32)
    wanted = settings(tmp_path / "a", encrypt=encrypt, key=str(key))
    with Rig(wanted) as rig:
        slots = rig.assign(0)[:6]
        job = rig.write_job(slots, length)
        offsets = [int(offset) for offset in job.offsets]
        sums = [xxhash.xxh3_64_intdigest(rig.arena[at : at + length]) for at in offsets]
        job.bodies[:4, W_PAYLOAD_SUM] = sums[:4]  # of the others nothing is known yet
        for block in (2, 5):
            rig.arena[offsets[block] + length - 1] ^= 1
        result = rig.run(job)
        changed = [0, 0, Status.MISMATCH, 0, 0, 0]
        assert result.status.tolist() == changed
    with Rig(wanted, generation=1) as again:
        assert np.array_equal(again.found(), slots)
        assert again.sums_found()[2] == sums[2]
        assert again.read(again.found(), again.sums_found(), length).status.tolist() == changed
