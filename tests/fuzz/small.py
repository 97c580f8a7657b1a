"""Small inputs: configuration files, packets at the holder, and a hostile daemon at a client."""

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec

from kvtier_client import wire
from kvtier_client.errors import KvtierError
from kvtier_client.protocol import Protocol
from kvtierd import config as configuration
from kvtierd.config import ConfigError
from kvtierd.tiers import holder_process
from kvtierd.tiers.holder import HolderKeeper, KeeperError
from tests.fuzz import grammar, script
from tests.fuzz.grammar import Dice, Mutate
from tests.fuzz.line import Finding, frame
from tests.support import raw
from tests.support.descriptors import descriptors

PACKETS_MAX = 40
REPLIES_MAX = 100
WAIT_S = 30.0


class Small:
    """What the small targets share."""

    unit = "inputs"
    input_bytes = 4096

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def set_up(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mutate(self, data: bytes, size: int, dice: Dice, change: Mutate) -> bytes:
        return change(data, size)


# ------------------------------------------------------------------ configuration

_SECTIONS = {
    "": ["runtime_dir", "state_dir", "log_level", "integrity"],
    **{
        field.name: [each.encode_name for each in msgspec.structs.fields(field.type)]
        for field in msgspec.structs.fields(configuration.Config)
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
    },
    "[tenants]": ["name", "uids", "arena_bytes", "spill_bytes"],
}
_VALUES = ['"a"', '""', "0", "1", "-1", "4096", "9223372036854775808", "1e400", "nan", "inf",
           "true", "[]", '["self"]', "[65534]", '["self", 0]', '"1GiB"', '"-1GiB"', '"999999EiB"',
           '"1.5KiB"', '"30s"', '"never"', '"1e99h"', '"/a"', '"relative"', '"{state_dir}/x"',
           '"off"', '"try"', '"holder"', "{a = 1}", "1979-05-27", '"\\u0000"', "0.5"]  # fmt: skip


class ConfigTarget(Small):
    """Configuration files: each is a whole, checked configuration or a `ConfigError`."""

    def draw(self, dice: Dice) -> bytes:
        lines = []
        for section in dice.sample(sorted(_SECTIONS), dice.randint(1, len(_SECTIONS))):
            lines += [f"[{section}]"] if section else []
            keys = _SECTIONS[section]
            for key in dice.sample(keys, dice.randint(0, len(keys))):
                lines.append(f"{key} = {dice.choice(_VALUES)}")
        return "\n".join(lines).encode()

    def mutate(self, data: bytes, size: int, dice: Dice, change: Mutate) -> bytes:
        lines = data.splitlines()
        if not lines or dice.random() < 0.5:
            return change(data, size)
        at = dice.randrange(len(lines))
        key = lines[at].partition(b"=")[0]
        lines[at] = key + b"= " + dice.choice(_VALUES).encode()
        return b"\n".join(lines)[:size]

    def take(self, data: bytes) -> None:
        self.counts["inputs"] += 1
        fd = os.memfd_create("configuration")
        try:
            os.write(fd, data)
            found = configuration.load(f"/proc/self/fd/{fd}")
        except ConfigError as error:
            self.counts["refused"] += 1
            if not str(error):
                raise Finding("a refusal without a word") from error
        else:
            self.counts["taken"] += 1
            configuration.difference(found, configuration.Config())
        finally:
            os.close(fd)


# ------------------------------------------------------------------ holder


class HolderTarget(Small):
    """Packets at the holder process, and a hostile holder's answers at the daemon."""

    def draw(self, dice: Dice) -> bytes:
        verbs = [b"P", b"G", b"D", b"H", b"=", b".", b"ok", b"X"]
        names = [b"", b"a", b"b", b"0123abcd-payload", b"n" * 128, b"n" * 129, b"\xff\0"]
        return script.encode(
            [[dice.choice(verbs) + dice.choice(names), dice.choice((0, 0, 1, 1, 2, 5))]
             for _ in range(dice.randint(1, 20))]
        )  # fmt: skip

    def take(self, data: bytes) -> None:
        packets = list(_packets(data))
        self.counts["inputs"] += 1
        before = descriptors()
        self._at_the_holder(packets)
        self._at_the_daemon(packets)
        if not descriptors().items() <= before.items():
            raise Finding("descriptors are left over")

    def _at_the_holder(self, packets: list[tuple[bytes, int]]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        held: dict[bytes, int] = {}
        with ours, theirs:
            for socket_ in (ours, theirs):
                socket_.settimeout(0.0 if socket_ is ours else WAIT_S)
            for packet, count in packets:
                if packet[:1] == b"S" or not packet:
                    continue  # the end of the process, or of the connection
                socket.send_fds(ours, [packet], [0] * count)
                holder_process.answer(theirs, held)
                self.counts["packets"] += 1
                with contextlib.suppress(BlockingIOError, TimeoutError):
                    while True:
                        _, fds, _, _ = socket.recv_fds(ours, 256, 8, socket.MSG_DONTWAIT)
                        holder_process.close_all(fds)
        holder_process.close_all(list(held.values()))
        if len(held) > holder_process.ITEMS_MAX:
            raise Finding(f"the holder holds {len(held)} things")

    def _at_the_daemon(self, packets: list[tuple[bytes, int]]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        keeper = HolderKeeper.__new__(HolderKeeper)
        keeper._path, keeper._deadline_s, keeper._socket = "holder", WAIT_S, theirs
        with ours, theirs:
            theirs.settimeout(WAIT_S)
            for packet, count in packets[:PACKETS_MAX]:
                if packet:
                    socket.send_fds(ours, [packet], [0] * count)
            ours.shutdown(socket.SHUT_WR)
            try:
                found = keeper.take_all()
            except KeeperError:
                self.counts["refused"] += 1
            else:
                holder_process.close_all(list(found.values()))


def _packets(data: bytes) -> Iterator[tuple[bytes, int]]:
    try:
        found = script.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        found = [[data[:200], 1]]
    for each in found[:PACKETS_MAX] if isinstance(found, list) else []:
        if isinstance(each, list) and len(each) == 2 and isinstance(each[0], bytes):
            yield each[0][:250], each[1] % 6 if isinstance(each[1], int) else 0


# ------------------------------------------------------------------ client

BOOT = 77
_LIMITS = [1 << 16, 4, 64, 64, 2.0, 60.0, 5.0, 256]
_WELCOME = ["welcome", 1, BOOT, 0, 1, "d", bytes(16), "t", 0, bytes(16), 1 << 20, "spill", _LIMITS]
_BY_NAME: dict[str, Any] = {
    "id": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 99, -1],
    "boot": [BOOT] * 30 + [0, 78],
    "acked": [0, 0, 1, 2, 99, 2**64 - 1],
    "offsets": [b"", raw.u64(0), raw.u64(0, 4096), raw.u64(2**63), b"odd"],
    "code": [100, 101, 103, 204, 301, 402, 501, 502, 0, 999, -1],
    "pages": [b"", raw.u32(1), b"odd"],
}


def _reply(dice: Dice) -> list[Any]:
    kinds = [*wire.AnyReply.__args__, *wire.Push.__args__]
    kind = dice.choice(kinds)
    if kind is wire.Welcome and dice.random() < 0.8:
        return _WELCOME
    values = [
        dice.choice(_BY_NAME[field.name])
        if field.name in _BY_NAME
        else grammar._by_type(field.type)(dice)
        for field in msgspec.structs.fields(kind)
    ]
    return [kind.__struct_config__.tag, *values]


class ClientTarget(Small):
    """What a hostile daemon may say: a client's protocol ends in its typed errors alone."""

    unit = "frames"
    input_bytes = 1 << 14

    def draw(self, dice: Dice) -> bytes:
        return script.encode([_WELCOME, *(_reply(dice) for _ in range(dice.randint(1, 40)))])

    def mutate(self, data: bytes, size: int, dice: Dice, change: Mutate) -> bytes:
        try:
            replies = script.decode(data)
        except (msgspec.MsgspecError, RecursionError):
            replies = None
        if not isinstance(replies, list) or not replies or dice.random() < 0.3:
            return change(data, size)
        at = dice.randrange(len(replies) + 1)
        if dice.random() < 0.7 or at == len(replies) or not isinstance(replies[at], list):
            replies.insert(at, _reply(dice))
        elif replies[at]:
            where = dice.randrange(len(replies[at]))
            replies[at] = [*replies[at]]
            replies[at][where] = grammar._anything(dice)
        return script.encode(replies[:REPLIES_MAX])[:size]

    def take(self, data: bytes) -> None:
        try:
            replies = script.decode(data)
        except (msgspec.MsgspecError, RecursionError):
            replies = None
        protocol = Protocol("fuzz", bytes(16), bytes(16))
        protocol.open()
        self._ask(protocol)
        try:
            if not isinstance(replies, list):
                self.counts["frames"] += 1
                protocol.receive(data)
                return
            for number, reply in enumerate(replies[:REPLIES_MAX]):
                self.counts["frames"] += 1
                protocol.receive(frame(script.encode(reply)))
                if number % 5 == 4:
                    self._ask(protocol)
                protocol.take_outbox()
        except KvtierError:
            self.counts["refused"] += 1
        protocol.lost()

    @staticmethod
    def _ask(protocol: Protocol) -> None:
        """Have requests of several kinds unanswered, one-way ones and abandoned ones too."""
        known, next_id = raw.fingerprint(script.LAYOUTS[0]), protocol.next_id
        protocol.sessions.setdefault(1, bytes(16))
        protocol.submit(wire.Reserve(next_id(), 1, known, 2))
        protocol.submit(wire.Release(next_id(), 5), oneway=True)
        protocol.abandon(protocol.submit(wire.Acquire(next_id(), 2, 1, 0, known, 0, 4)))
        protocol.submit(wire.GetBlob(next_id(), 1, 0))
