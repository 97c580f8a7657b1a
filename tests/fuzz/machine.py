"""A daemon in this process, on a stage: everything of it but sockets, threads and the disk is real.

`Machine` is one host with two tenants; what is said on its connections, `line.py` judges.
"""

import asyncio
import logging
import os
import sqlite3
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

import kvtierd.daemon
import kvtierd.restore
import kvtierd.server
import kvtierd.start
import kvtierd.turns
from kvtierd import config as configuration
from kvtierd.catalog.errors import CatalogError
from kvtierd.catalog.store import Catalog
from kvtierd.daemon import Daemon
from kvtierd.health import Health
from kvtierd.ledger import Ledger
from kvtierd.mover import Mover
from kvtierd.operator import Operator
from kvtierd.restore import Restore
from kvtierd.server import Listener
from kvtierd.start import tenants_of_uids
from kvtierd.tiers.headers import (
    ArenaHeaders,
    SpillHeaders,
    create,
    new_superblock,
    open_headers,
)  # fmt: skip
from kvtierd.tiers.spill_io import SpillCounters
from kvtierd.tiers.superblock import Expected, Geometry, Kind
from tests.fuzz.line import (
    FRAME_BYTES,
    MEMBERS,
    OPERATOR,
    OUTSIDER,
    TRACES,
    Finding,
    Line,
)  # fmt: skip
from tests.fuzz.stage import Loop, Processes
from tests.model.disk import INSTANCE, PAGE, SimDisk

SLAB_BYTES = 8 * PAGE
SPILL_SLABS = 4
ARENA_SLABS = {"a": 3, "b": 2}
UIDS = {"a": 1001, "b": 1002}
ROOT, STRANGER = 0, 4711
WAIT_MAX_S = 5.0


def settings() -> configuration.Config:
    """A host so small that everything is soon full."""
    return configuration.parse(
        {
            "runtime_dir": "/nonexistent/run", "state_dir": "/nonexistent/state",
            "arena": {"slab_bytes": SLAB_BYTES, "min_block_bytes": PAGE, "huge_pages": "off",
                      "mlock": "off", "prefault": False},
            "spill": {"capacity_bytes": SPILL_SLABS * SLAB_BYTES, "slab_bytes": SLAB_BYTES},
            "recovery": {"memory": "off", "orphan_ttl": "60s"},
            "limits": {
                "lease_ttl": "2s", "lease_ttl_max": "60s", "wait_max": f"{WAIT_MAX_S:.0f}s",
                "connections": 48, "requests_in_flight": 12, "blocks_per_request": 64,
                "leases_per_group": 24, "sessions_per_tenant": 12, "nodes_per_session": 12,
                "groups": 6, "blob_bytes": 256, "frame_bytes": FRAME_BYTES,
                "output_buffer_bytes": FRAME_BYTES,
            },
            "tenants": [
                {"name": name, "uids": [uid], "arena_bytes": ARENA_SLABS[name] * SLAB_BYTES,
                 "spill_bytes": (SPILL_SLABS - 1) * SLAB_BYTES}
                for name, uid in UIDS.items()
            ],
        }
    )  # fmt: skip


CONFIG = settings()


class Arena:
    """A tenant's arena: pages of numbers, and real headers on a memfd."""

    def __init__(self, name: str) -> None:
        slabs = ARENA_SLABS[name]
        geometry = Geometry(slabs, SLAB_BYTES, SLAB_BYTES // PAGE)
        number = kvtierd.start.tenant_number(name)
        superblock = new_superblock(
            Kind.ARENA, geometry, instance=INSTANCE, generation=1, tenant=number
        )
        fd = os.memfd_create("headers")
        headers = create(fd, superblock, "arena")
        assert isinstance(headers, ArenaHeaders)
        self.headers = headers
        self.expected = Expected(Kind.ARENA, INSTANCE, geometry, number)
        self.payload = np.zeros(geometry.payload_bytes // PAGE, np.uint64)
        self.payload_fd = fd
        self.arena_id = superblock.payload_id

    def reopen(self) -> None:
        """Read the headers again, as a start does."""
        fd = os.dup(self.headers.fd)
        headers = open_headers(fd, self.expected, "arena")
        assert isinstance(headers, ArenaHeaders)
        self.headers.close()
        self.headers, self.payload_fd = headers, headers.fd


class Disk(SimDisk):
    """The simulated disk, as one spill file."""

    def __init__(self) -> None:
        super().__init__(Geometry(SPILL_SLABS, SLAB_BYTES, SLAB_BYTES // PAGE), 8)
        directory = SimpleNamespace(path="disk")
        self.files = [SimpleNamespace(directory=directory, direct=False)]

    def restart(self) -> None:
        """What another life finds; the file must be what the configuration says."""
        self.pending.clear()
        expected = Expected(Kind.SPILL, INSTANCE, self.geometry, 0, 0)
        headers = open_headers(os.dup(self.headers.fd), expected, "spill")
        assert isinstance(headers, SpillHeaders)
        self.headers.close()
        self.headers, self.words = headers, headers.words
        self.slots = {entry.slab: entry for entry in headers.slab_table().entries()}

    def stuck_s(self, now_s: float) -> float:
        return 0.0

    def counters(self) -> SpillCounters:
        return SpillCounters(**dict.fromkeys(SpillCounters.__dataclass_fields__, 0))


class Notebook:
    """The catalog's writer without a thread; what it was told is kept as a list."""

    alive = True

    def __init__(self, loop: Loop) -> None:
        self.ops: list[Any] = []
        self.slow = False
        self.spoil: Callable[[Catalog], None] = lambda catalog: None
        """What happens to the catalog while no daemon runs."""
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()

    @property
    def queued(self) -> int:
        return len(self._waiting)

    def stuck_s(self, now_s: float) -> float:
        return 0.0

    def submit(self, ops: Any, done: Callable[[CatalogError | None], None]) -> None:
        def turn() -> None:
            self.ops += ops
            done(None)

        self._put(turn)

    def read_blob(self, tenant: str, session: bytes, node: int, done: Callable[..., None]) -> None:
        def turn() -> None:
            with stored(self.ops) as catalog:
                done(catalog.get_blob(tenant, session, node))

        self._put(turn)

    def _put(self, turn: Callable[[], None]) -> None:
        self._waiting.append(turn)
        if not self.slow:
            self.write()

    def write(self) -> None:
        """The disk of the catalog has time."""
        while self._waiting:
            self._waiting.popleft()()


@contextmanager
def stored(ops: list[Any]) -> Iterator[Catalog]:
    """A real catalog with some changes in it."""
    catalog = Catalog(sqlite3.connect(":memory:", isolation_level=None), "memory")
    try:
        catalog._create()
        catalog.apply(ops)
        yield catalog
    finally:
        catalog.close()


class Machine:
    """One host: its daemon, its processes and their connections."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.processes = Processes(self.loop)
        self.pids = [self.processes.new() for _ in range(MEMBERS)]
        self.arenas = {name: Arena(name) for name in UIDS}
        self.disk = Disk()
        self.notebook = Notebook(self.loop)
        self.lines: dict[int, Line] = {}
        self.generation = 0
        self.kinds: Counter[str] = Counter()
        """What the daemon has said, by the tag of the message or the code of the error."""
        self.given: dict[str, list[Any]] = {}
        """What the daemon has given out: leases, sessions, offsets."""
        self.restarts = 0
        self._looks_s = 0.0
        self._start()

    def _start(self) -> None:
        self.generation += 1
        state = kvtierd.start._state(CONFIG, self.arenas, self.disk, self.generation)  # type: ignore[arg-type]
        parts: Any = SimpleNamespace(
            state=state, arenas=self.arenas, spill=self.disk, spill_files=self.disk, catalog=None,
            keeper=None, tenant_of_uid=tenants_of_uids(CONFIG, state.world), watched=[],
            instance=INSTANCE, generation=self.generation,
        )  # fmt: skip
        self.daemon = daemon = Daemon(CONFIG, parts, None, keep_memory=True)
        daemon._loop = self.loop
        daemon.catalog = self.notebook  # type: ignore[assignment]
        daemon.ledger = Ledger(self.notebook, self.loop)  # type: ignore[arg-type]
        daemon.mover = Mover(state, self.disk, self.arenas, self.loop, daemon.perform)  # type: ignore[arg-type]
        daemon._do |= daemon.mover.handlers
        daemon.operator, daemon.health = Operator(daemon), Health(daemon)
        daemon._listeners = [Listener(daemon, "", 0o666, admin=False),
                             Listener(daemon, "", 0o600, admin=True)]  # fmt: skip
        self.world = state.world

    # ------------------------------------------------------------- what happens

    def uid(self, who: int) -> int:
        """Processes 0..3 are of tenant a, 4 and 5 of b."""
        return {OPERATOR: ROOT, OUTSIDER: STRANGER}.get(who, UIDS["a" if who < 4 else "b"])

    def clock(self) -> float:
        """Stands for the clock by which requests are measured: each look at it takes a while."""
        self._looks_s += 2e-5
        return self._looks_s

    def connect(self, number: int, who: int) -> "Line":
        """A process connects; a connection of that number ends first."""
        self.disconnect(number)
        line = self.lines[number] = Line(self, who)
        listener = self.daemon._listeners[who == OPERATOR]
        self.loop.create_task(listener._greet(line.sock))  # type: ignore[arg-type]
        self.loop.run_ready()
        return line

    def disconnect(self, number: int) -> None:
        """A client closes its connection."""
        line = self.lines.pop(number, None)
        if line is not None:
            line.sock.end()
            self.loop.run_ready()

    def die(self, who: int) -> None:
        """A client process ends; another one takes its place."""
        for number in [n for n, line in self.lines.items() if line.who == who]:
            self.disconnect(number)
        self.processes.die(self.pids[who])
        self.pids[who] = self.processes.new()
        self.loop.run_ready()

    def advance(self, seconds: float) -> None:
        """Time passes, and the daemon's clock ticks."""
        self.loop.advance(seconds)
        daemon = self.daemon
        daemon.state.tick(self.loop.now_s)
        daemon.perform()
        for listener in daemon._listeners:
            listener.close_partial(self.loop.now_s)
        daemon.ledger.retry()
        self.loop.run_ready()

    def finish(self, at: int, status: int, only: int | None) -> None:
        """A job of the disk ends."""
        if self.disk.pending:
            self.disk.finish(at % len(self.disk.pending), kvtierd.mover.Status(status), only)
            self.loop.run_ready()

    def restart(self) -> None:
        """The daemon is killed and starts again on what the media say."""
        for number in list(self.lines):
            self.disconnect(number)
        self.notebook.write()
        self.loop.readers.clear()
        self.loop.ready.clear()
        self.daemon._watch.close()
        self.disk.restart()
        for arena in self.arenas.values():
            arena.reopen()
        self._start()
        with stored(self.notebook.ops) as catalog:
            self.notebook.spoil(catalog)
            restore = Restore(self.daemon.state, self.arenas, self.disk)  # type: ignore[arg-type]
            _, watched = restore.run(catalog.load())
        for member in watched:
            self.daemon._watch_recovered(member)
        self.daemon.perform()
        self.advance(0.0)
        self.restarts += 1

    # ------------------------------------------------------------------ judging

    def check(self) -> None:
        """Nothing has gone wrong inside, and the books balance."""
        if self.daemon.faults:
            raise Finding(f"{self.daemon.faults} faults inside the daemon\n{TRACES.last}")
        self.daemon.state.validate()

    def drain(self) -> None:
        """All who wait are answered, and all that was lent comes back when its holders are dead."""
        self.notebook.slow = False
        self.notebook.write()
        for line in list(self.lines.values()):
            line.stall(False)
        self.loop.run_ready()
        for _ in range(3):
            self._finish_all()
            self.advance(WAIT_MAX_S / 2 + 0.1)
        for line in self.lines.values():
            line.settle()
        self.check()
        for who in range(MEMBERS):
            self.die(who)
        self._finish_all()
        self.advance(1.1)
        self._finish_all()
        self.check()
        for tenant in self.world.tenants.values():
            lent = [*tenant.leases, *tenant.waiting, *tenant.loading]
            promised = sum(pool.promised for pool in tenant.pools.values())
            if lent or promised or tenant.members:
                raise Finding(f"tenant {tenant.name}: {lent}, {promised} promised, stay for ever")

    def _finish_all(self) -> None:
        for _ in range(1000):
            if not self.disk.pending:
                return
            self.finish(0, 0, None)
        raise Finding("the disk is never done")

    def close(self) -> None:
        """Take the machine apart."""
        with running(self):
            self.daemon._watch.close()
        self.disk.close(0.0)
        for arena in self.arenas.values():
            arena.headers.close()


@contextmanager
def installed(machine: Callable[[], Machine]) -> Iterator[None]:
    """Put the stage in the place of sockets, processes and chance."""
    with ExitStack() as stack:
        put = lambda *what: stack.enter_context(mock.patch.object(*what))  # noqa: E731

        def start_time(pid: int) -> int | None:
            return machine().processes.start_time(pid)

        def pidfd(pid: int) -> int:
            return machine().processes.pidfd(pid)

        for module in (kvtierd.server, kvtierd.daemon, kvtierd.restore):
            put(module, "process_start_time", start_time)
        put(kvtierd.server, "_bind", mock.Mock())
        put(os, "pidfd_open", pidfd)
        chance = SimpleNamespace(randbits=lambda bits: 0x9E3779B97F4A7C15 >> 64 - bits)
        put(kvtierd.start, "secrets", chance)
        looks = lambda: machine().clock()  # noqa: E731
        clock = SimpleNamespace(monotonic=looks, perf_counter=looks)
        put(kvtierd.turns, "time", clock)
        log = logging.getLogger("kvtierd")
        put(log, "handlers", [TRACES])
        put(log, "propagate", False)
        put(log, "level", logging.ERROR)
        yield


@contextmanager
def running(machine: Machine) -> Iterator[None]:
    """The machine's loop is the running one."""
    asyncio._set_running_loop(machine.loop)
    try:
        yield
    finally:
        asyncio._set_running_loop(None)
