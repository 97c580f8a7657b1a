"""Spill files that were cut, taken away or changed: never other bytes, never zeros as data."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtierd.tiers.spill_files import HEADERS_NAME, PAYLOAD_NAME
from tests.fault.checker import KNOWN, Promises
from tests.support.daemon import DaemonProcess
from tests.support.fixtures import MakeDaemon
from tests.support.raw import RawClient, from_u32, from_u64, pattern, u32
from tests.support.wait import until

BLOCKS = 48
KEYS = [bytes([number]) * 16 for number in range(16)]


def flip(payload: Path) -> None:
    """One bit in every 4 KiB."""
    data = bytearray(payload.read_bytes())
    for at in range(100, len(data), 4096):
        data[at] ^= 1
    payload.write_bytes(data)


def swap_halves(payload: Path) -> None:
    """Every block becomes another block's whole bytes."""
    with payload.open("r+b") as file:
        size = 128 * 65536
        data = file.read(size)
        file.seek(0)
        file.write(b"".join(data[i : i + 65536] for i in range(size - 65536, -1, -65536)))


def cut(payload: Path) -> None:
    os.truncate(payload, 0)


def remove(payload: Path) -> None:
    payload.unlink()


def zero(payload: Path) -> None:
    size = payload.stat().st_size
    os.truncate(payload, 0)
    os.truncate(payload, size)


def store_on_nvme(daemon: DaemonProcess, client: RawClient, promises: Promises) -> int:
    session = promises.open(client)
    promises.swap_out(client, session, BLOCKS)
    granted = client.ask("reserve_keys", client.lease(), KNOWN, b"".join(KEYS))
    n = len(KEYS)
    for index, offset in enumerate(from_u64(granted[6])):
        client.write(offset, pattern(1000 + index))
    client.ask(
        "commit_keys", granted[4], u32(*range(n)), b"".join(KEYS), u32(*range(n)), u32(*[16] * n)
    )
    daemon.admin("evict", "t")
    until(lambda: daemon.tenant()["nvme"]["blocks"] == BLOCKS + n, "all is on NVMe")
    until(lambda: daemon.tenant()["dram"]["blocks"] == 0, "nothing is in DRAM")
    return session


def assert_lost_or_right(client: RawClient, session: int, promises: Promises) -> int:
    """Every page comes back right or is BlockLost; returns how many are lost."""
    lost = 0
    for page, seed in promises.pages[session].items():
        granted = client.call("acquire", client.lease(), session, 0, KNOWN, page, 1, 30.0)
        if granted[0] == "error":
            assert granted[4] == 402, granted
            assert page in from_u32(granted[6]), granted
            lost += 1
        else:
            assert client.read(from_u64(granted[6])[0]) == pattern(seed)
            client.ask("release", granted[4])
    for index, key in enumerate(KEYS):
        granted = client.ask("acquire_keys", client.lease(), KNOWN, key, 30.0)
        if granted[4]:  # else a miss
            assert client.read(from_u64(granted[6])[0]) == pattern(1000 + index)
            client.ask("release", granted[4])
    return lost


@pytest.mark.parametrize("harm", [flip, swap_halves, cut, remove, zero])
def test_harm_while_no_daemon_runs(make_daemon: MakeDaemon, harm: Callable[[Path], None]) -> None:
    daemon = make_daemon(recovery={"memory": "off"}).start()
    promises = Promises()
    with daemon.client() as client:
        session = store_on_nvme(daemon, client, promises)
    daemon.stop()
    harm(daemon.state_path / "spill" / PAYLOAD_NAME)
    daemon.start()
    with daemon.client() as client:
        promises.resume(client)
        assert assert_lost_or_right(client, session, promises) == BLOCKS
        for key in KEYS:
            assert client.ask("lookup", [KNOWN], key)[4] == [0]
        assert daemon.tenant()["dram"]["used_bytes"] == 0
        client.swap_out(KNOWN, session, 0, {0: 7})  # a lost page can be stored again
        assert client.swap_in(KNOWN, session, 0, 0, 1) == [pattern(7)]
        assert client.ask("close_session", session)[4] == BLOCKS


@pytest.mark.parametrize("harm", [flip, swap_halves, zero])
def test_harm_under_a_running_daemon(make_daemon: MakeDaemon, harm: Callable[[Path], None]) -> None:
    daemon = make_daemon(spill={"direct_io": "off"}).start()
    promises = Promises()
    with daemon.client() as client:
        session = store_on_nvme(daemon, client, promises)
        harm(daemon.state_path / "spill" / PAYLOAD_NAME)
        assert assert_lost_or_right(client, session, promises) == BLOCKS
        counters = daemon.counters()
        assert counters["lost_blocks"] == BLOCKS
        assert counters["checksum_mismatches"] == BLOCKS + len(KEYS)
        daemon.restart()
        client.come_back()
        promises.resume(client)
        assert client.ask("close_session", session)[4] >= 0
        assert daemon.tenant()["dram"]["used_bytes"] == 0


def test_headers_that_were_damaged_lose_their_blocks_only(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(recovery={"memory": "off"}).start()
    promises = Promises()
    with daemon.client() as client:
        session = store_on_nvme(daemon, client, promises)
    daemon.stop()
    headers = daemon.state_path / "spill" / HEADERS_NAME
    data = bytearray(headers.read_bytes())
    token = [i for i in range(len(data) - 7) if data[i : i + 8] == session.to_bytes(8, "little")]
    assert len(token) == BLOCKS
    for at in token[: BLOCKS // 2]:
        data[at + 3] ^= 0x40
    headers.write_bytes(data)
    daemon.start()
    with daemon.client() as client:
        promises.resume(client)
        root = client.ask("describe", session)[8][0]
        stored = from_u32(root[6][0])
        assert len(stored) == BLOCKS - BLOCKS // 2
        for page in stored:
            assert client.swap_in(KNOWN, session, 0, page, 1) == [
                pattern(promises.pages[session][page])
            ]
    assert "damaged" in daemon.log()
