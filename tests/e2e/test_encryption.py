"""A real daemon whose spill files are encrypted: over restarts, key changes and damage."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvtierd.ctl.main import main
from kvtierd.tiers.spill_files import HEADERS_NAME, PAYLOAD_NAME
from tests.fault.checker import KNOWN, Promises
from tests.fault.test_media import BLOCKS, KEYS, assert_lost_or_right, flip, store_on_nvme
from tests.support.daemon import DaemonProcess
from tests.support.fixtures import MakeDaemon
from tests.support.raw import HELD, RawClient, from_u64, pattern, u32
from tests.support.wait import until


def new_key(path: Path) -> str:
    path.write_bytes(os.urandom(32))
    path.chmod(0o400)
    return str(path)


@pytest.fixture
def encrypting(make_daemon: MakeDaemon, tmp_path: Path) -> DaemonProcess:
    """A daemon, not started yet, that encrypts and whose memory ends with it."""
    daemon = make_daemon(recovery={"memory": "off"})
    daemon.sections["spill.encryption"] = {"enabled": True, "key": new_key(tmp_path / "key")}
    return daemon


def give(daemon: DaemonProcess, **keys: str | bool) -> None:
    daemon.sections["spill.encryption"] = keys


def read_keys(client: RawClient) -> list[bytes]:
    granted = client.ask("acquire_keys", client.lease(), KNOWN, b"".join(KEYS), 30.0)
    found = [client.read(offset) for offset in from_u64(granted[6])]
    client.ask("release", granted[4])
    return found


KEYED = [pattern(1000 + index) for index in range(len(KEYS))]


def test_all_that_was_stored_comes_back_and_none_of_it_is_on_the_disk(
    encrypting: DaemonProcess,
) -> None:
    daemon, promises = encrypting.start(), Promises()
    with daemon.client() as client:
        session = store_on_nvme(daemon, client, promises)
        assert daemon.admin("scrub")["started"]
        until(lambda: not daemon.admin("stats")["scrub"]["running"], "the scrub has ended")
        scrub = daemon.admin("stats")["scrub"]
        assert (scrub["checked_blocks"], scrub["bad_blocks"]) == (BLOCKS + len(KEYS), 0)
        promises.check(client)
        assert read_keys(client) == KEYED
        client.ask("fork", session, 7, 0, 40 * 16 + 5)  # the child has a partly filled page
        client.swap_out(KNOWN, session, 7, {40: 77, 41: 78})
        for valid, seed in ((3, 79), (9, 80)):  # a longer copy of a page replaces the shorter one
            lease, (offset,) = client.reserve(KNOWN, 1)
            client.write(offset, pattern(seed))
            client.ask("commit", lease, session, 7, u32(0), u32(42), u32(valid), HELD)
            daemon.admin("evict", "t")
            assert client.swap_in(KNOWN, session, 7, 42, 1) == [pattern(seed)]
    daemon.stop()
    spill = daemon.state_path / "spill"
    payload, headers = (spill / PAYLOAD_NAME).read_bytes(), (spill / HEADERS_NAME).read_bytes()
    for stored in [
        *(pattern(seed, 64) for seed in promises.pages[session].values()),
        KEYED[0][:64],
    ]:
        assert stored not in payload and stored not in headers
    result = CliRunner().invoke(main, ["check", "--config", str(daemon.config_path), "--json"])
    [report] = json.loads(result.stdout)["spill"]
    assert result.exit_code == 0 and report["encrypted_blocks"] == report["payloads_verified"]
    assert report["payloads_verified"] == BLOCKS + len(KEYS) + 3
    daemon.start()
    with daemon.client() as client:
        promises.check(client)
        assert client.swap_in(KNOWN, session, 7, 40, 3) == [pattern(n) for n in (77, 78, 80)]
        assert client.swap_in(KNOWN, session, 7, 39, 1) == [pattern(promises.pages[session][39])]
        assert read_keys(client) == KEYED


def test_blocks_survive_kill_9_of_a_daemon_that_encrypts(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    daemon = make_daemon()
    give(daemon, enabled=True, key=new_key(tmp_path / "key"))
    daemon.start()
    promises = Promises()
    with daemon.client() as client:
        store_on_nvme(daemon, client, promises)
        daemon.restart()
        client.connect()
        client.hello()
        promises.check(client)
        assert read_keys(client) == KEYED


def test_harm_is_never_served(encrypting: DaemonProcess) -> None:
    daemon, promises = encrypting.start(), Promises()
    with daemon.client() as client:
        session = store_on_nvme(daemon, client, promises)
    daemon.stop()
    flip(daemon.state_path / "spill" / PAYLOAD_NAME)
    daemon.start()
    with daemon.client() as client:
        promises.resume(client)
        assert assert_lost_or_right(client, session, promises) == BLOCKS


def test_the_master_key_is_changed_and_the_old_one_opens_nothing_afterwards(
    encrypting: DaemonProcess, tmp_path: Path
) -> None:
    daemon, promises, old = encrypting.start(), Promises(), str(tmp_path / "key")
    new = new_key(tmp_path / "new")
    with daemon.client() as client:
        store_on_nvme(daemon, client, promises)
    daemon.stop()
    for keys in ({"key": new, "old_key": old}, {"key": new}):
        give(daemon, enabled=True, **keys)
        daemon.start()
        with daemon.client() as client:
            promises.check(client)
        daemon.stop()
    for keys in ({}, {"key": old, "enabled": True}):
        give(daemon, **keys)
        said = daemon.refuse()
        assert "spill.paths[0]" in said and "spill.encryption.key" in said
    give(daemon, key=new)  # encrypts no more, and still reads
    daemon.start()
    with daemon.client() as client:
        promises.check(client)


def test_a_key_that_is_not_there_is_said_in_one_line_before_anything_changes(
    encrypting: DaemonProcess, tmp_path: Path
) -> None:
    (tmp_path / "key").unlink()
    said = encrypting.refuse()
    assert "cannot use spill.encryption.key" in said and "Traceback" not in said
    assert not encrypting.state_path.exists()
