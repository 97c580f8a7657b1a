"""The wall clock jumps by years, forwards and back: leases, orphans and waits do not notice."""

import os

from tests.fault.checker import KNOWN, LAYOUT, Promises
from tests.fault.test_kill_daemon import assert_books_balance
from tests.support.fixtures import MakeDaemon
from tests.support.interpose import Faults
from tests.support.puppet import Puppet
from tests.support.raw import from_u64, pattern, u32
from tests.support.wait import until

YEAR_S = 365 * 24 * 3600
CATALOG_SAVES = 3


def test_times_run_on_evenly_while_the_wall_clock_jumps(
    make_daemon: MakeDaemon,
) -> None:
    daemon = make_daemon()
    faults = Faults(daemon)
    daemon.start()
    promises = Promises()
    token = os.urandom(16)
    with daemon.client() as client:
        session = promises.open(client)
        promises.swap_out(client, session, 16)
        with Puppet(daemon.client_path) as puppet:
            orphan = puppet.open(LAYOUT, token)
            puppet.swap_out(KNOWN, orphan, 0, {0: 1})
        until(lambda: daemon.tenant()["orphans"] == 1, "it is an orphan")
        lease, slots = client.reserve(KNOWN, 2)
        reading = client.ask("acquire", client.lease(), session, 0, KNOWN, 0, 4)
        faults.jump(YEAR_S)
        for _ in range(CATALOG_SAVES):  # changes with the new time in them
            client.ask("close_session", client.open(LAYOUT))
        idle_s = [each["idle_s"] for each in daemon.admin("sessions")["sessions"]]
        assert all(0 <= each < 600 for each in idle_s)
        counters = daemon.counters()
        assert counters["expired_leases"] == counters["reaped_orphans"] == 0
        seeds = promises.seeds(session, 2)
        for slot, seed in zip(slots, seeds.values(), strict=True):
            client.write(slot, pattern(seed))
        client.ask("commit", lease, session, 0, u32(0, 1), u32(*seeds), u32(16, 16))
        promises.pages[session] |= seeds
        client.ask("release", reading[4])
        assert len(from_u64(reading[6])) == 4
        promises.check(client)
        daemon.restart()  # a life whose clock is another than the catalog's
        client.come_back()
        assert daemon.tenant()["orphans"] >= 1
        assert daemon.counters()["reaped_orphans"] == 0
        promises.check(client)
        client.ask("resume_session", token)
        assert client.swap_in(KNOWN, orphan, 0, 0, 1) == [pattern(1)]
        client.ask("close_session", orphan)
        faults.jump(-20 * YEAR_S)
        client.ask("close_session", client.open(LAYOUT))
        promises.check(client)
        daemon.restart()
        client.come_back()
        assert daemon.counters()["reaped_orphans"] == 0
        promises.check(client)
        assert_books_balance(daemon, promises.total())
