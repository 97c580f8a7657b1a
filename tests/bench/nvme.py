"""Spill and restore through the whole daemon, against fio.

A round stores blocks, and then times two things: from an operator's `evict` of all of them until
the last one is on NVMe, and a client's `acquire` of all of them until the last one is in DRAM
again. Checksums, headers, tables, socket and syncing are part of it; copying to or from a client's
own memory is not, since fio does not do that either. Rounds of fio alternate with them.
"""

import time
from typing import Final

import numpy as np

from kvtier_client import Client
from kvtier_client.admin import AdminClient
from kvtier_client.client import Session
from kvtierd.core.copies import BATCH_BYTES
from tests.bench import fio
from tests.bench.daemons import BLOCK_BYTES, BLOCK_TOKENS, MIB, daemon, layout
from tests.bench.figures import Figure, middle
from tests.bench.fio import NAMES, Direction, Durability

BLOCKS: Final = 512
SPARE_BLOCKS: Final = 128
"""More of the arena than blocks, for the exchange headroom."""
ROUNDS: Final = 7
POLL_S: Final = 0.002
WAIT_S: Final = 60.0
BUDGET: Final = 0.9


class Rounds:
    """One daemon, and rounds of spill and restore in it."""

    def __init__(self, client: Client, admin: AdminClient) -> None:
        self.client, self.admin = client, admin
        self.fingerprint = client.register_layout(layout())
        with client.reserve(self.fingerprint, BLOCKS) as lease:
            random = np.random.default_rng(0)
            for block in lease.blocks:
                block[:] = random.integers(0, 256, BLOCK_BYTES, np.uint8)

    def store(self) -> Session:
        """All blocks in DRAM, in a new session; their bytes are what the slots have."""
        session = self.client.open_session([self.fingerprint])
        with self.client.reserve(self.fingerprint, BLOCKS, wait_s=WAIT_S) as lease:
            lease.commit(session, 0, (0, BLOCKS), BLOCK_TOKENS)
        return session

    def spill_s(self) -> float:
        """Until nothing of the tenant is in DRAM only."""
        begun = time.perf_counter()
        blocks = self.admin.call("evict", tenant="bench")["blocks"]
        assert blocks == BLOCKS, f"{blocks} blocks of {BLOCKS} began to move"
        self.until("dram")
        return time.perf_counter() - begun

    def until(self, tier: str) -> None:
        """Wait until a tier is empty."""
        deadline_s = time.perf_counter() + WAIT_S
        while True:
            stats = self.admin.call("stats")
            part = stats["tenants"]["bench"]["dram"] if tier == "dram" else stats["nvme"]
            if part["used_bytes"] == 0:
                return
            assert time.perf_counter() < deadline_s, stats
            time.sleep(POLL_S)

    def restore_s(self, session: Session) -> float:
        """Until every block was readable, in windows as large as the daemon grants them."""
        begun, done = time.perf_counter(), 0
        while done < BLOCKS:
            with session.acquire((done, BLOCKS), wait_s=WAIT_S) as lease:
                done += len(lease.offsets)
        return time.perf_counter() - begun

    def both_bytes_per_s(self) -> dict[Direction, float]:
        """One round."""
        session = self.store()
        size_bytes = BLOCKS * BLOCK_BYTES
        found: dict[Direction, float] = {"write": size_bytes / self.spill_s()}
        found["read"] = size_bytes / self.restore_s(session)
        session.close()
        self.until("nvme")
        return found


def compare(durability: Durability) -> dict[Direction, list[tuple[float, float]]]:
    """Bytes per second of the daemon and of fio, each direction and round."""
    size_bytes = BLOCKS * BLOCK_BYTES
    sync_blocks = BATCH_BYTES // BLOCK_BYTES if durability == "power" else 0
    found: dict[Direction, list[tuple[float, float]]] = {"write": [], "read": []}
    spill = {"durability": durability, "preallocate": True, "io_threads": fio.DEPTH}
    arena_bytes = (BLOCKS + SPARE_BLOCKS) * BLOCK_BYTES
    watermarks = {"high_watermark": 1.0, "low_watermark": 0.99}
    with (
        daemon(arena_bytes, 1024 * MIB, spill=spill, arena=watermarks) as process,
        Client(process.client_path, name="bench") as client,
        AdminClient(process.admin_path) as admin,
    ):
        rounds, place = Rounds(client, admin), process.directory
        rounds.both_bytes_per_s()  # files are written once on both sides
        fio.bytes_per_s(place, "write", size_bytes, sync_blocks)
        for _ in range(ROUNDS):
            mine = rounds.both_bytes_per_s()
            for direction, pairs in found.items():
                theirs = fio.bytes_per_s(place, direction, size_bytes, sync_blocks)
                pairs.append((mine[direction], theirs))
    return found


def measure() -> list[Figure]:
    """The figures of this benchmark. Errors: FioMissing."""
    fio.require()
    figures = []
    for durability, name in NAMES.items():
        for direction, pairs in compare(durability).items():
            mine, theirs = (np.median(column) / 1e9 for column in zip(*pairs, strict=True))
            figures.append(
                middle(
                    f"{name}.{'spill' if direction == 'write' else 'restore'}.ratio_fio",
                    [ours / reference for ours, reference in pairs],
                    BUDGET,
                    note=f"daemon {mine:.2f}, fio {theirs:.2f} GB/s",
                )
            )
    return figures
