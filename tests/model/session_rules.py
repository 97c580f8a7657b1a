"""Rules of sessions: open, resume, close, fork, prune, retention, folds, priority."""

import math

from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvtier_client import errors, wire
from tests.model import white_box
from tests.model.base import CAPACITY, PARTS, QUOTA, TOKENS_OF_SESSIONS, Base, few, small
from tests.model.harness import u32
from tests.model.reference import Block, Fold, Node


class SessionRules(Base):
    """Rules of sessions: open, resume, close, fork, prune, retention, folds, priority."""

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
            node.folds = []
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

    @rule(w=small, s=few, n=small, first=few, count=st.integers(1, 6),
          grace_s=st.sampled_from([0.0, 5.0, 50.0, math.inf]), twice=st.booleans())  # fmt: skip
    def fold(
        self, w: int, s: int, n: int, first: int, count: int, grace_s: float, twice: bool
    ) -> None:
        worker = self.worker(w)
        session = worker and self.open_session(worker, s)
        if not worker or not session:
            return
        node = self.pick(session.nodes.values(), n)
        pages = (node.start + first, node.start + first + count)
        there = white_box.stored(self.host, session)
        for _ in range(1 + twice):
            reply = worker.sim.ask(
                wire.Fold, session.id, node.id, pages[0], count, grace_s, kept=count
            )
            if self.failed(reply, *CAPACITY, QUOTA, errors.InvalidArgument.code):
                return
        known = next((x for x in node.folds if (x.pages, x.grace_s) == (pages, grace_s)), None)
        until_s = self.host.clock.now_s + grace_s
        if known is not None and known.until_s > self.host.clock.now_s:
            until_s = max(known.until_s, 0.0)
        node.folds = [x for x in node.folds if x.pages != pages]
        blocks = self.blocks_in(node, *pages)
        for name, block in blocks.items():
            block.held = grace_s > 0 and (node.id, *name) in there
        node.folds.append(Fold(pages, grace_s, until_s, list(blocks.values())))

    @rule(w=small, s=few, n=small, first=few, count=st.integers(1, 6), twice=st.booleans())
    def unfold(self, w: int, s: int, n: int, first: int, count: int, twice: bool) -> None:
        worker = self.worker(w)
        session = worker and self.open_session(worker, s)
        if not worker or not session:
            return
        node = self.pick(session.nodes.values(), n)
        pages = (node.start + first, node.start + first + count)
        there = white_box.stored(self.host, session)
        answers = []
        for _ in range(1 + twice):
            reply = worker.sim.ask(wire.Unfold, session.id, node.id, pages[0], count)
            if self.failed(reply, *CAPACITY, QUOTA, errors.InvalidArgument.code):
                return
            assert isinstance(reply, wire.Unfolded)
            answers.append(reply.gone)
        assert len(set(answers)) == 1, "a repeat says something else"
        gone = set(u32(answers[0]))
        node.folds = [x for x in node.folds if x.pages != pages]
        for (part, page), block in self.blocks_in(node, *pages).items():
            assert not block.held or block.value in self.hurt or page not in gone or any(
                not other.get(page) or not other[page].held or other[page].value in self.hurt
                for other in node.pages
            ), f"HELD page {page} is said to be gone"  # fmt: skip
            block.held = (node.id, part, page) in there

    @staticmethod
    def blocks_in(node: Node, first: int, end: int) -> dict[tuple[int, int], Block]:
        """A node's own blocks of some pages, by part and page."""
        return {
            (part, page): block
            for part, pages in enumerate(node.pages)
            for page, block in pages.items()
            if first <= page < end
        }
