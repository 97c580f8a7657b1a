"""What hostile and heavy neighbours do to a client that only needs DRAM.

Phases without and with the neighbours take turns. The daemon says how long requests of the client
took inside it: queueing and service, as `kvtierctl clients` shows them. Its event loop has a core
of its own and the neighbours are nice, so that its time is not what the scheduler gave to somebody
else; the client shares the other cores with them, which its own times include.
"""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvtier_client.admin import AdminClient
from kvtier_client.errors import DaemonError
from kvtierd.bench.daemons import Daemon, daemon, pin
from kvtierd.bench.figures import Figure, middle
from kvtierd.bench.neighbour_process import KINDS, NEIGHBOUR_BYTES, WAIT_S
from kvtierd.bench.plan import MIB, Plan
from kvtierd.bench.round_trips import Caller, Names
from kvtierd.turns import Served

ROUNDS: Final = 5
PHASE_S: Final = 2.0
NEIGHBOURS: Final = 8
BUDGET: Final = 5.0
ARENA_BYTES: Final = 1024 * MIB
SPILL_BYTES: Final = 1024 * MIB
PRIORITY_MAX: Final = 255
BATCH: Final = Names(16)
BATCHES: Final = 4
"""Batches of one session."""
WINDOW_S: Final = 0.03
SMALL_SLABS: Final = {"slab_bytes": 16 * MIB}


def measure(plan: Plan) -> list[Figure]:
    """Each phase with a connection of its own, whose requests the daemon counts."""
    alone, beside = list[tuple[float, float]](), list[tuple[float, float]]()
    with (
        daemon(
            plan, ARENA_BYTES, SPILL_BYTES, arena=SMALL_SLABS, recovery={"orphan_ttl": "1s"}
        ) as process,
        AdminClient(process.admin_path) as admin,
        apart(process.pid),
    ):
        for turn in range(1 + plan.rounds(ROUNDS)):
            without = _phase(process, admin, plan.duration_s(PHASE_S))
            with neighbours(process, turn):
                with_them = _phase(process, admin, plan.duration_s(PHASE_S))
            if turn:
                alone.append(without)
                beside.append(with_them)
        if admin.call("stats")["health"]["reasons"]:
            raise DaemonError(f"unwell: {admin.call('stats')['health']['reasons']}")
    figures = []
    for place, name in enumerate(("inside", "end_to_end")):
        ratios = [b[place] / a[place] for a, b in zip(alone, beside, strict=True)]
        budget = BUDGET if name == "inside" else None
        note = f"{NEIGHBOURS} neighbours: {', '.join(KINDS)}"
        figures += [
            middle(f"neighbours.{name}.p99_x", ratios, budget, "lower", note),
            middle(f"neighbours.{name}.alone.p99_us", [a[place] for a in alone], better="lower"),
            middle(f"neighbours.{name}.beside.p99_us", [b[place] for b in beside], better="lower"),
        ]
    return figures


def _phase(process: Daemon, admin: AdminClient, duration_s: float) -> tuple[float, float]:
    """99th percentiles of a client's requests in us: inside the daemon, and end to end.

    Windows in which the hypervisor took a core away are left out: nobody inside could answer then.
    """
    inside, outside_s = Counter[int](), list[float]()
    with Caller(process.client_path, NEIGHBOUR_BYTES) as caller:
        before, end_s = _classes(admin), time.monotonic() + duration_s
        stolen_before = _stolen()
        while time.monotonic() < end_s or not outside_s:
            taken_s: list[float] = []
            window_s = time.monotonic() + WINDOW_S
            while time.monotonic() < window_s:
                _session(caller, taken_s)
            after, stolen = _classes(admin), _stolen()
            if stolen == stolen_before:
                inside += after - before
                outside_s += taken_s
            before, stolen_before = after, stolen
    p99_us = Served.of(inside).quantile_s(0.99) * 1e6
    return p99_us, float(np.percentile(outside_s, 99)) * 1e6


def _session(caller: Caller, taken_s: list[float]) -> None:
    """Store and read some batches."""
    caller.renew()
    caller.ask("set_priority", caller.session, PRIORITY_MAX)
    for _ in range(BATCHES):
        first = caller.page
        lease = _timed(taken_s, caller.reserve, BATCH.blocks, WAIT_S)
        _timed(taken_s, caller.commit, lease, BATCH)
        _timed(taken_s, caller.read, first, BATCH.blocks)


def _classes(admin: AdminClient) -> Counter[int]:
    """This process's requests so far, by the class of their duration inside the daemon."""
    [mine] = [c for c in admin.call("clients")["clients"] if c["pid"] == os.getpid()]
    return Counter({int(place): count for place, count in mine["by_class"].items()})


def _stolen() -> int:
    """Ticks that the hypervisor has kept from this host's cores."""
    return int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8])


def _timed(taken_s: list[float], call: Callable[..., Any], *args: Any) -> Any:
    """Time one call."""
    begun_s = time.perf_counter()
    result = call(*args)
    taken_s.append(time.perf_counter() - begun_s)
    return result


@contextmanager
def neighbours(process: Daemon, turn: int) -> Iterator[None]:
    """Eight neighbours at work; with each turn another kind is left out."""
    with ExitStack() as stack:
        for number in range(NEIGHBOURS):
            kind = KINDS[(turn + number) % len(KINDS)]
            command = [sys.executable, "-m", "kvtierd.bench.neighbour_process"]
            one = subprocess.Popen(
                [*command, process.client_path, process.admin_path, kind],
                stdout=subprocess.PIPE, text=True, start_new_session=True,
            )  # fmt: skip
            stack.enter_context(one)
            stack.callback(one.kill)
            assert one.stdout is not None
            if one.stdout.readline() != "at work\n":
                raise DaemonError(f"the neighbour {kind!r} ended with code {one.wait()}")
        yield


@contextmanager
def apart(pid: int) -> Iterator[None]:
    """The daemon's event loop on one core; its other threads, this process and what it starts on
    the others."""
    before = os.sched_getaffinity(0)
    one = {max(before)}
    rest = before - one or one
    pin(pid, rest)
    os.sched_setaffinity(pid, one)
    pin(os.getpid(), rest)
    try:
        yield
    finally:
        pin(os.getpid(), before)
