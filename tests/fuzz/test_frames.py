"""Hostile bytes and frames at a real daemon: a typed error or a closed connection, and it goes on.

`KVTIERD_FUZZ_EXAMPLES` sets how many; `make fault` does many.
"""

import contextlib
import os
import random
import socket
import struct
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvtierd import config as configuration
from tests.fault.test_kill_daemon import assert_books_balance
from tests.support import raw
from tests.support.daemon import DaemonProcess
from tests.support.raw import NO_NODE, Closed, RawClient, from_u64, pattern, u32, u64
from tests.support.wait import until

EXAMPLES = int(os.environ.get("KVTIERD_FUZZ_EXAMPLES", "60"))
LAYOUT = raw.layout()
KNOWN = raw.fingerprint(LAYOUT)
TOKEN = bytes(range(16))
SESSION = raw.session_id(TOKEN)
TYPED = {101, 102, 103, *range(201, 208), *range(301, 304), 401, 402, 501}
"""Codes that a client may cause; 502 (a fault in the daemon) is not one."""
many = settings(
    max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), database=None,
    derandomize="KVTIERD_FUZZ_EXAMPLES" not in os.environ,
    phases=[Phase.explicit, Phase.generate],  # one daemon for all: shrinking would mislead
)  # fmt: skip

# Plausible values come often, so that requests get past the first check.
counters = st.sampled_from([0, 1, 2, 3, -1, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
sessions = st.sampled_from([SESSION, SESSION, SESSION, 0, 1, 2**64 - 1, -1])
nodes = st.sampled_from([0, 0, 1, 2, NO_NODE, NO_NODE + 1, -1, 2**64 - 1])
layouts = st.sampled_from([KNOWN, KNOWN, KNOWN, bytes(16), b"", bytes(3000)])
small = st.sampled_from([0, 1, 2, 3, 15, 16, 17, 128, 129, -1, 2**31, 2**32, 2**64 - 1])
numbers = st.one_of(
    st.lists(st.integers(0, 4), max_size=5).map(lambda values: u32(*values)),
    st.sampled_from([b"", b"abc", u32(2**32 - 1), u32(0) * 4, bytes(4000)]),
)
valid = st.one_of(
    st.lists(st.sampled_from([1, 16, 16, 0, 17]), max_size=5).map(lambda values: u32(*values)),
    numbers,
)
keys = st.one_of(
    st.lists(st.integers(0, 5), max_size=6).map(lambda ks: b"".join(bytes([k]) * 16 for k in ks)),
    st.sampled_from([b"", b"fifteen bytes..", bytes(1600)]),
)
seconds = st.sampled_from([0.0, 0.0, 0.01, -1.0, 1e300, float("nan"), float("inf"), 0])
oneway = st.sampled_from([0, 0, 1, 7, -1, 2**64 - 1])
retention = st.sampled_from([1, 2, 0, 3, -1])
text = st.sampled_from(["", "name", "n" * 300, "ü" * 100])
leases = st.one_of(counters, st.integers(0, 3).map(lambda n: n << 32 | 1), st.just(1))
held = st.lists(
    st.tuples(
        leases, st.booleans(),
        st.sampled_from([b"", b"odd", u64(0), u64(0, 0), u64(65536), u64(1), u64(2**64 - 1),
                         u64(2**63), u64(2**40)]),
    ), max_size=4,
)  # fmt: skip
VERBS: dict[str, list[st.SearchStrategy[Any]]] = {
    "hello": [st.integers(0, 2), text, st.just(bytes(16)), st.just(bytes(32)), small, held],
    "register_layout": [
        st.tuples(
            text, st.sampled_from(["uint8", "float32", "int3"]), small, small, small, small,
            st.sampled_from([4096, 65536, 1 << 19, 1 << 20, -1, 2**63]), small, small, small,
            small, st.booleans(), st.sampled_from(["raw", "packed"]), text,
        )
    ],
    "open_session": [
        st.sampled_from([TOKEN, TOKEN, b"", bytes(16), bytes(17)]),
        st.lists(layouts, max_size=3), small, text,
    ],
    "resume_session": [st.sampled_from([TOKEN, TOKEN, b"", bytes(17)])],
    "close_session": [sessions],
    "describe": [sessions],
    "fork": [sessions, nodes, nodes, small],
    "prune": [sessions, nodes, st.booleans()],
    "set_retention": [sessions, nodes, retention],
    "fold": [sessions, nodes, small, small, seconds, small, oneway],
    "unfold": [sessions, nodes, small, small],
    "set_priority": [sessions, small],
    "put_blob": [sessions, nodes, small, st.binary(max_size=50)],
    "get_blob": [sessions, nodes],
    "reserve": [counters, layouts, small, small, leases, seconds, seconds],
    "commit": [leases, sessions, nodes, numbers, numbers, valid, retention, oneway, numbers],
    "abort": [leases],
    "acquire": [counters, sessions, nodes, layouts, small, small, seconds, seconds],
    "renew": [leases, seconds],
    "release": [leases, oneway],
    "prefetch": [small, sessions, nodes, layouts, small, small, small, seconds],
    "cancel": [small],
    "lookup": [st.lists(layouts, max_size=3), keys, counters, seconds],
    "reserve_keys": [counters, layouts, keys, seconds, seconds],
    "commit_keys": [leases, numbers, keys, numbers, valid, oneway, numbers],
    "acquire_keys": [counters, layouts, keys, seconds, seconds],
    "hold": [sessions, layouts, keys],
    "unhold": [sessions, layouts, keys],
    "remove": [layouts, keys],
    "goodbye": [numbers],
}  # fmt: skip
plausible = st.one_of(
    [st.tuples(st.just(verb), *fields).map(list) for verb, fields in VERBS.items()]
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.binary(max_size=20),
    st.text(max_size=10),
)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=6), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
wrong_types = st.tuples(
    st.sampled_from([*VERBS, "no_such_verb", ""]), st.lists(anything, max_size=6)
).map(lambda pair: [pair[0], *pair[1]])


@pytest.fixture(scope="module")
def fuzzed(shared_daemon: DaemonProcess) -> DaemonProcess:
    return shared_daemon


@pytest.fixture
def witness(fuzzed: DaemonProcess) -> Iterator[RawClient]:
    """A well-behaved client with a stored session: it must not notice anything."""
    with fuzzed.client() as client:
        session = client.open(LAYOUT)
        client.swap_out(KNOWN, session, 0, {page: 100 + page for page in range(8)})
        yield client
        assert client.swap_in(KNOWN, session, 0, 0, 8) == [pattern(100 + i) for i in range(8)]
        client.ask("close_session", session)


def attack(client: RawClient) -> None:
    """Be a client that has a session, a write lease and a read lease to do harm with."""
    client.hello()
    client.open(LAYOUT, TOKEN)
    client.swap_out(KNOWN, SESSION, 0, {0: 1, 1: 2, 2: 3})
    client.reserve(KNOWN, 4)
    client.ask("acquire", client.lease(), SESSION, 0, KNOWN, 0, 2)


def give_back(client: RawClient) -> None:
    """End everything that was granted and opened; then nothing may be left."""
    client.call("cancel", 0)  # takes in what has come meanwhile
    client.clean()
    client.call("close_session", SESSION)


ONEWAY_AT = {"commit": 7, "commit_keys": 5, "release": 1, "fold": 6}
"""Where the field is that says that there will be no reply."""


def exchange(client: RawClient, requests: list[list[Any]]) -> None:
    """Send requests one by one; every reply is typed."""
    for verb, *fields in requests:
        request = client.send(verb, *fields)
        if verb in ONEWAY_AT and fields[ONEWAY_AT[verb]]:
            continue
        reply = client.reply(request)
        assert reply[0] != "error" or reply[4] in TYPED, (verb, fields, reply)
    client.call("cancel", 12345)
    for push in client.pushes:
        assert push[0] != "failed" or push[4] in TYPED, push
    client.pushes.clear()


@many
@given(st.lists(plausible, min_size=5, max_size=25))
def test_plausible_requests_with_hostile_values(
    fuzzed: DaemonProcess, requests: list[list[Any]]
) -> None:
    with RawClient(fuzzed.client_path) as client:
        attack(client)
        exchange(client, requests)
        until(lambda: waits_ended(client, fuzzed), "the waits have ended")
        give_back(client)
        forget_keys(client)
    assert_nothing_is_left(fuzzed)


def waits_ended(client: RawClient, daemon: DaemonProcess) -> bool:
    client.call("cancel", 0)  # takes in what has come meanwhile
    return bool(daemon.tenant()["waiting"] == 0)


def forget_keys(client: RawClient) -> None:
    for key in range(6):
        client.call("remove", KNOWN, bytes([key]) * 16)
    client.call("remove", KNOWN, bytes(16))


def assert_nothing_is_left(daemon: DaemonProcess) -> None:
    def empty() -> bool:
        tenant = daemon.tenant()
        return bool(
            tenant["leases"] == tenant["promised_blocks"] == tenant["sessions"] == 0
            and tenant["dram"]["used_bytes"] == tenant["nvme"]["used_bytes"] == 0
        )

    until(empty, lambda: f"nothing is left: {daemon.tenant()}", 30.0)


@many
@given(st.lists(wrong_types, min_size=1, max_size=8))
def test_wrong_types_and_shapes(fuzzed: DaemonProcess, requests: list[list[Any]]) -> None:
    with RawClient(fuzzed.client_path) as client:
        client.hello()
        for number, (verb, *fields) in enumerate(requests):
            client.send_frame(msgpack.packb([verb, 10**6 + number, *fields]))
        client.ask("register_layout", LAYOUT)
        for reply in client._replies.values():
            assert reply[0] != "error" or reply[4] in TYPED, reply
        client.clean()


@many
@given(st.lists(anything, min_size=1, max_size=10))
def test_any_value_is_answered(fuzzed: DaemonProcess, values: list[Any]) -> None:
    with RawClient(fuzzed.client_path) as client:
        client.hello()
        for value in values:
            client.send_frame(msgpack.packb(value))
        client.ask("register_layout", LAYOUT)


def until_closed(client: RawClient) -> Iterator[list[Any]]:
    """Everything that still comes."""
    with contextlib.suppress(Closed):
        while True:
            yield client.receive()


@many
@given(st.binary(max_size=2000))
def test_random_bytes(fuzzed: DaemonProcess, data: bytes) -> None:
    for greeted in (False, True):
        with RawClient(fuzzed.client_path) as client:
            if greeted:
                client.hello()
            client.socket.sendall(data)
            client.socket.shutdown(socket.SHUT_WR)
            for reply in until_closed(client):
                assert reply[0] == "error", reply
                assert reply[4] in TYPED, reply


@many
@given(st.lists(st.tuples(plausible, st.randoms(use_true_random=False)), min_size=1, max_size=8))
def test_mutated_frames(
    fuzzed: DaemonProcess, requests: list[tuple[list[Any], random.Random]]
) -> None:
    with RawClient(fuzzed.client_path) as client:
        client.hello()
        for number, ((verb, *fields), chance) in enumerate(requests):
            body = bytearray(msgpack.packb([verb, 1000 + number, *fields]))
            for _ in range(chance.randint(1, 4)):
                body[chance.randrange(len(body))] = chance.randrange(256)
            client.send_frame(bytes(body[: chance.randint(1, len(body))]))
        client.ask("register_layout", LAYOUT)
        client.clean()
        client.call("close_session", SESSION)


DEEP = 100_000


@pytest.mark.parametrize(
    "body",
    [
        b"", b"\xc1", b"\xc0", b"\x90", b"\x91" * DEEP + b"\xc0",
        b"\x94\xa6cancel\x01\x02" + b"\x91" * DEEP + b"\xc0",
        b"\x94\xa6cancel\x01\x02" + b"\x81\x01" * DEEP + b"\xc0",
        b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff", b"\x95\xa6lookup\x01\xdd\xff\xff\xff\xff\xc4\x00",
        b"\x93\xa6cancel\x01\xc6\xff\xff\xff\xff", b"\x93\xa6cancel\x01\xd4\x05\x00",
        b"\x93\xa2\xff\xfe\x01\x02", b"\x81\x80\x80",
    ],
    ids=lambda body: f"{body[:12]!r}+{len(body)}",
)  # fmt: skip
def test_crafted_frames(fuzzed: DaemonProcess, witness: RawClient, body: bytes) -> None:
    with RawClient(fuzzed.client_path) as client:
        client.hello()
        client.send_frame(body)
        reply = client.receive()
        if reply[0] == "error":
            assert reply[4] in TYPED
        client.ask("register_layout", LAYOUT)
    with RawClient(fuzzed.client_path) as client:
        client.send_frame(body)
        assert client.receive()[4] in TYPED
        with pytest.raises(Closed):
            client.receive()


@pytest.mark.parametrize("length", [2**32 - 1, 2**31, (2 << 20) + 1])
def test_declared_lengths_beyond_the_limit(
    fuzzed: DaemonProcess, witness: RawClient, length: int
) -> None:
    for greeted in (False, True):
        with RawClient(fuzzed.client_path) as client:
            if greeted:
                client.hello()
            client.socket.sendall(struct.pack("<I", length) + b"x")
            assert client.receive()[4] == 103
            with pytest.raises(Closed):
                client.receive()


def test_frames_in_single_bytes(fuzzed: DaemonProcess, witness: RawClient) -> None:
    with RawClient(fuzzed.client_path) as client:
        body = msgpack.packb(["hello", 1, 1, "slow", client.group, client.secret])
        for byte in struct.pack("<I", len(body)) + body:
            client.socket.sendall(bytes([byte]))
        assert client.receive()[0] == "welcome"
        body = msgpack.packb(["register_layout", 2, LAYOUT])
        for byte in (struct.pack("<I", len(body)) + body) * 3:
            client.socket.sendall(bytes([byte]))
        assert [client.receive()[0] for _ in range(3)] == ["layout_registered"] * 3


def test_halves_of_frames_are_forgotten_with_their_connection(
    fuzzed: DaemonProcess, witness: RawClient
) -> None:
    for cut in range(1, 40, 3):
        with RawClient(fuzzed.client_path) as client:
            body = msgpack.packb(["hello", 1, 1, "cut", client.group, client.secret])
            client.socket.sendall((struct.pack("<I", len(body)) + body)[:cut])
    until(lambda: fuzzed.tenant()["clients"] == 1, "the witness is alone")


def test_a_flood_of_pipelined_requests_is_answered_each(
    fuzzed: DaemonProcess, witness: RawClient
) -> None:
    count = 3000
    with RawClient(fuzzed.client_path) as client:
        client.hello()
        frames = [msgpack.packb(["register_layout", 10 + i, LAYOUT]) for i in range(count)]
        client.socket.sendall(b"".join(struct.pack("<I", len(f)) + f for f in frames))
        assert [client.receive()[1] for _ in range(count)] == list(range(10, 10 + count))


def test_a_flood_whose_replies_nobody_reads_is_held_back(
    fuzzed: DaemonProcess, witness: RawClient
) -> None:
    token = os.urandom(16)
    with RawClient(fuzzed.client_path) as client:
        client.hello()
        session = client.open(LAYOUT, token)
        client.swap_out(KNOWN, session, 0, {page: page for page in range(100)})
        body = msgpack.packb(["describe", 7, session])
        frame = struct.pack("<I", len(body)) + body
        send_until_it_is_held_back(client, frame * 1000)
        assert memory_bytes(fuzzed) < 300 << 20
        witness.ask("register_layout", LAYOUT)
    with fuzzed.client() as client:
        client.ask("resume_session", token)
        client.ask("close_session", session)


def send_until_it_is_held_back(client: RawClient, data: bytes) -> None:
    client.socket.settimeout(1.0)
    with contextlib.suppress(TimeoutError):
        while True:
            client.socket.sendall(data)


def memory_bytes(daemon: DaemonProcess) -> int:
    assert daemon.process is not None
    with open(f"/proc/{daemon.process.pid}/statm") as file:
        resident, shared = file.read().split()[1:3]
    return (int(resident) - int(shared)) * 4096


def test_ids_in_use_and_too_many_at_once(fuzzed: DaemonProcess, witness: RawClient) -> None:
    limit = configuration.LimitsConfig().requests_in_flight
    blocks = witness.welcome[10] // raw.BLOCK_BYTES
    with fuzzed.client() as client:
        client.ask("register_layout", LAYOUT)
        client.reserve(KNOWN, blocks - blocks // 8)
        waiting = ["reserve", 50, 999, KNOWN, blocks // 2, 0, 0, 60.0]
        client.send_frame(msgpack.packb(waiting))
        for _ in range(5):
            client.send_frame(msgpack.packb(waiting))
            assert client.reply(50)[4] == 204  # the first one still waits
        for number in range(limit - 1):
            reserve = ["reserve", 1000 + number, 1000 + number, KNOWN, blocks // 2, 0, 0, 60.0]
            client.send_frame(msgpack.packb(reserve))
        client.send_frame(msgpack.packb(["reserve", 5000, 5000, KNOWN, blocks // 2, 0, 0, 60.0]))
        assert client.reply(5000)[4] == 207
        client.send_frame(msgpack.packb(["release", 5001, 77, 1]))  # one-way ones always pass
        assert client.push("failed")[1] == 5001
    until(lambda: fuzzed.tenant()["waiting"] == 0, "nobody waits for a closed connection")
    with RawClient(fuzzed.client_path, client.group, client.secret) as again:
        again.member = client.member
        again.hello()
        again.granted = client.granted
        again.clean()


def test_leases_claimed_with_nonsense(fuzzed: DaemonProcess, witness: RawClient) -> None:
    """What a client says that it holds is believed only where the daemon knows it already."""
    reading = witness.ask("acquire", witness.lease(), session_of(witness), 0, KNOWN, 0, 4)
    offsets = from_u64(reading[6])
    claims = [
        [reading[4], False, reading[6]], [reading[4], True, reading[6]],
        [1, True, u64(*offsets)], [2**63, False, u64(*offsets)], [-5, False, u64(0)],
        [2**40, False, u64(2**63, 2**64 - 1)], [3, False, u64(offsets[0] + 1)], [4, True, b"odd"],
        [0, False, b""],
    ]  # fmt: skip
    with RawClient(fuzzed.client_path) as thief:
        thief.hello(claims)
        assert sorted(thief.welcome[13]) == sorted(claim[0] for claim in claims)
        assert thief.code("release", reading[4]) == 206
        assert thief.code("abort", reading[4]) == 206
    assert witness.ask("release", reading[4])[4] == 4


def session_of(client: RawClient) -> int:
    (session,) = client.sessions
    return session


def test_the_books_balance_in_the_end(fuzzed: DaemonProcess, witness: RawClient) -> None:
    assert_books_balance(fuzzed, fuzzed.tenant()["held_blocks"])
    fuzzed.assert_no_faults()
    assert fuzzed.ails() == []
