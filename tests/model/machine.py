"""The state machine: all rules together, and what must be true after every step."""

from hypothesis.stateful import invariant

from kvtier_client import wire
from tests.model import white_box
from tests.model.base import KEYS, LAYOUTS, PRINTS
from tests.model.fate_rules import FateRules
from tests.model.key_rules import KeyRules
from tests.model.read_rules import ReadRules
from tests.model.session_rules import SessionRules
from tests.model.write_rules import WriteRules


class Machine(SessionRules, WriteRules, ReadRules, KeyRules, FateRules):
    """Histories of clients, disk and fate."""

    @invariant()
    def holds_true(self) -> None:
        if not hasattr(self, "host"):
            return
        self.collect()
        self.host.check()
        for session in self.sessions.values():
            for node in session.nodes.values():
                node.grow_old(self.host.clock.now_s)
        white_box.check_sessions(self.host, self.sessions, self.hurt, LAYOUTS)
        white_box.check_keys(self.host, self.sessions, self.keys, self.hurt, PRINTS[2])
        for worker in self.workers:
            for lease in worker.reads.values():
                seen = [worker.sim.read(at, self.pages(lease.layout)) for at in lease.offsets]
                assert seen == lease.values, "bytes changed under a reader"

    def teardown(self) -> None:
        if not hasattr(self, "host"):
            return
        for worker in list(self.workers):
            self.host.kill(worker.sim)
        for tenant in ("a", "b"):
            last = self.host.spawn(tenant)
            for each in LAYOUTS:
                last.do(wire.RegisterLayout, each)
            for name, token in self.sessions:
                if name == tenant:
                    session = last.do(wire.ResumeSession, token).session
                    last.do(wire.CloseSession, session)
            self.host.settle()
            last.do(wire.Remove, PRINTS[2], b"".join(KEYS))
            self.host.kill(last)
        self.host.settle()
        self.host.check()
        white_box.check_empty(self.host)
        self.host.close()
