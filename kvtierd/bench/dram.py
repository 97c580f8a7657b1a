"""Swap-out and swap-in through the sync client, against memcpy of the same bytes.

Both sides copy every block twice: from a source to a middle place and from there to a destination.
The middle places of memcpy are plain buffers, those of the client are arena slots. Sources and
destinations are the same; all of them have been touched before.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np

from kvtier_client import Client
from kvtier_client.client import Session
from kvtierd.bench.daemons import BLOCK_BYTES, BLOCK_TOKENS, daemon, layout
from kvtierd.bench.figures import Figure, middle
from kvtierd.bench.memory import Buffers, seconds
from kvtierd.bench.plan import MIB, Plan

BLOCKS: Final = 64
"""Blocks of a round, and buffers that sources, middle places and destinations rotate over."""
ROUNDS: Final = 61
WARM_ROUNDS: Final = 5
ARENA_BYTES: Final = 512 * MIB


@contextmanager
def session(plan: Plan) -> Iterator[tuple[Client, Session]]:
    """A session of a daemon of its own, for blocks of 1 MiB."""
    with (
        daemon(plan, ARENA_BYTES) as process,
        process.client() as client,
    ):
        yield client, client.open_session([layout()])


def batch(plan: Plan) -> list[Figure]:
    """64 blocks with one swap-out and one swap-in."""
    memory, ratios, speeds = Buffers(BLOCKS, BLOCK_BYTES), [], []
    with session(plan) as (_, kv):

        def ours() -> None:
            kv.swap_out(memory.sources, (0, BLOCKS), BLOCK_TOKENS, node=node)
            kv.swap_in(memory.targets, (0, BLOCKS), node=node)

        for node in range(1, plan.rounds(ROUNDS) + WARM_ROUNDS + 1):
            kv.fork(node, 0, 0)
            mine_s = seconds(ours)
            memory.check()
            kv.prune(node)
            plain_s = seconds(memory.memcpy_batch)
            if node > WARM_ROUNDS:
                ratios.append(plain_s / mine_s)
                speeds.append(memory.round_bytes / plain_s / 1e9)
    note = f"{BLOCKS} blocks of 1 MiB; memcpy {np.median(speeds):.1f} GB/s"
    return [middle("dram.batch.ratio_memcpy", ratios, 0.95, note=note)]


def single(plan: Plan) -> list[Figure]:
    """64 blocks, a call for each: pre-granted slots and one-way commits out, a round trip in.

    Once all blocks go out before the first comes in, and once each comes in at once: its bytes are
    still in the processor's cache then, which makes memcpy faster and the round trip weigh more.
    """
    memory = Buffers(BLOCKS, BLOCK_BYTES)
    ratios: dict[str, list[float]] = {"single": [], "single.pair": []}
    plain_us: dict[str, list[float]] = {"single": [], "single.pair": []}
    with session(plan) as (client, kv):

        def passes() -> None:
            for page, source in enumerate(memory.sources):
                kv.swap_out(source, page, BLOCK_TOKENS, node=node, ack=False)
            for page, target in enumerate(memory.targets):
                kv.swap_in(target, page, node=node)

        def pairs() -> None:
            for page, (source, _, target) in enumerate(memory.rows):
                kv.swap_out(source, page, BLOCK_TOKENS, node=node, ack=False)
                kv.swap_in(target, page, node=node)

        node = 0
        works = {
            "single": (passes, memory.memcpy_batch),
            "single.pair": (pairs, memory.memcpy_pairs),
        }
        for turn in range(plan.rounds(ROUNDS) + WARM_ROUNDS):
            for name, (ours, plain) in works.items():
                node += 1
                kv.fork(node, 0, 0)
                mine_s = seconds(ours)
                client.flush()
                memory.check()
                kv.prune(node)
                plain_s = seconds(plain)
                if turn >= WARM_ROUNDS:
                    ratios[name].append(plain_s / mine_s)
                    plain_us[name].append(plain_s / BLOCKS * 1e6)
    return [
        middle(
            f"dram.{name}.ratio_memcpy",
            ratios[name],
            0.70 if name == "single" else None,
            note=f"1 MiB out and in; memcpy of both {np.median(plain_us[name]):.0f} us",
        )
        for name in works
    ]
