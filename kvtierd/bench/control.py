"""Round trips of the control plane: against a bare echo, and by verb and number of blocks.

The daemon's message differs in every round trip, as real ones do.
"""

import struct
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from kvtierd.bench.daemons import daemon, pinned
from kvtierd.bench.figures import Cell, Figure, middle
from kvtierd.bench.plan import MIB, Plan
from kvtierd.bench.round_trips import Caller, Connection, Names, ask, each_us, echo

PAIRS: Final = 32
"""Round trips of a round."""
ROUNDS: Final = 121
WARM_ROUNDS: Final = 10
BATCH_BLOCKS: Final = 256
ARENA_BYTES: Final = 512 * MIB
COUNTS: Final = (1, 16, 256)
SAMPLES: Final = 500
"""Calls of each verb and number of blocks."""


class Writer(Caller):
    """Reserves and commits, each commit under a name of its own."""

    batch_names: Final = Names(BATCH_BLOCKS)

    def one(self) -> None:
        """One block, two round trips."""
        self.number += 1
        granted = ask(self.sock, ["reserve", self.number, self.number, self.fingerprint, 1])
        self.number += 1
        page = struct.pack("<I", self.page)
        self.page += 1
        names = (b"\0\0\0\0", page, b"\x10\0\0\0")
        done = ask(self.sock, ["commit", self.number, granted[4], self.session, 0, *names])
        assert done[0] == "done", done

    def batch(self) -> None:
        """As many blocks as an engine moves at once, two round trips."""
        self.commit(self.reserve(BATCH_BLOCKS), self.batch_names)


def measure(plan: Plan) -> list[Figure]:
    """Reserve and commit against one echo, all processes on one core."""
    ratios, one_us, batch_us, echo_us = [], [], [], []
    with (
        daemon(plan, ARENA_BYTES) as process,
        Writer(process.client_path) as writer,
        echo() as (sock, pid),
    ):
        message = ["reserve", 7, 1234, writer.fingerprint, 1]
        assert ask(sock, message) == message
        with pinned(process.pid, pid):
            for turn in range(plan.rounds(ROUNDS) + WARM_ROUNDS):
                bare = each_us(lambda: ask(sock, message), PAIRS)
                mine = each_us(writer.one, PAIRS)
                writer.renew()
                many = each_us(writer.batch, 1)
                writer.renew()
                if turn >= WARM_ROUNDS:
                    ratios.append(mine / bare)
                    one_us.append(mine)
                    echo_us.append(bare)
                    batch_us.append(many)
    return [
        middle("control.one.ratio_echo", ratios, 3.0, "lower", "reserve + commit of one block"),
        middle("control.one.us", one_us, better="lower"),
        middle("control.echo.us", echo_us, better="lower"),
        middle("reserve_commit.256.us", batch_us, 200.0, "lower", "two round trips, 256 blocks"),
    ]


class Watch:
    """Collects how long calls take, by verb and number of blocks."""

    def __init__(self) -> None:
        self.found_us: dict[str, list[float]] = {}

    def call(self, name: str, work: Callable[..., Any], *args: Any) -> Any:
        """Time one call."""
        begun = time.perf_counter()
        result = work(*args)
        self.found_us.setdefault(name, []).append((time.perf_counter() - begun) * 1e6)
        return result

    def figures(self) -> list[Figure]:
        """Median and 99th percentile of each."""
        figures = []
        for name, taken_us in self.found_us.items():
            for percent in (50, 99):
                value = float(np.percentile(taken_us, percent))
                cell = Cell("round trips (us)", name, f"p{percent}")
                figures.append(
                    Figure(f"control.{name}.p{percent}_us", value, better="lower", cell=cell)
                )
        return figures


def verbs(plan: Plan) -> list[Figure]:
    """Each verb by itself, all processes where the system puts them."""
    watch, samples = Watch(), plan.part(SAMPLES)
    with daemon(plan, ARENA_BYTES) as process, Caller(process.client_path) as caller:
        for _ in range(samples):
            watch.call("hello", Connection, process.client_path).sock.close()
        for blocks in COUNTS:
            names = Names(blocks)
            for _ in range(samples):
                lease = watch.call(f"reserve.x{blocks}", caller.reserve, blocks)
                watch.call(f"commit.x{blocks}", caller.commit, lease, names)
                wanted = (caller.number, caller.session, 0, caller.fingerprint, 0, blocks)
                granted = watch.call(f"acquire.x{blocks}", caller.ask, "acquire", *wanted)
                watch.call(f"release.x{blocks}", caller.ask, "release", granted[4])
                caller.renew()
    return watch.figures()
