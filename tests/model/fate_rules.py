"""Rules of fate: the disk, time, eviction, lost connections, dead processes, a killed daemon."""

IMPORTS


class FateRules(Base):
    """Rules of fate: the disk, time, eviction, lost connections, dead processes, a killed daemon."""

    @rule(at=small, status=st.sampled_from([Status.OK] * 4 + [Status.FULL, Status.UNSURE]),
          only=st.one_of(st.none(), few))  # fmt: skip
    def finish_job(self, at: int, status: Status, only: int | None) -> None:
        if self.host.disk.pending:
            self.host.finish(at % len(self.host.disk.pending), status, only)

    @rule()
    def finish_all(self) -> None:
        for _ in range(len(self.host.disk.pending)):
            self.host.finish()

    @rule(slot=st.integers(0, 39))
    def corrupt(self, slot: int) -> None:
        """Bytes on NVMe change behind the daemon's back."""
        disk = self.host.disk
        if slot // disk.geometry.max_slots in disk.slots:
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

    @rule(w=small)
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

    @rule(w=small)
    def kill(self, w: int) -> None:
        """A process dies, and another one takes its place."""
        worker = self.workers.pop(w % len(self.workers))
        self.host.kill(worker.sim)
        same = [x for x in self.workers if (x.tenant, x.sim.group) == (worker.tenant, worker.sim.group)]
        if same:  # its leases are the group's: the others may end them
            same[0].writes |= worker.writes
            same[0].reads |= worker.reads
        self.spawn(worker.tenant, worker.sim.group)
        self.workers[-1].sessions = set(same[0].sessions) if same else set()

    @rule(dead=st.lists(few, max_size=2))
    def crash(self, dead: list[int]) -> None:
        """The daemon is killed and starts again; some clients die meanwhile."""
        for worker in self.workers:
            worker.sim.peer = None
            worker.waits.clear()
        self.host.crash()
        for i in dead:
            self.host.processes.pop(self.workers[i % len(self.workers)].sim.pid, None)
        self.host.recover()
        alive = [x for x in self.workers if x.sim.pid in self.host.processes]
        for worker in [x for x in self.workers if x not in alive]:
            self.workers.remove(worker)
            self.spawn(worker.tenant, worker.sim.group)

    @precondition(lambda self: any(x.promise for w in self.workers for x in w.writes.values()))
    @rule(w=small)
    def draw_promise(self, w: int) -> None:
        """What was promised can be had, once readers have let go."""
        for each in self.workers:
            if each.connected:
                for lease_id in [*each.reads, *each.pins]:
                    each.sim.ask(wire.Release, lease_id)
                each.reads.clear()
                each.pins.clear()
        self.finish_all()
        holders = [
            (each, x) for each in self.workers for x in each.writes.values()
            if x.promise and not x.expired and each.connected
        ]  # fmt: skip
        if not holders or any(each.reads for each in self.workers):
            return
        worker, source = holders[w % len(holders)]
        counter = worker.sim.counter()
        take = source.promise
        request = worker.sim.send(
            wire.Reserve, counter, PRINTS[source.layout], take, 0, source.id, 30.0
        )
        wait = Waiting(request, "write", source.layout, counter, drawn=source)
        worker.waits.append(wait)
        for _ in range(30):
            self.collect()
            if wait not in worker.waits:
                break
            self.finish_all()
            self.host.tick(0.2)
        assert wait not in worker.waits, "a promise could not be drawn"
        assert worker.writes.get(worker.sim.member << 32 | counter), "a promise was refused"
