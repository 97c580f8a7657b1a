"""Rules of sessions: open, resume, close, fork, prune, retention, priority."""

from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvtier_client import errors, wire
from tests.model import white_box
from tests.model.base import CAPACITY, PARTS, TOKENS_OF_SESSIONS, Base, few, small


class SessionRules(Base):
    """Rules of sessions: open, resume, close, fork, prune, retention, priority."""

    @rule(w=small, t=few, parts=few)
    def open(self, w: int, t: int, parts: int) -> None:
        worker = self.worker(w)
        if worker is None:
            return
        self.open_for(worker, self.pick(TOKENS_OF_SESSIONS, t), self.pick(PARTS, parts))

    @rule(w=small, t=few)
    def resume(self, w: int, t: int) -> None:
        worker = self.worker(w)
        if worker is None:
            return
        name = (worker.tenant, self.pick(TOKENS_OF_SESSIONS, t))
        reply = worker.sim.ask(wire.ResumeSession, name[1])
        if name not in self.sessions:
            assert self.failed(reply, errors.UnknownSession.code)
            return
        assert isinstance(reply, wire.SessionReply)
        assert {info.node for info in reply.nodes} == set(self.sessions[name].nodes)
        self.attach(worker, name)

    @rule(w=small, s=few, twice=st.booleans(), sure=few)
    def close(self, w: int, s: int, twice: bool, sure: int) -> None:
        worker = self.worker(w) if sure else None
        session = worker and self.open_session(worker, s)
        if not worker or not session:
            return
        for _ in range(1 + twice):
            assert isinstance(worker.sim.ask(wire.CloseSession, session.id), wire.Done)
        del self.sessions[worker.tenant, session.token]
        for each in self.workers:
            each.sessions.discard((worker.tenant, session.token))

    @rule(w=small, s=few, n=small, tokens=st.integers(0, 24), twice=st.booleans())
    def fork(self, w: int, s: int, n: int, tokens: int, twice: bool) -> None:
        worker = self.worker(w)
        session = worker and self.open_session(worker, s)
        if not worker or not session:
            return
        parent = self.pick(session.nodes.values(), n)
        tokens = max(tokens, parent.fork)
        self.node_ids += 1
        for _ in range(1 + twice):
            reply = worker.sim.ask(wire.Fork, session.id, self.node_ids, parent.id, tokens)
            if parent.ended and tokens > max((c.fork for c in parent.children), default=0):
                assert self.failed(reply, errors.UnknownBranch.code)
                return
            assert isinstance(reply, wire.Done)
        session.add(self.node_ids, parent, tokens)

    @rule(w=small, s=few, n=small, subtree=st.booleans(), twice=st.booleans())
    def prune(self, w: int, s: int, n: int, subtree: bool, twice: bool) -> None:
        worker = self.worker(w)
        session = worker and self.open_session(worker, s)
        if not worker or not session:
            return
        node = self.pick(session.nodes.values(), n)
        for _ in range(1 + twice):
            reply = worker.sim.ask(wire.Prune, session.id, node.id, subtree)
            if node.parent is None and (subtree or not node.children):
                assert self.failed(reply, errors.InvalidArgument.code)
                return
            assert isinstance(reply, wire.Done)
        if subtree or not node.children:
            session.prune(node)
        else:
            node.ended = True
            session.trim(node)

    @rule(w=small, s=few, n=small, everything=st.booleans(), held=st.booleans())
    def set_retention(self, w: int, s: int, n: int, everything: bool, held: bool) -> None:
        worker = self.worker(w)
        session = worker and self.open_session(worker, s)
        if not worker or not session:
            return
        nodes = list(session.nodes.values())
        chosen = nodes if everything else [nodes[n % len(nodes)]]
        there = white_box.stored(self.host, session)
        reply = worker.sim.ask(
            wire.SetRetention, session.id, wire.NO_NODE if everything else chosen[0].id,
            wire.HELD if held else wire.CACHED,
        )  # fmt: skip
        if self.failed(reply, *CAPACITY):
            return
        for node in chosen:
            for part, pages in enumerate(node.pages):
                for page in pages:
                    # One that was dropped may come back after a crash, as CACHED as it was.
                    pages[page].held = held and (node.id, part, page) in there

    @rule(w=small, s=few, priority=st.integers(0, 255))
    def set_priority(self, w: int, s: int, priority: int) -> None:
        worker = self.worker(w)
        session = worker and self.open_session(worker, s)
        if worker and session:
            assert isinstance(worker.sim.ask(wire.SetPriority, session.id, priority), wire.Done)
