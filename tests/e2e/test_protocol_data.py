"""The verbs that move blocks, sent to a real daemon with a socket and `msgpack` alone."""

import hashlib

import pytest

from tests.support import raw
from tests.support.daemon import DaemonProcess
from tests.support.raw import (
    BLOCK_BYTES,
    HELD,
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
NODE, PAGES, VALID, TIERS = 0, 6, 7, 8
IN_DRAM, ON_NVME = 1, 2


def keys(*numbers: int) -> bytes:
    return b"".join(hashlib.md5(str(number).encode()).digest() for number in numbers)


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


# ------------------------------------------------------- swap out and in


def test_blocks_come_back_from_both_tiers(
    daemon: DaemonProcess, client: RawClient, session: int
) -> None:
    blocks = 3 * client.welcome[10] // BLOCK_BYTES  # three times the arena
    for first in range(0, blocks, 16):
        client.swap_out(KNOWN, session, 0, {page: page for page in range(first, first + 16)})
    tiers = node_of(client.ask("describe", session))[TIERS][0]
    assert set(tiers) == {IN_DRAM, ON_NVME}
    assert tiers.count(ON_NVME) >= blocks // 2
    assert client.swap_in(KNOWN, session, 0, 0, blocks) == [pattern(page) for page in range(blocks)]
    counters = daemon.counters()
    assert counters["restored_blocks"] >= blocks // 2


def test_reserve_and_commit_are_idempotent(client: RawClient, session: int) -> None:
    counter = client.lease()
    first = client.ask("reserve", counter, KNOWN, 3)
    again = client.ask("reserve", counter, KNOWN, 3)
    assert (first[4], first[6]) == (again[4], again[6])
    assert first[4] == client.member << 32 | counter
    lease = first[4]
    commit = ["commit", lease, session, 0, u32(0, 1), u32(0, 1), u32(16, 16)]
    assert client.ask(*commit)[4] == 2
    assert client.code("commit", lease, session, 0, u32(0), u32(7), u32(16)) == 204
    assert client.ask("abort", lease)[4] == 1
    assert client.ask("abort", lease)[4] == 1
    assert client.ask(*commit)[4] == 2
    assert client.code("commit", lease, session, 0, u32(2), u32(2), u32(16)) == 205


def test_a_longer_copy_of_a_page_replaces_a_shorter_one(
    daemon: DaemonProcess, client: RawClient, session: int
) -> None:
    for seed, valid in ((1, 4), (2, 9), (3, 5)):
        lease, offsets = client.reserve(KNOWN, 1)
        client.write(offsets[0], pattern(seed))
        client.ask("commit", lease, session, 0, u32(0), u32(0), u32(valid))
    granted = client.ask("acquire", client.lease(), session, 0, KNOWN, 0, 1)
    assert from_u32(granted[7]) == [9]
    assert client.read(from_u64(granted[6])[0]) == pattern(2)
    client.ask("release", granted[4])
    assert daemon.tenant()["dram"]["used_bytes"] == BLOCK_BYTES


def test_promises_are_kept(daemon: DaemonProcess, client: RawClient, session: int) -> None:
    ahead = client.ask("reserve", client.lease(), KNOWN, 0, 8)
    assert daemon.tenant()["promised_blocks"] == 8
    drawn = client.ask("reserve", client.lease(), KNOWN, 3, 0, ahead[4])
    assert len(from_u64(drawn[6])) == 3
    assert daemon.tenant()["promised_blocks"] == 5
    client.ask("abort", ahead[4])
    client.ask("abort", drawn[4])
    assert daemon.tenant()["promised_blocks"] == 0
    assert client.code("reserve", client.lease(), KNOWN, 1, 0, 12345 << 32 | 1) == 205


def test_commits_that_name_nonsense_publish_nothing(client: RawClient, session: int) -> None:
    lease, _ = client.reserve(KNOWN, 2)
    for index, pages, valid in [
        (u32(0), u32(0), u32(0)), (u32(0), u32(0), u32(17)), (u32(5), u32(0), u32(16)),
        (u32(0, 0), u32(0, 1), u32(16, 16)), (u32(0, 1), u32(1, 0), u32(16, 16)),
        (u32(0, 1), u32(0), u32(16)), (b"", b"", b""), (b"abc", u32(0), u32(16)),
        (u32(0), u32(0xFFFFFFFF), u32(16)), (u32(0), u32(0), b"\1"),
    ]:  # fmt: skip
        assert client.code("commit", lease, session, 0, index, pages, valid) == 204
    assert client.code("commit", lease, session, 0, u32(0), u32(0), u32(16), 3) == 204
    assert client.code("commit", lease, session, 0, u32(0), u32(0), u32(16), HELD, 0, u64(1)) == 204
    assert client.code("commit", lease, session, 9, u32(0), u32(0), u32(16)) == 202
    assert client.code("commit", lease, session + 1, 0, u32(0), u32(0), u32(16)) == 201
    assert from_u32(node_of(client.ask("describe", session))[PAGES][0]) == []
    assert client.ask("abort", lease)[4] == 2


def test_a_lease_fits_its_layout_its_group_and_its_kind(
    daemon: DaemonProcess, client: RawClient, session: int
) -> None:
    other = raw.layout("other")
    client.ask("register_layout", other)
    foreign, _ = client.reserve(raw.fingerprint(other), 1)
    assert client.code("commit", foreign, session, 0, u32(0), u32(0), u32(16)) == 203
    client.swap_out(KNOWN, session, 0, {0: 1})
    read = client.ask("acquire", client.lease(), session, 0, KNOWN, 0, 1)[4]
    assert client.code("abort", read) == 204
    assert client.code("release", foreign) == 204
    with daemon.client() as thief:
        for verb in ("abort", "release"):
            assert thief.code(verb, foreign) == 206
            assert thief.code(verb, read) == 206
        assert thief.code("renew", read, 1.0) == 206
    assert client.ask("release", read)[4] == 1
    assert client.ask("release", read)[4] == 1
    assert client.code("release", read + 1000) == 205


def test_a_counter_that_is_in_use_is_not_given_to_another_lease(
    daemon: DaemonProcess, client: RawClient, session: int
) -> None:
    client.swap_out(KNOWN, session, 0, {0: 1})
    write, read = client.lease(), client.lease()
    client.ask("reserve", write, KNOWN, 1)
    client.ask("acquire", read, session, 0, KNOWN, 0, 1)
    assert client.code("acquire", write, session, 0, KNOWN, 0, 1) == 204
    assert client.code("reserve", read, KNOWN, 1) == 204
    assert client.code("lookup", [KNOWN], keys(1), read) == 204
    client.ask("abort", client.member << 32 | write)
    client.ask("release", client.member << 32 | read)
    assert daemon.tenant()["leases"] == 0


def test_reading_what_is_not_there(client: RawClient, session: int) -> None:
    client.swap_out(KNOWN, session, 0, {0: 1, 2: 3})
    acquire = ["acquire", client.lease(), session, 0]
    assert client.code(*acquire, KNOWN, 1, 1) == 204
    assert client.code(*acquire, KNOWN, 0, 0) == 204
    assert client.code(*acquire, bytes(16), 0, 1) == 203
    assert client.code(*acquire, KNOWN, 0, 1, 1e9) == 204
    assert client.code(*acquire, KNOWN, 0, 1, -1.0) == 204
    granted = client.ask(*acquire, KNOWN, 0, 3)
    assert len(from_u64(granted[6])) == 1  # the window ends before the hole
    client.ask("release", granted[4])


def test_a_lease_that_runs_out_is_quarantined_and_revoked(
    daemon: DaemonProcess, client: RawClient, session: int
) -> None:
    granted = client.ask("reserve", client.lease(), KNOWN, 2, 0, 0, 0.0, 0.1)
    assert 0 < granted[5] <= 0.1
    assert client.push("revoke")[4] == granted[4]
    assert daemon.tenant()["dram"]["quarantined_bytes"] == 2 * BLOCK_BYTES
    assert client.code("commit", granted[4], session, 0, u32(0), u32(0), u32(16)) == 205
    assert client.code("renew", granted[4], 1.0) == 205
    assert client.ask("abort", granted[4])[4] == 2
    assert daemon.tenant()["dram"]["quarantined_bytes"] == 0


def test_a_renewed_lease_lives_on(client: RawClient, session: int) -> None:
    def renewed() -> list | None:
        granted = client.ask("reserve", client.lease(), KNOWN, 1, 0, 0, 0.0, 0.3)
        return granted if client.call("renew", granted[4], 60.0)[0] == "done" else None

    granted = until(renewed, "one is renewed in time")
    client.pushes.clear()
    probe = client.ask("reserve", client.lease(), KNOWN, 1, 0, 0, 0.0, 0.3)
    assert client.push("revoke")[4] == probe[4]  # was granted later, ran out alone
    client.ask("commit", granted[4], session, 0, u32(0), u32(0), u32(16))
    assert client.code("renew", granted[4], 1.0) == 205
    assert client.code("renew", probe[4], 1e9) in (204, 205)


# ---------------------------------------------------------------- one-way


def test_oneway_requests_are_acknowledged_cumulatively(client: RawClient, session: int) -> None:
    lease, offsets = client.reserve(KNOWN, 3)
    for index in range(3):
        client.write(offsets[index], pattern(index))
        client.send(
            "commit", lease, session, 0, u32(index), u32(index), u32(16), HELD, 10 + index
        )  # fmt: skip
    assert client.ask("describe", session)[3] == 12
    assert client.swap_in(KNOWN, session, 0, 0, 3) == [pattern(i) for i in range(3)]
    granted = client.ask("acquire", client.lease(), session, 0, KNOWN, 0, 1)
    client.send("release", granted[4], 13)
    assert client.ask("describe", session)[3] == 13


def test_a_failed_oneway_request_is_pushed(client: RawClient, session: int) -> None:
    bad = client.send("commit", 77, session, 0, u32(0), u32(0), u32(16), HELD, 1)
    failed = client.push("failed")
    assert (failed[1], failed[4]) == (bad, 205)
    assert client.ask("describe", session)[3] == 1


# --------------------------------------------------------------- prefetch


def test_prefetch_brings_blocks_up_and_says_so(
    daemon: DaemonProcess, client: RawClient, session: int
) -> None:
    client.swap_out(KNOWN, session, 0, {page: page for page in range(8)})
    daemon.admin("evict", "t")
    until(lambda: daemon.tenant()["dram"]["blocks"] == 0, "all is on NVMe")
    assert client.ask("prefetch", 5, session, 0, KNOWN, 0, 8, 1, 60.0)[4] == 8
    assert client.push("ready")[4:] == [5, 8, 0]
    assert set(node_of(client.ask("describe", session))[TIERS][0]) == {IN_DRAM}
    client.ask("prefetch", 6, session, 0, KNOWN, 0, 8)
    assert client.push("ready")[4:] == [6, 0, 0]  # nothing was left to do
    assert client.ask("cancel", 6)[4] == 0
    assert client.code("prefetch", 7, session, 0, KNOWN, 0, 8, 0, -1.0) == 204


# ------------------------------------------------------------------ keyed


def put_keys(client: RawClient, *numbers: int) -> None:
    granted = client.ask("reserve_keys", client.lease(), KNOWN, keys(*numbers), 30.0)
    missing = from_u32(granted[9])
    for place, offset in zip(missing, from_u64(granted[6]), strict=True):
        client.write(offset, pattern(numbers[place]))
    if missing:
        stored = [numbers[place] for place in missing]
        n = len(stored)
        client.ask(
            "commit_keys", granted[4], u32(*range(n)), keys(*stored), u32(*missing), u32(*[16] * n)
        )


def test_keyed_blocks_are_stored_found_held_and_removed(
    daemon: DaemonProcess, client: RawClient, session: int
) -> None:
    assert client.ask("lookup", [KNOWN], keys(1, 2))[4:] == [[0], 0]
    put_keys(client, 1, 2, 3)
    put_keys(client, 2, 3, 4)
    other = client.ask("register_layout", raw.layout("other"))[4]
    assert client.ask("lookup", [KNOWN, other], keys(1, 2, 3, 4, 5))[4] == [4, 0]
    assert client.ask("lookup", [KNOWN], keys(9, 1))[4] == [0]
    granted = client.ask("acquire_keys", client.lease(), KNOWN, keys(1, 2, 3, 4, 5))
    assert [client.read(offset) for offset in from_u64(granted[6])] == list(
        map(pattern, range(1, 5))
    )
    client.ask("release", granted[4])
    assert client.ask("acquire_keys", client.lease(), KNOWN, keys(9))[4] == 0
    assert client.ask("hold", session, KNOWN, keys(1, 2, 9))[4] == 2
    assert client.ask("hold", session, KNOWN, keys(1))[4] == 1
    assert client.ask("remove", KNOWN, keys(1, 2, 3))[4] == 1
    assert client.ask("unhold", session, KNOWN, keys(1, 9))[4] == 1
    assert client.ask("remove", KNOWN, keys(1, 2))[4] == 1
    client.ask("close_session", session)
    assert client.ask("remove", KNOWN, keys(2, 4))[4] == 2
    assert daemon.tenant()["keyed_blocks"] == 0
    assert daemon.tenant()["dram"]["used_bytes"] == 0


def test_a_lookup_with_a_lease_pins_what_it_found(daemon: DaemonProcess, client: RawClient) -> None:
    client.ask("register_layout", LAYOUT)
    put_keys(client, 1, 2)
    hits = client.ask("lookup", [KNOWN], keys(1, 2, 3), client.lease())
    assert hits[4] == [2]
    assert client.ask("remove", KNOWN, keys(1, 2))[4] == 0
    assert client.ask("release", hits[5])[4] == 2
    assert client.ask("remove", KNOWN, keys(1, 2))[4] == 2


@pytest.mark.parametrize("packed", [b"", b"fifteen bytes.."])
def test_keys_are_whole(client: RawClient, session: int, packed: bytes) -> None:
    counter = client.lease()
    assert client.code("lookup", [KNOWN], packed) == 204
    assert client.code("reserve_keys", counter, KNOWN, packed) == 204
    assert client.code("acquire_keys", counter, KNOWN, packed) == 204
    assert client.code("hold", session, KNOWN, packed) == 204
    assert client.code("remove", KNOWN, packed) == 204
