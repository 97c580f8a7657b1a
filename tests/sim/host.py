"""One simulated machine: the real daemon from its start on, over simulated threads, disk, sockets.

`Host` starts the daemon, kills it between any two events or inside any system call, takes the
power away, and starts it again on what is left.
"""

import contextlib
import functools
import logging
import os
import secrets
import shutil
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import kvtierd.daemon
import kvtierd.restore
import kvtierd.server
import kvtierd.start
import kvtierd.tiers.headers
import kvtierd.tiers.memory
import kvtierd.tiers.spill
import kvtierd.turns
from kvtier_client import link, looping
from kvtierd.connection import Connection
from kvtierd.core.leases import Group, Peer
from kvtierd.core.slabs import QUARANTINED
from kvtierd.core.tree import Node
from kvtierd.core.validate import homeless, validate
from kvtierd.core.world import World
from kvtierd.daemon import Daemon
from kvtierd.start import start
from kvtierd.tiers.cipher import FileCipher
from kvtierd.tiers.errors import StartError
from kvtierd.tiers.headers import ArenaHeaders
from kvtierd.tiers.spill_open import open_spill
from kvtierd.tiers.spill_work import Running
from tests.sim import net
from tests.sim.clock import Failure, Secrets, Sim, SimLoop, Times, hash_by_age
from tests.sim.files import HeaderCalls, Medium
from tests.sim.parts import (
    SimCatalogWriter,
    SimKeeper,
    SimPool,
    settings,
    with_encryption,
    with_other_sizes,
)

FAULT_RATES = [0.003, 0.01, 0.03, 0.1]
"""How likely a fault is in one call, drawn from the seed; higher ones in brief histories."""
RETURN_S = 5.0
"""After a start, all clients are back by then."""
CHECK_EVERY = 8
"""The books are recounted after so many events of the core that changed something."""
TICKS_S = [0.25, 0.5, 0.05]
"""How often the daemon looks at its clock, drawn from the seed; seldom, as each look is a step, and
in a brief history never often."""


class Host:
    """The machine, its daemon's lives, and its processes."""

    def __init__(self, sim: Sim, *, brief: bool) -> None:
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
        self.faults = self.begun = False
        self.fault_rate = sim.random.choice(FAULT_RATES[1:] if brief else FAULT_RATES[:-1])
        self.disturbed_s = 0.0
        """Until when some clients had or have no daemon that serves them."""
        self._was_up = False
        self._encrypted = sim.random.choice(((False,), (False,), (True,), (False, True)))
        """Whether spill files are encrypted, at each start one of these."""
        self.killed_at: Counter[str] = Counter()
        """After which callbacks, and at which awaits, the daemon was killed."""
        self._proven = self.config
        """The configuration of the last start that succeeded."""
        self.snapshots: list[bytes] = []
        self.counts = sim.counts
        self.check_every = CHECK_EVERY
        self.tick_s = sim.random.choice(TICKS_S[: 2 if brief else 3])
        self.slice_s = sim.random.choice((0.0, kvtierd.turns.SLICE_S))
        """0: every request waits for its turn."""
        self._checked_s = 0.0
        self._books: Books = ()
        self._homeless = True
        """Since the start, blocks that it found may have no place."""
        self._due = 0
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
        return self.sim.pidfd(process)

    # --------------------------------------------------------- life and death

    def boot(self) -> None:
        """The service manager starts the daemon."""
        self.loop, self._was_up = self.process("daemon"), False
        medium, self.disturbed_s = self.medium, self.sim.now_s
        medium.killed, medium.calls_left, medium.rate, medium.start_rate = False, -1, 0.0, 0.0
        if self.begun and self.faults and self.sim.chance(0.2):
            medium.calls_left = self.sim.random.randint(1, 40)
        if self.begun and self.faults and self.sim.chance(0.1):
            medium.start_rate = 0.1
        self.daemon = self.parts = None
        encrypted = self.sim.random.choice(self._encrypted)
        self.config = with_encryption(self._proven, enabled=encrypted)
        if self.begun and self.faults:
            self.config = with_other_sizes(self.sim, self.config)
        self.loop.call_soon(self._start)

    def _start(self) -> None:
        assert self.loop is not None
        self.counts["starts"] += 1
        self._books, self._due, self._homeless = (), 0, True
        self.medium.faulty_starts = 0
        try:
            self.parts = start(self.config)
        except StartError:
            if self._resizes:
                self.counts["other sizes refused"] += 1
            elif not self.medium.faulty_starts:
                raise
            self.kill("starts refused")
            return
        finally:
            self.medium.start_rate = 0.0
        self.begun = True
        self.counts["other sizes"] += self._resizes
        self._proven = self.config
        for kind in ("sessions", "orphans", "blocks", "lost"):
            self.counts[f"start found: {kind}"] += getattr(self.parts.outcome, kind)
        self.medium.geometry = self.parts.spill_files.geometry
        self.parts.close_locks = _once(self.parts.close_locks)
        self.daemon = Daemon(self.config, self.parts, None, keep_memory=True)
        self.serving = self.loop.create_task(self.daemon.serve())
        self.set_faults(self.faults)

    @property
    def _resizes(self) -> bool:
        """Whether a start has other sizes than the last one."""
        return with_encryption(self._proven, enabled=self.config.spill.encryption.enabled) != (
            self.config
        )

    def set_faults(self, on: bool) -> None:
        """Whether disk and catalog fail now and then."""
        self.faults = on
        self.medium.rate = self.fault_rate if on else 0.0
        SimCatalogWriter.rate = self.fault_rate if on else 0.0

    @property
    def up(self) -> bool:
        """Whether the daemon serves."""
        return self.daemon is not None and bool(self.daemon._listeners)

    def calm_since(self, then_s: float) -> bool:
        """Whether the daemon has served all clients without interruption."""
        return self.up and self.disturbed_s < then_s

    def kill(self, why: str) -> None:
        """SIGKILL; the service manager starts the daemon again."""
        assert self.loop is not None
        self.counts[why] += 1
        self.disturbed_s = self.sim.now_s
        self.killed_at[f"after {self.loop.last}"] += 1
        for place in self.loop.awaiting():
            self.killed_at[f"await {place}"] += 1
        self.medium.killed = True
        self.loop.kill()
        self._bury()
        self.sim.outside.call_later(self.sim.random.uniform(0.01, 0.3), self.boot)

    def _bury(self) -> None:
        """Close what the daemon's process had open, without a word to anybody."""
        self._count_life()
        if self.daemon is not None:
            for fd in self.daemon._watch._fds.values():
                self.loop.remove_reader(fd)
                os.close(fd)
        parts, self.daemon = self.parts, None
        if parts is None:
            return
        for file in parts.spill_files.files:
            if file.payload_fd >= 0:  # a graceful stop has not come so far
                file.close()
        for arena in parts.arenas.values():
            arena.close()
        parts.catalog._db.close()
        parts.close_locks()

    def reboot(self) -> bool:
        """The power goes: all processes and memory with it, and what was not synced.

        Returns whether an older catalog came back."""
        for process in list(self._processes.values()):
            if not process.dead and process is not self.loop:
                process.kill()
        self.kill("reboots")
        for fd in self.kept.values():
            os.close(fd)
        self.kept.clear()
        self.medium.lose_power()
        if not self.power and self.snapshots and self.sim.chance(0.5):
            self.counts["older catalogs"] += 1
            self._older_catalog(self.sim.random.choice(self.snapshots))
            return True
        return False

    def snapshot(self) -> None:
        """Remember the catalog as it is now: without power durability, it may come back."""
        if self.parts is not None and self.daemon is not None:
            with contextlib.suppress(sqlite3.ProgrammingError):  # it is stopping
                self.snapshots.append(self.parts.catalog._db.serialize())
                del self.snapshots[:-3]

    def _older_catalog(self, content: bytes) -> None:
        directory = Path(self.config.state_dir)
        for name in ("catalog.db-wal", "catalog.db-shm"):
            (directory / name).unlink(missing_ok=True)
        (directory / "catalog.db").write_bytes(content)

    def stop(self) -> None:
        """SIGTERM; the daemon is started again when it has ended."""
        if self.daemon is None or self.daemon._stopping:
            return
        self.counts["graceful stops"] += 1
        self.disturbed_s = self.sim.now_s
        self.daemon._stop.set()
        self.serving.add_done_callback(self._stopped)

    def _stopped(self, task: Any) -> None:
        if self.loop is None or self.loop.dead:
            return
        if task.exception() is not None:
            self.sim.failure = task.exception()
        self.loop.kill()
        self._count_life()
        self.daemon = None
        self.sim.outside.call_later(self.sim.random.uniform(0.01, 0.3), self.boot)

    def _count_life(self) -> None:
        """What the daemon has counted in this life."""
        if self.daemon is not None:
            for kind, count in self.daemon.state.world.counters.items():
                if not kind.endswith("_bytes"):
                    self.counts[f"daemon: {kind}"] += count

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
        if not self._was_up and self.up:
            self._was_up, self.disturbed_s = True, self.sim.now_s + RETURN_S
        if self.daemon.faults:
            raise Failure(f"{self.daemon.faults} faults inside the daemon; see the log")
        world = self.daemon.state.world
        if world.now_s != self._checked_s:  # the core has run
            self._checked_s = world.now_s
            self._count_again(world)

    def _count_again(self, world: World) -> None:
        """Each time that a sum has changed, it must be right; now and then all is recounted."""
        books = _books(world)
        if books == self._books:
            return
        self._books = books
        self._due -= 1
        if self._due <= 0:
            self._due = self.check_every
            self.recount()

    def recount(self) -> None:
        """All tables of the core against each other."""
        if self.daemon is not None:
            world = self.daemon.state.world
            self.counts["recounts"] += 1
            self.counts["recounts with slots in quarantine"] += any(
                part.counts[QUARANTINED] for pool in world.pools for part in (pool.dram, pool.nvme)
            )
            self._homeless = self._homeless and homeless(world)
            validate(world, may_be_homeless=self._homeless)

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
        times, drawn = Times(self.sim), Secrets(self.sim)
        with contextlib.ExitStack() as stack:

            def put(owner: Any, name: str, value: Any) -> None:
                if name in vars(owner):
                    stack.callback(setattr, owner, name, vars(owner)[name])
                else:
                    stack.callback(delattr, owner, name)
                setattr(owner, name, value)

            for logger in map(logging.getLogger, ("kvtier_client", "kvtierd")):
                stack.callback(logger.setLevel, logger.level)
                logger.setLevel(logging.CRITICAL)  # thousands of faults are meant to happen

            for module in _users(len(sys.modules)):
                if vars(module).get("time") is time:
                    put(module, "time", times)
                if vars(module).get("secrets") is secrets:
                    put(module, "secrets", drawn)
            for module in (kvtierd.server, kvtierd.daemon, kvtierd.restore):
                put(module, "process_start_time", self.start_time)
            put(kvtierd.server, "_bind", self.network.listen)
            for kind in (Connection, Peer, Group, Node, Running):
                put(kind, "__hash__", hash_by_age)
            put(kvtierd.daemon, "CatalogWriter", SimCatalogWriter)
            put(kvtierd.daemon, "TICK_S", self.tick_s)
            put(kvtierd.start, "open_keeper", lambda *_: SimKeeper(self.kept))
            put(kvtierd.start, "open_spill", functools.partial(open_spill, kernel=self.medium))
            put(kvtierd.tiers.spill, "WorkPool", SimPool)
            put(kvtierd.tiers.memory, "require_memory", lambda *_: None)
            put(kvtierd.turns, "SLICE_S", self.slice_s)
            put(kvtierd.tiers.headers, "os", HeaderCalls(self.medium))
            put(ArenaHeaders, "write_bodies", self._store(ArenaHeaders.write_bodies))
            put(ArenaHeaders, "write_body", self._store(ArenaHeaders.write_body))
            put(FileCipher, "encrypt", self._encrypt(FileCipher.encrypt))
            put(os, "pidfd_open", self.pidfd_open)
            put(looping, "new_socket", self.network.new_socket)
            put(link, "random", self.sim.random)
            yield

    def _encrypt(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Encrypt, and tell the medium what is behind the bytes that it gets."""

        def encrypt(
            cipher: Any, known: Any, places: Any, sources: Any, into: Any, size_bytes: int
        ) -> Any:
            words = method(cipher, known, places, sources, into, size_bytes)
            for i, source in enumerate(sources if words is not None else ()):
                first = i * size_bytes
                self.medium.note_encrypted(source, into[first : first + len(source)])
            return words

        return encrypt

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


@functools.lru_cache(maxsize=1)
def _users(loaded: int) -> list[ModuleType]:
    """Modules of daemon and client that use a clock or secrets; found anew as others are loaded."""
    names = [x for x in sys.modules if x.partition(".")[0] in ("kvtierd", "kvtier_client")]
    return [
        module for module in map(sys.modules.__getitem__, names)
        if vars(module).keys() & {"time", "secrets"}
    ]  # fmt: skip


Books = tuple[Any, ...]


def _books(world: World) -> Books:
    """Sums that change with nearly all that the core does. Errors: Failure if one cannot be."""
    books: list[Any] = [world.seq, world.next_batch, len(world.batches), world.table.used]
    for pool in world.pools:
        for part in (pool.dram, pool.nvme):
            if sum(part.counts) != part.total or min(part.counts) < 0:
                raise Failure(f"free + used + leased + quarantined: {part.counts} of {part.total}")
            books.append(tuple(part.counts))
        books += (pool.held, pool.clean, pool.promised, pool.moving)
    books += [len(x) for t in world.tenants.values() for x in (t.leases, t.waiting, t.loading)]
    return tuple(books)


def _once(call: Callable[[], None]) -> Callable[[], None]:
    left = [call]
    return lambda: left.pop()() if left else None
