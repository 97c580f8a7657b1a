"""The spill tier alone, without the daemon around it, against fio.

Rounds of fio and of the tier alternate, and each figure is the median of the rounds' ratios: a
shared disk's speed differs from one second to the next, and fio's own by how contiguous the memory
is that each of its processes happens to get (the best of all rounds is printed for that reason).
Both sides first write their files once, so that neither pays for allocating them while measured.
The tier joins neighbouring blocks into one call, and computes or verifies every block's checksum.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtierd.bench import fio
from kvtierd.bench.daemons import BLOCK_BYTES
from kvtierd.bench.figures import Figure, middle
from kvtierd.bench.fio import DEPTH, NAMES, Direction, Durability
from kvtierd.bench.plan import Plan
from kvtierd.core.slabs import ready_words
from kvtierd.tiers.records import SlabEntry
from kvtierd.tiers.spill import SpillTier
from kvtierd.tiers.spill_files import SpillSettings
from kvtierd.tiers.spill_io import Job, JobResult, ReadJob, WriteJob
from kvtierd.tiers.spill_open import open_spill
from tests.spill_support import FINGERPRINT, INSTANCE, MIB, TENANT, bodies_of, new_arena

JOB_BLOCKS: Final = 64
"""Blocks per job; under "power" both sides sync once per so many blocks."""
JOBS_AHEAD: Final = 2
"""Jobs in flight, so that one is being published while the next one's payload moves."""
ROUND_BYTES: Final = 512 * MIB
ROUNDS: Final = 11
WAIT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Load:
    """The blocks that the tier moves in a round, from and to an arena of half their size."""

    slots: npt.NDArray[np.int64]
    arena: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.uint64]
    bodies: npt.NDArray[np.uint64]
    words: npt.NDArray[np.uint64]
    checksums: npt.NDArray[np.uint64]

    def jobs(self, direction: Direction) -> Iterator[Job]:
        """A round's jobs."""
        for first in range(0, len(self.slots), JOB_BLOCKS):
            part = slice(first, first + JOB_BLOCKS)
            place = (self.slots[part], self.arena, self.offsets[part], BLOCK_BYTES)
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


def compare(
    place: Path, durability: Durability, rounds: int
) -> dict[Direction, list[tuple[float, float]]]:
    """Bytes per second of the tier and of fio, each direction and round."""
    settings = SpillSettings(
        (str(place / "tier"),),
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
    sync_blocks = JOB_BLOCKS if durability == "power" else 0
    found: dict[Direction, list[tuple[float, float]]] = {"write": [], "read": []}
    try:
        load = new_load(tier, files.geometry.max_slots, settings.slab_bytes)
        tier_bytes_per_s(tier, load, "write")
        fio.bytes_per_s(place, "write", ROUND_BYTES, BLOCK_BYTES, sync_blocks)
        for turn in range(rounds):
            for direction, pairs in found.items():
                first = tier_bytes_per_s(tier, load, direction) if turn % 2 else 0.0
                theirs = fio.bytes_per_s(place, direction, ROUND_BYTES, BLOCK_BYTES, sync_blocks)
                pairs.append((first or tier_bytes_per_s(tier, load, direction), theirs))
    finally:
        assert tier.close(WAIT_S)
    return found


def measure(plan: Plan) -> list[Figure]:
    """The figures of this benchmark. Errors: FioMissing."""
    fio.require()
    figures = []
    for durability, name in NAMES.items():
        with plan.empty_directory() as place:
            found = compare(place, durability, plan.rounds(ROUNDS))
        for direction, pairs in found.items():
            ours, theirs = (max(column) / 1e9 for column in zip(*pairs, strict=True))
            figures.append(
                middle(
                    f"{name}.raw.{'spill' if direction == 'write' else 'restore'}.ratio_fio",
                    [mine / reference for mine, reference in pairs],
                    note=f"best of all rounds: tier {ours:.2f}, fio {theirs:.2f} GB/s",
                )
            )
    return figures
