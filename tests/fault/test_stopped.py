"""SIGSTOP: who stands still past its leases and deadlines does no harm when it goes on."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier_client.client import Client
from kvtier_client.errors import Timeout
from tests.fault.checker import KNOWN, LAYOUT, Promises
from tests.fault.ledger import LAYOUT as LIBRARY_LAYOUT
from tests.fault.ledger import contents
from tests.fault.test_kill_daemon import assert_books_balance
from tests.support.daemon import DaemonProcess
from tests.support.puppet import Puppet
from tests.support.raw import BLOCK_BYTES, RawClient, from_u64, pattern, u32
from tests.support.wait import until

TTL_S = 0.3


@pytest.fixture
def daemon(shared_daemon: DaemonProcess) -> DaemonProcess:
    """One daemon for all; each test leaves it empty."""
    until(shared_daemon.is_empty, "what earlier tests had is gone")
    return shared_daemon


@pytest.fixture
def puppet(daemon: DaemonProcess) -> Iterator[Puppet]:
    with Puppet(daemon.client_path) as puppet:
        yield puppet


def pass_s(seconds: float) -> None:
    """Let a lease's time go by."""
    end_s = time.monotonic() + seconds
    until(lambda: time.monotonic() > end_s, "the time is over")


def test_a_writer_that_goes_on_after_its_lease_writes_into_nobodys_block(
    daemon: DaemonProcess, client: RawClient, puppet: Puppet
) -> None:
    session = puppet.open(LAYOUT)
    granted = puppet.ask("reserve", 1, KNOWN, 16, 0, 0, 0.0, TTL_S)
    slots = from_u64(granted[6])
    puppet.freeze()
    quarantined = 16 * BLOCK_BYTES
    until(lambda: daemon.tenant()["dram"]["quarantined_bytes"] == quarantined, "its time is over")
    promises = Promises()
    mine = promises.open(client)
    promises.swap_out(client, mine, 40)
    puppet.thaw()
    for slot in slots:
        puppet.write(slot, pattern(999))  # late, into its own mapping
    code = puppet.code("commit", granted[4], session, 0, u32(0), u32(0), u32(16), 1)
    assert code == 205
    promises.check(client)
    assert puppet.code("acquire", 2, session, 0, KNOWN, 0, 1) == 204  # nothing was published
    puppet.call("abort", granted[4])  # its acknowledgement: it writes no more
    until(lambda: daemon.tenant()["dram"]["quarantined_bytes"] == 0, "the slots are free")
    puppet.ask("close_session", session)
    assert_books_balance(daemon, 40)


def test_a_reader_that_goes_on_after_its_lease_still_sees_its_own_blocks(
    daemon: DaemonProcess, client: RawClient, puppet: Puppet
) -> None:
    session = puppet.open(LAYOUT)
    puppet.swap_out(KNOWN, session, 0, {page: page for page in range(8)})
    before = daemon.counters()["expired_leases"]
    granted = puppet.ask("acquire", 50, session, 0, KNOWN, 0, 8, 0.0, TTL_S)
    puppet.freeze()
    until(lambda: daemon.counters()["expired_leases"] > before, "its time is over")
    promises = Promises()
    mine = promises.open(client)
    promises.swap_out(client, mine, 100)  # takes every slot that can be had
    puppet.thaw()
    found = [puppet.read(offset) for offset in from_u64(granted[6])]
    assert found == [pattern(page) for page in range(8)]
    puppet.ask("release", granted[4])
    assert puppet.ask("close_session", session)[4] == 8
    assert_books_balance(daemon, 100)


def test_a_daemon_that_was_stopped_past_all_leases_keeps_every_promise(
    daemon: DaemonProcess, client: RawClient, puppet: Puppet
) -> None:
    promises = Promises()
    mine = promises.open(client)
    promises.swap_out(client, mine, 40)
    session = puppet.open(LAYOUT)
    granted = puppet.ask("reserve", 1, KNOWN, 4, 0, 0, 0.0, TTL_S)
    reading = client.ask("acquire", client.lease(), mine, 0, KNOWN, 0, 8, 0.0, TTL_S)
    daemon.freeze()
    pass_s(2 * TTL_S)
    for slot in from_u64(granted[6]):
        puppet.write(slot, pattern(77))
    puppet.begin(
        "call", "commit", granted[4], session, 0, u32(*range(4)), u32(*range(4)), u32(*[16] * 4), 1
    )
    daemon.thaw()
    answer = puppet.end()
    if answer[0] == "error":  # the daemon saw the time before it saw the commit
        assert answer[4] == 205
        puppet.call("abort", granted[4])
    else:
        assert puppet.swap_in(KNOWN, session, 0, 0, 4) == [pattern(77)] * 4
    assert [client.read(at) for at in from_u64(reading[6])] == [
        pattern(promises.pages[mine][page]) for page in range(8)
    ]
    client.ask("release", reading[4])
    promises.check(client)
    puppet.ask("close_session", session)
    until(lambda: daemon.tenant()["dram"]["quarantined_bytes"] == 0, "nothing is quarantined")
    assert_books_balance(daemon, 40)


def test_the_library_times_out_on_a_stopped_daemon_and_the_repeat_succeeds(
    daemon: DaemonProcess,
) -> None:
    records = contents([1, 2, 3, 4])
    with Client(Path(daemon.client_path)) as client:
        session = client.open_session([LIBRARY_LAYOUT])
        session.swap_out(records[:2], range(2), 16)
        daemon.freeze()
        patience_s, client._core.deadline_s = client._core.deadline_s, 0.5
        with pytest.raises(Timeout):
            session.swap_out(records[2:], range(2, 4), 16)
        with pytest.raises(Timeout):
            session.nodes()
        daemon.thaw()
        client._core.deadline_s = patience_s
        session.swap_out(records[2:], range(2, 4), 16)
        back = np.zeros_like(records)
        session.swap_in(back, range(4))
        assert (back == records).all()
        session.close()
    until(daemon.is_empty, "nothing is left")


def test_a_client_that_closes_while_the_daemon_stands_still_leaves_no_lease(
    daemon: DaemonProcess,
) -> None:
    records = contents([1, 2, 3, 4])
    client = Client(Path(daemon.client_path), deadline_s=0.5)
    session = client.open_session([LIBRARY_LAYOUT])
    token = session.token
    session.swap_out(records, range(4), 16)
    client.reserve(LIBRARY_LAYOUT, 3)
    session.acquire((0, 2))
    daemon.freeze()
    with pytest.raises(Timeout):
        session.acquire((0, 4))
    client.close()
    daemon.thaw()  # this process lives on, and the daemon never hears of its death
    until(lambda: not daemon.tenant()["leases"], "nothing is leased")
    with Client(Path(daemon.client_path)) as again:
        again.register_layout(LIBRARY_LAYOUT)
        again.resume_session(token).close()
    until(daemon.is_empty, "nothing is left")


def test_a_client_process_that_stands_still_holds_up_nobody(
    daemon: DaemonProcess, client: RawClient, puppet: Puppet
) -> None:
    puppet.open(LAYOUT)
    puppet.freeze()
    replies = threading.Semaphore(0)
    promises = Promises()
    mine = promises.open(client)
    for _ in range(8):
        promises.swap_out(client, mine, 16)  # also through its turn in the daemon's queues
        replies.release()
    promises.check(client)
    os.kill(puppet.pid, signal.SIGCONT)
    puppet.clean()
