"""A catalog that is gone, cut, or of another time than the headers: refused or reconciled.

Whatever a restore from a backup mixes, no block comes under a name that is not its own, and nothing
is lost without a word."""

import os
import shutil
from pathlib import Path

from kvtierd.ctl.check import check_files
from tests.fault.checker import KNOWN, LAYOUT, Promises
from tests.support.daemon import DaemonProcess
from tests.support.fixtures import MakeDaemon
from tests.support.raw import RawClient, from_u32, pattern
from tests.support.wait import until

CATALOG = ("catalog.db", "catalog.db-wal", "catalog.db-shm")


def delete(state: Path) -> None:
    for name in CATALOG:
        (state / name).unlink(missing_ok=True)


def cut(state: Path) -> None:
    (state / "catalog.db-wal").unlink(missing_ok=True)
    os.truncate(state / "catalog.db", 4096 + 100)


def scribble(state: Path) -> None:
    with (state / "catalog.db").open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(3 * 4096))


def history(daemon: DaemonProcess, before: Path) -> tuple[Promises, int, int]:
    """A session with blocks on both tiers; a copy of all files; then more, and one closed.

    Returns the promises, the session that was closed after the copy, and the one opened after it.
    """
    promises = Promises()
    with daemon.client() as client:
        kept, closed = promises.open(client), promises.open(client)
        for session in (kept, closed):
            promises.swap_out(client, session, 24)
        daemon.admin("evict", "t")
        until(lambda: daemon.tenant()["nvme"]["blocks"] == 48, "all is on NVMe")
    daemon.stop()
    shutil.copytree(daemon.state_path, before)
    daemon.start()
    daemon.restart()  # two starts apart: a crash in the middle of one start cannot look like this
    with daemon.client() as client:
        promises.resume(client)
        promises.swap_out(client, kept, 8)
        client.ask("close_session", closed)
        new = promises.open(client)
        promises.swap_out(client, new, 24)
        daemon.admin("evict", "t")
        until(lambda: daemon.tenant()["nvme"]["blocks"] == 56, "all is on NVMe")
    daemon.stop()
    daemon.kill_keeper()
    return promises, closed, new


def readable(client: RawClient, session: int, promises: Promises) -> set[int]:
    """The pages that are there; each of them is right."""
    if client.call("resume_session", promises.tokens[session])[0] == "error":
        return set()
    root = client.ask("describe", session)[8][0]
    there: set[int] = set()
    for page in from_u32(root[6][0]):
        granted = client.call("acquire", client.lease(), session, 0, KNOWN, page, 1, 30.0)
        if granted[0] == "error":
            assert granted[4] == 402, granted  # and so reported
            continue
        offset = int.from_bytes(granted[6][:8], "little")
        assert client.read(offset) == pattern(promises.pages[session][page])
        client.ask("release", granted[4])
        there.add(page)
    return there


def test_a_catalog_that_is_gone_or_damaged_is_refused_until_it_is_restored(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    daemon = make_daemon().start()
    promises, closed, new = history(daemon, tmp_path / "before")
    now = tmp_path / "now"
    shutil.copytree(daemon.state_path, now)
    for harm in (delete, cut, scribble):
        harm(daemon.state_path)
        report = check_files(str(daemon.state_path), [str(daemon.state_path / "spill")], True)
        assert not report.ok
        said = daemon.refuse()
        assert str(daemon.state_path) in said and "Traceback" not in said, said
        shutil.rmtree(daemon.state_path)
        shutil.copytree(now, daemon.state_path)
        daemon.state_path.chmod(0o700)
    daemon.start()
    with daemon.client() as client:
        del promises.pages[closed], promises.tokens[closed]
        promises.check(client)
        assert len(promises.pages[new]) == 24


def test_a_catalog_older_than_the_headers(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    daemon = make_daemon().start()
    promises, closed, new = history(daemon, tmp_path / "before")
    delete(daemon.state_path)
    for name in CATALOG:
        if (tmp_path / "before" / name).exists():
            shutil.copy2(tmp_path / "before" / name, daemon.state_path / name)
    report = check_files(str(daemon.state_path), [str(daemon.state_path / "spill")], True)
    assert any("restored from an older copy" in note for note in report.notes)
    daemon.start()
    with daemon.client() as client:
        client.ask("register_layout", LAYOUT)
        kept = next(iter(promises.tokens))
        assert readable(client, kept, promises) == set(promises.pages[kept])
        assert readable(client, new, promises) == set(promises.pages[new])  # by its headers alone
        assert readable(client, closed, promises) <= set(promises.pages[closed])
    assert "restored from" in daemon.log() or "generation" in daemon.log()


def test_spill_files_older_than_the_catalog(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    daemon = make_daemon().start()
    promises, closed, new = history(daemon, tmp_path / "before")
    spill = daemon.state_path / "spill"
    shutil.rmtree(spill)
    shutil.copytree(tmp_path / "before" / "spill", spill)
    report = check_files(str(daemon.state_path), [str(spill)], True)
    assert any("restored from an older copy" in note for note in report.notes)
    daemon.start()
    with daemon.client() as client:
        client.ask("register_layout", LAYOUT)
        kept = next(iter(promises.tokens))
        assert readable(client, kept, promises) == set(range(24))  # resume tells that 8 are missing
        assert readable(client, new, promises) == set()
        assert readable(client, closed, promises) == set()  # closed stays closed
        promises.swap_out(client, new, 1)  # and what is missing can be stored again


def test_a_write_ahead_log_that_is_gone(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    daemon = make_daemon().start()
    promises = Promises()
    with daemon.client() as client:
        session = promises.open(client)
        promises.swap_out(client, session, 24)
    daemon.kill()  # so that the log was not folded in: it has everything
    wal, aside = daemon.state_path / "catalog.db-wal", tmp_path / "wal"
    shutil.move(wal, aside)
    (daemon.state_path / "catalog.db-shm").unlink()
    said = daemon.refuse()
    assert "another" in said or "belongs" in said, said
    shutil.move(aside, wal)
    daemon.start()
    with daemon.client() as client:
        promises.check(client)
