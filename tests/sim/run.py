"""One seed's history: clients at work, fate at play, then everything is read, and drained."""

import contextlib
import functools
import gc
import random
import signal
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvtier_client import errors
from kvtier_client.aio import AsyncClient, AsyncSession
from tests.model import white_box
from tests.sim.actor import Actor
from tests.sim.clock import Failure, Sim, SimLoop, forget_ages
from tests.sim.fate import Fate
from tests.sim.hand import KEYED, KEYS
from tests.sim.host import Host
from tests.sim.parts import UIDS
from tests.sim.truth import Truth
from tests.sim.watchers import Operator, Probe

STEPS = 3000
"""Steps of the longest histories before they come to their end."""
SHORTEST = 50
BRIEF = 500
"""Histories of fewer steps have less of everything: whoever comes must also come to rest."""
CLIENTS = 3
WIND_DOWN_STEPS = 300
"""While everybody ends what he is at, fate strikes for as long."""
PATIENCE_S = 600.0
"""Simulated time in which a quiet system must have come to its end."""
HISTORY_MAX_S = 600
"""Real time after which a history that does not end is killed."""


@dataclass(slots=True, eq=False)
class Worker:
    """A client process, alone or one of a group."""

    loop: SimLoop
    tenant: str
    group: bytes
    client: AsyncClient
    actors: list[Actor]
    tasks: list[Any] = field(default_factory=list)


class History:
    """The run of one seed."""

    def __init__(self, seed: int, steps: int = STEPS) -> None:
        self.seed, self.steps = seed, steps
        self.sim = Sim(seed)
        self.truth = Truth()
        self.brief = steps < BRIEF
        self.host = Host(self.sim, brief=self.brief)
        self.clients = CLIENTS - 1 if self.brief else CLIENTS
        self.crews = (1, 1, 1, 2) if self.brief else (1, 1, 2, 3)
        """How many actors a client has, to draw from."""
        self.workers: list[Worker] = []
        self.read: dict[bytes, AsyncSession] = {}
        """Sessions whose blocks were all read at the end, by their tokens."""
        self.bereaved: set[bytes] = set()
        """Groups of which a process was killed."""
        self.counts = self.sim.counts
        self.ending = False
        """Nobody begins anything new."""
        self.fate = Fate(self)

    def run(self) -> None:
        """Everything. Errors: Failure, or whatever was raised where nothing should be."""
        collecting = gc.isenabled()
        gc.disable()
        with self.host.installed():
            try:
                self._run()
            finally:
                self._count()
                self.host.close()
                forget_ages()
                if collecting:
                    gc.enable()

    def _run(self) -> None:
        sim, host = self.sim, self.host
        self.operator = Operator(self)
        host.boot()
        sim.run_until(lambda: host.up, 60.0, host.check)
        host.set_faults(True)
        self.probe = Probe(self)
        self.crowd()
        end = sim.steps + self.steps

        def after(loop: SimLoop) -> None:
            host.check(loop)
            self.fate.after()

        sim.run_until(lambda: sim.steps >= end, 1e9, after)
        self._wind_down()
        end += WIND_DOWN_STEPS
        sim.run_until(lambda: sim.steps >= end or self._quiet(), 1e9, after)
        self.counts["requests while fate strikes"] = self.counts["requests"]
        self._finish()

    def _count(self) -> None:
        self.counts["steps"] += self.sim.steps
        self.counts["seeds"] += 1
        self.counts["operations"] += sum(a.done for w in self.workers for a in w.actors)

    # --------------------------------------------------------------- clients

    def crowd(self) -> None:
        """See to it that there are clients."""
        while len(self.living) < self.clients and not self.ending:
            self.spawn()
        if self.probe.loop.dead:
            self.probe = Probe(self, self.probe.token)
            self.probe.stopping = self.ending

    def spawn(self, tenant: str | None = None, actors: int | None = None) -> Worker:
        """A client process begins, in a group of its own or with others."""
        sim = self.sim
        friends = [] if tenant else self.living
        tenant = tenant or sim.random.choice("aab")
        count = actors if actors is not None else sim.random.choice(self.crews)
        group = sim.random.randbytes(16)
        if friends and sim.chance(0.4):
            friend = sim.random.choice(friends)
            tenant, group = friend.tenant, friend.group
        loop = self.host.process("client", UIDS[tenant])
        client = AsyncClient(
            self.host.path, loop.name, 20.0, group, b"secret of " + group[:6], copy_threads=1
        )
        client._driver.inline_copy_bytes = 0 if sim.chance(0.7) else 1 << 20
        made = [
            Actor(sim, self.truth, self.host.medium, client, tenant, count == 1)
            for _ in range(count)
        ]
        worker = Worker(loop, tenant, group, client, made)
        self.workers.append(worker)

        def begin() -> None:
            for actor in made:
                actor.loop, actor.colleagues = loop, lambda: self.colleagues(worker)
                task = loop.create_task(actor.run())
                task.add_done_callback(self.ended)
                worker.tasks.append(task)

        loop.call_soon(begin)
        return worker

    def ended(self, task: Any) -> None:
        """A task of a client has ended, as it should, or by a failure of this history."""
        if not task.cancelled() and task.exception() is not None and self.sim.failure is None:
            self.sim.failure = task.exception()

    @property
    def living(self) -> list[Worker]:
        """Clients that were not killed."""
        return [worker for worker in self.workers if not worker.loop.dead]

    def colleagues(self, worker: Worker) -> list[Worker]:
        """The other living processes of its group."""
        return [x for x in self.living if x.group == worker.group and x is not worker]

    def bury(self) -> None:
        """The sessions of dead clients are anybody's."""
        for worker in self.workers:
            if worker.loop.dead:
                self.bereaved.add(worker.group)
                self.counts["operations"] += sum(actor.done for actor in worker.actors)
                for actor in worker.actors:
                    if actor.session is not None:
                        actor.session.busy = False
        self.workers = self.living

    # ------------------------------------------------------------------- end

    def _wind_down(self) -> None:
        """Everybody ends what he is at, while fate still strikes."""
        self.ending = self.probe.stopping = True
        for worker in self.living:
            for actor in worker.actors:
                actor.stopping = True

    def _finish(self) -> None:
        """All comes to rest; all that must be there is read; all that was taken comes back."""
        sim, host = self.sim, self.host
        host.set_faults(False)
        host.medium.calls_left = -1
        sim.run_until(self._quiet, PATIENCE_S, host.check)
        began_s = sim.now_s
        self._all(self.living, self._close)
        heard = host.calm_since(began_s)
        for worker in self.living:
            if worker.group in self.bereaved or not heard:
                worker.loop.kill()  # what the dead one leased, or nobody took back, goes with it
        tenants = {session.tenant for session in self.truth.sessions}
        last = [self.spawn(tenant, actors=0) for tenant in UIDS if tenant in tenants]
        self._all(last, self._verify)
        self._all(last, self._drain)
        self._all(last, self._close)
        assert host.daemon is not None
        world = host.daemon.state.world
        sim.run_until(lambda: self._empty(world), PATIENCE_S, host.check)
        host.recount()
        unanswered = [talk.open for talk in host.network.talks.values() if talk.open]
        if unanswered:
            raise Failure(f"requests {unanswered} were never answered")
        white_box.check_empty(SimpleNamespace(world=world))  # type: ignore[arg-type]

    @staticmethod
    def _empty(world: Any) -> bool:
        return not (
            world.table.used or world.batches or any(t.leases for t in world.tenants.values())
        )

    def _quiet(self) -> bool:
        probe = self.probe.task
        if probe is None or not probe.done() or self.sim.now_s <= self.sim.stuck_until_s:
            return False
        tasks = (task for worker in self.living for task in worker.tasks)
        return self.host.up and all(task.done() for task in tasks)

    def _all(self, workers: list[Worker], step: Callable[[Worker], Any]) -> None:
        """Have all of them take a step; it must succeed."""
        tasks: list[Any] = []
        for worker in workers:
            worker.loop.call_soon(
                lambda each: tasks.append(each.loop.create_task(step(each))), worker
            )
        self.sim.run_until(
            lambda: len(tasks) == len(workers) and all(task.done() for task in tasks),
            PATIENCE_S, self.host.check,
        )  # fmt: skip
        for task in tasks:
            task.result()

    @staticmethod
    async def _close(worker: Worker) -> None:
        with contextlib.suppress(errors.KvtierError):  # a one-way commit that nobody asked after
            await worker.client.close()

    async def _verify(self, worker: Worker) -> None:
        actor = Actor(
            self.sim, self.truth, self.host.medium, worker.client, worker.tenant, alone=True
        )
        actor.wait_s = 60.0
        for session in self.truth.sessions:
            if session.tenant != worker.tenant or not session.opened or session.ended:
                continue
            if session.adrift:
                await actor.revisit(session)
            else:
                await actor.verify(session)
                self.read[session.token] = actor.handle
        self.counts["blocks verified at the end"] += actor.done

    async def _drain(self, worker: Worker) -> None:
        for session in self.truth.sessions:
            if session.tenant == worker.tenant:
                try:
                    handle = self.read.pop(session.token, None)
                    handle = handle or await worker.client.resume_session(session.token)
                except errors.UnknownSession:
                    if session.opened and not session.ended:
                        raise
                    continue
                if session.closed and not session.adrift:
                    raise Failure("a session that was closed is there again")
                await handle.close()
        await worker.client.remove(KEYED, KEYS)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What some seeds came to: what was counted, and the first that failed, if any."""

    counts: Counter[str]
    killed_at: Counter[str]
    digest: int
    seed: int = 0
    problem: str = ""


def run_seeds(first: int, stop: int, longest: int, check_every: int = 0) -> Outcome:
    """Run the histories of seeds `first .. stop`, up to the first that fails."""
    counts: Counter[str] = Counter()
    killed_at: Counter[str] = Counter()
    digest = 0
    for seed in range(first, stop):
        history = History(seed, length_of(seed, longest))
        history.host.check_every = check_every or history.host.check_every
        signal.alarm(HISTORY_MAX_S)
        try:
            history.run()
        except BaseException:
            return Outcome(counts + history.counts, killed_at, digest, seed, traceback.format_exc())
        finally:
            signal.alarm(0)
        counts += history.counts
        killed_at += history.host.killed_at
        digest ^= history.sim.digest
        del history
        gc.collect()
        _freeze()
    return Outcome(counts, killed_at, digest)


@functools.cache
def _freeze() -> None:
    """Modules stay: the next collections need not look at them."""
    gc.freeze()


def length_of(seed: int, longest: int) -> int:
    """Steps of a seed's history before its end: many are short."""
    shortest = min(max(SHORTEST, longest // 10), longest)
    return int(shortest * (longest / shortest) ** random.Random(seed).random())
