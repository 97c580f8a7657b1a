"""Clients that flood, dawdle, pass descriptors and lie, at a real daemon: the others are served."""

import array
import contextlib
import os
import socket
import struct
from collections.abc import Iterator

import msgpack
import pytest

from kvtierd.config import LimitsConfig
from tests.support import raw
from tests.support.daemon import DaemonProcess
from tests.support.raw import NO_NODE, Closed, RawClient, pattern, u32
from tests.support.wait import until

LAYOUT = raw.layout()
KNOWN = raw.fingerprint(LAYOUT)
CONNECTIONS = 60
DESCRIPTORS = 200
MIB = 1 << 20


@pytest.fixture(scope="module")
def shared(shared_daemon: DaemonProcess) -> DaemonProcess:
    return shared_daemon


@pytest.fixture
def witness(shared: DaemonProcess) -> Iterator[RawClient]:
    """A well-behaved client with a stored session: it must not notice anything."""
    with shared.client() as client:
        session = client.open(LAYOUT)
        client.swap_out(KNOWN, session, 0, {page: 100 + page for page in range(4)})
        yield client
        is_served(client)
        client.clean()
    until(lambda: shared.tenant()["clients"] == 0, "all have left")


def is_served(client: RawClient) -> None:
    (session,) = client.sessions
    assert client.swap_in(KNOWN, session, 0, 0, 4) == [pattern(100 + i) for i in range(4)]


def descriptors(daemon: DaemonProcess) -> int:
    assert daemon.process is not None
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


def memory_bytes(daemon: DaemonProcess) -> int:
    assert daemon.process is not None
    with open(f"/proc/{daemon.process.pid}/statm") as file:
        resident, shared = file.read().split()[1:3]
    return (int(resident) - int(shared)) * 4096


def connect(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(path)  # waits while the backlog is full
    sock.settimeout(raw.TIMEOUT_S)
    return sock


def frame(*fields: object) -> bytes:
    body = msgpack.packb(list(fields))
    return struct.pack("<I", len(body)) + body


# ---------------------------------------------------------------- slow ones


def test_many_that_never_say_hello(shared: DaemonProcess, witness: RawClient) -> None:
    """They are closed at their deadline, and until then nobody waits for them."""
    before = descriptors(shared)
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connect(shared.client_path)) for _ in range(CONNECTIONS)]
        for number, sock in enumerate(socks):
            with contextlib.suppress(BrokenPipeError):  # its time may be over already
                sock.sendall(frame("hello", 1, 1, "slow", bytes(16), bytes(16))[: number % 20])
        is_served(witness)
        with shared.client() as another:
            another.ask("register_layout", LAYOUT)
        for sock in socks:
            assert sock.recv(1) == b""
    until(lambda: descriptors(shared) <= before + 1, "of them all only the other's pidfd is left")


def test_many_that_stop_inside_a_frame(shared: DaemonProcess, witness: RawClient) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(shared.client()) for _ in range(10)]
        for number, client in enumerate(clients):
            whole = frame("register_layout", 7, LAYOUT)
            client.socket.sendall(whole[: 1 + number * 5])
        is_served(witness)
        for number, client in enumerate(clients):  # nothing was forgotten meanwhile
            client.socket.sendall(frame("register_layout", 7, LAYOUT)[1 + number * 5 :])
            assert client.receive()[:2] == ["layout_registered", 7]


def test_half_closed_sockets(shared: DaemonProcess, witness: RawClient) -> None:
    """What came before the end is carried out; then the connection is gone."""
    before = descriptors(shared)
    for _ in range(20):
        with shared.client() as client:
            client.socket.sendall(frame("register_layout", 7, LAYOUT) + b"\x09")
            client.socket.shutdown(socket.SHUT_WR)
            with contextlib.suppress(Closed):
                while True:
                    client.receive()
        with connect(shared.client_path) as sock:
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(1) == b""
    is_served(witness)
    until(lambda: descriptors(shared) <= before + 20, "their pidfds are left, for they live")


# ---------------------------------------------------------------- floods


def test_a_process_gets_a_share_of_the_connections_only(make_daemon: raw.Any) -> None:
    """Its own flood fills its share; others still get in, and it gets in again afterwards."""
    daemon = make_daemon(limits={"connections": 30}).start()
    with contextlib.ExitStack() as stack:
        refused = 0
        for _ in range(30):
            client = stack.enter_context(RawClient(daemon.client_path))
            try:
                reply = client.call("hello", 1, 1, "flood", client.group, client.secret)
            except Closed:
                refused += 1
                continue
            refused += reply[0] == "error"
            assert reply[0] == "welcome" or reply[4] in (103, 204, 207), reply
        assert refused > 0
        assert daemon.ails() == []
    until(lambda: daemon.tenant()["clients"] == 0, "they are gone")
    with daemon.client() as client:
        client.ask("register_layout", LAYOUT)


def test_a_flood_of_connects(shared: DaemonProcess, witness: RawClient) -> None:
    before = descriptors(shared)
    for _ in range(300):
        connect(shared.client_path).close()
    is_served(witness)
    until(lambda: descriptors(shared) <= before, "nothing is left of them")


def test_a_flood_of_the_smallest_frames(shared: DaemonProcess, witness: RawClient) -> None:
    with shared.client() as client:
        count = 20_000
        client.socket.setblocking(False)
        data = memoryview(struct.pack("<I", 1) + b"\xc0").cast("B").tobytes() * count
        sent = answered = 0
        while answered < count:
            with contextlib.suppress(BlockingIOError):
                sent += client.socket.send(data[sent : sent + 65536]) if sent < len(data) else 0
            if answered % 5000 == 0:
                is_served(witness)
            client.socket.settimeout(raw.TIMEOUT_S)
            reply = client.receive()
            client.socket.setblocking(False)
            assert reply[0] == "error"
            assert reply[4] in (103, 204)
            answered += 1


def test_more_requests_than_may_wait(shared: DaemonProcess, witness: RawClient) -> None:
    limit, blocks = LimitsConfig().requests_in_flight, witness.welcome[10] // raw.BLOCK_BYTES
    with shared.client() as client:
        client.ask("register_layout", LAYOUT)
        client.reserve(KNOWN, blocks - blocks // 4)
        client.socket.sendall(
            b"".join(frame("reserve", 100 + n, 100 + n, KNOWN, blocks // 2, 0, 0, 60.0)
                     for n in range(2 * limit))
        )  # fmt: skip
        for _ in range(limit):
            reply = client.receive()
            assert (reply[0], reply[4]) == ("error", 207)
        is_served(witness)
        assert shared.tenant()["waiting"] == limit
    until(lambda: shared.tenant()["waiting"] == 0, "nobody waits for a closed connection")


def test_who_never_reads_costs_a_bounded_amount_of_memory(
    shared: DaemonProcess, witness: RawClient
) -> None:
    before = memory_bytes(shared)
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            client = stack.enter_context(shared.client())
            session = client.open(LAYOUT)
            client.swap_out(KNOWN, session, 0, {page: page for page in range(16)})
            client.socket.settimeout(0.5)
            with contextlib.suppress(TimeoutError):
                for _ in range(1000):
                    client.socket.sendall(frame("describe", 7, session) * 1000)
        is_served(witness)
        bound = 4 * (2 * LimitsConfig().output_buffer_bytes + LimitsConfig().frame_bytes)
        assert memory_bytes(shared) - before < bound + 64 * MIB
    until(lambda: shared.tenant()["clients"] == 1, "they are gone")
    with shared.client() as client:
        for session in [each["session"] for each in shared.admin("sessions")["sessions"]]:
            assert session
        client.ask("register_layout", LAYOUT)


@pytest.mark.parametrize("greeted", [False, True])
def test_lengths_that_nobody_may_send_take_no_memory(
    shared: DaemonProcess, witness: RawClient, greeted: bool
) -> None:
    before = memory_bytes(shared)
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            client = stack.enter_context(RawClient(shared.client_path))
            if greeted:
                client.hello()
            client.socket.sendall(struct.pack("<I", 2**32 - 1) + bytes(1000))
            assert client.receive()[4] == 103
            with pytest.raises(Closed):
                client.receive()
        assert memory_bytes(shared) - before < 16 * MIB


# ---------------------------------------------------------------- descriptors


def pass_descriptors(sock: socket.socket, data: bytes, count: int = DESCRIPTORS) -> None:
    """Send bytes with many descriptors beside them."""
    with open(os.devnull, "rb") as null:
        fds = array.array("i", [null.fileno()] * count)
        sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])


def test_descriptors_passed_to_the_daemon_are_not_taken(
    shared: DaemonProcess, witness: RawClient
) -> None:
    before = descriptors(shared)
    hello = frame("hello", 1, 1, "fds", os.urandom(16), bytes(16))
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            sock = stack.enter_context(connect(shared.client_path))
            pass_descriptors(sock, hello[:10])
            pass_descriptors(sock, hello[10:])
            assert sock.recv(1 << 16)
            for _ in range(5):
                pass_descriptors(sock, frame("register_layout", 2, LAYOUT))
                assert sock.recv(1 << 16)
        operator = stack.enter_context(connect(shared.admin_path))
        pass_descriptors(operator, frame("stats", 1))
        assert operator.recv(1 << 16)
        is_served(witness)
        assert descriptors(shared) <= before + 11 * 2  # a socket and a pidfd each, nothing else
    until(lambda: descriptors(shared) <= before + 10, "their pidfds are left, for they live")


# ---------------------------------------------------------------- liars


def test_the_verbs_of_operators_are_not_for_clients(
    shared: DaemonProcess, witness: RawClient
) -> None:
    with shared.client() as client:
        for verb, *fields in (["stats"], ["sessions"], ["evict", "t", 1], ["reload"], ["tree", ""]):
            assert client.code(verb, *fields) == 204
    with RawClient(shared.admin_path) as operator:
        assert operator.code("open_session", bytes(16), [KNOWN]) == 204
        assert operator.code("hello", 1, "x", bytes(16), bytes(16)) == 204


def test_hello_once_and_under_the_own_number(shared: DaemonProcess, witness: RawClient) -> None:
    with shared.client() as client:
        assert client.code("hello", 1, "again", client.group, client.secret) == 204
        client.ask("register_layout", LAYOUT)
    with RawClient(shared.client_path) as liar:  # the witness's number in a group of its own
        liar.member = witness.member
        liar.hello()
        assert liar.member != witness.member


def test_a_group_cannot_be_entered_by_guessing(shared: DaemonProcess, witness: RawClient) -> None:
    session = next(iter(witness.sessions))
    reading = witness.ask("acquire", witness.lease(), session, 0, KNOWN, 0, 2)
    for secret in (bytes(16), witness.secret[:16], witness.secret + b"\0", os.urandom(32)):
        with RawClient(shared.client_path, witness.group, secret) as guesser:
            reply = guesser.call("hello", 1, "guess", guesser.group, secret)
            assert (reply[0], reply[4]) == ("error", 206)
            with pytest.raises(Closed):
                guesser.receive()
    with shared.client() as stranger:  # of the same tenant: only who has the token has the session
        stranger.ask("register_layout", LAYOUT)
        for code in refusals(stranger, session, reading[4], reading[6]):
            assert code in (201, 205, 206), code
    witness.ask("release", reading[4])


def refusals(client: RawClient, session: int, lease: int, offsets: bytes) -> Iterator[int]:
    """What a client is told that asks for what is another group's, with every verb for it."""
    one, keys = u32(0), bytes(16)
    for verb, *fields in (
        ["close_session", session], ["describe", session], ["fork", session, 9, 0, 16],
        ["prune", session, 0], ["set_retention", session, NO_NODE, 2], ["set_priority", session, 0],
        ["fold", session, 0, 0, 1, 0.0], ["unfold", session, 0, 0, 1],
        ["put_blob", session, 0, 99, b"x"], ["get_blob", session, 0],
        ["acquire", client.lease(), session, 0, KNOWN, 0, 1], ["abort", lease],
        ["prefetch", 1, session, 0, KNOWN, 0, 1], ["renew", lease, 60.0], ["release", lease],
        ["commit", lease, session, 0, one, one, u32(16)],
        ["commit_keys", lease, one, keys, one, u32(16)],
        ["hold", session, KNOWN, keys], ["unhold", session, KNOWN, keys],
        ["reserve", client.lease(), KNOWN, 1, 0, lease],
    ):  # fmt: skip
        yield client.code(verb, *fields)
    assert len(offsets) % 8 == 0


def test_nothing_of_all_this_was_a_fault(shared: DaemonProcess) -> None:
    shared.assert_no_faults()
    assert shared.ails() == []
