"""Spill and restore through the whole daemon, against fio, by block size and durability.

A round stores blocks, and then times two things: from an operator's `evict` of all of them until
the last one is on NVMe, and a client's `acquire` of all of them until the last one is in DRAM
again. Checksums, headers, tables, socket and syncing are part of it; copying to or from a client's
own memory is not, since fio does not do that either. Rounds of fio alternate with them.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvtier_client import Client
from kvtier_client.admin import AdminClient
from kvtier_client.client import Session
from kvtier_client.errors import DaemonError
from kvtierd.bench import fio
from kvtierd.bench.daemons import BLOCK_TOKENS, POLL_S, TENANT, Daemon, daemon, layout, wait_for
from kvtierd.bench.figures import Cell, Figure, middle
from kvtierd.bench.fio import NAMES, Direction, Durability
from kvtierd.bench.plan import KIB, MIB, Plan, label, short
from kvtierd.core.copies import BATCH_BYTES
from kvtierd.tiers.master_key import KEY_BYTES

ROUND_BYTES: Final = 512 * MIB
SPARE_BYTES: Final = 128 * MIB
"""More of the arena than blocks, for the exchange headroom."""
SPILL_BYTES: Final = 1024 * MIB
SIZES: Final = (256 * KIB, 4 * MIB)
"""Beside 1 MiB."""
ROUNDS: Final = 7
WAIT_S: Final = 60.0
BUDGET: Final = 0.95
GRID: Final = "NVMe (GB/s)"
WAYS: Final[dict[Direction, str]] = {"write": "spill", "read": "restore"}

Pairs = dict[Direction, list[tuple[float, float]]]
"""Bytes per second of the daemon and of fio (NaN without it), each direction and round."""


class Rounds:
    """One daemon, and rounds of spill and restore in it."""

    def __init__(
        self,
        client: Client,
        admin: AdminClient,
        size_bytes: int,
        block_bytes: int,
        poll_s: float,
    ) -> None:
        self.client, self.admin = client, admin
        self.size_bytes, self.poll_s = size_bytes, poll_s
        self.blocks = size_bytes // block_bytes
        self.fingerprint = client.register_layout(layout(block_bytes))
        with client.reserve(self.fingerprint, self.blocks) as lease:
            random = np.random.default_rng(0)
            for block in lease.blocks:
                block[:] = random.integers(0, 256, block_bytes, np.uint8)

    def store(self) -> Session:
        """All blocks in DRAM, in a new session; their bytes are what the slots have."""
        session = self.client.open_session([self.fingerprint])
        with self.client.reserve(self.fingerprint, self.blocks, wait_s=WAIT_S) as lease:
            lease.commit(session, 0, (0, self.blocks), BLOCK_TOKENS)
        return session

    def spill_s(self) -> float:
        """Until nothing of the tenant is in DRAM only."""
        begun = time.perf_counter()
        blocks = self.admin.call("evict", tenant=TENANT)["blocks"]
        if blocks != self.blocks:
            raise DaemonError(f"{blocks} blocks of {self.blocks} began to move to NVMe")
        wait_for(
            self.admin, "no block is in DRAM",
            lambda stats: stats["tenants"][TENANT]["dram"]["used_bytes"] == 0, self.poll_s,
        )  # fmt: skip
        return time.perf_counter() - begun

    def restore_s(self, session: Session) -> float:
        """Until every block was readable, in windows as large as the daemon grants them."""
        begun, done = time.perf_counter(), 0
        while done < self.blocks:
            with session.acquire((done, self.blocks), wait_s=WAIT_S) as lease:
                done += len(lease.offsets)
        return time.perf_counter() - begun

    def both_s(self) -> dict[Direction, float]:
        """One round: seconds of each direction."""
        session = self.store()
        found: dict[Direction, float] = {"write": self.spill_s(), "read": self.restore_s(session)}
        session.close()
        wait_for(
            self.admin, "no block is on NVMe",
            lambda stats: stats["nvme"]["used_bytes"] == 0, self.poll_s,
        )  # fmt: skip
        return found


@contextmanager
def rounds_of(
    plan: Plan,
    durability: Durability,
    block_bytes: int,
    poll_s: float = POLL_S,
    key_file: Path | None = None,
) -> Iterator[tuple[Rounds, Daemon]]:
    """A daemon whose files have been written once, ready for rounds; it encrypts with a key.

    `poll_s` is how often it is asked whether a round has ended, which costs it CPU time.
    """
    spill: dict[str, Any] = {
        "durability": durability, "preallocate": True, "io_threads": fio.DEPTH,
    }  # fmt: skip
    if key_file is not None:
        spill |= {"encryption.enabled": True, "encryption.key": str(key_file)}
    spill_bytes = plan.part(SPILL_BYTES, least=256 * MIB)
    watermarks = {"high_watermark": 1.0, "low_watermark": 0.99}
    with (
        daemon(
            plan, ROUND_BYTES + SPARE_BYTES, spill_bytes, spill=spill, arena=watermarks
        ) as process,
        Client(process.client_path, name="bench") as client,
        AdminClient(process.admin_path) as admin,
    ):
        rounds = Rounds(client, admin, plan.part(ROUND_BYTES), block_bytes, poll_s)
        rounds.both_s()
        yield rounds, process


def compare(plan: Plan, durability: Durability, block_bytes: int) -> Pairs:
    """Rounds of both, in turns."""
    sync_blocks = max(BATCH_BYTES // block_bytes, 1) if durability == "power" else 0
    found: Pairs = {"write": [], "read": []}
    with rounds_of(plan, durability, block_bytes) as (rounds, process):

        def reference(direction: Direction) -> float:
            if not fio.installed():
                return float("nan")
            size_bytes = rounds.size_bytes
            return fio.bytes_per_s(
                process.directory, direction, size_bytes, block_bytes, sync_blocks
            )

        reference("write")  # its file is written once too
        for _ in range(plan.rounds(ROUNDS)):
            mine_s = rounds.both_s()
            for direction, pairs in found.items():
                pairs.append((rounds.size_bytes / mine_s[direction], reference(direction)))
    return found


def figures_of(name: str, row: str, found: Pairs) -> list[Figure]:
    """Speeds of both for the grid, and their ratios."""
    figures = []
    for direction, pairs in found.items():
        mine, theirs = zip(*pairs, strict=True)
        way = WAYS[direction]
        speeds = [speed / 1e9 for speed in mine]
        figures.append(middle(f"{name}.{way}.gb_s", speeds, cell=Cell(GRID, row, way)))
        if np.isnan(theirs).any():
            continue
        speeds = [speed / 1e9 for speed in theirs]
        fio_cell = Cell(GRID, row, f"fio {direction}")
        figures.append(middle(f"{name}.fio_{direction}.gb_s", speeds, cell=fio_cell))
        ratios = [ours / reference for ours, reference in pairs]
        figures.append(middle(f"{name}.{way}.ratio_fio", ratios, BUDGET, note=row))
    return figures


def measure(plan: Plan) -> list[Figure]:
    """Blocks of 1 MiB under either durability."""
    rows: dict[Durability, str] = {"process": label(MIB), "power": f"{label(MIB)}, power"}
    return [
        figure
        for durability, name in NAMES.items()
        for figure in figures_of(name, rows[durability], compare(plan, durability, MIB))
    ]


def sizes(plan: Plan) -> list[Figure]:
    """Other block sizes."""
    return [
        figure
        for size in plan.some(SIZES)
        for figure in figures_of(f"nvme.{short(size)}", label(size), compare(plan, "process", size))
    ]


def encrypted(plan: Plan) -> list[Figure]:
    """Blocks of 1 MiB, encrypted and not, in turns by two daemons beside each other."""
    found: Pairs = {"write": [], "read": []}
    cpu_s: list[tuple[float, float]] = []
    with plan.empty_directory() as place:
        key_file = place / "key"
        key_file.touch(0o600)
        key_file.write_bytes(os.urandom(KEY_BYTES))
        with (
            rounds_of(plan, "process", MIB, key_file=key_file) as (closed, first),
            rounds_of(plan, "process", MIB) as (plain, second),
        ):
            for _ in range(plan.rounds(ROUNDS)):
                before_s = first.cpu_s(), second.cpu_s()
                closed_s, plain_s = closed.both_s(), plain.both_s()
                cpu_s.append((first.cpu_s() - before_s[0], second.cpu_s() - before_s[1]))
                for way, pairs in found.items():
                    pairs.append(
                        (closed.size_bytes / closed_s[way], plain.size_bytes / plain_s[way])
                    )
            moved_gb = 2 * closed.size_bytes / 1e9
    figures = []
    for direction, pairs in found.items():
        name = f"nvme.encrypted.{WAYS[direction]}"
        figures.append(middle(f"{name}.gb_s", [mine / 1e9 for mine, _ in pairs]))
        ratios = [mine / theirs for mine, theirs in pairs]
        figures.append(middle(f"{name}.ratio_plain", ratios, note="against files that are not"))
    for name, column in (("nvme.encrypted", 0), ("nvme.plain", 1)):
        each = [pair[column] / moved_gb for pair in cpu_s]
        figures.append(middle(f"{name}.cpu_s_per_gb", each, better="lower"))
    return figures
