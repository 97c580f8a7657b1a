"""What stands in for threads, catalog thread and keeper of the daemon, and its configuration."""

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvtierd import config as configuration
from kvtierd.catalog.errors import CatalogFull
from kvtierd.catalog.writer import CatalogWriter
from kvtierd.fair import Flow
from tests.model.disk import PAGE
from tests.sim.clock import Sim, SimLoop

SLAB_BYTES = 8 * PAGE
UIDS = {"a": 1001, "b": 1002}
PROBE = "probe"
"""A tenant whose few blocks never leave DRAM."""
PROBE_UID = 1003
IO_DELAYS_S = [*[0.0002] * 8, *[0.002] * 4, 0.05, 0.6]
CATALOG_DELAYS_S = [*[0.0005] * 6, 0.01, 0.2]


def stuck(sim: Sim, delay_s: float) -> float:
    """How long work of the disk takes that would take `delay_s`, were the disk not stuck."""
    return max(0.0, sim.stuck_until_s - sim.now_s) + delay_s


def settings(sim: Sim, base: str) -> configuration.Config:
    """A small machine, drawn from the seed."""
    pick = sim.random.choice
    arenas, spill = {"a": pick([2, 3, 4]), "b": pick([2, 3, 4])}, pick([4, 6, 9])
    return configuration.parse(
        {
            "runtime_dir": f"{base}/run",
            "state_dir": f"{base}/state",
            "arena": {
                "slab_bytes": f"{SLAB_BYTES}B", "min_block_bytes": f"{PAGE}B",
                "huge_pages": "off", "mlock": "off", "prefault": False,
            },
            "spill": {
                "encryption": {"enabled": False, "key": _key(base)},
                "capacity_bytes": f"{spill * SLAB_BYTES}B", "slab_bytes": f"{SLAB_BYTES}B",
                "direct_io": "off", "durability": pick(["process", "power"]), "io_threads": 2,
                "queue_bytes": f"{pick([4, 16, 64]) * PAGE}B",
            },
            "integrity": pick(["spill", "end_to_end"]),
            "scrub": {"interval": pick(["1s", "20s", "never"]), "rate": "1MiB"},
            "recovery": {"memory": "holder", "orphan_ttl": "2h"},
            "limits": {"lease_ttl": "2s", "lease_ttl_max": "60s", "wait_max": "5s"},
            "tenants": [
                {"name": name, "uids": [UIDS[name]], "arena_bytes": f"{slabs * SLAB_BYTES}B",
                 "spill_bytes": f"{(spill - 1) * SLAB_BYTES}B"}
                for name, slabs in arenas.items()
            ]
            + [{"name": PROBE, "uids": [PROBE_UID], "arena_bytes": f"{2 * SLAB_BYTES}B",
                "spill_bytes": f"{PAGE}B"}],
        }
    )  # fmt: skip


def with_encryption(config: configuration.Config, *, enabled: bool) -> configuration.Config:
    """The same, with spill files that are encrypted from the next start on, or are not."""
    spill = config.spill
    if spill.encryption.enabled == enabled:
        return config
    encryption = msgspec.structs.replace(spill.encryption, enabled=enabled)
    return msgspec.structs.replace(
        config, spill=msgspec.structs.replace(spill, encryption=encryption)
    )


def with_other_sizes(sim: Sim, config: configuration.Config) -> configuration.Config:
    """The same, with spill files and arenas that may have grown or shrunk."""

    def other(size_bytes: int) -> int:
        slabs = size_bytes // SLAB_BYTES
        if sim.chance(0.1):
            slabs = max(2, slabs + sim.random.choice((-2, -1, 1, 2)))
        return slabs * SLAB_BYTES

    replace, spill = msgspec.structs.replace, config.spill
    return replace(
        config,
        spill=replace(spill, capacity_bytes=other(spill.capacity_bytes)),
        tenants=tuple(
            each if each.name == PROBE
            else replace(each, arena_bytes=other(each.arena_bytes))
            for each in config.tenants
        ),
    )  # fmt: skip


def _key(base: str) -> str:
    """A file with a master key."""
    path = f"{base}/key"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(fd, bytes(range(32)))
    os.close(fd)
    return path


class SimPool:
    """Stands for the threads of the spill tier: each task runs at one moment, a while later."""

    def __init__(self, threads: int, name: str) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        self._loop = loop
        self._tasks: dict[int, tuple[float, Callable[[], None]]] = {}
        self._ended_s = 0.0
        self._number = 0
        self.busy_s = 0.0
        self.crashes = 0

    def put(
        self, priority: int, flow: Flow, cost: float, tasks: Sequence[Callable[[], None]]
    ) -> None:
        sim = self._loop.sim
        for task in tasks:
            self._number += 1
            self._tasks[self._number] = sim.now_s, task
            delay_s = stuck(sim, sim.random.choice(IO_DELAYS_S))
            self._loop.call_later(delay_s, self._run, self._number)

    def _run(self, number: int) -> None:
        _, task = self._tasks.pop(number, (0.0, None))
        if task is not None:
            self._ended_s = self._loop.sim.now_s
            task()

    def stuck_s(self, now_s: float) -> float:
        begun = [begun_s for begun_s, _ in self._tasks.values()]
        return now_s - max(min(begun), self._ended_s) if begun else 0.0

    @property
    def queued_tasks(self) -> int:
        return len(self._tasks)

    def close(self, deadline_s: float) -> bool:
        while self._tasks:
            self._run(next(iter(self._tasks)))
        return True


class SimCatalogWriter(CatalogWriter):
    """The catalog's writer without its thread: its turns come a while after there is work."""

    rate = 0.0
    """How likely a transaction is refused."""

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        self._loop, self._due = loop, False

    @property
    def alive(self) -> bool:
        return True

    def _put(self, item: Any, ops: int) -> None:
        super()._put(item, ops)
        if not self._due:
            self._due = True
            sim = self._loop.sim
            delay_s = stuck(sim, sim.random.choice(CATALOG_DELAYS_S))
            self._loop.call_later(delay_s, self._turn_now)

    def _turn_now(self) -> None:
        self._due = False
        if self._queue:
            self._turn()

    def _apply(self, ops: Any) -> Any:
        if self.rate and self._loop.sim.chance(self.rate):
            self._loop.sim.counts["catalog ENOSPC"] += 1
            return CatalogFull("cannot change the catalog", "no space left", "make room")
        return super()._apply(ops)

    def close(self, timeout_s: float = 0.0) -> bool:
        self._closing = True
        while self._queue:
            self._turn()
        self._catalog.close()
        return True


class SimKeeper:
    """Keeps the arenas' descriptors for as long as the machine runs."""

    def __init__(self, kept: dict[str, int]) -> None:
        self._kept = kept

    def put(self, name: str, fd: int) -> None:
        self.drop(name)
        self._kept[name] = os.dup(fd)

    def take_all(self) -> dict[str, int]:
        return {name: os.dup(fd) for name, fd in self._kept.items()}

    def drop(self, name: str) -> None:
        fd = self._kept.pop(name, None)
        if fd is not None:
            os.close(fd)

    def fileno(self) -> None:
        return None

    def close(self) -> None:
        pass

    abandon = close
