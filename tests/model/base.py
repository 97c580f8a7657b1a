"""What the model's rules share: the host, its clients, what was committed, and how to ask."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize

from kvtier_client import errors, wire
from tests.model.clients import Reading, Waiting, Worker
from tests.model.harness import LIMITS, Host, layout, u32, u64
from tests.model.limits import with_limits
from tests.model.reference import Node, Session

LAYOUTS = [layout(1), layout(2, group=1), layout(1, name="keyed")]
PRINTS = [each.fingerprint() for each in LAYOUTS]
PARTS = [[0], [0, 1], [1]]
TOKENS_OF_SESSIONS = [bytes([65 + i]) * 16 for i in range(3)]
KEYS = [bytes([97 + i]) * 16 for i in range(5)]
CAPACITY = {errors.ArenaFull.code, errors.SpillFull.code}
QUOTA = errors.QuotaExceeded.code

small = st.integers(0, 7)
few = st.integers(0, 3)


class Base(RuleBasedStateMachine):
    """The machine's state, and how its rules talk to the daemon."""

    @initialize(power=st.booleans(), queue=st.sampled_from([1, 64]), slabs=st.sampled_from([3, 5]))
    def begin(self, power: bool, queue: int, slabs: int) -> None:
        limits = with_limits(LIMITS, power=power)
        self.host = Host(
            {"a": (3, slabs - 1), "b": (2, 1)}, spill_slabs=slabs, limits=limits, queue_jobs=queue
        )
        self.value = 1000
        self.sessions: dict[tuple[str, bytes], Session] = {}
        self.keys: dict[tuple[str, bytes], set[int]] = {}
        self.hurt: set[int] = set()  # values that a medium may have lost
        self.node_ids = 0
        self.workers: list[Worker] = []
        self.gone: list[Worker] = []
        for tenant, group in (
            ("a", b"g" * 16),
            ("a", b"g" * 16),
            ("a", b"h" * 16),
            ("b", b"g" * 16),
        ):
            self.spawn(tenant, group)
        for i, worker in enumerate(self.workers):
            self.open_for(worker, TOKENS_OF_SESSIONS[i % 2], PARTS[i % 2])

    def open_for(self, worker: Worker, token: bytes, layouts: list[int]) -> None:
        """Open a session, or meet the one that has the token."""
        reply = worker.sim.ask(wire.OpenSession, token, [PRINTS[i] for i in layouts], priority=3)
        name = (worker.tenant, token)
        known = self.sessions.get(name)
        if known is not None and known.layouts != layouts:
            assert self.failed(reply, errors.LayoutMismatch.code)
            return
        assert isinstance(reply, wire.SessionReply)
        assert reply.created == (known is None)
        if known is None:
            self.sessions[name] = Session(worker.tenant, token, reply.session, layouts)
        self.attach(worker, name)

    def attach(self, worker: Worker, name: tuple[str, bytes]) -> None:
        for each in self.workers:
            if (each.tenant, each.sim.group) == (worker.tenant, worker.sim.group):
                each.sessions.add(name)

    def spawn(self, tenant: str, group: bytes) -> None:
        worker = Worker(self.host.spawn(tenant, group))
        for each in LAYOUTS:
            assert isinstance(worker.sim.ask(wire.RegisterLayout, each), wire.LayoutRegistered)
        self.workers.append(worker)

    def fresh_value(self) -> int:
        self.value += 1
        return self.value

    def worker(self, i: int) -> Worker | None:
        there = [each for each in self.workers if each.connected]
        return there[i % len(there)] if there else None

    def open_session(self, worker: Worker, i: int) -> Session | None:
        mine = sorted(key for key in worker.sessions if key in self.sessions)
        return self.sessions[mine[i % len(mine)]] if mine else None

    @staticmethod
    def pick(items: Any, i: int) -> Any:
        ordered = list(items)
        return ordered[i % len(ordered)] if ordered else None

    def page(self, node: Node, part: int, i: int) -> int:
        """A page of a branch, mostly one that is stored."""
        pages: set[int] = set()
        at: Node | None = node
        while at is not None:
            pages |= set(at.pages[part])
            at = at.parent
        return sorted(pages)[i % len(pages)] if pages and i < 8 else i

    @staticmethod
    def failed(reply: Any, *codes: int) -> bool:
        """Whether the reply is an error; it must be one of these."""
        if not isinstance(reply, wire.Error):
            return False
        assert reply.code in codes, f"{reply.code}: {reply.message}"
        return True

    def collect(self) -> None:
        """Take what came in: late answers and pushes."""
        for worker in self.workers:
            for push in worker.sim.pushes(wire.Revoke):
                if push.lease in worker.writes:
                    worker.writes[push.lease].expired = True
                worker.pins.pop(push.lease, None)
            worker.sim.pushes(wire.Pressure)
            worker.sim.pushes(wire.Ready)
            for wait in list(worker.waits):
                reply = worker.sim.answer(wait.request)
                if reply is not None:
                    worker.waits.remove(wait)
                    self.finish_wait(worker, wait, reply)

    def finish_wait(self, worker: Worker, wait: Waiting, reply: Any) -> None:
        """Use the answer to a request that may wait."""
        if wait.kind == "write":
            allowed = CAPACITY | {QUOTA, errors.LeaseExpired.code}
            if not self.failed(reply, *allowed):
                self.take_grant(worker, wait, reply)
            return
        gone = {errors.UnknownSession.code, errors.UnknownBranch.code}
        data = {errors.InvalidArgument.code, errors.BlockLost.code, errors.Timeout.code}
        if not self.failed(reply, *CAPACITY, QUOTA, *gone, *data) and reply.lease:
            self.take_reading(worker, wait, reply)

    def take_grant(self, worker: Worker, wait: Waiting, reply: wire.Granted) -> None:
        if not reply.lease:
            return
        lease = worker.granted(reply, wait.layout, wait.ahead, 0)
        payload = self.host.arenas[worker.tenant].payload
        for index, offset in enumerate(lease.offsets):
            lease.open[index] = int(payload[offset // 4096])
        if wait.keys:
            lease.keys = [wait.keys[i] for i in u32(reply.index)]
        source = wait.drawn
        if source is not None:
            source.promise = max(source.promise - len(lease.offsets), 0)
            if not source.promise and not source.open:
                worker.writes.pop(source.id, None)

    def take_reading(self, worker: Worker, wait: Waiting, reply: wire.Granted) -> None:
        offsets, valid = u64(reply.offsets), u32(reply.valid)
        values = [worker.sim.read(offset, self.pages(wait.layout)) for offset in offsets]
        for i, value in enumerate(values):
            if wait.session is None:
                possible = self.keys.get((worker.tenant, wait.keys[i]), set())
                assert value in possible, f"key {wait.keys[i]!r} reads {value}, not {possible}"
                continue
            node = wait.session.nodes.get(wait.node)
            if node is None or wait.session.token not in self.tokens(worker.tenant):
                continue  # it was pruned or closed while its blocks were on their way
            part = wait.session.layouts.index(wait.layout)
            readable = wait.session.readable(node, part, wait.first + i)
            right = [(block.value, tokens) for block, tokens in readable]
            assert (value, valid[i]) in right or not readable, (
                f"page {wait.first + i} reads {value} with {valid[i]} tokens, not one of {right}"
            )
        worker.reads[reply.lease] = Reading(reply.lease, wait.layout, offsets, values)

    def tokens(self, tenant: str) -> set[bytes]:
        return {token for name, token in self.sessions if name == tenant}

    @staticmethod
    def pages(which: int) -> int:
        return LAYOUTS[which].block_bytes // 4096

    def begin_wait(self, worker: Worker, wait: Waiting, patient: bool) -> None:
        """Note a request; only one that may wait, or loads, is left unanswered."""
        worker.waits.append(wait)
        self.collect()
        assert patient or wait.kind == "read" or wait not in worker.waits

    def finish_all(self) -> None:
        """All jobs under way succeed."""
        for _ in range(len(self.host.disk.pending)):
            self.host.finish()
