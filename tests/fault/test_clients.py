"""Clients that die, stop or come late: nothing of theirs is reused while they could still write."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.shells import SHELLS, Shells
from tests.fault.checker import KNOWN, LAYOUT, Promises
from tests.fault.ledger import LAYOUT as LIBRARY_LAYOUT
from tests.fault.ledger import contents
from tests.fault.test_kill_daemon import assert_books_balance
from tests.support.daemon import ARENA_BYTES, DaemonProcess
from tests.support.fixtures import MakeDaemon
from tests.support.puppet import Puppet
from tests.support.raw import BLOCK_BYTES, Closed, RawClient, from_u64, pattern, u32, u64
from tests.support.wait import until

BLOCKS = ARENA_BYTES // BLOCK_BYTES


@pytest.fixture
def daemon(shared_daemon: DaemonProcess) -> DaemonProcess:
    """One daemon for the tests that do not restart it; each leaves it empty."""
    until(shared_daemon.is_empty, "what earlier tests had is gone")
    return shared_daemon


@pytest.fixture
def puppet(daemon: DaemonProcess) -> Iterator[Puppet]:
    with Puppet(daemon.client_path) as puppet:
        yield puppet


@pytest.fixture
def own(make_daemon: MakeDaemon) -> DaemonProcess:
    """A daemon that the test may kill."""
    return make_daemon().start()


@pytest.fixture
def own_puppet(own: DaemonProcess) -> Iterator[Puppet]:
    with Puppet(own.client_path) as puppet:
        yield puppet


def test_a_writer_killed_between_reserve_and_commit_publishes_nothing(
    daemon: DaemonProcess, puppet: Puppet
) -> None:
    token = os.urandom(16)
    session = puppet.open(LAYOUT, token)
    puppet.swap_out(KNOWN, session, 0, {0: 1, 1: 2})
    _, slots = puppet.reserve(KNOWN, 4)
    puppet.write(slots[0], pattern(9))
    assert daemon.tenant()["dram"]["writing_bytes"] == 4 * BLOCK_BYTES
    puppet.kill()
    until(lambda: daemon.tenant()["leases"] == 0, "the dead writer's slots are free")
    with daemon.client() as client:
        client.ask("register_layout", LAYOUT)
        client.ask("resume_session", token)
        assert client.swap_in(KNOWN, session, 0, 0, 2) == [pattern(1), pattern(2)]
        assert client.code("acquire", client.lease(), session, 0, KNOWN, 2, 1) == 204
        assert_books_balance(daemon, 2)
        client.ask("close_session", session)


def test_a_reader_killed_with_leases_lets_go_of_them(daemon: DaemonProcess, puppet: Puppet) -> None:
    token = os.urandom(16)
    session = puppet.open(LAYOUT, token)
    puppet.swap_out(KNOWN, session, 0, {page: page for page in range(8)})
    puppet.ask("acquire", 100, session, 0, KNOWN, 0, 8)
    puppet.ask("lookup", [KNOWN], bytes(16), 101)
    puppet.kill()
    until(lambda: daemon.tenant()["leases"] == 0, "the dead reader's leases have ended")
    with daemon.client() as client:
        client.ask("register_layout", LAYOUT)
        client.ask("resume_session", token)
        assert client.ask("close_session", session)[4] == 8
        assert_books_balance(daemon, 0)


def test_waiting_requests_of_a_dead_client_are_forgotten(
    daemon: DaemonProcess, client: RawClient, puppet: Puppet
) -> None:
    client.ask("register_layout", LAYOUT)
    lease, _ = client.reserve(KNOWN, BLOCKS * 15 // 16)
    puppet.begin("ask", "reserve", 1, KNOWN, BLOCKS // 2, 0, 0, 30.0)
    until(lambda: daemon.tenant()["waiting"] == 1, "the puppet waits")
    puppet.kill()
    until(lambda: daemon.tenant()["waiting"] == 0, "nobody waits")
    client.ask("abort", lease)
    assert_books_balance(daemon, 0)


def test_a_stopped_writers_slots_are_quarantined_until_it_is_dead(
    daemon: DaemonProcess, client: RawClient, puppet: Puppet
) -> None:
    client.ask("register_layout", LAYOUT)
    granted = puppet.ask("reserve", 1, KNOWN, 16, 0, 0, 0.0, 0.2)
    mine = set(from_u64(granted[6]))
    puppet.freeze()
    quarantined = 16 * BLOCK_BYTES
    until(lambda: daemon.tenant()["dram"]["quarantined_bytes"] == quarantined, "it is quarantined")
    lease, others = client.reserve(KNOWN, BLOCKS - 16 - 8)
    assert not mine & set(others)
    assert client.code("reserve", client.lease(), KNOWN, 12) == 301
    client.ask("abort", lease)
    puppet.kill()
    until(lambda: daemon.tenant()["dram"]["quarantined_bytes"] == 0, "its death frees them")
    assert_books_balance(daemon, 0)


def test_quarantine_is_capped(daemon: DaemonProcess, client: RawClient, puppet: Puppet) -> None:
    client.ask("register_layout", LAYOUT)
    puppet.ask("reserve", 1, KNOWN, BLOCKS // 2, 0, 0, 0.0, 0.1)
    puppet.freeze()
    until(lambda: daemon.tenant()["dram"]["quarantined_bytes"] > 0, "it is quarantined")
    assert client.code("reserve", client.lease(), KNOWN, BLOCKS // 2 + 1) == 207


def test_a_slow_reader_keeps_its_blocks_past_its_lease(
    daemon: DaemonProcess, client: RawClient, puppet: Puppet
) -> None:
    token = os.urandom(16)
    session = puppet.open(LAYOUT, token)
    puppet.swap_out(KNOWN, session, 0, {page: page for page in range(16)})
    before = daemon.counters()["expired_leases"]
    granted = puppet.ask("acquire", 50, session, 0, KNOWN, 0, 16, 0.0, 0.1)
    puppet.freeze()
    until(lambda: daemon.counters()["expired_leases"] > before, "its time is over")
    client.ask("register_layout", LAYOUT)
    client.ask("resume_session", token)
    client.ask("close_session", session)
    lease, others = client.reserve(KNOWN, BLOCKS - 16 - 8)
    assert not set(from_u64(granted[6])) & set(others)
    client.ask("abort", lease)
    puppet.kill()
    assert_books_balance(daemon, 0)


def test_a_stopped_writer_is_quarantined_over_a_restart_and_freed_by_its_death(
    own: DaemonProcess, own_puppet: Puppet
) -> None:
    own_puppet.ask("register_layout", LAYOUT)
    granted = own_puppet.ask("reserve", 1, KNOWN, 16, 0, 0, 0.0, 0.1)
    own_puppet.freeze()
    until(lambda: own.tenant()["dram"]["quarantined_bytes"] > 0, "it is quarantined")
    own.restart()
    assert own.tenant()["dram"]["quarantined_bytes"] == 16 * BLOCK_BYTES
    with own.client() as client:
        client.ask("register_layout", LAYOUT)
        lease, others = client.reserve(KNOWN, BLOCKS - 16 - 8)
        assert not set(from_u64(granted[6])) & set(others)
        client.ask("abort", lease)
        own_puppet.kill()
        until(lambda: own.tenant()["dram"]["quarantined_bytes"] == 0, "its death frees them")


def test_a_client_that_died_while_no_daemon_ran_is_found_dead(
    own: DaemonProcess, own_puppet: Puppet
) -> None:
    own_puppet.ask("register_layout", LAYOUT)
    own_puppet.reserve(KNOWN, 16)
    own.kill()
    own_puppet.kill()
    own.start()
    assert own.tenant()["dram"]["used_bytes"] == 0
    assert own.tenant()["leases"] == 0


def test_one_of_two_processes_of_a_group_dies_and_the_other_goes_on(
    daemon: DaemonProcess, client: RawClient
) -> None:
    session = client.open(LAYOUT)
    with Puppet(daemon.client_path, hello=False) as worker:
        worker.do("join", client.group, client.secret)
        lease, slots = client.reserve(KNOWN, 2)
        worker.write(slots[0], pattern(1))
        worker.ask("commit", lease, session, 0, u32(0), u32(0), u32(16))
        left, lost = worker.reserve(KNOWN, 2)
        worker.kill()
    client.write(slots[1], pattern(2))
    client.ask("commit", lease, session, 0, u32(1), u32(1), u32(16))
    assert client.swap_in(KNOWN, session, 0, 0, 2) == [pattern(1), pattern(2)]
    assert client.ask("abort", left)[4] == len(lost) == 2  # its leases are the group's


def test_a_member_cannot_be_taken_over_by_another_process(
    daemon: DaemonProcess, client: RawClient
) -> None:
    with Puppet(daemon.client_path, hello=False) as thief:
        thief.do("join", client.group, client.secret, False)
        reply = thief.call("hello", 1, "thief", client.group, client.secret, client.member)
        assert reply[0] == "welcome"
        assert reply[8] != client.member, "it is another member"


def test_a_client_writes_on_through_a_restart_and_commits(own: DaemonProcess) -> None:
    promises = Promises()
    with own.client() as client:
        session = promises.open(client)
        promises.swap_out(client, session, 4)
        seeds = promises.seeds(session, 8)
        lease, slots = client.reserve(KNOWN, 8)
        for life in range(2):
            own.kill()
            for slot, seed in list(zip(slots, seeds.values(), strict=True))[
                4 * life : 4 * life + 4
            ]:
                client.write(slot, pattern(seed))
            own.start()
            with pytest.raises(Closed):
                client.call("describe", session)
            client.connect()
            client.hello([[lease, True, u64(*slots)]])
            assert client.welcome[13] == []
        promises.resume(client)
        client.ask("commit", lease, session, 0, u32(*range(8)), u32(*seeds), u32(*[16] * 8))
        promises.pages[session] |= seeds
        promises.check(client)
        assert_books_balance(own, 12)


def test_sessions_of_the_dead_are_orphans_until_their_time_is_over(
    make_daemon: MakeDaemon,
) -> None:
    daemon = make_daemon(recovery={"orphan_ttl": "1h"}).start()
    with Puppet(daemon.client_path) as puppet:
        session = puppet.open(LAYOUT)
        puppet.swap_out(KNOWN, session, 0, {0: 1})
        puppet.kill()
    until(lambda: daemon.tenant()["orphans"] == 1, "it is an orphan")
    daemon.restart()
    assert daemon.tenant()["orphans"] == 1
    daemon.sections["recovery"]["orphan_ttl"] = "100ms"
    daemon.write_config()
    assert daemon.admin("reload")["changed"] == ["recovery.orphan_ttl"]
    until(lambda: daemon.tenant()["sessions"] == 0, "it is reaped")
    assert daemon.counters()["reaped_orphans"] == 1
    assert f"{session:016x}" in daemon.log()
    assert_books_balance(daemon, 0)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_close_that_a_kill_left_unanswered_is_done_in_the_next_life(
    own: DaemonProcess, shell: str
) -> None:
    assert own.process is not None
    shells = Shells(shell)
    client = shells.open(Path(own.client_path))
    session = client.open_session([LIBRARY_LAYOUT])
    session.swap_out(contents([1, 2, 3]), range(3), 16)
    os.kill(own.process.pid, signal.SIGSTOP)  # it takes the request, and does not read it
    closing = threading.Thread(target=session.close)
    closing.start()
    until(lambda: client._core.protocol.unsettled, "it has asked")
    own.restart()
    closing.join(60.0)
    assert not closing.is_alive()
    assert own.tenant()["sessions"] == 0
    assert_books_balance(own, 0)
    shells.close()
