"""The daemon's life: stop, reload, tenants, strangers, and memory that ends with it."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.checker import KNOWN, LAYOUT, Promises
from tests.fault.test_capacity import fill_both_tiers
from tests.fault.test_kill_daemon import assert_books_balance, assert_files_are_sound
from tests.support.daemon import ARENA_BYTES, DaemonProcess
from tests.support.fixtures import MakeDaemon
from tests.support.puppet import Puppet
from tests.support.raw import BLOCK_BYTES, Closed, RawClient, pattern, u32
from tests.support.wait import until

NOBODY = 65534


def test_sigterm_ends_it_in_time_with_busy_clients(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    promises = Promises()
    with daemon.client() as client:
        session = promises.open(client)
        promises.swap_out(client, session, 64)
        client.reserve(KNOWN, 40)
        client.ask("acquire", client.lease(), session, 0, KNOWN, 0, 8)
        client.send("reserve", client.lease(), KNOWN, 100, 0, 0, 60.0)
        half_a_frame = RawClient(daemon.client_path)
        half_a_frame.socket.sendall(b"\x10\0\0\0half")
        daemon.stop()
        half_a_frame.close()
        with pytest.raises(Closed):
            client.push("nothing")
        assert not os.path.exists(daemon.client_path)
        assert_files_are_sound(daemon)
        daemon.start()
        client.come_back()
        promises.check(client)
        assert_books_balance(daemon, 64)


def test_memory_that_ends_with_the_daemon_is_spilled_on_sigterm(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(recovery={"memory": "off"}).start()
    promises = Promises()
    with daemon.client() as client:
        session = promises.open(client)
        promises.swap_out(client, session, 96)
        client.ask("acquire", client.lease(), session, 0, KNOWN, 0, 16)  # still being read
        client.reserve(KNOWN, 8)
        daemon.stop()
        daemon.start()
        client.connect()
        with daemon.client() as back:
            promises.check(back)
            assert_books_balance(daemon, 96)
    assert daemon.holders() == []


@pytest.mark.parametrize("durability", ["process", "power"])
def test_both_durabilities_bring_blocks_back_from_nvme(
    make_daemon: MakeDaemon, durability: str
) -> None:
    daemon = make_daemon(
        spill={"durability": durability}, recovery={"memory": "off"}
    ).start()  # fmt: skip
    promises = Promises()
    with daemon.client() as client:
        session = promises.open(client)
        promises.swap_out(client, session, 32)
        daemon.admin("evict", "t")
        until(lambda: daemon.tenant()["nvme"]["blocks"] == 32, "all is on NVMe")
        daemon.restart()  # kill -9, and the memory is gone
        client.connect()
        with daemon.client() as back:
            promises.check(back)


def test_a_reload_changes_limits_and_refuses_a_broken_file(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    assert daemon.process is not None
    with daemon.client() as client:
        client.ask("register_layout", LAYOUT)
        daemon.sections["limits"]["leases_per_group"] = 1
        daemon.tenants[0]["spill_bytes"] = 1 << 20
        daemon.sections["spill"]["io_threads"] = 7
        daemon.sections["recovery"]["memory"] = "off"
        daemon.write_config()
        daemon.process.send_signal(signal.SIGHUP)
        until(lambda: "takes effect at the next start" in daemon.log(), "it has reloaded")
        until(lambda: daemon.tenant()["nvme"]["quota_bytes"] == 1 << 20, "the quota is new")
        client.reserve(KNOWN, 1)
        assert client.code("reserve", client.lease(), KNOWN, 1) == 207
        daemon.sections["limits"]["leases_per_group"] = "many"
        daemon.write_config()
        daemon.process.send_signal(signal.SIGHUP)
        until(lambda: "reload: nothing was changed" in daemon.log(), "it has refused")
        assert "limits.leases_per_group" in daemon.log()
        with RawClient(daemon.admin_path) as operator:
            assert operator.code("reload") == 204
        assert client.code("reserve", client.lease(), KNOWN, 1) == 207
    assert daemon.holders() != []  # how memory is kept changes with a restart only


def test_a_reload_answers_what_it_did(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    daemon.sections["limits"]["groups"] = 3
    daemon.sections["arena"]["high_watermark"] = 0.7
    daemon.sections["arena"]["low_watermark"] = 0.5
    daemon.sections["arena"]["mlock"] = "try"
    daemon.write_config()
    assert daemon.admin("reload") == {
        "changed": ["arena.high_watermark", "arena.low_watermark", "limits.groups"],
        "needs_restart": ["arena.mlock"],
    }
    assert daemon.tenant()["dram"]["high_watermark"] == 0.7


def test_an_unlisted_uid_is_refused(make_daemon: MakeDaemon) -> None:
    other = os.geteuid() + 1
    daemon = make_daemon(
        tenants=[{"name": "t", "uids": [other], "arena_bytes": ARENA_BYTES}]
    ).start()
    with RawClient(daemon.client_path) as client:
        assert client.code("hello", 1, "raw", client.group, client.secret) == 206
        with pytest.raises(Closed):
            client.receive()
    assert daemon.tenant()["clients"] == 0


def test_a_reload_lets_a_uid_in(make_daemon: MakeDaemon) -> None:
    other = os.geteuid() + 1
    tenant = {"name": "t", "uids": [other], "arena_bytes": ARENA_BYTES}
    daemon = make_daemon(tenants=[tenant]).start()
    tenant["uids"] = [other, os.geteuid()]
    daemon.write_config()
    assert daemon.admin("reload")["needs_restart"] == []
    with daemon.client() as client:
        assert client.welcome[7] == "t"


if os.geteuid() == 0:  # only root can become somebody else

    @pytest.fixture
    def public(make_daemon: MakeDaemon) -> Iterator[DaemonProcess]:
        """A daemon of two tenants at a place that every user can reach."""
        place = Path(tempfile.mkdtemp(prefix="kv-"))
        place.chmod(0o755)
        daemon = make_daemon(
            tenants=[
                {"name": "t", "uids": [0], "arena_bytes": ARENA_BYTES, "spill_bytes": 8 << 20},
                {"name": "u", "uids": [NOBODY], "arena_bytes": ARENA_BYTES // 2,
                 "spill_bytes": 8 << 20},
            ]
        )  # fmt: skip
        daemon.directory = place
        daemon.client_path = str(place / "run" / "kvtierd.sock")
        daemon.admin_path = str(place / "run" / "admin.sock")
        yield daemon.start()
        daemon.end()
        shutil.rmtree(place)

    def test_tenants_see_only_themselves(public: DaemonProcess) -> None:
        token, key = os.urandom(16), bytes(range(16))
        with public.client() as mine, Puppet(public.client_path, uid=NOBODY) as theirs:
            assert (mine.welcome[7], theirs.welcome[7]) == ("t", "u")
            assert theirs.welcome[10] == ARENA_BYTES // 2
            session = mine.open(LAYOUT, token)
            mine.swap_out(KNOWN, session, 0, {0: 1})
            lease = mine.ask("reserve_keys", mine.lease(), KNOWN, key)[4]
            mine.ask("commit_keys", lease, u32(0), key, u32(0), u32(16))
            reading = mine.ask("acquire", mine.lease(), session, 0, KNOWN, 0, 1)[4]
            theirs.ask("register_layout", LAYOUT)
            assert theirs.code("resume_session", token) == 201
            assert theirs.code("describe", session) == 201
            assert theirs.ask("lookup", [KNOWN], key)[4] == [0]
            assert theirs.ask("remove", KNOWN, key)[4] == 0
            assert theirs.code("release", reading) in (205, 206)
            assert theirs.code("hello", 1, "x", mine.group, mine.secret) == 204
            same = theirs.ask("open_session", token, [KNOWN])  # the same token is another session
            assert same[5] is True
            theirs.swap_out(KNOWN, session, 0, {0: 2})
            assert mine.swap_in(KNOWN, session, 0, 0, 1) == [pattern(1)]
            assert theirs.swap_in(KNOWN, session, 0, 0, 1) == [pattern(2)]
            mine.ask("lookup", [KNOWN], key)

    def test_the_admin_socket_is_the_operators_alone(public: DaemonProcess) -> None:
        with pytest.raises(AssertionError, match="PermissionError"):
            Puppet(public.admin_path, uid=NOBODY, hello=False)

    def test_tenants_survive_a_restart_each_in_its_arena(public: DaemonProcess) -> None:
        token = os.urandom(16)
        with public.client() as mine, Puppet(public.client_path, uid=NOBODY) as theirs:
            for client, seed in ((mine, 1), (theirs, 100)):
                session = client.open(LAYOUT, token)
                for first in range(0, 96, 16):
                    pages = range(first, first + 16)
                    client.swap_out(KNOWN, session, 0, {page: seed + page for page in pages})
            public.restart()
            for client, seed in ((mine, 1), (theirs, 100)):
                client.come_back()
                client.ask("register_layout", LAYOUT)
                client.ask("resume_session", token)
                found = client.swap_in(KNOWN, session, 0, 0, 96)
                assert found == [pattern(seed + page) for page in range(96)]


def test_a_full_spill_quota_of_one_tenant_is_its_own(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(
        tenants=[
            {"name": "t", "uids": ["self"], "arena_bytes": ARENA_BYTES, "spill_bytes": 2 << 20},
            {"name": "u", "uids": [os.geteuid() + 1], "arena_bytes": ARENA_BYTES},
        ]
    ).start()
    with daemon.client() as client:
        promises = Promises()
        session = promises.open(client)
        fill_both_tiers(client, promises, session)
        assert daemon.tenant()["nvme"]["used_bytes"] <= 2 << 20
        assert promises.total() * BLOCK_BYTES > ARENA_BYTES
        promises.check(client)
