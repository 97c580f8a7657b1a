"""Raw spill and restore against fio: same directory, block size, depth, O_DIRECT and syncing.

Rounds of fio and of the tier alternate, and each figure is the median of the rounds' ratios: a
shared disk's speed differs from one second to the next, and fio's own by how contiguous the memory
is that each of its processes happens to get (the best of all rounds is printed for that reason).
Both sides first write their files once, so that neither pays for allocating them while measured.
The tier joins neighbouring blocks into one call, and computes or verifies every block's checksum.

    python -m tests.bench.spill_raw [DIRECTORY]
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from kvtierd.core.slabs import ready_words
from kvtierd.tiers.records import SlabEntry
from kvtierd.tiers.spill import SpillTier
from kvtierd.tiers.spill_files import SpillSettings
from kvtierd.tiers.spill_io import Job, JobResult, ReadJob, WriteJob
from kvtierd.tiers.spill_open import open_spill
from tests.spill_support import FINGERPRINT, INSTANCE, MIB, TENANT, bodies_of, new_arena

BLOCK_BYTES: Final = MIB
DEPTH: Final = 16
"""fio's queue depth, and the tier's threads."""
JOB_BLOCKS: Final = 64
"""Blocks per job; under "power" both sides sync once per so many blocks."""
JOBS_AHEAD: Final = 2
"""Jobs in flight, so that one is being published while the next one's payload moves."""
ROUND_BYTES: Final = 512 * MIB
ROUNDS: Final = 11
WAIT_S: Final = 120.0

Direction = Literal["write", "read"]
Durability = Literal["process", "power"]
NAMES: Final[dict[Durability, str]] = {"process": "nvme", "power": "nvme.power"}


def fio_bytes_per_s(directory: Path, direction: Direction, durability: Durability) -> float:
    """One round of fio over a file of its own."""
    command = [
        "fio",
        "--name=reference",
        f"--filename={directory / 'fio.dat'}",
        f"--size={ROUND_BYTES}",
        f"--bs={BLOCK_BYTES}",
        f"--rw={direction}",
        f"--iodepth={DEPTH}",
        "--ioengine=io_uring",
        "--direct=1",
        "--overwrite=1",
        "--output-format=json",
    ]
    if direction == "write" and durability == "power":
        command.append(f"--fdatasync={JOB_BLOCKS}")
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=WAIT_S)
    report = json.loads(done.stdout[done.stdout.index("{") :])
    return float(report["jobs"][0][direction]["bw_bytes"])


@dataclass(frozen=True, slots=True)
class Load:
    """The blocks that the tier moves in a round, from and to an arena of half their size."""

    slots: npt.NDArray[np.int64]
    arena: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.uint64]
    bodies: npt.NDArray[np.uint64]
    words: npt.NDArray[np.uint64]
    checksums: npt.NDArray[np.uint64]

    def jobs(self, direction: Direction) -> Iterator[Job]:
        """A round's jobs."""
        for first in range(0, len(self.slots), JOB_BLOCKS):
            part = slice(first, first + JOB_BLOCKS)
            place = (self.slots[part], self.arena, self.offsets[part], self.lengths[part])
            if direction == "write":
                yield WriteJob(*place, self.bodies[part], self.words[part])
            else:
                yield ReadJob(*place, self.checksums[part])


def new_load(tier: SpillTier, max_slots: int, slab_bytes: int) -> Load:
    """Give the tier's slabs out and fill an arena."""
    per_slab, blocks = slab_bytes // BLOCK_BYTES, ROUND_BYTES // BLOCK_BYTES
    for slab in range(blocks // per_slab):
        tier.assign_slab(SlabEntry(slab, FINGERPRINT, TENANT, BLOCK_BYTES, per_slab, BLOCK_BYTES))
    number = np.arange(blocks, dtype=np.int64)
    arena = new_arena(ROUND_BYTES // 2)
    arena.view(np.uint64)[:] = np.random.default_rng(0).integers(0, 2**63, len(arena) // 8)
    seqs = number.astype(np.uint64) + np.uint64(1)
    return Load(
        number // per_slab * max_slots + number % per_slab,
        arena,
        number.astype(np.uint64) * np.uint64(BLOCK_BYTES) % np.uint64(len(arena)),
        np.full(blocks, BLOCK_BYTES, np.uint64),
        bodies_of(seqs, BLOCK_BYTES),
        ready_words(seqs),
        np.zeros(blocks, np.uint64),
    )


def tier_bytes_per_s(tier: SpillTier, load: Load, direction: Direction) -> float:
    """One round of the tier."""
    ahead = threading.Semaphore(JOBS_AHEAD)
    failed: list[JobResult] = []

    def done(result: JobResult) -> None:
        if not result.ok:
            failed.append(result)
        load.checksums[np.searchsorted(load.slots, result.job.slots)] = result.checksums
        ahead.release()

    begun = time.perf_counter()
    for job in load.jobs(direction):
        assert ahead.acquire(timeout=WAIT_S)
        tier.submit(job, done)
    for _ in range(JOBS_AHEAD):
        assert ahead.acquire(timeout=WAIT_S)
    assert not failed, failed[0].status
    return ROUND_BYTES / (time.perf_counter() - begun)


def compare(directory: Path, durability: Durability) -> dict[Direction, float]:
    """The tier's speed over fio's, each direction."""
    settings = SpillSettings(
        (str(directory / "tier"),),
        capacity_bytes=ROUND_BYTES,
        slab_bytes=256 * MIB,
        min_block_bytes=BLOCK_BYTES,
        durability=durability,
        preallocate=True,
        io_threads=DEPTH,
    )
    files = open_spill(settings, INSTANCE, 0)
    files.begin(1)
    tier = SpillTier(files)
    speeds: dict[Direction, list[tuple[float, float]]] = {"write": [], "read": []}
    try:
        load = new_load(tier, files.geometry.max_slots, settings.slab_bytes)
        tier_bytes_per_s(tier, load, "write")
        fio_bytes_per_s(directory, "write", durability)
        for turn in range(ROUNDS):
            for direction, found in speeds.items():
                if turn % 2:
                    ours = tier_bytes_per_s(tier, load, direction)
                    theirs = fio_bytes_per_s(directory, direction, durability)
                else:
                    theirs = fio_bytes_per_s(directory, direction, durability)
                    ours = tier_bytes_per_s(tier, load, direction)
                found.append((ours, theirs))
    finally:
        assert tier.close(WAIT_S)
    for direction, found in speeds.items():
        best = [max(column) / 1e9 for column in zip(*found, strict=True)]
        middle = [statistics.median(column) / 1e9 for column in zip(*found, strict=True)]
        print(
            f"{durability:8} {direction:6} GB/s  tier {middle[0]:.2f} (best {best[0]:.2f})  "
            f"fio {middle[1]:.2f} (best {best[1]:.2f})  "
            f"ratios {' '.join(f'{ours / theirs:.2f}' for ours, theirs in found)}"
        )
    return {
        direction: statistics.median(ours / theirs for ours, theirs in found)
        for direction, found in speeds.items()
    }


def measure(parent: Path) -> dict[str, float]:
    """The figures of this benchmark; needs fio and 1 GiB below `parent`, which are given back."""
    if shutil.which("fio") is None:
        raise SystemExit("spill_raw compares with fio: install it (Debian: apt-get install fio)")
    figures = {}
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        for durability, name in NAMES.items():
            place = Path(directory) / durability
            place.mkdir()
            ratio = compare(place, durability)
            figures[f"{name}.spill.ratio_fio"] = ratio["write"]
            figures[f"{name}.restore.ratio_fio"] = ratio["read"]
            shutil.rmtree(place)
    return figures


def main() -> None:
    """Measure below the given directory (default: build) and add to build/bench.json there."""
    build = Path(__file__).parents[2] / "build"
    build.mkdir(exist_ok=True)
    figures = measure(Path(sys.argv[1]) if len(sys.argv) > 1 else build)
    path = build / "bench.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | figures, indent=1, sort_keys=True) + "\n")
    for figure, value in figures.items():
        print(f"{figure} = {value:.3f}")


if __name__ == "__main__":
    main()
