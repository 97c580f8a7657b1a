"""Rules of writers: reserve, write, commit, abort; swap_out does it all at once."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvtier_client import errors, wire
from tests.model import white_box
from tests.model.base import PRINTS, Base, few, small
from tests.model.clients import Waiting, Worker, Writing
from tests.model.harness import pack
from tests.model.reference import TOKENS, Block, Node, Session


class WriteRules(Base):
    """Rules of writers: reserve, write, commit, abort; swap_out does it all at once."""

    @rule(w=small, which=st.integers(0, 2), n=st.integers(0, 8), ahead=st.integers(0, 4),
          draw=st.integers(0, 5), wait_s=st.sampled_from([0.0, 5.0]))  # fmt: skip
    def reserve(self, w: int, which: int, n: int, ahead: int, draw: int, wait_s: float) -> None:
        worker = self.worker(w)
        if worker is None or n + ahead == 0:
            return
        promising = [x for x in worker.writes.values() if x.promise and x.layout == which]
        source = self.pick(promising, draw) if draw < 3 else None
        self.reserve_now(worker, which, n, ahead, source, wait_s)

    def reserve_now(
        self, worker: Worker, which: int, n: int, ahead: int, source: Writing | None, wait_s: float
    ) -> None:
        counter = worker.sim.counter()
        request = worker.sim.send(
            wire.Reserve, counter, PRINTS[which], n, ahead, source.id if source else 0, wait_s
        )
        wait = Waiting(request, "write", which, counter, ahead=ahead, drawn=source)
        self.begin_wait(worker, wait, patient=wait_s > 0)

    @rule(w=small, s=few, n=small, part=few, first=st.integers(0, 4), count=st.integers(1, 8),
          last=st.integers(1, TOKENS), held=st.booleans())  # fmt: skip
    def swap_out(
        self, w: int, s: int, n: int, part: int, first: int, count: int, last: int, held: bool
    ) -> None:
        """Reserve, write and commit in one go, as a preemption does."""
        worker = self.worker(w)
        session = worker and self.open_session(worker, s)
        if not worker or not session:
            return
        which = session.layouts[part % len(session.layouts)]
        before = set(worker.writes)
        self.reserve_now(worker, which, count, 0, None, 5.0)
        self.finish_all()
        self.collect()
        for lease_id in set(worker.writes) - before:
            self.commit_now(worker, worker.writes[lease_id], session, n, first, count, last, held)

    @rule(w=small, s=few, n=small, first=st.integers(0, 4), count=st.integers(4, 12))
    def swap_out_all(self, w: int, s: int, n: int, first: int, count: int) -> None:
        """The same, for every part of the session."""
        for part in range(2):
            self.swap_out(w, s, n, part, first, count, TOKENS, True)

    @rule(w=small, lease=small, index=small)
    def write(self, w: int, lease: int, index: int) -> None:
        """A copy of a writer lands; also after its lease ran out, while it is disconnected."""
        worker = self.workers[w % len(self.workers)]
        chosen = self.pick(worker.writes.values(), lease)
        if chosen is not None and chosen.open:
            at = self.pick(chosen.open, index)
            chosen.open[at] = self.fresh_value()
            worker.sim.write(chosen.offsets[at], self.pages(chosen.layout), chosen.open[at])

    @rule(w=small, lease=small, s=few, n=small, first=st.integers(0, 6), count=st.integers(1, 6),
          last=st.integers(1, TOKENS), held=st.booleans(),
          twice=st.booleans())  # fmt: skip
    def commit(
        self, w: int, lease: int, s: int, n: int, first: int, count: int, last: int, held: bool,
        twice: bool,
    ) -> None:  # fmt: skip
        worker = self.worker(w)
        session = worker and self.open_session(worker, s)
        chosen = worker and self.pick([x for x in worker.writes.values() if not x.keys], lease)
        if not worker or not session or not chosen or not chosen.open:
            return
        self.commit_now(worker, chosen, session, n, first, count, last, held, twice)

    def commit_now(
        self, worker: Worker, chosen: Writing, session: Session, n: int, first: int, count: int,
        last: int, held: bool, twice: bool = False,
    ) -> None:  # fmt: skip
        node = self.pick(session.nodes.values(), n)
        index = list(chosen.open)[:count]
        pages = [node.start + first + i for i in range(len(index))]
        for at in index:
            if chosen.open[at] <= 1000 or self.used_elsewhere(worker, chosen, at):
                chosen.open[at] = self.fresh_value()
                worker.sim.write(chosen.offsets[at], self.pages(chosen.layout), chosen.open[at])
        valid = [TOKENS] * (len(index) - 1) + [last]
        args = (chosen.id, session.id, node.id, pack(*index), pack(*pages), pack(*valid),
                wire.HELD if held else wire.CACHED)  # fmt: skip
        before = white_box.stored(self.host, session)
        reply = worker.sim.ask(wire.Commit, *args)
        if self.commit_failed(reply, session, node, chosen):
            return
        if twice:
            repeat = worker.sim.ask(wire.Commit, *args)
            assert isinstance(repeat, wire.Done), repeat
            assert repeat.count == reply.count
        if not chosen.expired:
            part = session.layouts.index(chosen.layout)
            for at, page, tokens in zip(index, pages, valid, strict=True):
                new = Block(chosen.open.pop(at), tokens, held)
                known = (node.id, part, page) in before
                self.put(session, node, part, page, new, known)
            if not chosen.open and not chosen.promise:
                del worker.writes[chosen.id]

    def used_elsewhere(self, worker: Worker, lease: Writing, at: int) -> bool:
        """Whether the slot still holds bytes that were committed before it was leased."""
        payload = self.host.arenas[worker.tenant].payload
        first = lease.offsets[at] // 4096
        part = payload[first : first + self.pages(lease.layout)]
        return not (part == lease.open[at]).all() or lease.open[at] in self.committed()

    def committed(self) -> set[int]:
        values = {
            block.value
            for session in self.sessions.values()
            for node in session.nodes.values()
            for pages in node.pages
            for block in pages.values()
        }
        return values.union(*self.keys.values())

    def commit_failed(self, reply: Any, session: Session, node: Node, lease: Writing) -> bool:
        if lease.expired:
            return True if isinstance(reply, wire.Done) else self.failed(
                reply, errors.LeaseExpired.code, errors.UnknownBranch.code,
                errors.LayoutMismatch.code,
            )  # fmt: skip
        if lease.layout not in session.layouts:
            assert self.failed(reply, errors.LayoutMismatch.code)
        elif node.ended:
            assert self.failed(reply, errors.UnknownBranch.code)
        else:
            assert isinstance(reply, wire.Done), reply
            return False
        return True

    def put(
        self, session: Session, node: Node, part: int, page: int, new: Block, known: bool
    ) -> None:
        """A block was committed: the longer one of two has the name, HELD beats CACHED."""
        old = node.pages[part].get(page)
        if old is None or not known:
            new.older = [] if old is None else [*old.older, old.value]
            node.pages[part][page] = new
            return
        actual = white_box.value(self.host, session, node.id, part, page)
        replaces = new.valid > old.valid or (new.held and not old.held)
        if old.value in self.hurt:
            replaces = actual == new.value
        elif actual is not None or old.held:
            assert actual == (new.value if replaces else old.value), (actual, old, new)
        if replaces:
            new.held |= old.held
            new.older = [*old.older, old.value]
            node.pages[part][page] = new

    @rule(w=small, lease=small, twice=st.booleans())
    def abort(self, w: int, lease: int, twice: bool) -> None:
        worker = self.worker(w)
        chosen = worker and self.pick(worker.writes.values(), lease)
        if not worker or not chosen:
            return
        del worker.writes[chosen.id]
        for i in range(1 + twice):
            reply = worker.sim.ask(wire.Abort, chosen.id)
            assert isinstance(reply, wire.Done) or (
                chosen.expired and self.failed(reply, errors.LeaseExpired.code)
            ), (i, reply)

    @rule(w=small)
    def draw_promise(self, w: int) -> None:
        """What was promised can be had, block by block, once readers and other writers let go."""
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
        self.others_let_go()
        if any(lease.open for each in self.workers for lease in each.writes.values()):
            return  # somebody goes on writing: its slots cannot move
        worker, source = holders[w % len(holders)]
        counter = worker.sim.counter()
        request = worker.sim.send(
            wire.Reserve, counter, PRINTS[source.layout], 1, 0, source.id, 30.0
        )
        wait = Waiting(request, "write", source.layout, counter, drawn=source)
        worker.waits.append(wait)
        for _ in range(30):
            self.collect()
            if wait not in worker.waits:
                break
            self.others_let_go()
            self.finish_all()
            self.host.tick(0.2)
        assert wait not in worker.waits, "a promise could not be drawn"
        assert worker.writes.get(worker.sim.member << 32 | counter), "a promise was refused"

    def others_let_go(self) -> None:
        """Writers without a promise abort what they hold."""
        for each in self.workers:
            for lease in [x for x in each.writes.values() if x.open and not x.promise]:
                if each.connected:
                    each.sim.ask(wire.Abort, lease.id)
                    del each.writes[lease.id]
