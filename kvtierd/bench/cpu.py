"""CPU time that the daemon needs for what it moves; the clients' copies are not in it."""

from typing import Final

from kvtierd.bench import nvme
from kvtierd.bench.daemons import BLOCK_BYTES, BLOCK_TOKENS, daemon, layout
from kvtierd.bench.figures import Figure, middle
from kvtierd.bench.memory import Buffers
from kvtierd.bench.plan import GIB, MIB, Plan

BLOCKS: Final = 64
ROUND_BYTES: Final = 2 * GIB
"""Much, since CPU time is counted in steps of 10 ms."""
ROUNDS: Final = 7
ARENA_BYTES: Final = 512 * MIB
POLL_S: Final = 0.05
"""Seldom: what the daemon is asked meanwhile counts as its own CPU time."""
DRAM_BUDGET: Final = 0.1
NVME_BUDGET: Final = 0.4


def measure(plan: Plan) -> list[Figure]:
    """Each way of a block out and in again counts once."""
    note = "user + system of the daemon's process, blocks of 1 MiB, out and in"
    return [
        middle("cpu.dram.s_per_gib", dram(plan), DRAM_BUDGET, "lower", note),
        middle("cpu.nvme.s_per_gib", spill(plan), NVME_BUDGET, "lower", "spilled and restored"),
    ]


def dram(plan: Plan) -> list[float]:
    """Seconds per GiB of batches through DRAM, each round."""
    memory, found = Buffers(BLOCKS, BLOCK_BYTES), []
    repeats = plan.part(ROUND_BYTES) // (BLOCKS * BLOCK_BYTES)
    with (
        daemon(plan, ARENA_BYTES) as process,
        process.client() as client,
    ):
        kv = client.open_session([layout()])
        for turn in range(plan.rounds(ROUNDS)):
            before_s = process.cpu_s()
            for node in range(turn * repeats + 1, (turn + 1) * repeats + 1):
                kv.fork(node, 0, 0)
                kv.swap_out(memory.sources, (0, BLOCKS), BLOCK_TOKENS, node=node)
                kv.swap_in(memory.targets, (0, BLOCKS), node=node)
                kv.prune(node)
            used_s = process.cpu_s() - before_s
            found.append(used_s * GIB / (repeats * BLOCKS * BLOCK_BYTES))
    return found


def spill(plan: Plan) -> list[float]:
    """Seconds per GiB that went to NVMe and came back, each round."""
    found = []
    with nvme.rounds_of(plan, "process", BLOCK_BYTES, POLL_S) as (rounds, process):
        for _ in range(plan.rounds(ROUNDS)):
            before_s = process.cpu_s()
            rounds.both_s()
            found.append((process.cpu_s() - before_s) * GIB / rounds.size_bytes)
    return found
