"""What hostile and heavy neighbours do to a client that only needs DRAM.

Phases without and with the neighbours take turns. The daemon says how long requests of the client
took inside it, queueing and service, as `kvtierctl clients` shows them; the client's own times, end
to end, stand beside. Once the neighbours pause between their bursts, so that it is the daemon that
is loaded; and once they do not: then a small host has not enough cores for them all, and its
scheduler is in every figure.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import numpy as np

from kvtier_client.admin import AdminClient
from kvtier_client.errors import DaemonError
from kvtierd.bench.daemons import Daemon, daemon
from kvtierd.bench.figures import Figure, middle
from kvtierd.bench.neighbour_process import KINDS, NEIGHBOUR_BYTES, WAIT_S
from kvtierd.bench.plan import MIB, Plan
from kvtierd.bench.round_trips import Caller, Names

ROUNDS: Final = 5
SATURATED_ROUNDS: Final = 3
PHASE_S: Final = 2.0
PAUSE_S: Final = 0.1
"""Of a neighbour between its bursts."""
NEIGHBOURS: Final = 8
BUDGET: Final = 5.0
ARENA_BYTES: Final = 1024 * MIB
SPILL_BYTES: Final = 1024 * MIB
PRIORITY_MAX: Final = 255
BATCH: Final = Names(16)
BATCHES: Final = 16
"""Batches of one session."""
SMALL_SLABS: Final = {"slab_bytes": 16 * MIB}


def measure(plan: Plan) -> list[Figure]:
    """With pauses and without."""
    return [
        *_compare(plan, "neighbours", PAUSE_S, ROUNDS, BUDGET),
        *_compare(plan, "neighbours.saturated", 0.0, SATURATED_ROUNDS, None),
    ]


def _compare(
    plan: Plan, name: str, pause_s: float, rounds: int, budget: float | None
) -> list[Figure]:
    """Each phase with a connection of its own, whose requests the daemon counts."""
    alone, beside = list[tuple[float, ...]](), list[tuple[float, ...]]()
    with (
        daemon(
            plan, ARENA_BYTES, SPILL_BYTES, arena=SMALL_SLABS, recovery={"orphan_ttl": "1s"}
        ) as process,
        AdminClient(process.admin_path) as admin,
    ):
        for turn in range(1 + plan.rounds(rounds)):
            without = _phase(process, admin, plan.duration_s(PHASE_S))
            with neighbours(process, turn, pause_s):
                with_them = _phase(process, admin, plan.duration_s(PHASE_S))
            if turn:
                alone.append(without)
                beside.append(with_them)
    figures = []
    for place, where in enumerate(("inside", "end_to_end")):
        ratios = [b[place] / a[place] for a, b in zip(alone, beside, strict=True)]
        note = f"{NEIGHBOURS} of: {', '.join(KINDS)}"
        limit = budget if where == "inside" else None
        figures += [
            middle(f"{name}.{where}.p99_x", ratios, limit, "lower", note),
            middle(f"{name}.{where}.alone.p99_us", [a[place] for a in alone], better="lower"),
            middle(f"{name}.{where}.beside.p99_us", [b[place] for b in beside], better="lower"),
        ]
    return [*figures, middle(f"{name}.daemon_cores", [b[2] for b in beside], better="lower")]


def _phase(process: Daemon, admin: AdminClient, duration_s: float) -> tuple[float, float, float]:
    """99th percentiles of a client's requests in us, inside the daemon and end to end; and how
    many cores the daemon used."""
    taken_s: list[float] = []
    begun_s, used_s = time.monotonic(), process.cpu_s()
    with Caller(process.client_path, NEIGHBOUR_BYTES) as caller:
        end_s = time.monotonic() + duration_s
        while time.monotonic() < end_s:
            caller.renew()
            caller.ask("set_priority", caller.session, PRIORITY_MAX)
            for _ in range(BATCHES):
                taken_s += _batch(caller)
        [mine] = [c for c in admin.call("clients")["clients"] if c["pid"] == os.getpid()]
    cores = (process.cpu_s() - used_s) / (time.monotonic() - begun_s)
    return mine["p99_s"] * 1e6, float(np.percentile(taken_s, 99)) * 1e6, cores


def _batch(caller: Caller) -> list[float]:
    """Store and read a batch; the seconds of each request."""
    taken_s: list[float] = []
    first = caller.page
    lease = _timed(taken_s, caller.reserve, BATCH.blocks, WAIT_S)
    _timed(taken_s, caller.commit, lease, BATCH)
    _timed(taken_s, caller.read, first, BATCH.blocks)
    return taken_s


def _timed(taken_s: list[float], call: Callable[..., Any], *args: Any) -> Any:
    """Time one call."""
    begun_s = time.perf_counter()
    result = call(*args)
    taken_s.append(time.perf_counter() - begun_s)
    return result


@contextmanager
def neighbours(process: Daemon, turn: int, pause_s: float) -> Iterator[None]:
    """Eight neighbours at work; with each turn another kind is left out."""
    with ExitStack() as stack:
        for number in range(NEIGHBOURS):
            kind = KINDS[(turn + number) % len(KINDS)]
            command = [sys.executable, "-m", "kvtierd.bench.neighbour_process"]
            one = subprocess.Popen(
                [*command, process.client_path, process.admin_path, kind, str(pause_s)],
                stdout=subprocess.PIPE, text=True, start_new_session=True,
            )  # fmt: skip
            stack.enter_context(one)
            stack.callback(one.kill)
            assert one.stdout is not None
            if one.stdout.readline() != "at work\n":
                raise DaemonError(f"the neighbour {kind!r} ended with code {one.wait()}")
        yield
