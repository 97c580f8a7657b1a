"""One seed's history: clients at work, fate at play, then everything is read, and drained."""

import asyncio
import contextlib
import gc
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvtier_client import errors
from kvtier_client.aio import AsyncClient
from kvtierd.core.blocks import F_FILLING, NONE
from kvtierd.core.sessions import token_hash
from tests.model import white_box
from tests.sim.actor import KEYED, KEYS, LAYOUTS, Actor
from tests.sim.clock import Failure, Sim, SimLoop
from tests.sim.host import UIDS, Host
from tests.sim.truth import Truth

STEPS = 3000
"""Steps of a history before it comes to its end."""
CLIENTS = 3
PATIENCE_S = 300.0
"""Simulated time in which a quiet system must have come to its end."""


@dataclass(slots=True, eq=False)
class Worker:
    """A client process."""

    loop: SimLoop
    tenant: str
    client: AsyncClient
    actors: list[Actor]
    tasks: list[Any] = field(default_factory=list)


class History:
    """The run of one seed."""

    def __init__(self, seed: int, steps: int = STEPS) -> None:
        self.seed, self.steps = seed, steps
        self.sim = Sim(seed)
        self.truth = Truth()
        self.host = Host(self.sim)
        self.workers: list[Worker] = []
        self.counts: Counter[str] = Counter()

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
                if collecting:
                    gc.enable()

    def _run(self) -> None:
        sim, host = self.sim, self.host
        host.boot()
        sim.run_until(lambda: host.up, 60.0, host.check)
        host.set_faults(True)
        for _ in range(CLIENTS):
            self.spawn()
        sim.outside.call_later(0.5, self.fate)
        end = sim.steps + self.steps
        sim.run_until(lambda: sim.steps >= end, 1e9, host.check)
        self._finish()

    def _count(self) -> None:
        self.counts += self.host.counts + self.host.medium.counts
        self.counts["steps"] += self.sim.steps
        self.counts["seeds"] += 1
        self.counts["operations"] += sum(a.done for w in self.workers for a in w.actors)

    # --------------------------------------------------------------- clients

    def spawn(self, tenant: str | None = None, actors: int | None = None) -> Worker:
        """A client process begins."""
        sim = self.sim
        tenant = tenant or sim.random.choice("aab")
        count = actors if actors is not None else sim.random.choice((1, 1, 2, 3))
        loop = self.host.process("client", UIDS[tenant])
        group = sim.random.randbytes(16)
        client = AsyncClient(
            self.host.path, loop.name, 20.0, group, b"secret of " + group[:6], copy_threads=1
        )
        client._driver.inline_copy_bytes = 0 if sim.chance(0.7) else 1 << 20
        made = [
            Actor(sim, self.truth, self.host.medium, client, tenant, count == 1)
            for _ in range(count)
        ]
        worker = Worker(loop, tenant, client, made)
        self.workers.append(worker)

        def begin() -> None:
            for actor in made:
                task = loop.create_task(actor.run())
                task.add_done_callback(self._ended)
                worker.tasks.append(task)

        loop.call_soon(begin)
        return worker

    def _ended(self, task: Any) -> None:
        if not task.cancelled() and task.exception() is not None and self.sim.failure is None:
            self.sim.failure = task.exception()

    @property
    def living(self) -> list[Worker]:
        """Clients that were not killed."""
        return [worker for worker in self.workers if not worker.loop.dead]

    def bury(self) -> None:
        """The sessions of dead clients are anybody's."""
        for worker in self.workers:
            if worker.loop.dead:
                self.counts["operations"] += sum(actor.done for actor in worker.actors)
                for actor in worker.actors:
                    if actor.session is not None:
                        actor.session.busy = False
        self.workers = self.living

    # ------------------------------------------------------------------ fate

    def fate(self) -> None:
        """What happens now and then to a machine."""
        sim, host = self.sim, self.host
        if not host.faults:
            return
        what = sim.random.choices(
            (self.kill_daemon, self.kill_in_call, self.reboot, host.stop, self.kill_client,
             self.stop_process, self.cut, self.corrupt, self.evict),
            (5, 7, 1, 2, 6, 8, 5, 3, 5),
        )[0]  # fmt: skip
        if host.up:
            what()
        while len(self.living) < CLIENTS:
            self.spawn()
        sim.outside.call_later(sim.random.choice((0.05, 0.3, 1.0, 2.0)), self.fate)

    def kill_daemon(self) -> None:
        self.host.kill("kills between events")

    def kill_in_call(self) -> None:
        self.host.medium.calls_left = self.sim.random.randint(1, 60)

    def kill_client(self) -> None:
        self.counts["clients killed"] += 1
        self.sim.random.choice(self.living).loop.kill()
        self.bury()

    def stop_process(self) -> None:
        """SIGSTOP, for longer than a lease lives."""
        self.counts["SIGSTOP"] += 1
        loops = [*(worker.loop for worker in self.living), self.host.loop]
        loop = self.sim.random.choice(loops)
        assert loop is not None
        loop.stopped_until_s = self.sim.now_s + self.sim.random.choice((0.2, 4.0, 9.0))

    def cut(self) -> None:
        """A connection breaks."""
        socks = [sock for worker in self.living for sock in worker.loop.sockets if sock.peer]
        if socks:
            self.counts["connections cut"] += 1
            peer = self.sim.random.choice(socks).peer
            assert peer is not None
            peer._later(peer, peer._end)
            peer._later(peer.peer, peer.peer._end)

    def corrupt(self) -> None:
        file = self.host.parts.spill_files.files[0]
        pages = file.headers.geometry.payload_bytes // 4096
        self.host.medium.corrupt(file.payload_fd, self.sim.random.randrange(pages))

    def evict(self) -> None:
        """The operator has blocks moved."""
        daemon, count = self.host.daemon, self.sim.random.randint(1, 40)
        assert daemon is not None

        def work() -> None:
            for tenant in daemon.state.world.tenants.values():
                daemon.state.evictor.evict(tenant, count)
            daemon.perform()

        daemon._loop.call_soon(work)

    def reboot(self) -> None:
        """The power goes; under "power", what had reached NVMe must be there again."""
        kept = self._on_nvme() if self.host.power else {}
        self.host.reboot()
        self.bury()
        for session in self.truth.sessions:
            session.forget_after_reboot(
                kept.get((session.tenant, token_hash(session.token)), set())
            )

    def _on_nvme(self) -> dict[tuple[str, bytes], set[tuple[int, int, int]]]:
        assert self.host.daemon is not None
        world = self.host.daemon.state.world
        kept: dict[tuple[str, bytes], set[tuple[int, int, int]]] = {}
        for tenant in world.tenants.values():
            for session in tenant.sessions.values():
                kept[tenant.name, session.token_hash] = {
                    (node.id, part, page + run.start)
                    for node in session.nodes.values()
                    for part, run in enumerate(node.runs)
                    for page in np.flatnonzero(run.rows != NONE).tolist()
                    if world.table.nvme[run.rows[page]] != NONE
                    and not world.table.flags[run.rows[page]] & F_FILLING
                }
        return kept

    # ------------------------------------------------------------------- end

    def _finish(self) -> None:
        sim, host = self.sim, self.host
        host.set_faults(False)
        host.medium.calls_left = -1
        for worker in self.living:
            for actor in worker.actors:
                actor.stopping = True
        sim.run_until(self._quiet, PATIENCE_S, host.check)
        self._all(self.living, self._close)
        last = [self.spawn(tenant, actors=0) for tenant in UIDS]
        self._all(last, self._verify)
        self._all(last, self._drain)
        self._all(last, self._close)
        end_s = sim.now_s + 20.0
        sim.run_until(lambda: sim.now_s > end_s, PATIENCE_S, host.check)
        assert host.daemon is not None
        unanswered = [talk.open for talk in host.network.talks.values() if talk.open]
        if unanswered:
            raise Failure(f"requests {unanswered} were never answered")
        white_box.check_empty(SimpleNamespace(world=host.daemon.state.world))  # type: ignore[arg-type]

    def _quiet(self) -> bool:
        return self.host.up and all(t.done() for w in self.living for t in w.tasks)

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
        for session in self.truth.sessions:
            if session.tenant == worker.tenant and session.opened and not session.ended:
                await actor.verify(session)
        self.counts["blocks verified at the end"] += actor.done
        self.counts["of these without room to read"] += actor.crowded_out

    async def _drain(self, worker: Worker) -> None:
        for each in LAYOUTS:
            await worker.client.register_layout(each)
        for session in self.truth.sessions:
            if session.tenant == worker.tenant:
                try:
                    handle = await worker.client.resume_session(session.token)
                except errors.UnknownSession:
                    if session.opened and not session.ended:
                        raise
                    continue
                await handle.close()
        await worker.client.remove(KEYED, KEYS)
        await asyncio.sleep(1.0)


def run_one(seed_and_steps: tuple[int, int]) -> tuple[int, str, Counter[str]]:
    """A seed, what went wrong with it (or nothing), and what was counted."""
    history = History(*seed_and_steps)
    try:
        history.run()
    except BaseException:
        return history.seed, traceback.format_exc(), history.counts
    return history.seed, "", history.counts
