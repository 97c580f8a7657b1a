"""One simulated machine: the real daemon from its start on, over simulated threads, disk, sockets.

`Host` starts the daemon, kills it between any two events or inside any system call, takes the
power away, and starts it again on what is left.
"""

import asyncio
import contextlib
import functools
import logging
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import kvtierd.daemon
import kvtierd.restore
import kvtierd.server
import kvtierd.start
import kvtierd.tiers.headers
import kvtierd.tiers.spill
from kvtier_client import link, looping
from kvtierd import config as configuration
from kvtierd.catalog.errors import CatalogFull
from kvtierd.catalog.writer import CatalogWriter
from kvtierd.connection import Connection
from kvtierd.core.leases import Group, Peer
from kvtierd.core.tree import Node
from kvtierd.core.validate import validate
from kvtierd.daemon import Daemon
from kvtierd.start import start
from kvtierd.tiers.headers import ArenaHeaders
from kvtierd.tiers.spill_open import open_spill
from kvtierd.tiers.spill_work import Running
from tests.model.disk import PAGE
from tests.sim import net
from tests.sim.clock import Failure, Secrets, Sim, SimLoop, Times, hash_by_age
from tests.sim.files import HeaderCalls, Medium

SLAB_BYTES = 8 * PAGE
UIDS = {"a": 1001, "b": 1002}
IO_DELAYS_S = [*[0.0002] * 8, *[0.002] * 4, 0.05, 0.6]
CATALOG_DELAYS_S = [*[0.0005] * 6, 0.01, 0.2]


def settings(sim: Sim, base: str) -> configuration.Config:
    """A small machine, drawn from the seed."""
    pick = sim.random.choice
    arenas, spill = {"a": pick([3, 4, 6]), "b": pick([3, 4])}, pick([6, 8, 12])
    return configuration.parse(
        {
            "runtime_dir": f"{base}/run",
            "state_dir": f"{base}/state",
            "arena": {
                "slab_bytes": f"{SLAB_BYTES}B", "min_block_bytes": f"{PAGE}B",
                "huge_pages": "off", "mlock": "off", "prefault": False,
            },
            "spill": {
                "capacity_bytes": f"{spill * SLAB_BYTES}B", "slab_bytes": f"{SLAB_BYTES}B",
                "direct_io": "off", "durability": pick(["process", "power"]), "io_threads": 2,
                "queue_bytes": f"{pick([4, 16, 64]) * PAGE}B",
            },
            "integrity": pick(["spill", "end_to_end"]),
            "recovery": {"memory": "holder", "orphan_ttl": "2h"},
            "limits": {"lease_ttl": "2s", "lease_ttl_max": "60s", "wait_max": "5s"},
            "tenants": [
                {"name": name, "uids": [UIDS[name]], "arena_bytes": f"{slabs * SLAB_BYTES}B",
                 "spill_bytes": f"{(spill - 1) * SLAB_BYTES}B"}
                for name, slabs in arenas.items()
            ],
        }
    )  # fmt: skip


class SimPool:
    """Stands for the threads of the spill tier: each task runs at one moment, a while later."""

    def __init__(self, threads: int, name: str) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        self._loop = loop
        self._tasks: dict[int, Callable[[], None]] = {}
        self._number = 0
        self.busy_s = 0.0
        self.crashes = 0

    def put(self, priority: int, tasks: Sequence[Callable[[], None]]) -> None:
        for task in tasks:
            self._number += 1
            self._tasks[self._number] = task
            delay_s = self._loop.sim.random.choice(IO_DELAYS_S)
            self._loop.call_later(delay_s, self._run, self._number)

    def _run(self, number: int) -> None:
        task = self._tasks.pop(number, None)
        if task is not None:
            task()

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
            self._loop.call_later(self._loop.sim.random.choice(CATALOG_DELAYS_S), self._turn_now)

    def _turn_now(self) -> None:
        self._due = False
        if self._queue:
            self._turn()

    def _apply(self, ops: Any) -> Any:
        if self.rate and self._loop.sim.chance(self.rate):
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


class Host:
    """The machine, its daemon's lives, and its processes."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.network = net.Network(sim)
        self.medium = Medium(sim)
        shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self.base = tempfile.mkdtemp(prefix="kvtierd-sim-", dir=shared)
        self.config = settings(sim, self.base)
        self.power = self.config.spill.durability == "power"
        self.path = self.config.socket.client_path
        self.kept: dict[str, int] = {}
        self.loop: SimLoop | None = None
        self.parts: Any = None
        self.daemon: Daemon | None = None
        self.serving: Any = None
        self.faults = False
        self.counts: Counter[str] = Counter()
        self._checked_s = 0.0
        self._pids = 100
        self._processes: dict[int, SimLoop] = {}

    # -------------------------------------------------------------- processes

    def process(self, name: str, uid: int = 0) -> SimLoop:
        """A new process."""
        self._pids += 1
        loop = SimLoop(self.sim, f"{name}-{self._pids}", self._pids, uid)
        self._processes[self._pids] = loop
        return loop

    def start_time(self, pid: int) -> int | None:
        """Stands for `process_start_time`."""
        process = self._processes.get(pid)
        return None if process is None or process.dead else pid * 10

    def pidfd_open(self, pid: int) -> int:
        """Stands for `os.pidfd_open`."""
        process = self._processes.get(pid)
        if process is None or process.dead:
            raise ProcessLookupError(3, "No such process")
        return net.pidfd(process)

    # --------------------------------------------------------- life and death

    def boot(self) -> None:
        """The service manager starts the daemon."""
        self.loop = self.process("daemon")
        self.medium.killed, self.medium.calls_left, self.medium.rate = False, -1, 0.0
        if self.parts is not None and self.faults and self.sim.chance(0.2):
            self.medium.calls_left = self.sim.random.randint(1, 40)
        self.daemon = self.parts = None
        self.loop.call_soon(self._start)

    def _start(self) -> None:
        assert self.loop is not None
        self.counts["starts"] += 1
        self.parts = start(self.config)
        self.parts.close_locks = _once(self.parts.close_locks)
        self.daemon = Daemon(self.config, self.parts, None, keep_memory=True)
        self.serving = self.loop.create_task(self.daemon.serve())
        self.set_faults(self.faults)

    def set_faults(self, on: bool) -> None:
        """Whether disk and catalog fail now and then."""
        self.faults = on
        self.medium.rate = 0.01 if on else 0.0
        SimCatalogWriter.rate = 0.01 if on else 0.0

    @property
    def up(self) -> bool:
        """Whether the daemon serves."""
        return self.daemon is not None and bool(self.daemon._listeners)

    def kill(self, why: str) -> None:
        """SIGKILL; the service manager starts the daemon again."""
        assert self.loop is not None
        self.counts[why] += 1
        self.medium.killed = True
        self.loop.kill()
        self._bury()
        self.sim.outside.call_later(self.sim.random.uniform(0.01, 1.0), self.boot)

    def _bury(self) -> None:
        """Close what the daemon's process had open, without a word to anybody."""
        parts, self.daemon = self.parts, None
        if parts is None:
            self.parts = SimpleNamespace(arenas={})  # it has started before
            return
        for file in parts.spill_files.files:
            if file.payload_fd >= 0:  # a graceful stop has not come so far
                file.close()
        for arena in parts.arenas.values():
            arena.close()
        parts.catalog._db.close()
        parts.close_locks()

    def reboot(self) -> None:
        """The power goes: all processes and memory with it, and what was not synced."""
        for process in list(self._processes.values()):
            if not process.dead and process is not self.loop:
                process.kill()
        self.kill("reboots")
        for fd in self.kept.values():
            os.close(fd)
        self.kept.clear()
        self.medium.lose_power()

    def stop(self) -> None:
        """SIGTERM; the daemon is started again when it has ended."""
        if self.daemon is None or self.daemon._stopping:
            return
        self.counts["graceful stops"] += 1
        self.daemon._stop.set()
        self.serving.add_done_callback(self._stopped)

    def _stopped(self, task: Any) -> None:
        if self.loop is None or self.loop.dead:
            return
        if task.exception() is not None:
            self.sim.failure = task.exception()
        self.loop.kill()
        self.daemon = None
        self.sim.outside.call_later(self.sim.random.uniform(0.01, 0.3), self.boot)

    # ------------------------------------------------------------- invariants

    def check(self, loop: SimLoop) -> None:
        """After a step: the books balance, and nothing has gone wrong inside the daemon."""
        if loop is not self.loop:
            return
        if self.medium.killed and not loop.dead:
            self.kill("kills inside a call")
            return
        if self.daemon is None or loop.dead:
            return
        if self.daemon.faults:
            raise Failure(f"{self.daemon.faults} faults inside the daemon; see the log")
        world = self.daemon.state.world
        if world.now_s != self._checked_s:  # the core has run
            self._checked_s = world.now_s
            validate(world)

    # ---------------------------------------------------------------- the end

    def close(self) -> None:
        """Take the machine apart."""
        for process in list(self._processes.values()):
            if not process.dead:
                process.kill()
        if self.daemon is not None:
            self._bury()
        for fd in self.kept.values():
            os.close(fd)
        shutil.rmtree(self.base, ignore_errors=True)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Put the simulated parts in place of sockets, threads, clock and keeper."""
        times, secrets = Times(self.sim), Secrets(self.sim)
        with contextlib.ExitStack() as stack:

            def put(owner: Any, name: str, value: Any) -> None:
                stack.enter_context(mock.patch.object(owner, name, value))

            for logger in map(logging.getLogger, ("kvtier_client", "kvtierd")):
                stack.callback(logger.setLevel, logger.level)
                logger.setLevel(logging.CRITICAL)  # thousands of faults are meant to happen

            for name, module in list(sys.modules.items()):
                if name.partition(".")[0] in ("kvtierd", "kvtier_client"):
                    if getattr(module, "time", None) is time:
                        put(module, "time", times)
                    if getattr(getattr(module, "secrets", None), "__name__", "") == "secrets":
                        put(module, "secrets", secrets)
            for module in (kvtierd.server, kvtierd.daemon, kvtierd.restore):
                put(module, "process_start_time", self.start_time)
            put(kvtierd.server, "_bind", self.network.listen)
            for kind in (Connection, Peer, Group, Node, Running):
                put(kind, "__hash__", hash_by_age)
            put(kvtierd.daemon, "CatalogWriter", SimCatalogWriter)
            put(kvtierd.start, "open_keeper", lambda *_: SimKeeper(self.kept))
            put(kvtierd.start, "open_spill", functools.partial(open_spill, kernel=self.medium))
            put(kvtierd.tiers.spill, "WorkPool", SimPool)
            put(kvtierd.tiers.headers, "os", HeaderCalls(self.medium))
            put(ArenaHeaders, "write_bodies", self._store(ArenaHeaders.write_bodies))
            put(ArenaHeaders, "write_body", self._store(ArenaHeaders.write_body))
            put(os, "pidfd_open", self.pidfd_open)
            put(looping, "new_socket", self.network.new_socket)
            put(link, "random", self.sim.random)
            yield

    def _store(self, method: Callable[..., None]) -> Callable[..., None]:
        """A store into the arena's headers, before or after which the daemon may be killed."""

        def store(*args: Any) -> None:
            first = self.sim.chance(0.5)
            if first:
                self.medium.call()
            method(*args)
            if not first:
                self.medium.call()

        return store


def _once(call: Callable[[], None]) -> Callable[[], None]:
    left = [call]
    return lambda: left.pop()() if left else None
