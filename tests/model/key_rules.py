"""Rules of keyed blocks: reserve, commit, look up, acquire, hold, remove."""

from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvtier_client import errors, wire
from tests.model.base import CAPACITY, KEYS, PRINTS, QUOTA, Base, few, small
from tests.model.clients import Waiting
from tests.model.harness import pack
from tests.model.reference import TOKENS


class KeyRules(Base):
    """Rules of keyed blocks: reserve, commit, look up, acquire, hold, remove."""

    @rule(w=small, k=small, count=st.integers(1, 4), wait_s=st.sampled_from([0.0, 5.0]))
    def reserve_keys(self, w: int, k: int, count: int, wait_s: float) -> None:
        worker = self.worker(w)
        if worker is None:
            return
        keys = self.key_run(k, count)
        counter = worker.sim.counter()
        request = worker.sim.send(wire.ReserveKeys, counter, PRINTS[2], b"".join(keys), wait_s)
        self.begin_wait(
            worker, Waiting(request, "write", 2, counter, keys=keys), patient=wait_s > 0
        )

    @staticmethod
    def key_run(k: int, count: int) -> list[bytes]:
        first = k % len(KEYS)
        return KEYS[first : first + count]

    @rule(w=small, lease=small)
    def commit_keys(self, w: int, lease: int) -> None:
        worker = self.worker(w)
        chosen = worker and self.pick([x for x in worker.writes.values() if x.keys], lease)
        if not worker or not chosen:
            return
        index = list(chosen.open)
        for at in index:
            chosen.open[at] = self.fresh_value()
            worker.sim.write(chosen.offsets[at], self.pages(2), chosen.open[at])
        keys = [chosen.keys[at] for at in index]
        pages = pack(*[KEYS.index(key) for key in keys])
        reply = worker.sim.ask(
            wire.CommitKeys, chosen.id, pack(*index), b"".join(keys), pages,
            pack(*[TOKENS] * len(index)),
        )  # fmt: skip
        if chosen.expired:
            assert self.failed(reply, errors.LeaseExpired.code)
            return
        assert isinstance(reply, wire.Done), reply
        for at, key in zip(index, keys, strict=True):
            self.keys.setdefault((worker.tenant, key), set()).add(chosen.open[at])
        del worker.writes[chosen.id]

    @rule(w=small, k=small, count=st.integers(1, 4), lease=st.booleans())
    def lookup(self, w: int, k: int, count: int, lease: bool) -> None:
        worker = self.worker(w)
        if worker is None:
            return
        keys = self.key_run(k, count)
        counter = worker.sim.counter() if lease else 0
        reply = worker.sim.ask(wire.Lookup, [PRINTS[2]], b"".join(keys), counter)
        if self.failed(reply, QUOTA):
            return
        assert all((worker.tenant, key) in self.keys for key in keys[: reply.hits[0]])
        if reply.lease:
            worker.pins[reply.lease] = keys[: reply.hits[0]]

    @rule(w=small, k=small, count=st.integers(1, 4), wait_s=st.sampled_from([0.0, 5.0]))
    def acquire_keys(self, w: int, k: int, count: int, wait_s: float) -> None:
        worker = self.worker(w)
        if worker is None:
            return
        keys = self.key_run(k, count)
        counter = worker.sim.counter()
        request = worker.sim.send(wire.AcquireKeys, counter, PRINTS[2], b"".join(keys), wait_s)
        wait = Waiting(request, "read", 2, counter, keys=keys)
        self.begin_wait(worker, wait, patient=wait_s > 0)

    @rule(w=small, s=few, k=small, count=st.integers(1, 4), hold=st.booleans())
    def hold(self, w: int, s: int, k: int, count: int, hold: bool) -> None:
        worker = self.worker(w)
        session = worker and self.open_session(worker, s)
        if not worker or not session:
            return
        keys = self.key_run(k, count)
        verb = wire.Hold if hold else wire.Unhold
        reply = worker.sim.ask(verb, session.id, PRINTS[2], b"".join(keys))
        if self.failed(reply, *CAPACITY):
            return
        if hold:
            session.holds |= {(2, key) for key in keys[: reply.count]}
        else:
            session.holds -= {(2, key) for key in keys}

    @rule(w=small, k=small, count=st.integers(1, 4))
    def remove(self, w: int, k: int, count: int) -> None:
        worker = self.worker(w)
        if worker is not None:
            reply = worker.sim.ask(wire.Remove, PRINTS[2], b"".join(self.key_run(k, count)))
            assert isinstance(reply, wire.Done)
