"""A disk that errs, does things by halves, or hangs, under the real daemon; then it is well again.

Neither costs more than the blocks that the disk has lost, and those are reported; what is in DRAM
is served on; and nothing stays behind when the disk has recovered.
"""

import errno
from collections.abc import Callable

import pytest

from tests.fault.checker import KNOWN, Promises
from tests.fault.test_kill_daemon import assert_books_balance, assert_files_are_sound
from tests.fault.test_media import KEYS, assert_lost_or_right, store_on_nvme
from tests.support.daemon import DaemonProcess
from tests.support.fixtures import MakeDaemon
from tests.support.interpose import READ, SYNC, WRITE, Faults
from tests.support.raw import BLOCK_BYTES, RawClient
from tests.support.wait import until

PAYLOAD = "/spill/blocks.kv"
HEADERS = "/spill/headers.kv"
CATALOG = "/catalog.db"


def start(make_daemon: MakeDaemon, **sections: dict[str, object]) -> tuple[DaemonProcess, Faults]:
    daemon = make_daemon(**sections)
    faults = Faults(daemon)
    return daemon.start(), faults


def use_dram(client: RawClient, promises: Promises) -> None:
    """Swap a new session out and in, and end it."""
    session = promises.open(client)
    promises.swap_out(client, session, 8)
    client.swap_in(KNOWN, session, 0, 0, 8)
    client.ask("close_session", session)
    del promises.pages[session], promises.tokens[session]


def test_a_read_error_is_a_lost_block_or_a_miss_while_it_lasts(make_daemon: MakeDaemon) -> None:
    daemon, faults = start(make_daemon)
    promises = Promises()
    with daemon.client() as client:
        session = store_on_nvme(daemon, client, promises)
        faults.fail(READ, PAYLOAD, error=errno.EIO)
        use_dram(client, promises)
        assert assert_lost_or_right(client, session, promises) == len(promises.pages[session])
        for key in KEYS:
            assert client.ask("acquire_keys", client.lease(), KNOWN, key, 30.0)[4] == 0
        faults.heal()
        assert assert_lost_or_right(client, session, promises) == 0  # the medium still has them
        daemon.restart()
        client.come_back()
        promises.check(client)
        client.ask("remove", KNOWN, b"".join(KEYS))
        assert_books_balance(daemon, promises.total())


def test_a_bad_sector_costs_only_what_lies_on_it(make_daemon: MakeDaemon) -> None:
    daemon, faults = start(make_daemon)
    promises = Promises()
    with daemon.client() as client:
        session = store_on_nvme(daemon, client, promises)
        faults.fail(READ, PAYLOAD, error=errno.EIO, within=(BLOCK_BYTES, 2 * BLOCK_BYTES))
        assert assert_lost_or_right(client, session, promises) <= 1
        assert daemon.counters()["io_errors"] + daemon.counters()["lost_blocks"] > 0


@pytest.mark.parametrize(
    ("part", "number"), [(PAYLOAD, errno.EIO), (HEADERS, errno.EIO), (HEADERS, errno.ENOSPC)]
)
def test_writes_that_fail_lose_nothing_and_succeed_later(
    make_daemon: MakeDaemon, part: str, number: int
) -> None:
    daemon, faults = start(make_daemon)
    promises = Promises()
    with daemon.client() as client:
        session = promises.open(client)
        promises.swap_out(client, session, 64)
        faults.fail(WRITE, part, error=number)
        daemon.admin("evict", "t")
        until(lambda: faults.hits() and daemon.ails(), "it is unwell")
        assert "NVMe: writing" in "; ".join(daemon.ails())
        use_dram(client, promises)
        promises.check(client)
        refused = client.call("reserve", client.lease(), KNOWN, 100, 0, 0, 0.5)
        assert (refused[0], refused[4]) in [("error", 301), ("error", 302)]
        faults.heal()
        for _ in range(8):
            promises.swap_out(client, session, 12)
        until(lambda: not daemon.ails(), "it is well again")
        promises.check(client)
        assert_books_balance(daemon, promises.total())
        daemon.kill()
        assert_files_are_sound(daemon)
        daemon.start()
        client.come_back()
        promises.check(client)


def test_what_cannot_be_made_durable_stays_in_memory(make_daemon: MakeDaemon) -> None:
    daemon, faults = start(make_daemon, spill={"durability": "power"})
    promises = Promises()
    with daemon.client() as client:
        session = promises.open(client)
        promises.swap_out(client, session, 64)
        faults.fail(SYNC, "/spill/", error=errno.EIO)
        daemon.admin("evict", "t")
        until(lambda: faults.hits() and daemon.ails(), "it is unwell")
        assert daemon.tenant()["dram"]["blocks"] == 64
        assert daemon.tenant()["nvme"]["blocks"] == 0
        faults.heal()
        until(lambda: daemon.admin("evict", "t") and daemon.tenant()["nvme"]["blocks"] == 64, "all")
        promises.check(client)
        assert_books_balance(daemon, 64)


@pytest.mark.parametrize("calls", [READ, WRITE], ids=["reads", "writes"])
def test_transfers_by_halves_are_only_slow(make_daemon: MakeDaemon, calls: int) -> None:
    daemon, faults = start(make_daemon)
    promises = Promises()
    with daemon.client() as client:
        faults.fail(calls, PAYLOAD, short_bytes=3 * 4096)
        session = store_on_nvme(daemon, client, promises)
        assert assert_lost_or_right(client, session, promises) == 0
        assert faults.hits() > 0
        assert daemon.counters()["lost_blocks"] == 0


STUCK: list[Callable[[Faults], None]] = [
    lambda faults: faults.fail(WRITE, PAYLOAD, stuck=True),
    lambda faults: faults.fail(READ, PAYLOAD, stuck=True),
    lambda faults: faults.fail(SYNC, "/spill/", stuck=True),
]


@pytest.mark.parametrize("hang", STUCK, ids=["writes", "reads", "syncs"])
def test_a_disk_that_hangs_stops_nothing_in_dram_and_is_named(
    make_daemon: MakeDaemon, hang: Callable[[Faults], None]
) -> None:
    daemon, faults = start(
        make_daemon, spill={"durability": "power"}, limits={"stuck_after": "500ms"}
    )
    promises = Promises()
    with daemon.client() as client:
        session = store_on_nvme(daemon, client, promises)
        new = promises.open(client)
        promises.swap_out(client, new, 8)
        hang(faults)
        waiting = client.send("acquire", client.lease(), session, 0, KNOWN, 0, 8, 60.0)
        daemon.admin("evict", "t")
        until(faults.hits, "the disk hangs")
        until(daemon.ails, "it is unwell")
        assert "NVMe" in "; ".join(daemon.ails())
        for _ in range(20):
            use_dram(client, promises)
        faults.heal()
        granted = client.reply(waiting)
        assert granted[0] == "granted", granted
        client.ask("release", granted[4])
        until(lambda: not daemon.ails(), "it is well again")
        promises.check(client)
        assert_lost_or_right(client, session, promises)
        client.ask("remove", KNOWN, b"".join(KEYS))
        assert_books_balance(daemon, promises.total())


def test_a_hanging_disk_does_not_hold_up_the_end(make_daemon: MakeDaemon) -> None:
    daemon, faults = start(make_daemon, stop={"timeout": "2s"})
    promises = Promises()
    with daemon.client() as client:
        session = promises.open(client)
        promises.swap_out(client, session, 32)
        faults.fail(WRITE, PAYLOAD, stuck=True)
        daemon.admin("evict", "t")
        until(faults.hits, "the disk hangs")
        daemon.process.terminate()  # type: ignore[union-attr]
        until(lambda: "stopped" in daemon.log(), "it says that it gave up waiting")
        faults.heal()
        daemon.process.wait(60.0)  # type: ignore[union-attr]
        daemon.process = None
        daemon.start()
        client.come_back()
        promises.check(client)


def test_a_catalog_that_cannot_be_written_refuses_and_recovers(make_daemon: MakeDaemon) -> None:
    daemon, faults = start(make_daemon)
    promises = Promises()
    with daemon.client() as client:
        session = promises.open(client)
        promises.swap_out(client, session, 8)
        faults.fail(WRITE, CATALOG, error=errno.ENOSPC)
        token = bytes(range(16))
        assert client.code("open_session", token, [KNOWN]) == 302
        promises.swap_out(client, session, 8)  # blocks need no catalog
        assert len(client.swap_in(KNOWN, session, 0, 0, 16)) == 16
        assert "catalog" in "; ".join(daemon.ails())
        faults.heal()
        until(lambda: not daemon.ails(), "what waited is stored")
        opened = client.ask("open_session", token, [KNOWN])
        daemon.restart()
        client.come_back()
        promises.check(client)
        client.ask("resume_session", token)
        client.ask("close_session", opened[4])
        assert_books_balance(daemon, promises.total())
