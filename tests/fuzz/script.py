"""One input of the protocol's fuzzer: a MessagePack array of steps that many clients take.

A step is `[kind, ...]`, see `STEPS`. In frames, extension values stand for what the daemon has
given out (`GIVEN`): the n-th lease, session or offsets, so that deep states are reached again
whatever ids this run draws. Bytes that are no such array are one client's stream.
"""

from typing import Any

import msgspec

from kvtierd.core.slabs import READY
from tests.fuzz.line import MEMBERS, OPERATOR, Finding, Line, frame
from tests.fuzz.machine import Machine, running
from tests.support import raw

LINES = 8
FRAME, BYTES, CONNECT, CLOSE, DIE, TIME, DISK, STALL, CATALOG, RESTART = range(10)
GIVEN = {1: "lease", 2: "session", 3: "offsets", 4: "member"}
CODES = {name: code for code, name in GIVEN.items()}
ANYBODY = 16
"""Added to a code: what was given to any connection, not only to this one."""
STEPS_MAX = 400
LAYOUTS = [
    raw.layout("one", 4096), raw.layout("two", 8192), raw.layout("odd", 4096, group=1),
    raw.layout("big", 4096 * 8),
]  # fmt: skip
PRINTS = [raw.fingerprint(each) for each in LAYOUTS]
TOKENS = [bytes([65 + n]) * 16 for n in range(4)]
GROUPS = [bytes([97 + n]) * 16 for n in range(5)]
TIMES_S = [0.01, 0.1, 0.5, 1.0, 2.1, 6.0, 31.0, 70.0]

Given = msgspec.msgpack.Ext
_encoder = msgspec.msgpack.Encoder()
decode = msgspec.msgpack.Decoder().decode
encode = _encoder.encode


def given(kind: str, number: int, *, anybody: bool = False) -> Given:
    """The value of that kind that was given to this connection (`anybody`) `number` values ago."""
    return Given(CODES[kind] + ANYBODY * anybody, bytes([number & 0xFF]))


def hello(group: int, secret: int = 0, member: Any = -1, leases: Any = ()) -> list[Any]:
    """The first frame of a connection."""
    return ["hello", 1, 1, "fuzz", GROUPS[group], bytes([secret]) * 16, member, list(leases)]


class Run:
    """Takes the steps of one input on a fresh machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._ids = 1
        self.frames = 0

    def play(self, data: bytes) -> None:
        """All of it, then the reckoning. Errors: Finding, AssertionError."""
        try:
            steps = decode(data)
        except (msgspec.MsgspecError, RecursionError):
            steps = None
        machine = self.machine
        with running(machine):
            if isinstance(steps, list):
                for step in steps[:STEPS_MAX]:
                    self.take(step)
            else:
                machine.connect(0, 0).say(data)
            machine.check()
            self._count()
            machine.drain()

    def _count(self) -> None:
        self.frames += sum(line.frames for line in self.machine.lines.values())
        for line in self.machine.lines.values():
            line.frames = 0

    def take(self, step: Any) -> None:
        """One step; what is no step is none."""
        if not isinstance(step, list) or not step or not isinstance(step[0], int):
            return
        kind, rest = step[0], step[1:]
        numbers = [x & 0xFF if isinstance(x, int) else 0 for x in rest] + [0, 0, 0]
        if kind == FRAME:
            self._frame(numbers[0] % LINES, rest[1] if len(rest) > 1 else None)
        elif kind == BYTES:
            self._bytes(numbers[0] % LINES, rest[1] if len(rest) > 1 else b"")
        else:
            self._count()
            self._event(kind, numbers)

    def _event(self, kind: int, numbers: list[int]) -> None:
        machine = self.machine
        if kind == CONNECT:
            machine.connect(numbers[0] % LINES, numbers[1] % MEMBERS)
        elif kind == CLOSE:
            machine.disconnect(numbers[0] % LINES)
        elif kind == DIE:
            machine.die(numbers[0] % MEMBERS)
        elif kind == TIME:
            machine.advance(TIMES_S[numbers[0] % len(TIMES_S)])
        elif kind == DISK:
            machine.finish(numbers[0], numbers[1] % 5, numbers[2] or None)
        elif kind == STALL:
            self._stall(numbers[0] % LINES, bool(numbers[1] & 1))
        elif kind == CATALOG:
            machine.notebook.slow = bool(numbers[0] & 1)
            if not machine.notebook.slow:
                machine.notebook.write()
                machine.loop.run_ready()
        elif kind == RESTART:
            machine.restart()

    def _stall(self, number: int, stalled: bool) -> None:
        line = self.machine.lines.get(number)
        if line is not None:
            line.stall(stalled)
            self.machine.loop.run_ready()

    def _bytes(self, number: int, data: Any) -> None:
        machine = self.machine
        line = machine.lines.get(number)
        if line is None or line.sock.closed:
            self._count()
            line = machine.connect(number, number)
        line.say(data if isinstance(data, bytes) else b"")

    def _frame(self, number: int, value: Any) -> None:
        machine = self.machine
        line = machine.lines.get(number)
        if line is None or line.sock.closed:
            self._count()
            line = machine.connect(number, number)
        greeting = isinstance(value, list) and value and value[0] == "hello"
        if not line.greeted and (value == ["hello"] or not greeting):
            line.say(frame(encode(hello(number % len(GROUPS)))))
        value = self._resolve(value, line)
        if isinstance(value, list) and len(value) > 1 and value[1] is None:
            self._ids += 1
            value[1] = self._ids
        others = self._holdings(line.who)
        line.say(frame(encode(value)))
        if self._holdings(line.who) != others:
            raise Finding(f"a request of one tenant has touched another's: {value}")

    def _holdings(self, who: int) -> Any:
        """What the tenants hold that process `who` is not of."""
        if who == OPERATOR:
            return None
        tenant = self.machine.world.tenants["b" if who < 4 else "a"]
        return list(tenant.sessions), list(tenant.leases), [
            (pool.held, pool.promised, pool.dram.counts[READY], pool.nvme.counts[READY])
            for pool in tenant.pools.values()
        ]  # fmt: skip

    def _resolve(self, value: Any, line: Line) -> Any:
        if isinstance(value, list):
            return [self._resolve(item, line) for item in value]
        if isinstance(value, Given):
            kind = GIVEN.get(value.code % ANYBODY, "")
            anybody = self.machine.given.get(kind)
            found = anybody if value.code >= ANYBODY else line.given.get(kind) or anybody
            if not found:
                return 0
            return found[-1 - (value.data[0] if value.data else 0) % len(found)]
        return value
