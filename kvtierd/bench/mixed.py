"""What a load on the disk does to those who only need memory, and how writers are slowed down.

Phases without and with the load take turns. The load is a spill of many blocks at once; what is
watched stays in DRAM, because its session goes before.
"""

import itertools
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from kvtier_client import NO_NODE, Client
from kvtier_client.admin import AdminClient
from kvtier_client.client import Session
from kvtier_client.errors import DaemonError
from kvtierd.bench import fio
from kvtierd.bench.daemons import BLOCK_BYTES, BLOCK_TOKENS, TENANT, daemon, layout, wait_for
from kvtierd.bench.figures import Figure, middle
from kvtierd.bench.memory import Buffers, seconds
from kvtierd.bench.plan import MIB, Plan
from kvtierd.bench.round_trips import Caller

ROUNDS: Final = 7
WARM_ROUNDS: Final = 1
SLICE_S: Final = 0.05
"""How long is measured before it is asked whether the spill still runs."""
IDLE_S: Final = 0.4
BLOCKS: Final = 64
LOAD_BLOCKS: Final = 768
PRIORITY_MAX: Final = 255
ARENA_BYTES: Final = 1024 * MIB
SPILL_BYTES: Final = 1536 * MIB
P99_BUDGET: Final = 4.0

WRITER_ARENA_BYTES: Final = 256 * MIB
WRITER_SLABS: Final = {"slab_bytes": 16 * MIB}
WRITER_BYTES: Final = 512 * MIB
"""What a round writes, after a quarter as much that fills the arena."""
CALL_BLOCKS: Final = 8
STALL_BUDGET_S: Final = 1.0


def timed(probe: Callable[[], object], duration_s: float) -> list[float]:
    """Seconds of each call of a probe that is repeated for some time."""
    end_s, taken_s = time.monotonic() + duration_s, []
    while time.monotonic() < end_s:
        taken_s.append(seconds(probe))
    return taken_s


def p99_us(taken_s: list[float]) -> float:
    """The 99th percentile."""
    return float(np.percentile(taken_s, 99)) * 1e6


def quiet(admin: AdminClient) -> None:
    """Wait until nothing moves between the tiers."""

    def still(stats: dict[str, Any]) -> bool:
        counters = stats["counters"]
        return not counters["spill_jobs_in_flight"] and not counters["mover_queued"]

    wait_for(admin, "the disk is idle", still)


class Load:
    """Blocks in DRAM that go to NVMe all at once when an operator asks."""

    def __init__(self, client: Client, admin: AdminClient, blocks: int) -> None:
        self.admin, self.blocks, self.node = admin, blocks, 0
        self.memory = Buffers(BLOCKS, BLOCK_BYTES)
        self.session = client.open_session([layout()])
        self.speeds: list[float] = []

    def under(self, probe: Callable[[], object]) -> list[float]:
        """Seconds of each call of a probe while the blocks are spilled."""
        self.node += 1
        self.session.fork(self.node, 0, 0)
        for page in range(0, self.blocks, BLOCKS):
            self.session.swap_out(
                self.memory.sources,
                (page, page + BLOCKS),
                BLOCK_TOKENS,
                node=self.node,
                wait_s=30.0,
            )
        begun_s, taken_s = time.monotonic(), list[float]()
        if self.admin.call("evict", tenant=TENANT, blocks=self.blocks)["blocks"] != self.blocks:
            raise DaemonError("not all blocks of the load began to move to NVMe")
        while self.admin.call("stats")["counters"]["spilled_blocks"] < self.node * self.blocks:
            taken_s += timed(probe, SLICE_S)
        self.speeds.append(self.blocks * BLOCK_BYTES / (time.monotonic() - begun_s))
        self.session.prune(self.node)
        quiet(self.admin)
        return taken_s


def under_spill(plan: Plan) -> list[Figure]:
    """99th percentiles of a swap-in from DRAM and of a bare round trip, idle and under a spill."""
    memory = Buffers(BLOCKS, BLOCK_BYTES)
    calm = {"high_watermark": 1.0, "low_watermark": 0.99}
    with (
        daemon(plan, ARENA_BYTES, SPILL_BYTES, spill={"preallocate": True}, arena=calm) as process,
        process.client() as client,
        Caller(process.client_path) as caller,
        AdminClient(process.admin_path) as admin,
    ):
        kv = client.open_session([layout()], priority=PRIORITY_MAX)
        kv.swap_out(memory.sources, (0, BLOCKS), BLOCK_TOKENS)
        load = Load(client, admin, plan.part(LOAD_BLOCKS // BLOCKS) * BLOCKS)
        turns = itertools.cycle(enumerate(memory.targets))

        def swap_in() -> None:
            page, target = next(turns)
            kv.swap_in(target, page)

        probes: dict[str, Callable[[], object]] = {
            "swapin": swap_in,
            "echo": lambda: caller.ask("get_blob", caller.session, NO_NODE),
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in probes}
        for turn in range(WARM_ROUNDS + plan.rounds(ROUNDS)):
            for name, probe in probes.items():
                idle_us = p99_us(timed(probe, plan.duration_s(IDLE_S)))
                loaded_us = p99_us(load.under(probe))
                if turn >= WARM_ROUNDS:
                    found[name].append((idle_us, loaded_us))
        if admin.call("stats")["counters"]["restored_blocks"]:
            raise DaemonError("blocks that should have stayed in DRAM were on NVMe")
    disk = f"spill of {np.median(load.speeds) / 1e9:.2f} GB/s"
    return [figure for name, pairs in found.items() for figure in _compared(name, pairs, disk)]


def _compared(name: str, pairs: list[tuple[float, float]], disk: str) -> list[Figure]:
    idle_us, loaded_us = zip(*pairs, strict=True)
    ratios = [loaded / idle for idle, loaded in pairs]
    return [
        middle(f"{name}.p99_under_spill_x", ratios, P99_BUDGET, "lower", disk),
        middle(f"{name}.idle.p99_us", idle_us, better="lower"),
        middle(f"{name}.under_spill.p99_us", loaded_us, better="lower"),
    ]


def writer(plan: Plan) -> list[Figure]:
    """A client that swaps out without pause into an arena much smaller than what it writes."""
    size_bytes = plan.part(WRITER_BYTES, least=128 * MIB)
    arena_bytes = plan.part(WRITER_ARENA_BYTES, least=64 * MIB)
    blocks = size_bytes // BLOCK_BYTES
    memory, speeds, pairs, longest_s = Buffers(BLOCKS, BLOCK_BYTES), [], [], 0.0
    with (
        daemon(
            plan, arena_bytes, 4 * size_bytes, spill={"preallocate": True}, arena=WRITER_SLABS
        ) as process,
        process.client() as client,
        AdminClient(process.admin_path) as admin,
    ):
        kv = client.open_session([layout()])
        for turn in range(2 + plan.rounds(ROUNDS)):  # twice, so that the files are written once
            node = turn + 1
            kv.fork(node, 0, 0)
            first_s = _write(kv, memory, node, 0, blocks // 4)
            calls_s = _write(kv, memory, node, blocks // 4, blocks)
            if node > 1:
                kv.prune(node - 1)
            quiet(admin)
            if turn < 2:
                continue
            longest_s = max(longest_s, *first_s, *calls_s)
            speeds.append(size_bytes / sum(calls_s))
            if fio.installed():
                theirs = fio.bytes_per_s(process.directory, "write", size_bytes)
                pairs.append(speeds[-1] / theirs)
    figures = [
        middle("evict.writer.gb_s", [speed / 1e9 for speed in speeds]),
        Figure("evict.writer.longest_stall_s", longest_s, STALL_BUDGET_S, "lower", "of all rounds"),
    ]
    if pairs:
        note = f"arena of {arena_bytes // MIB} MiB, {size_bytes // MIB} MiB a round"
        figures.append(middle("evict.writer.ratio_disk", pairs, note=note))
    return figures


def _write(kv: Session, memory: Buffers, node: int, first: int, blocks: int) -> list[float]:
    """Swap out so many blocks from a page on; returns the seconds of each call."""
    calls_s = []
    for page in range(first, first + blocks, CALL_BLOCKS):
        part = memory.sources[page % BLOCKS :][:CALL_BLOCKS]
        begun = time.perf_counter()
        kv.swap_out(part, (page, page + CALL_BLOCKS), BLOCK_TOKENS, node=node)
        calls_s.append(time.perf_counter() - begun)
    return calls_s
