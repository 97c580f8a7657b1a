"""Draws and changes scripts: plausible lives of clients, and what an attacker makes of them.

Which verbs there are and what fields they have is read from the wire's own structs, so that a new
verb is attacked from its first day; how a field is filled is known by its name or its type.
"""

import random
import types
import typing
from collections.abc import Callable
from typing import Any

import msgspec

from kvtier_client import wire
from kvtier_client.admin_wire import AdminRequest
from tests.fuzz import script
from tests.fuzz.line import MEMBERS, OPERATOR
from tests.fuzz.script import CODES, GROUPS, LAYOUTS, LINES, PRINTS, TIMES_S, TOKENS, Given, given
from tests.support.raw import NO_NODE, u32, u64

Dice = random.Random
NUMBERS = [0, 1, 2, 3, 4, 7, 8, 15, 16, 17, 63, 64, 65, 255, 256, 4095, 4096, 65535,
           2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1, 2**32, 2**48, 2**53, 2**62, 2**63 - 1, 2**63,
           2**64 - 1, -1, -2, -2**31, -2**63]  # fmt: skip
SECONDS = [0, 0.0, 0.5, 3.0, 60.0, 1e300, -1.0, float("nan"), float("inf"), float("-inf")]
TEXTS = ["", "a", "b", "n" * 200, "n" * 201, "\0", "ü" * 100, "0" * 16]


def _index(dice: Dice) -> bytes:
    n, first = dice.choice((1, 1, 2, 3, 4, 8)), dice.choice((0, 0, 0, 0, 1, 2, 5))
    numbers = [first + i for i in range(n)]
    if dice.random() < 0.1:
        dice.shuffle(numbers)
    if dice.random() < 0.05:
        numbers[-1] = dice.choice(NUMBERS) & 0xFFFFFFFF
    return u32(*numbers)


def _valid(dice: Dice) -> bytes:
    n = dice.choice((1, 1, 2, 3, 4, 8))
    return u32(*[16] * (n - 1), dice.choice((16, 16, 16, 1, 9, 15, 0, 17)))


def _keys(dice: Dice) -> bytes:
    first = dice.choice((0, 0, 0, 3, 6))
    return b"".join(bytes([first + i]) * 16 for i in range(dice.choice((1, 2, 3, 4, 8))))


def _held(dice: Dice) -> list[Any]:
    offsets = (given("offsets", dice.randrange(4)), u64(0, 4096), b"odd", u64(2**63))
    return [
        [_lease(dice), dice.random() < 0.5, dice.choice(offsets)]
        for _ in range(dice.choice((0, 0, 1, 2)))
    ]


def _lease(dice: Dice) -> Any:
    if dice.random() < 0.9:
        return given("lease", _recent(dice), anybody=dice.random() < 0.1)
    return dice.choice((0, 1, 2, 3, 1 << 32 | 1, 1 << 48, dice.choice(NUMBERS)))


def _recent(dice: Dice) -> int:
    return min(int(dice.expovariate(0.7)), 255)


def _node(dice: Dice) -> int:
    return dice.choice((0, 0, 0, 0, 1, 1, 2, 3, NO_NODE, dice.choice(NUMBERS)))


def _layout(dice: Dice) -> Any:
    fields = list(dice.choice(LAYOUTS))
    if dice.random() < 0.15:
        at = dice.randrange(len(fields))
        fields[at] = dice.choice((dice.choice(NUMBERS), dice.choice(TEXTS), None, True))
    return fields


def _small(*values: Any) -> Callable[[Dice], Any]:
    return lambda dice: dice.choice(values)


def _print(dice: Dice) -> Any:
    return dice.choice(PRINTS) if dice.random() < 0.95 else dice.choice((b"", bytes(16), TOKENS[0]))


def _session(dice: Dice) -> Any:
    if dice.random() < 0.97:
        return given("session", _recent(dice), anybody=dice.random() < 0.1)
    return dice.choice(NUMBERS)


FIELDS: dict[str, Callable[[Dice], Any]] = {
    "id": _small(*[None] * 30, 0, 1, 7, 2**63 - 1, 2**63, -1),
    "version": _small(1, 1, 1, 2, 3, 0),
    "group": _small(*GROUPS, b"", bytes(17)),
    "secret": _small(*[bytes(16)] * 6, b"\1" * 16, b"short", bytes(64), bytes(65)),
    "member": lambda dice: dice.choice((-1, -1, given("member", _recent(dice)), 0, 1023, 1024)),
    "leases": _held,
    "layout": _print,
    "layouts": lambda dice: [_print(dice) for _ in range(dice.choice((1, 1, 1, 2, 3)))],
    "token": lambda dice: dice.choice((*TOKENS, *TOKENS, b"", bytes(16), bytes(17))),
    "priority": _small(0, 0, 1, 5, 255, 256, -1),
    "session": _session,
    "node": _node,
    "parent": _node,
    "fork_tokens": _small(0, 8, 15, 16, 17, 32, 48, 64, 1000, 2**31 - 1, -1),
    "retention": _small(1, 1, 2, 2, 0, 3),
    "lease": _lease,
    "draw": lambda dice: dice.choice((0, 0, 0, _lease(dice))),
    "blocks": _small(1, 1, 2, 3, 4, 8, 12, 24, 64, 65),
    "ahead": _small(0, 0, 0, 1, 4, 16, 2**31),
    "index": _index,
    "pages": _index,
    "valid": _valid,
    "checksums": _small(b"", b"", b"", u64(1), u64(1, 2)),
    "oneway": _small(0, 0, 0, 1, 2, 3, 9, 2**63 - 1),
    "first": _small(0, 0, 0, 1, 2, 4),
    "ticket": _small(1, 1, 2, 3, 0, 2**63),
    "keys": _keys,
    "wait_s": _small(*[0.0] * 20, 1.0, 3.0, *SECONDS),
    "ttl_s": _small(0.0, 0.0, 1.0, 30.0, *SECONDS),
    "grace_s": _small(0.0, 0.0, 1.0, 30.0, *SECONDS),
    "kept": _small(0, 0, 4, -1, 2**32),
    "deadline_s": _small(0.0, 1.0, 3.0, *SECONDS),
    "tenant": _small("", "a", "b", "c"),
    "data": lambda dice: dice.randbytes(dice.choice((0, 1, 20, 256, 257))),
}  # fmt: skip
OF_A_VERB: dict[tuple[str, str], Callable[[Dice], Any]] = {
    ("register_layout", "layout"): _layout,
    ("reserve", "lease"): lambda dice: dice.choice((1, 2, 3, 4, 5, dice.randrange(1, 1000), 0)),
    ("reserve_keys", "lease"): lambda dice: dice.randrange(1, 40),
    ("acquire", "lease"): lambda dice: dice.randrange(1, 40),
    ("acquire_keys", "lease"): lambda dice: dice.randrange(1, 40),
    ("lookup", "lease"): lambda dice: dice.choice((0, dice.randrange(1, 40))),
    ("acquire", "pages"): _small(1, 2, 3, 4, 8, 16, 64, 65),
    ("prefetch", "pages"): _small(1, 2, 3, 4, 8, 16, 64, 65),
    ("fold", "pages"): _small(1, 1, 2, 4, 64, 65),
    ("unfold", "pages"): _small(1, 1, 2, 4, 64, 65),
    ("fork", "node"): _small(1, 2, 3, 4, 5, 6, 0, NO_NODE),
    ("tree", "session"): lambda dice: dice.choice((*TEXTS, "zz")),
}


def _by_type(kind: Any) -> Callable[[Dice], Any]:
    if isinstance(kind, types.UnionType):
        kind = typing.get_args(kind)[0]
    if kind is int:
        return lambda dice: dice.choice(NUMBERS)
    if kind is float:
        return _small(*SECONDS)
    if kind is str:
        return _small(*TEXTS)
    if kind is bool:
        return _small(True, True, False)
    return lambda dice: dice.randbytes(dice.choice((0, 1, 16)))


def _verbs(union: Any) -> dict[str, list[Callable[[Dice], Any]]]:
    found = {}
    for struct in typing.get_args(union):
        tag = str(struct.__struct_config__.tag)
        found[tag] = [
            OF_A_VERB.get((tag, field.name), FIELDS.get(field.name, _by_type(field.type)))
            for field in msgspec.structs.fields(struct)
        ]
    return found


VERBS = _verbs(wire.ClientRequest)
ORDERS = _verbs(AdminRequest)
NAMES = sorted(VERBS)
OFTEN = ["reserve", "reserve", "commit", "commit", "commit", "acquire", "acquire", "release",
         "open_session", "register_layout", "reserve_keys", "commit_keys", "acquire_keys",
         "prefetch", "fork", "prune", "set_retention", "fold", "unfold"]  # fmt: skip


def request(dice: Dice, verb: str) -> list[Any]:
    """A plausible request; some end early, as they may."""
    fields = (VERBS | ORDERS)[verb]
    values = [field(dice) for field in fields]
    if dice.random() < 0.05:
        values = values[: dice.randrange(len(values) + 1)]
    return [verb, *values]


def swap(dice: Dice, line: int) -> list[list[Any]]:
    """A swap-out that fits together, and perhaps the way back."""
    blocks, first = dice.choice((1, 2, 3, 4, 8)), dice.choice((0, 0, 1, 2, 4, 8))
    lease, known = dice.randrange(1, 5000), dice.choice(PRINTS[:3])
    token, retention = dice.choice(TOKENS), dice.choice((1, 1, 2))
    node, pages = dice.choice((0, 0, 0, 1, 2)), [first + i for i in range(blocks)]
    index, full = u32(*range(blocks)), u32(*[16] * blocks)
    oneway = dice.choice((0, 0, 0, dice.randrange(1, 99)))
    steps: list[list[Any]] = [
        ["register_layout", None, LAYOUTS[PRINTS.index(known)]],
        ["open_session", None, token, [known], 0, "s"],
        ["reserve", None, lease, known, blocks, 0, 0, dice.choice((0.0, 3.0))],
        ["commit", None, given("lease", 0), given("session", 0), node, index, u32(*pages), full,
         retention, oneway],
        ["acquire", None, lease + 1, given("session", 0), node, known, first, blocks, 3.0],
        ["release", None, given("lease", 0)],
    ]  # fmt: skip
    keep = dice.choice((4, 4, 5, 6))
    return [[script.FRAME, line, step] for step in steps[dice.choice((0, 0, 2)) : keep]]


def keyed(dice: Dice, line: int) -> list[list[Any]]:
    """Keyed blocks that fit together."""
    keys, lease, known = _keys(dice), dice.randrange(1, 5000), dice.choice(PRINTS[:3])
    n = len(keys) // 16
    steps: list[list[Any]] = [
        ["register_layout", None, LAYOUTS[PRINTS.index(known)]],
        ["reserve_keys", None, lease, known, keys, dice.choice((0.0, 3.0))],
        ["commit_keys", None, given("lease", 0), u32(*range(n)), keys, u32(*range(n)),
         u32(*[16] * n)],
        ["acquire_keys", None, lease + 1, known, keys, 3.0],
        ["release", None, given("lease", 0)],
    ]  # fmt: skip
    return [[script.FRAME, line, step] for step in steps[: dice.choice((3, 4, 5))]]


EVENTS = [
    *[script.TIME] * 3, *[script.DISK] * 4, script.CONNECT, script.CLOSE, script.DIE, script.STALL,
    script.CATALOG,
]  # fmt: skip


def event(dice: Dice) -> list[Any]:
    """Something that is no frame."""
    kind = dice.choice(EVENTS)
    if dice.random() < 0.01:
        return [script.RESTART]
    numbers = [dice.randrange(LINES), dice.choice((0, 0, 0, 1, 2, 3, 4)), dice.choice((0, 0, 1, 2))]
    if kind == script.TIME:
        numbers[0] = dice.choice((0, 0, 1, 1, 2, 3, dice.randrange(len(TIMES_S))))
    elif kind == script.CONNECT:
        numbers[1] = dice.choice((dice.randrange(6), dice.randrange(MEMBERS)))
    return [kind, *numbers]


def some_steps(dice: Dice) -> list[list[Any]]:
    """One thing that a client does, or that happens."""
    draw = dice.random()
    line = dice.choice((0, 0, 0, 1, 1, 2, 4, 4, 5, dice.randrange(LINES)))
    if draw < 0.12:
        return swap(dice, line)
    if draw < 0.18:
        return keyed(dice, line)
    if draw < 0.28:
        return [event(dice)]
    if line == OPERATOR:
        return [[script.FRAME, line, request(dice, dice.choice(sorted(ORDERS)))]]
    verb = dice.choice(OFTEN) if dice.random() < 0.6 else dice.choice(NAMES)
    return [[script.FRAME, line, request(dice, verb)]]


def life(dice: Dice, steps: int) -> bytes:
    """A script of about so many steps."""
    found: list[list[Any]] = []
    while len(found) < steps:
        found += some_steps(dice)
    return script.encode(found)


# ------------------------------------------------------------------- mutations

Mutate = Callable[[bytes, int], bytes]
"""Changes raw bytes: libFuzzer's own mutations, or `scramble`."""


def scramble(dice: Dice) -> Mutate:
    """Changes bytes by dice alone."""

    def change(data: bytes, size: int) -> bytes:
        found = bytearray(data or b"\0")
        for _ in range(dice.randint(1, 4)):
            found[dice.randrange(len(found))] = dice.randrange(256)
        return bytes(found[: dice.randint(1, size)])

    return change


def mutate(data: bytes, size: int, dice: Dice, change: Mutate) -> bytes:
    """Another script, made from this one; at most `size` bytes."""
    try:
        steps = script.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        steps = []
    if not isinstance(steps, list) or not steps:
        return life(dice, 20)[:size]
    if dice.random() < 0.01:
        return change(data, size)
    for _ in range(dice.choice((1, 1, 2, 3, 5))):
        _mutate_steps(steps, dice, change)
    del steps[script.STEPS_MAX :]
    while len(found := script.encode(steps)) > size:
        del steps[len(steps) // 2 :]
    return found


def _mutate_steps(steps: list[Any], dice: Dice, change: Mutate) -> None:
    at, draw = dice.randrange(len(steps) + 1), dice.random()
    if draw < 0.35 or not steps:
        steps[at:at] = some_steps(dice)
        return
    at = min(at, len(steps) - 1)
    if draw < 0.45 and len(steps) > 4:
        del steps[at : at + dice.choice((1, 1, 1, 2, 5, 10))]
    elif draw < 0.52:
        steps[at:at] = steps[at : at + dice.choice((1, 2, 5))]
    elif draw < 0.58:
        other = dice.randrange(len(steps))
        steps[at], steps[other] = steps[other], steps[at]
    elif draw < 0.62:
        steps += some_steps(dice)
    elif isinstance(steps[at], list) and steps[at] and steps[at][0] == script.FRAME:
        steps[at] = _mutate_frame(steps[at], dice, change)
    elif isinstance(steps[at], list) and len(steps[at]) > 1:
        steps[at] = [*steps[at]]
        steps[at][dice.randrange(1, len(steps[at]))] = dice.randrange(8)


def _mutate_frame(step: list[Any], dice: Dice, change: Mutate) -> list[Any]:
    if len(step) < 3 or not isinstance(step[2], list) or not step[2]:
        return [script.FRAME, dice.randrange(LINES), request(dice, dice.choice(NAMES))]
    line, frame, draw = step[1], [*step[2]], dice.random()
    if draw < 0.1:
        return [script.FRAME, dice.randrange(LINES), frame]
    if draw < 0.15:
        raw = script.frame(script.encode([0 if isinstance(x, Given) else x for x in frame]))
        return [script.BYTES, line, change(raw, len(raw) + 64)[:4096]]
    if draw < 0.2:
        frame[0] = dice.choice(NAMES)
        return [script.FRAME, line, frame]
    fields = (VERBS | ORDERS).get(frame[0] if isinstance(frame[0], str) else "")
    at = dice.randrange(1, max(len(frame), 2))
    if draw < 0.7 and fields and at - 1 < len(fields) and at < len(frame):
        frame[at] = fields[at - 1](dice)
    elif draw < 0.9 and at < len(frame):
        frame[at] = _mutate_value(frame[at], dice, change)
    elif draw < 0.95:
        frame.insert(at, _anything(dice))
    else:
        del frame[at:]
    return [script.FRAME, line, frame]


def _mutate_value(value: Any, dice: Dice, change: Mutate) -> Any:
    draw = dice.random()
    if draw < 0.2:
        return _anything(dice)
    if isinstance(value, Given):
        return Given(value.code, bytes([_recent(dice)]))
    if isinstance(value, bytes):
        return change(value, len(value) + 16)[:2048]
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return (value + dice.choice((1, -1, 2, -2, 1 << dice.randrange(64)))) % 2**64
    if isinstance(value, list) and value and len(value) < 200:
        return [*value, *value] if draw < 0.5 else value[:-1]
    return _anything(dice)


def _anything(dice: Dice) -> Any:
    return dice.choice((
        dice.choice(NUMBERS), dice.choice(SECONDS), dice.choice(TEXTS), None, True, [], {}, b"",
        given(dice.choice(sorted(CODES)), _recent(dice), anybody=True),
        dice.randbytes(dice.choice((1, 4, 16))),
        [dice.choice(NUMBERS)], [[]], {"a": 1}, u32(*range(dice.randrange(9))),
    ))  # fmt: skip


def cross(one: bytes, other: bytes, size: int, dice: Dice) -> bytes:
    """The beginning of one script and the end of another."""
    try:
        head, tail = script.decode(one), script.decode(other)
    except (msgspec.MsgspecError, RecursionError):
        return one[:size]
    if not (isinstance(head, list) and isinstance(tail, list) and head and tail):
        return one[:size]
    steps = head[: dice.randint(1, len(head))] + tail[dice.randrange(len(tail)) :]
    while len(found := script.encode(steps[: script.STEPS_MAX])) > size:
        del steps[len(steps) // 2 :]
    return found


# --------------------------------------------------------------------- bursts

BURST_FRAMES = 150
PLAIN: dict[int, Any] = {1: 1 << 32 | 1, 2: 1, 3: u64(0), 4: 0}
"""In bursts nothing is known of what was given out."""


def bursts(dice: Dice) -> bytes:
    """A few connections, each with many small frames in one write."""
    steps: list[Any] = []
    for _ in range(dice.choice((1, 2, 4))):
        line = dice.choice((0, 1, 4, OPERATOR))
        names = sorted(ORDERS) if line == OPERATOR else NAMES
        data = b"".join(_torn(dice, dice.choice(names)) for _ in range(BURST_FRAMES))
        steps += [[script.FRAME, line, ["hello"]], [script.BYTES, line, data]]
    return script.encode(steps)


def _torn(dice: Dice, verb: str) -> bytes:
    values = [PLAIN[x.code % script.ANYBODY] if isinstance(x, Given) else x
              for x in request(dice, verb)]  # fmt: skip
    if len(values) > 1 and values[1] is None:
        values[1] = dice.randrange(1, 2**31)
    body = script.encode(values)
    if dice.random() < 0.5:
        body = scramble(dice)(body, len(body) + 1)
    return script.frame(body)


def mutate_bursts(data: bytes, size: int, dice: Dice, change: Mutate) -> bytes:
    """Other bursts, made from these."""
    try:
        steps = script.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        steps = None
    usable = [
        step for step in (steps if isinstance(steps, list) else [])
        if isinstance(step, list) and len(step) == 3 and isinstance(step[2], bytes)
    ]  # fmt: skip
    if not usable or dice.random() < 0.05:
        return bursts(dice)[:size]
    step = dice.choice(usable)
    frames = _split(step[2])
    for _ in range(dice.choice((1, 4, 16))):
        at = dice.randrange(len(frames))
        body = frames[at]
        draw = dice.random()
        if draw < 0.6:
            frames[at] = script.frame(change(body[4:], len(body) + 8)[:4096])
        elif draw < 0.7:
            frames[at] = change(body, len(body) + 8)[:4096]
        elif draw < 0.9:
            frames.insert(at, _torn(dice, dice.choice(NAMES)))
        elif len(frames) > 1:
            del frames[at]
    step[2] = b"".join(frames[: 2 * BURST_FRAMES])
    found = script.encode(steps)
    return found if len(found) <= size else bursts(dice)[:size]


def _split(data: bytes) -> list[bytes]:
    frames, at = [], 0
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        frames.append(data[at:end])
        at = end
    return frames or [b""]
