"""Processes of several users at one daemon: a tenant sees, takes and disturbs nothing of another's.

Only root can become other users; elsewhere this file has no tests.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fault.checker import KNOWN, LAYOUT
from tests.support.daemon import ARENA_BYTES, DaemonProcess
from tests.support.puppet import Puppet
from tests.support.raw import BLOCK_BYTES, CACHED, NO_NODE, RawClient, pattern, u32
from tests.support.wait import until

OWNER, RIVAL, STRANGER = 0, 65534, 4711
KEY = bytes(range(16))
TOKEN = bytes(range(100, 116))
SPILL_BYTES = 8 << 20

if os.geteuid() == 0:

    @pytest.fixture(scope="module")
    def public() -> Iterator[DaemonProcess]:
        """A daemon of two tenants at a place that every user can reach."""
        place = Path(tempfile.mkdtemp(prefix="kv-"))
        place.chmod(0o755)
        daemon = DaemonProcess(
            place,
            tenants=[
                {"name": "t", "uids": [OWNER], "arena_bytes": ARENA_BYTES,
                 "spill_bytes": SPILL_BYTES},
                {"name": "u", "uids": [RIVAL], "arena_bytes": ARENA_BYTES // 2,
                 "spill_bytes": SPILL_BYTES},
            ],
            limits={"sessions_per_tenant": 20, "groups": 16},
        )  # fmt: skip
        try:
            yield daemon.start()
        finally:
            daemon.end()
            shutil.rmtree(place)
        daemon.assert_no_faults()

    @pytest.fixture
    def mine(public: DaemonProcess) -> Iterator[RawClient]:
        """A client of the first tenant with a session, a key, a lease of each kind, a prefetch."""
        with public.client() as client:
            session = client.open(LAYOUT, TOKEN)
            client.swap_out(KNOWN, session, 0, {page: 1 + page for page in range(8)})
            lease = client.ask("reserve_keys", client.lease(), KNOWN, KEY)[4]
            client.ask("commit_keys", lease, u32(0), KEY, u32(0), u32(16))
            yield client
            assert client.swap_in(KNOWN, session, 0, 0, 8) == [pattern(1 + i) for i in range(8)]
            assert client.ask("lookup", [KNOWN], KEY)[4] == [1]
            client.clean()
            client.ask("remove", KNOWN, KEY)
        until(lambda: public.tenant("t")["clients"] == 0, "it has left")

    @pytest.fixture
    def theirs(public: DaemonProcess) -> Iterator[Puppet]:
        """A client of the other tenant, in a process of another user."""
        with Puppet(public.client_path, uid=RIVAL) as client:
            client.ask("register_layout", LAYOUT)
            yield client
        until(lambda: public.tenant("u")["clients"] == 0, "it has left")

    def books(daemon: DaemonProcess, tenant: str) -> dict[str, Any]:
        """What a tenant has, apart from who is connected."""
        found = daemon.tenant(tenant)
        return {key: found[key] for key in ("sessions", "leases", "held_blocks", "promised_blocks",
                                            "waiting", "dram", "nvme")}  # fmt: skip

    def test_a_user_of_no_tenant_is_turned_away(public: DaemonProcess) -> None:
        with Puppet(public.client_path, uid=STRANGER, hello=False) as stranger:
            group, secret = os.urandom(16), os.urandom(32)
            assert stranger.code("hello", 1, "x", group, secret) == 206

    def test_every_verb_with_the_others_ids(
        public: DaemonProcess, mine: RawClient, theirs: Puppet
    ) -> None:
        """It is told the same as of ids that never existed, and nothing of the other's changes."""
        (session,) = mine.sessions
        writing, offsets = mine.reserve(KNOWN, 2)
        reading = mine.ask("acquire", mine.lease(), session, 0, KNOWN, 0, 4)
        pin = mine.ask("lookup", [KNOWN], KEY, mine.lease())[5]
        before = books(public, "t")
        for verb, *fields in requests_about(session):
            if verb == "acquire":
                fields[0] = theirs.lease()
            assert theirs.code(verb, *fields) == 201, (verb, fields)
        for lease in (writing, reading[4], pin, 1 << 48):
            for verb, *fields in requests_under(lease):
                assert theirs.code(verb, *fields) in (205, 206), (verb, fields)
        assert theirs.code("resume_session", TOKEN) == 201
        assert theirs.ask("lookup", [KNOWN], KEY)[4] == [0]
        assert theirs.ask("acquire_keys", theirs.lease(), KNOWN, KEY)[4] == 0
        assert theirs.ask("remove", KNOWN, KEY)[4] == 0
        assert theirs.ask("cancel", 1)[4] == 0
        assert books(public, "t") == before
        assert mine.ask("abort", writing)[4] == 2
        assert mine.ask("release", reading[4])[4] == 4
        assert len(offsets) == 2

    def requests_about(session: int) -> list[list[Any]]:
        return [
            ["close_session", session], ["describe", session], ["fork", session, 9, 0, 16],
            ["prune", session, 0], ["set_retention", session, NO_NODE, CACHED],
            ["fold", session, 0, 0, 1, 0.0], ["unfold", session, 0, 0, 1],
            ["set_priority", session, 0], ["put_blob", session, 0, 9, b"x"],
            ["get_blob", session, 0], ["acquire", 0, session, 0, KNOWN, 0, 1],
            ["prefetch", 1, session, 0, KNOWN, 0, 1], ["hold", session, KNOWN, KEY],
            ["unhold", session, KNOWN, KEY],
        ]  # fmt: skip

    def requests_under(lease: int) -> list[list[Any]]:
        one = u32(0)
        return [
            ["abort", lease], ["renew", lease, 60.0], ["release", lease],
            ["commit_keys", lease, one, KEY, one, u32(16)],
            ["reserve", 4000, KNOWN, 1, 0, lease],
        ]  # fmt: skip

    def test_the_others_group_with_its_own_secret_is_another_group(
        public: DaemonProcess, mine: RawClient
    ) -> None:
        with Puppet(public.client_path, uid=RIVAL, hello=False) as spy:
            spy.join(mine.group, mine.secret)
            spy.ask("register_layout", LAYOUT)
            (session,) = mine.sessions
            assert spy.code("describe", session) == 201
        assert mine.ask("describe", session)[4] == session

    def test_leases_claimed_by_the_other_at_hello(public: DaemonProcess, mine: RawClient) -> None:
        (session,) = mine.sessions
        reading = mine.ask("acquire", mine.lease(), session, 0, KNOWN, 0, 4)
        with Puppet(public.client_path, uid=RIVAL, hello=False) as spy:
            spy.join(mine.group, mine.secret, False)
            spy.hello([[reading[4], False, reading[6]], [reading[4], True, reading[6]]])
            assert spy.code("release", reading[4]) in (205, 206)
        assert mine.ask("release", reading[4])[4] == 4

    def test_each_has_an_arena_of_its_own(
        public: DaemonProcess, mine: RawClient, theirs: Puppet
    ) -> None:
        """The other's mapping is other memory: what it writes over all of it nobody else sees."""
        assert theirs.welcome[9] != mine.welcome[9]
        assert theirs.welcome[10] == ARENA_BYTES // 2
        for offset in range(0, theirs.welcome[10], 1 << 20):
            theirs.write(offset, b"\xee" * (1 << 20))
        (session,) = mine.sessions
        assert mine.swap_in(KNOWN, session, 0, 0, 8) == [pattern(1 + i) for i in range(8)]

    def test_a_tenant_at_its_limits_takes_nothing_from_the_other(
        public: DaemonProcess, mine: RawClient, theirs: Puppet
    ) -> None:
        """Sessions, DRAM, NVMe and waiting requests: each fills its own and meets its own end."""
        before = books(public, "t")
        tokens = [bytes([n]) * 16 for n in range(1, 22)]
        opened = [theirs.call("open_session", token, [KNOWN]) for token in tokens]
        assert [reply[0] for reply in opened] == ["session"] * 20 + ["error"]
        assert opened[-1][4] == 207
        session, stored = opened[0][4], 0
        while True:
            granted = theirs.call("reserve", theirs.lease(), KNOWN, 8, 0, 0, 1.0)
            if granted[0] == "error" and granted[4] == 301:
                continue  # what leaves DRAM is on its way
            if granted[0] == "error":
                assert granted[4] == 302
                break
            theirs.ask("abort", granted[4])
            theirs.swap_out(KNOWN, session, 0, {stored + i: 500 + i for i in range(8)})
            stored += 8
        used = public.tenant("u")
        assert used["nvme"]["used_bytes"] <= SPILL_BYTES
        assert stored * BLOCK_BYTES > ARENA_BYTES // 2
        for number in range(50):
            theirs.send("reserve", 3000 + number, KNOWN, 8, 0, 0, 60.0)
        until(lambda: public.tenant("u")["waiting"] == 50, "its requests wait")
        assert books(public, "t") == before
        other = mine.open(LAYOUT)  # and all of its own is still there to be used
        mine.swap_out(KNOWN, other, 0, {page: 700 + page for page in range(100)})
        assert mine.swap_in(KNOWN, other, 0, 0, 100) == [pattern(700 + i) for i in range(100)]
        mine.ask("close_session", other)
        for token in tokens[:20]:
            theirs.call("resume_session", token)
        for reply in opened[:20]:
            theirs.ask("close_session", reply[4])

    def test_a_storm_of_evictions_drops_nothing_of_the_other(
        public: DaemonProcess, mine: RawClient, theirs: Puppet
    ) -> None:
        """CACHED blocks of one tenant stay while the other turns its whole arena over and over."""
        session = mine.open(LAYOUT)
        mine.swap_out(KNOWN, session, 0, {page: 900 + page for page in range(40)}, CACHED)
        before = books(public, "t")
        own = theirs.ask("open_session", bytes(16), [KNOWN])[4]
        for first in range(0, 320, 16):
            pages = {first + i: first + i for i in range(16)}
            theirs.swap_out(KNOWN, own, 0, pages, CACHED)
        counters = public.counters()
        assert counters["dropped_cached_blocks"] > 0
        assert books(public, "t") == before
        assert mine.swap_in(KNOWN, session, 0, 0, 40) == [pattern(900 + i) for i in range(40)]
        theirs.ask("close_session", own)

    def test_the_sockets_and_files_of_the_daemon_are_its_own(public: DaemonProcess) -> None:
        """Another user reaches the client socket and nothing else."""
        with pytest.raises(AssertionError, match="PermissionError"):
            Puppet(public.admin_path, uid=RIVAL, hello=False)
        place = public.directory
        holder = place / "run" / "holder.sock"
        for path in (place / "state", *place.joinpath("state").rglob("*"), holder):
            assert path.lstat().st_mode & 0o077 == 0, path
        assert place.joinpath("run").stat().st_mode & 0o022 == 0
