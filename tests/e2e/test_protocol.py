"""The protocol, verb by verb, against a real daemon, spoken with a socket and `msgpack` alone."""

import ast
import errno
import os
import sys
from pathlib import Path

import pytest

from tests.support import raw
from tests.support.daemon import DaemonProcess
from tests.support.fixtures import MakeDaemon
from tests.support.raw import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    CACHED,
    HELD,
    NO_NODE,
    Closed,
    RawClient,
    from_u32,
    from_u64,
    pattern,
    u32,
    u64,
)  # fmt: skip
from tests.support.wait import until

LAYOUT = raw.layout()
KNOWN = raw.fingerprint(LAYOUT)
NODE, PARENT, FORK, RETENTION, ENDED, BLOB_VERSION, PAGES, VALID, TIERS = range(9)
IN_DRAM, ON_NVME = 1, 2


def node_of(reply: list, node: int = 0) -> list:
    return next(each for each in reply[8] if each[NODE] == node)


@pytest.fixture
def daemon(shared_daemon: DaemonProcess) -> DaemonProcess:
    """One daemon for the file: every test cleans up behind its client, and begins after that."""
    until(shared_daemon.is_empty, "what earlier tests had is gone")
    return shared_daemon


@pytest.fixture
def session(client: RawClient) -> int:
    return client.open(LAYOUT)


def test_the_raw_client_needs_nothing_but_a_socket_and_msgpack() -> None:
    tree = ast.parse(Path(raw.__file__).read_text())
    imported = {
        name.name.partition(".")[0]
        for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    } | {
        (node.module or "").partition(".")[0]
        for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
    }  # fmt: skip
    assert imported - sys.stdlib_module_names == {"msgpack"}


# ------------------------------------------------------------------ hello


def test_welcome_says_all_that_a_client_needs(daemon: DaemonProcess) -> None:
    with RawClient(daemon.client_path) as client:
        welcome = client.hello()
        tag, number, boot, acked, version, name, instance, tenant, member, arena_id = welcome[:10]
        assert (tag, number, acked, version, tenant) == ("welcome", 1, 0, 1, "t")
        assert boot > 0
        assert name.startswith("kvtierd ")
        assert len(instance) == len(arena_id) == 16
        assert 0 <= member < 1024
        assert welcome[10] == os.fstat(client.arena_fd).st_size
        assert welcome[11] == "spill"
        assert len(welcome[12]) == 8
        assert all(limit > 0 for limit in welcome[12])
        assert welcome[13] == []


def test_the_arena_cannot_be_resized_through_its_descriptor(
    client: RawClient, session: int
) -> None:
    for size in (0, 4096, client.welcome[10] + 4096):
        with pytest.raises(PermissionError) as refused:
            os.ftruncate(client.arena_fd, size)
        assert refused.value.errno == errno.EPERM
    client.swap_out(KNOWN, session, 0, {0: 1})
    assert client.swap_in(KNOWN, session, 0, 0, 1) == [pattern(1)]


def test_a_wrong_version_is_refused(daemon: DaemonProcess) -> None:
    with RawClient(daemon.client_path) as client:
        assert client.code("hello", 2, "raw", client.group, client.secret) == 103
        with pytest.raises(Closed):
            client.receive()


def test_hello_comes_first_and_once(daemon: DaemonProcess, client: RawClient) -> None:
    with RawClient(daemon.client_path) as early:
        early.send("describe", 1)
        assert early.receive()[4] == 103
        with pytest.raises(Closed):
            early.receive()
    assert client.code("hello", 1, "raw", client.group, client.secret) == 204
    client.ask("register_layout", LAYOUT)


def test_a_group_is_entered_with_its_secret_only(daemon: DaemonProcess, client: RawClient) -> None:
    with RawClient(daemon.client_path, group=client.group) as stranger:
        assert stranger.code("hello", 1, "raw", stranger.group, stranger.secret) == 206
    with RawClient(daemon.client_path, client.group, client.secret) as friend:
        friend.hello()
        assert friend.member != client.member


@pytest.mark.parametrize(("group", "secret"), [(b"short", b"s" * 32), (b"g" * 16, b"short")])
def test_group_and_secret_have_their_lengths(
    daemon: DaemonProcess, group: bytes, secret: bytes
) -> None:
    with RawClient(daemon.client_path) as client:
        assert client.code("hello", 1, "raw", group, secret) == 204


def test_requests_that_come_with_hello_are_answered_in_order(daemon: DaemonProcess) -> None:
    with RawClient(daemon.client_path) as client:
        first = client.send("hello", 1, "raw", client.group, client.secret)
        rest = [client.send("register_layout", raw.layout(f"m{i}")) for i in range(20)]
        assert [client.receive()[1] for _ in range(21)] == [first, *rest]


# ---------------------------------------------------------------- layouts


def test_layouts_have_the_fingerprint_of_the_specification(client: RawClient) -> None:
    fields = raw.layout("a", 8192, extra="rope=1e6")
    reply = client.ask("register_layout", fields)
    assert reply[4:] == [raw.fingerprint(fields), 8192, 8192]
    assert client.ask("register_layout", fields)[4:] == reply[4:]
    odd = raw.layout("b", 8192)
    odd[12], odd[6] = "packed", 5000
    assert client.ask("register_layout", odd)[4:] == [raw.fingerprint(odd), 5000, 8192]


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "int3"}, {"layers": 0}, {"block_bytes": BLOCK_BYTES + 1}, {"tp_rank": 1},
        {"block_tokens": 0}, {"tp_rank": 1, "tp_size": 2, "replicated": True}, {"kv_heads": -2},
        {"codec": "packed", "block_bytes": 1 << 30}, {"group": -1}, {"model": "m" * 5000},
    ],
)  # fmt: skip
def test_layouts_that_contradict_themselves_are_refused(
    client: RawClient, changes: dict[str, object]
) -> None:
    assert client.code("register_layout", raw.layout(**changes)) == 203


# --------------------------------------------------------------- sessions


def test_a_session_is_opened_described_resumed_and_closed(
    daemon: DaemonProcess, client: RawClient
) -> None:
    client.ask("register_layout", LAYOUT)
    token = os.urandom(16)
    opened = client.ask("open_session", token, [KNOWN], 7, "mine")
    assert opened[4:8] == [raw.session_id(token), True, 7, [KNOWN]]
    assert opened[8] == [[0, NO_NODE, 0, HELD, False, 0, [b""], [b""], [b""], []]]
    sid = opened[4]
    assert client.ask("open_session", token, [KNOWN])[5] is False
    client.swap_out(KNOWN, sid, 0, {0: 1, 1: 2})
    with daemon.client() as other:
        assert other.code("describe", sid) == 201
        resumed = node_of(other.ask("resume_session", token))
        assert from_u32(resumed[PAGES][0]) == [0, 1]
        assert from_u32(resumed[VALID][0]) == [BLOCK_TOKENS] * 2
        assert set(resumed[TIERS][0]) == {IN_DRAM}
        assert other.swap_in(KNOWN, sid, 0, 0, 2) == [pattern(1), pattern(2)]
    assert client.ask("close_session", sid)[4] == 2
    assert client.ask("close_session", sid)[4] == 0
    assert client.code("describe", sid) == 201
    assert client.code("resume_session", token) == 201
    assert daemon.tenant()["dram"]["used_bytes"] == 0


def test_a_session_keeps_the_layouts_it_was_opened_with(client: RawClient) -> None:
    other = raw.layout("other")
    token = os.urandom(16)
    client.open(LAYOUT, token)
    client.ask("register_layout", other)
    assert client.code("open_session", token, [raw.fingerprint(other)]) == 203
    assert client.code("open_session", os.urandom(16), [bytes(16)]) == 203
    assert client.code("open_session", os.urandom(16), []) == 204
    assert client.code("open_session", b"short", [KNOWN]) == 204
    assert client.code("open_session", os.urandom(16), [KNOWN], 256) == 204


def test_a_page_exists_when_every_part_has_it(client: RawClient) -> None:
    ranks = [raw.layout(tp_rank=rank, tp_size=2) for rank in range(2)]
    known = [client.ask("register_layout", fields)[4] for fields in ranks]
    sid = client.ask("open_session", os.urandom(16), known)[4]
    client.swap_out(known[0], sid, 0, {0: 1, 1: 2})
    client.swap_out(known[1], sid, 0, {0: 3})
    root = node_of(client.ask("describe", sid))
    assert [from_u32(part) for part in root[PAGES]] == [[0, 1], [0]]
    assert client.swap_in(known[1], sid, 0, 0, 1) == [pattern(3)]


def test_fork_shares_pages_and_prune_frees_them(
    daemon: DaemonProcess, client: RawClient, session: int
) -> None:
    client.swap_out(KNOWN, session, 0, {page: page for page in range(4)})
    fork = ["fork", session, 1, 0, 2 * BLOCK_TOKENS + 5]
    client.ask(*fork)
    client.ask(*fork)
    assert client.code("fork", session, 1, 0, BLOCK_TOKENS) == 204
    assert client.code("fork", session, 2, 9, 0) == 202
    client.swap_out(KNOWN, session, 1, {2: 12, 3: 13})
    seen = client.swap_in(KNOWN, session, 1, 0, 4)
    assert seen == [pattern(0), pattern(1), pattern(12), pattern(13)]
    granted = client.ask("acquire", client.lease(), session, 1, KNOWN, 0, 4)
    assert from_u32(granted[7]) == [BLOCK_TOKENS] * 4
    client.ask("release", granted[4])
    assert client.ask("prune", session, 0, False)[4] == 1  # page 3 is behind the fork
    assert client.code("fork", session, 3, 0, 4 * BLOCK_TOKENS) == 202
    assert client.ask("prune", session, 1)[4] >= 2
    assert client.ask("prune", session, 1)[4] == 0
    assert client.code("acquire", client.lease(), session, 1, KNOWN, 0, 1) == 202
    assert client.code("fork", session, 1, 0, 0) == 204
    assert client.code("prune", session, 0) == 204
    client.ask("close_session", session)
    assert daemon.tenant()["dram"]["used_bytes"] == 0


def test_blobs_grow_by_version(client: RawClient, session: int) -> None:
    assert client.ask("get_blob", session, NO_NODE)[4:] == [0, b""]
    client.ask("put_blob", session, NO_NODE, 2, b"second")
    client.ask("put_blob", session, NO_NODE, 1, b"first")
    client.ask("put_blob", session, 0, 1, b"root")
    assert client.ask("get_blob", session, NO_NODE)[4:] == [2, b"second"]
    assert client.ask("get_blob", session, 0)[4:] == [1, b"root"]
    assert node_of(client.ask("describe", session))[BLOB_VERSION] == 1
    assert client.code("put_blob", session, NO_NODE, 0, b"") == 204
    assert client.code("put_blob", session, 5, 1, b"") == 202
    too_long = client.welcome[12][7] + 1
    assert client.code("put_blob", session, NO_NODE, 9, bytes(too_long)) == 207


def test_retention_and_priority(daemon: DaemonProcess, client: RawClient, session: int) -> None:
    client.swap_out(KNOWN, session, 0, {0: 1, 1: 2})
    assert daemon.tenant()["held_blocks"] == 2
    assert client.ask("set_retention", session, NO_NODE, CACHED)[4] == 2
    assert daemon.tenant()["held_blocks"] == 0
    assert client.ask("set_retention", session, 0, HELD)[4] == 2
    assert client.code("set_retention", session, 0, 3) == 204
    assert client.code("set_retention", session, 8, HELD) == 202
    assert client.ask("set_priority", session, 255)[4] == 2
    assert client.code("set_priority", session, -1) == 204


# ----------------------------------------------------------------- limits


def test_too_much_at_once_is_refused_with_its_limit(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    daemon.sections["limits"] |= {
        "leases_per_group": 2, "requests_in_flight": 2, "nodes_per_session": 2, "groups": 1,
        "sessions_per_tenant": 1, "blocks_per_request": 200, "connections": 6,
    }  # fmt: skip
    daemon.start()
    with daemon.client() as client:
        session = client.open(LAYOUT)
        assert client.code("open_session", os.urandom(16), [KNOWN]) == 207
        client.ask("fork", session, 1, 0, 0)
        assert client.code("fork", session, 2, 0, 0) == 207
        assert client.code("reserve", client.lease(), KNOWN, 201) == 204
        client.reserve(KNOWN, 60)
        client.reserve(KNOWN, 61)
        assert client.code("reserve", client.lease(), KNOWN, 1) == 207
        with RawClient(daemon.client_path) as other:
            assert other.code("hello", 1, "raw", other.group, other.secret) == 207  # a second group
        with RawClient(daemon.client_path, client.group, client.secret) as friend:
            friend.hello()
            with RawClient(daemon.client_path) as third:  # a process gets a third of what is left
                refusal = third.receive()  # before it has said a word
                assert (refusal[0], refusal[4]) == ("error", 207)


def test_a_full_arena_is_told_or_waited_for(daemon: DaemonProcess, client: RawClient) -> None:
    client.ask("register_layout", LAYOUT)
    blocks = client.welcome[10] // BLOCK_BYTES
    assert client.code("reserve", client.lease(), KNOWN, blocks + 1) == 301
    lease, _ = client.reserve(KNOWN, blocks - blocks // 16)
    assert client.code("reserve", client.lease(), KNOWN, blocks // 2) == 301
    waiting = client.send("reserve", client.lease(), KNOWN, blocks // 2, 0, 0, 60.0)
    assert client.code("reserve", client.lease(), KNOWN, blocks // 2, 0, 0, 0.05) == 301
    client.ask("abort", lease)
    assert client.reply(waiting)[0] == "granted"


def test_full_tiers_are_told(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(spill={"capacity_bytes": 4 << 20}).start()
    with daemon.client() as client:
        session = client.open(LAYOUT)
        stored = 0
        while True:
            granted = client.call("reserve", client.lease(), KNOWN, 8, 0, 0, 1.0)
            if granted[0] == "error" and granted[4] == 301:
                continue  # what leaves DRAM is on its way
            if granted[0] == "error":
                break
            for index, offset in enumerate(from_u64(granted[6])):
                client.write(offset, pattern(stored + index))
            pages = range(stored, stored + 8)
            client.ask(
                "commit", granted[4], session, 0, u32(*range(8)), u32(*pages), u32(*[16] * 8)
            )
            stored += 8
        assert granted[4] == 302
        assert stored * BLOCK_BYTES > client.welcome[10]
        assert client.swap_in(KNOWN, session, 0, 0, stored) == [pattern(i) for i in range(stored)]


# ------------------------------------------------------------------ admin


def test_the_admin_socket_answers(daemon: DaemonProcess, client: RawClient, session: int) -> None:
    client.swap_out(KNOWN, session, 0, {0: 1})
    stats = daemon.admin("stats")
    assert stats["health"]["ok"] == (not stats["health"]["reasons"])
    assert daemon.ails() == []
    assert stats["tenants"]["t"]["dram"]["blocks"] == 1
    (line,) = daemon.admin("sessions", "t")["sessions"]
    assert line["session"] == f"{session:016x}"
    assert daemon.admin("tree", line["session"])["nodes"][0]["dram_blocks"] == 1
    assert daemon.admin("reload") == {"changed": [], "needs_restart": []}
    with RawClient(daemon.admin_path) as operator:
        assert operator.code("tree", "nobody") == 201
        assert operator.code("evict", "nobody") == 204
        assert operator.code("hello", 1, "raw", b"", b"") == 204
    assert oct(os.stat(daemon.admin_path).st_mode & 0o777) == "0o600"


# ---------------------------------------------------------------- restart


def test_a_client_goes_on_after_a_restart(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    with daemon.client() as client:
        go_on_after_a_restart(daemon, client)


def go_on_after_a_restart(daemon: DaemonProcess, client: RawClient) -> None:
    token = os.urandom(16)
    session = client.open(LAYOUT, token)
    client.swap_out(KNOWN, session, 0, {0: 1, 1: 2})
    writing, offsets = client.reserve(KNOWN, 2)
    reading = client.ask("acquire", client.lease(), session, 0, KNOWN, 0, 2)
    boot, member = client.welcome[2], client.member
    daemon.restart()
    client.write(offsets[0], pattern(3))
    with pytest.raises(Closed):
        client.call("describe", session)
    client.connect()
    claims = [
        [writing, True, u64(*offsets)], [reading[4], False, reading[6]],
        [member << 32 | 999, True, u64(offsets[0])],
    ]  # fmt: skip
    welcome = client.hello(claims)
    assert welcome[2] != boot
    assert welcome[8] == member
    assert welcome[13] == [member << 32 | 999]
    client.ask("resume_session", token)
    client.ask("register_layout", LAYOUT)
    client.ask("commit", writing, session, 0, u32(0), u32(2), u32(16))
    assert client.ask("abort", writing)[4] == 1
    assert client.ask("release", reading[4])[4] == 2
    assert client.swap_in(KNOWN, session, 0, 0, 3) == [pattern(1), pattern(2), pattern(3)]
    assert daemon.tenant()["leases"] == 0
