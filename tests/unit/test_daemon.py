"""The daemon around the core: whatever fails in it, its clients are answered and others go on."""

import itertools
import os
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import msgpack
import pytest

from kvtier_client import errors, wire
from kvtierd import server
from kvtierd.catalog.errors import CatalogBusy, CatalogError, CatalogFull
from kvtierd.core import actions as act
from kvtierd.server import Credentials
from kvtierd.tiers.blockio import LinuxKernel
from tests.support import raw
from tests.support.puppet import Puppet
from tests.support.raw import Closed, RawClient, from_u64, pattern, u32
from tests.support.served import WAIT_S, Served
from tests.support.wait import until

BLOCK_BYTES = 16384
LAYOUT = raw.layout(block_bytes=BLOCK_BYTES)
KNOWN = raw.fingerprint(LAYOUT)
STRANGER = 4242


@pytest.fixture
def served(tmp_path: Path) -> Served:
    return Served(tmp_path)


# ------------------------------------------------------------------- processes


def test_a_process_that_dies_with_leases_leaves_nothing(served: Served) -> None:
    def scene(served: Served) -> None:
        with Puppet(served.client_path) as puppet:
            session = puppet.open(LAYOUT)
            lease, _ = puppet.reserve(KNOWN, 2)
            puppet.ask("commit", lease, session, 0, u32(0), u32(0), u32(16))
            puppet.ask("acquire", 90, session, 0, KNOWN, 0, 1)
            assert served.tenant()["leases"] == 2
            puppet.kill()
        until(lambda: served.tenant()["leases"] == 0, "its leases have ended")
        assert served.tenant()["orphans"] == 1

    served.play(scene)


# --------------------------------------------------------------------- answers


def values_of(kind: Any) -> list[Any]:
    """Fields of the right types for a request of a kind."""
    chosen = {
        "int": 1, "str": "", "bool": False, "float": 0.0, "bytes": bytes(16), "list": [],
        "Layout": LAYOUT,
    }  # fmt: skip
    fields = list(kind.__struct_fields__)[1:]
    types = {name: kind.__annotations__[name] for name in fields}
    return [
        0 if name == "oneway" else chosen[getattr(types[name], "__name__", str(types[name]))]
        for name in fields
    ]


VERBS = [kind for kind in get_args(wire.ClientRequest) if kind is not wire.Hello]


def test_every_answer_carries_the_boot_id(served: Served) -> None:
    def scene(served: Served) -> None:
        with served.client() as client:
            boot = client.welcome[2]
            for kind in VERBS:
                reply = client.call(kind.__struct_config__.tag, *values_of(kind))
                assert reply[2] == boot, reply
            client.send_frame(b"\xc1")
            assert client.receive()[2] == boot
            client.send("commit", 99, 1, 0, u32(0), u32(0), u32(16), 1, 1)
            assert client.push("failed")[2] == boot
        with RawClient(served.client_path) as stranger:
            assert stranger.call("hello", 99, "", b"g" * 16, b"s" * 16)[2] == boot

    served.play(scene)


def test_whatever_a_handler_raises_is_answered_at_once(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_: object) -> None:
        raise ZeroDivisionError

    def scene(served: Served) -> None:
        with served.client() as client:
            client.ask("register_layout", LAYOUT)
            with monkeypatch.context() as broken:
                broken.setattr(served.daemon.state, "handle", fault)
                for kind in VERBS:
                    tag = kind.__struct_config__.tag
                    assert client.code(tag, *values_of(kind)) == errors.Internal.code, tag
            assert client.ask("lookup", [KNOWN], bytes(16))[4] == [0]
        assert served.faults() == len(VERBS)

    served.play(scene)


def test_whatever_an_operators_request_raises_is_answered_at_once(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_: object) -> None:
        raise ZeroDivisionError

    def scene(served: Served) -> None:
        with monkeypatch.context() as broken, RawClient(served.admin_path) as operator:
            broken.setattr(served.daemon.operator, "answer", fault)
            assert operator.code("stats") == errors.Internal.code
        assert served.stats()["daemon"]["pid"] == os.getpid()

    served.play(scene)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", errors.ProtocolError.code),
        (b"\xc1", errors.ProtocolError.code),
        (b"\x91" * 2000 + b"\xc0", errors.ProtocolError.code),
        (msgpack.packb(["no such verb", 7]), errors.InvalidArgument.code),
        (msgpack.packb(["describe", 7]), errors.InvalidArgument.code),
        (msgpack.packb(["describe", 7, "seven"]), errors.InvalidArgument.code),
        (msgpack.packb({"describe": 7}), errors.InvalidArgument.code),
    ],
    ids=["empty", "reserved", "nested", "unknown verb", "missing field", "wrong type", "a map"],
)
def test_what_is_no_request_is_answered_too(served: Served, body: bytes, code: int) -> None:
    def scene(served: Served) -> None:
        with served.client() as client:
            client.send_frame(body)
            reply = client.receive()
            assert (reply[0], reply[4]) == ("error", code)
            client.ask("register_layout", LAYOUT)

    served.play(scene)


# ------------------------------------------------------------------- background


def test_an_action_that_raises_takes_no_other_along_and_is_seen_in_health(served: Served) -> None:
    def fault(_: object) -> None:
        raise ZeroDivisionError

    def scene(served: Served) -> None:
        daemon = served.daemon
        with served.client() as client:
            (group,) = daemon.state.world.tenants["t"].groups.values()
            (peer,) = group.peers

            def perform() -> None:
                daemon._do[act.Note] = fault
                daemon.state.world.actions += [
                    act.Note("a note", "that cannot be written"),
                    act.Send(peer, wire.Pressure(0, daemon.boot, 0, 1, 77)),
                ]
                daemon.perform()

            served.on_loop(perform)
            assert client.push("pressure")[5] == 77
        assert served.faults() == 1

    served.play(scene)


def test_a_tick_that_raises_is_followed_by_the_next_and_seen_in_health(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scene(served: Served) -> None:
        tick, again = served.daemon.state.tick, threading.Event()
        left = [ZeroDivisionError]

        def once(now_s: float) -> None:
            if left:
                raise left.pop()
            tick(now_s)
            again.set()

        monkeypatch.setattr(served.daemon.state, "tick", once)
        assert again.wait(WAIT_S)
        assert served.faults() == 1

    served.play(scene)


class Stuck(LinuxKernel):
    """A disk that takes no write until it is let go."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        assert self.go_on.wait(WAIT_S)
        return super().pwritev(fd, buffers, offset)


def store(client: RawClient, session: int, pages: int) -> None:
    lease, offsets = client.reserve(KNOWN, pages)
    for page, offset in enumerate(offsets):
        client.write(offset, pattern(page, BLOCK_BYTES))
    every = u32(*range(pages))
    client.ask("commit", lease, session, 0, every, every, u32(*[16] * pages))


def test_a_disk_that_does_not_answer_is_told_while_dram_is_served(tmp_path: Path) -> None:
    def scene(served: Served) -> None:
        disk = served.daemon.parts.spill_files.kernel = Stuck()
        with served.client() as client:
            session = client.open(LAYOUT)
            store(client, session, 8)
            with RawClient(served.admin_path) as operator:
                operator.ask("evict", "t")
            until(lambda: served.told("NVMe: no read or write"), "it is stuck")
            granted = client.ask("acquire", 1, session, 0, KNOWN, 0, 8)
            found = [client.read(offset, BLOCK_BYTES) for offset in from_u64(granted[6])]
            assert found == [pattern(page, BLOCK_BYTES) for page in range(8)]
            disk.go_on.set()
            until(lambda: not served.told("NVMe"), "it is well again")

    Served(tmp_path, limits={"stuck_after": "100ms"}).play(scene)


def test_a_catalog_that_does_not_end_is_told_while_blocks_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scene(served: Served) -> None:
        catalog, go_on = served.daemon.parts.catalog, threading.Event()
        apply = catalog.apply

        def slowly(ops: Any) -> None:
            assert go_on.wait(WAIT_S)
            apply(ops)

        with served.client() as client:
            session = client.open(LAYOUT)
            monkeypatch.setattr(catalog, "apply", slowly)
            fork = client.send("fork", session, 1, 0, 0)
            until(lambda: served.told("catalog: a transaction"), "it is stuck")
            store(client, session, 2)
            go_on.set()
            assert client.reply(fork)[0] == "done"
            until(lambda: not served.told("catalog"), "it is well again")

    Served(tmp_path, limits={"stuck_after": "100ms"}).play(scene)


# --------------------------------------------------------------------- catalog


def test_nothing_is_acknowledged_before_the_catalog_has_it(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scene(served: Served) -> None:
        catalog = served.daemon.parts.catalog
        apply, go_on = catalog.apply, threading.Event()

        def slowly(ops: Any) -> None:
            assert go_on.wait(WAIT_S)
            apply(ops)

        token = os.urandom(16)
        with served.client() as client:
            client.ask("register_layout", LAYOUT)
            session = client.ask("open_session", os.urandom(16), [KNOWN])[4]
            monkeypatch.setattr(catalog, "apply", slowly)
            waiting = [
                client.send(*request)
                for request in (
                    ("register_layout", raw.layout("other")),
                    ("open_session", token, [KNOWN]),
                    ("fork", session, 1, 0, 0),
                    ("set_retention", session, 0, 2),
                    ("fold", session, 0, 0, 1, 60.0),
                    ("set_priority", session, 9),
                    ("put_blob", session, 0, 1, b"state"),
                    ("prune", session, 1),
                    ("close_session", session),
                    ("open_session", token, [KNOWN]),  # repeats of what is not stored yet
                    ("close_session", session),
                )
            ]
            client.ask("cancel", 1)  # needs no catalog, and is not held up
            assert not client._replies
            go_on.set()
            kinds = [client.reply(number)[0] for number in waiting]
            assert kinds == ["layout_registered", "session", *["done"] * 7, "session", "done"]

    served.play(scene)


@pytest.mark.parametrize(
    ("refusal", "code"),
    [
        (CatalogFull, errors.SpillFull.code),
        (CatalogError, errors.Internal.code),
        (CatalogBusy, errors.Internal.code),
    ],
)
def test_what_the_catalog_refuses_is_told_kept_and_stored_later(
    served: Served, monkeypatch: pytest.MonkeyPatch, refusal: type[CatalogError], code: int
) -> None:
    def refuse(*_: object) -> None:
        raise refusal("cannot change it", "no room", "make some")

    def scene(served: Served) -> None:
        writer, catalog = served.daemon.catalog, served.daemon.parts.catalog
        where = (writer, "submit") if refusal is CatalogBusy else (catalog, "apply")
        token = os.urandom(16)
        with served.client() as client:
            client.ask("register_layout", LAYOUT)
            with monkeypatch.context() as full:
                full.setattr(*where, refuse)
                assert client.code("open_session", token, [KNOWN]) == code
                assert served.told("catalog")
            assert client.ask("open_session", token, [KNOWN])[5] is False
            until(lambda: not served.told("catalog"), "it is stored, and all is well")
            until(lambda: not writer.queued, "nothing is queued")
        stored = catalog.load().sessions
        assert [one.session[:8] for one in stored] == [raw.session_id(token).to_bytes(8, "little")]

    served.play(scene)


def test_what_the_catalog_has_refused_is_told_while_it_is_tried_again(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scene(served: Served) -> None:
        catalog, calls = served.daemon.parts.catalog, itertools.count()
        apply, again, go_on = catalog.apply, threading.Event(), threading.Event()

        def refused_at_first(ops: Any) -> None:
            if next(calls) == 0:
                raise CatalogFull("cannot change it", "no room", "make some")
            again.set()
            assert go_on.wait(WAIT_S)
            apply(ops)

        with served.client() as client:
            client.ask("register_layout", LAYOUT)
            monkeypatch.setattr(catalog, "apply", refused_at_first)
            assert client.code("open_session", bytes(16), [KNOWN]) == errors.SpillFull.code
            assert again.wait(WAIT_S)
            assert served.told("catalog")
            go_on.set()
            until(lambda: not served.told("catalog"), "it is stored")

    served.play(scene)


# ---------------------------------------------------------------------- strangers


def test_a_uid_that_no_tenant_lists_gets_nothing(tmp_path: Path) -> None:
    def scene(served: Served) -> None:
        for _ in range(2):
            with RawClient(served.client_path) as stranger:
                assert stranger.code("hello", 1, "raw", stranger.group, stranger.secret) == 206
                with pytest.raises(Closed):
                    stranger.receive()
                assert not hasattr(stranger, "_passed"), "the arena's descriptor was passed"
        assert served.tenant()["clients"] == 0

    tenant = {"name": "t", "uids": [STRANGER], "arena_bytes": 2 << 20}
    Served(tmp_path, tenants=[tenant]).play(scene)


def test_only_root_and_the_daemons_user_operate_it(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scene(served: Served) -> None:
        assert stat.S_IMODE(os.stat(served.admin_path).st_mode) == 0o600
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(server, "credentials", lambda _: Credentials(1, STRANGER, 1))
            for verb in ("stats", "sessions", "evict", "reload"):
                with RawClient(served.admin_path) as stranger:
                    reply = stranger.receive()
                    assert (reply[0], reply[4]) == ("error", errors.NotOwner.code), verb
        assert served.stats()["daemon"]["pid"] == os.getpid()

    served.play(scene)


def test_an_operator_who_names_a_tenant_that_is_not_there_is_told_which_are(served: Served) -> None:
    def scene(served: Served) -> None:
        with RawClient(served.admin_path) as operator:
            assert operator.ask("sessions", "")[4] == {"sessions": []}
            for request in (("sessions", "nobody"), ("evict", "nobody", 0)):
                reply = operator.call(*request)
                assert (reply[0], reply[4]) == ("error", errors.InvalidArgument.code)
                assert "'nobody'" in reply[5] and served.daemon.config.tenants[0].name in reply[5]

    served.play(scene)


def test_bytes_of_one_session_are_read_by_who_has_its_token(served: Served) -> None:
    def scene(served: Served) -> None:
        token = os.urandom(16)
        with served.client() as client, served.client() as other:
            session = client.open(LAYOUT, token)
            lease, (offset,) = client.reserve(KNOWN, 1)
            client.write(offset, pattern(1, BLOCK_BYTES))
            client.ask("commit", lease, session, 0, u32(0), u32(0), u32(16))
            for verb, fields in (
                ("acquire", (1, session, 0, KNOWN, 0, 1)), ("describe", (session,)),
                ("prune", (session, 0, False)), ("close_session", (session,)),
                ("set_retention", (session, 0, 2)), ("get_blob", (session, 0)),
                ("fold", (session, 0, 0, 1, 0.0)), ("unfold", (session, 0, 0, 1)),
                ("fork", (session, 1, 0, 0)), ("prefetch", (1, session, 0, KNOWN, 0, 1)),
            ):  # fmt: skip
                assert other.code(verb, *fields) == errors.UnknownSession.code, verb
            assert other.code("resume_session", os.urandom(16)) == errors.UnknownSession.code
            other.ask("resume_session", token)
            assert other.ask("describe", session)[4] == session

    served.play(scene)
