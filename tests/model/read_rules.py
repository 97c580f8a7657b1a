"""Rules of readers: acquire, release, prefetch, cancel."""

from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvtier_client import errors, wire
from tests.model.base import CAPACITY, PRINTS, Base, few, small
from tests.model.clients import Waiting


class ReadRules(Base):
    """Rules of readers: acquire, release, prefetch, cancel."""

    @rule(w=small, s=few, n=small, part=few, first=st.integers(0, 8), count=st.integers(1, 12),
          wait_s=st.sampled_from([0.0, 5.0]))  # fmt: skip
    def acquire(
        self, w: int, s: int, n: int, part: int, first: int, count: int, wait_s: float
    ) -> None:
        worker = self.worker(w)
        session = worker and self.open_session(worker, s)
        if not worker or not session:
            return
        node = self.pick(session.nodes.values(), n)
        part %= len(session.layouts)
        first = self.page(node, part, first)
        which = session.layouts[part]
        counter = worker.sim.counter()
        request = worker.sim.send(
            wire.Acquire, counter, session.id, node.id, PRINTS[which], first, count, wait_s
        )
        readable = session.readable(node, part, first)
        reply = next((m for m in worker.sim.inbox if m.id == request), None)
        if not readable:
            assert self.failed(reply, errors.InvalidArgument.code)
        if readable and readable[0][0].held and readable[0][0].value not in self.hurt:
            assert not isinstance(reply, wire.Error) or reply.code in CAPACITY, reply
        wait = Waiting(request, "read", which, counter, session, node.id, first)
        self.begin_wait(worker, wait, patient=wait_s > 0)

    @rule(w=small, lease=small, twice=st.booleans())
    def release(self, w: int, lease: int, twice: bool) -> None:
        worker = self.worker(w)
        chosen = worker and self.pick([*worker.reads, *worker.pins], lease)
        if not worker or not chosen:
            return
        pinned = worker.pins.pop(chosen, None) is not None
        worker.reads.pop(chosen, None)
        for _ in range(1 + twice):
            reply = worker.sim.ask(wire.Release, chosen)
            assert isinstance(reply, wire.Done) or pinned, reply

    @rule(w=small, s=few, n=small, part=few, first=few, count=st.integers(1, 12), cancel=few)
    def prefetch(
        self, w: int, s: int, n: int, part: int, first: int, count: int, cancel: int
    ) -> None:
        worker = self.worker(w)
        session = worker and self.open_session(worker, s)
        if not worker or not session:
            return
        node = self.pick(session.nodes.values(), n)
        part %= len(session.layouts)
        first = self.page(node, part, first)
        which = session.layouts[part]
        ticket = worker.sim.counter()
        reply = worker.sim.ask(
            wire.Prefetch, ticket, session.id, node.id, PRINTS[which], first, count, 1, 5.0
        )
        if (
            not self.failed(reply, errors.InvalidArgument.code, errors.BlockLost.code)
            and not cancel
        ):
            assert isinstance(worker.sim.ask(wire.Cancel, ticket), wire.Done)
