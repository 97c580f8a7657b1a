"""DRAM swap by block size: throughput by batch against memcpy, and the latency of a single block.

A round moves the same bytes through the daemon and, right after it, by memcpy.
"""

import time
from typing import Final

import numpy as np

from kvtier_client import Client
from kvtier_client.client import Session
from kvtierd.bench.daemons import BLOCK_TOKENS, daemon, layout
from kvtierd.bench.figures import Cell, Figure, middle
from kvtierd.bench.memory import Buffers, seconds
from kvtierd.bench.plan import KIB, MIB, Plan, label, short

SIZES: Final = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
BATCHES: Final = (1, 8, 64)
BATCH_BYTES_MAX: Final = 128 * MIB
ROUND_BYTES: Final = 64 * MIB
"""What a round moves each way, unless one batch is more."""
ROUND_BLOCKS_MAX: Final = 256
ROUNDS: Final = 9
WARM_ROUNDS: Final = 2
ARENA_BYTES: Final = 512 * MIB
SAMPLES: Final = 400
"""Single blocks of each size, of which the 99th percentile is taken."""
LATENCY_BUFFERS: Final = 8
GRID: Final = "DRAM (GB/s)"
OUT, IN, MEMCPY, RATIO = "swap-out", "swap-in", "memcpy", "ratio"


def batches(size: int) -> dict[int, int]:
    """Blocks of a batch -> blocks of a round."""
    usual = min(max(ROUND_BYTES // size, 1), ROUND_BLOCKS_MAX)
    counts = {min(batch, BATCH_BYTES_MAX // size) for batch in BATCHES}
    return {batch: max(usual // batch, 1) * batch for batch in sorted(counts)}


def sweep(plan: Plan) -> list[Figure]:
    """Every size and batch."""
    found = []
    with (
        daemon(plan, ARENA_BYTES) as process,
        process.client() as client,
    ):
        for size in plan.some(SIZES):
            for batch, blocks in batches(size).items():
                kv = client.open_session([layout(size)])
                memory = Buffers(blocks, size)
                times = [
                    _round_s(client, kv, memory, batch, node)
                    for node in range(1, 1 + WARM_ROUNDS + plan.rounds(ROUNDS))
                ]
                kv.close()
                found += _figures(size, batch, memory.round_bytes, times[WARM_ROUNDS:])
    return found


def _round_s(
    client: Client, kv: Session, memory: Buffers, batch: int, node: int
) -> tuple[float, float, float]:
    """Seconds to swap out, to swap in, and to copy both ways."""
    parts = [(first, first + batch) for first in range(0, len(memory.rows), batch)]

    def swap_out() -> None:
        if batch == 1:  # from granted slots, with one-way commits
            for page, source in enumerate(memory.sources):
                kv.swap_out(source, page, BLOCK_TOKENS, node=node, ack=False)
            return
        for first, last in parts:
            kv.swap_out(memory.sources[first:last], (first, last), BLOCK_TOKENS, node=node)

    def swap_in() -> None:
        if batch == 1:
            for page, target in enumerate(memory.targets):
                kv.swap_in(target, page, node=node)
            return
        for first, last in parts:
            kv.swap_in(memory.targets[first:last], (first, last), node=node)

    kv.fork(node, 0, 0)
    out_s, in_s = seconds(swap_out), seconds(swap_in)
    client.flush()
    memory.check()
    kv.prune(node)
    return out_s, in_s, seconds(memory.memcpy_batch)


def _figures(
    size: int, batch: int, round_bytes: int, times: list[tuple[float, float, float]]
) -> list[Figure]:
    half = round_bytes / 2e9
    name, row = f"dram.{short(size)}.x{batch}", f"{label(size)} x {batch}"
    columns = {
        (OUT, "out.gb_s"): [half / out_s for out_s, _, _ in times],
        (IN, "in.gb_s"): [half / in_s for _, in_s, _ in times],
        (MEMCPY, "memcpy.gb_s"): [2 * half / plain_s for _, _, plain_s in times],
        (RATIO, "ratio_memcpy"): [plain_s / (out_s + in_s) for out_s, in_s, plain_s in times],
    }
    return [
        middle(f"{name}.{last}", values, cell=Cell(GRID, row, column))
        for (column, last), values in columns.items()
    ]


def _one_block_us(client: Client, size: int, samples: int) -> dict[str, list[float]]:
    memory = Buffers(LATENCY_BUFFERS, size)
    taken_us: dict[str, list[float]] = {OUT: [], IN: []}
    for turn in range(samples):
        source, _, target = memory.rows[turn % LATENCY_BUFFERS]
        kv = client.open_session([layout(size)])
        begun = time.perf_counter()
        kv.swap_out(source, 0, BLOCK_TOKENS)
        stored = time.perf_counter()
        kv.swap_in(target, 0)
        ended = time.perf_counter()
        kv.close()
        taken_us[OUT].append((stored - begun) * 1e6)
        taken_us[IN].append((ended - stored) * 1e6)
    return taken_us


def latency(plan: Plan) -> list[Figure]:
    """One block at a time: until its commit is acknowledged, and until its bytes are there."""
    found = []
    with (
        daemon(plan, ARENA_BYTES) as process,
        process.client() as client,
    ):
        for size in plan.some(SIZES):
            taken_us = _one_block_us(client, size, plan.part(SAMPLES))
            found += [
                Figure(
                    f"latency.{short(size)}.{'out' if way == OUT else 'in'}.p{percent}_us",
                    float(np.percentile(values, percent)),
                    better="lower",
                    cell=Cell("one block (us)", label(size), f"{way} p{percent}"),
                )
                for way, values in taken_us.items()
                for percent in (50, 99)
            ]
    return found
