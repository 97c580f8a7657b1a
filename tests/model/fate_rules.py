"""Rules of fate: disk, time, eviction, lost connections, dead processes, a killed daemon."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvtier_client import wire
from kvtierd.tiers.spill_io import Status
from tests.model import white_box
from tests.model.base import LAYOUTS, Base, few, small
from tests.model.clients import Worker
from tests.model.reference import Session


class FateRules(Base):
    """Rules of fate."""

    @rule(at=small, status=st.sampled_from([Status.OK] * 4 + [Status.FULL, Status.UNSURE]),
          only=st.one_of(st.none(), few))  # fmt: skip
    def finish_job(self, at: int, status: Status, only: int | None) -> None:
        if self.host.disk.pending:
            self.host.finish(at % len(self.host.disk.pending), status, only)

    @rule()
    def disk_catches_up(self) -> None:
        self.finish_all()

    @rule(slot=st.integers(0, 39))
    def corrupt(self, slot: int) -> None:
        """Bytes on NVMe change behind the daemon's back."""
        disk = self.host.disk
        slab, place = divmod(slot, disk.geometry.max_slots)
        if slab in disk.slots and place < disk.slots[slab].slots:
            first, _ = disk.place(slot)
            self.hurt.add(int(disk.pages[first]))
            disk.pages[first] ^= np.uint64(1 << 40)

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0, 61.0]))
    def tick(self, seconds: float) -> None:
        self.host.tick(seconds)

    @rule(n=st.integers(1, 30), tenant=st.sampled_from("ab"))
    def evict(self, n: int, tenant: str) -> None:
        self.host.state.evictor.evict(self.host.tenant(tenant), n)
        self.host.perform()

    @rule(w=small, what=small, dead=st.lists(few, max_size=2))
    def fate(self, w: int, what: int, dead: list[int]) -> None:
        """What happens seldom, so that histories grow in between."""
        if what in (2, 7):
            self.crash(dead)
        elif what == 3:
            self.reboot()
        elif what == 6:
            self.kill(w)
        elif what in (4, 5):
            self.disconnect(w)

    def reboot(self) -> None:
        """The host goes down: of the blocks, those on NVMe are there again.

        Where only an earlier, shorter copy of a page was on NVMe, that one is."""
        for session in self.sessions.values():
            on_nvme = white_box.on_nvme(self.host, session)
            for node in session.nodes.values():
                for part, pages in enumerate(node.pages):
                    for page, block in pages.items():
                        block.held &= (node.id, part, page) in on_nvme
        for values in self.keys.values():
            self.hurt |= values
        groups = [(worker.tenant, worker.sim.group) for worker in self.workers]
        self.workers = []
        self.host.reboot()
        self.host.recover()
        for session in self.sessions.values():
            self.adopt(session)
        for tenant, group in groups:
            self.spawn(tenant, group)

    def adopt(self, session: Session) -> None:
        """Believe what is stored now, if it was committed once under its name.

        A CACHED block that was dropped may be there again while its header is not cleared, and a
        shorter copy too, with what was said of it before the longer one came."""
        there = white_box.stored(self.host, session)
        for node in session.nodes.values():
            for part, pages in enumerate(node.pages):
                for page, block in list(pages.items()):
                    if (node.id, part, page) not in there:
                        assert not block.held or block.value in self.hurt
                        del pages[page]
                        continue
                    found = white_box.value(self.host, session, node.id, part, page)
                    if found != block.value and found in block.older:
                        assert not block.held
                        pages[page] = white_box.block(self.host, session, node.id, part, page)
                        for fold in node.folds:  # one of when the older copy was there is its own
                            same = [x.value == found for x in fold.blocks]
                            if any(same):
                                fold.blocks[same.index(True)] = pages[page]

    def disconnect(self, w: int) -> None:
        worker = self.worker(w)
        if worker is not None:
            worker.waits.clear()
            worker.sim.disconnect()

    @rule(w=small)
    def reconnect(self, w: int) -> None:
        away = [each for each in self.workers if not each.connected]
        if away:
            self.come_back(away[w % len(away)])

    def come_back(self, worker: Worker) -> None:
        worker.reconnect(self.host)
        for each in LAYOUTS:
            assert isinstance(worker.sim.ask(wire.RegisterLayout, each), wire.LayoutRegistered)
        for name in sorted(worker.sessions):
            reply = worker.sim.ask(wire.ResumeSession, name[1])
            assert isinstance(reply, wire.SessionReply), reply

    def kill(self, w: int) -> None:
        """A process dies, and another one takes its place."""
        worker = self.workers.pop(w % len(self.workers))
        self.host.kill(worker.sim)
        same = [
            x for x in self.workers if (x.tenant, x.sim.group) == (worker.tenant, worker.sim.group)
        ]
        if same:  # its leases are the group's: the others may end them
            same[0].writes |= worker.writes
            same[0].reads |= worker.reads
        self.spawn(worker.tenant, worker.sim.group)
        for name in sorted(same[0].sessions if same else ()):
            self.workers[-1].sessions.add(name)
            reply = self.workers[-1].sim.ask(wire.ResumeSession, name[1])
            assert isinstance(reply, wire.SessionReply), reply

    def crash(self, dead: list[int]) -> None:
        """The daemon is killed and starts again; some clients die meanwhile."""
        for worker in self.workers:
            worker.sim.peer = None
            worker.waits.clear()
        self.host.crash()
        for i in dead:
            self.host.processes.pop(self.workers[i % len(self.workers)].sim.pid, None)
        self.host.recover()
        for session in self.sessions.values():
            self.adopt(session)
        alive = [x for x in self.workers if x.sim.pid in self.host.processes]
        for worker in [x for x in self.workers if x not in alive]:
            self.workers.remove(worker)
            self.spawn(worker.tenant, worker.sim.group)
