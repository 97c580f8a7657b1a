"""Changes go to the catalog in their order and in bounds; it has what is acknowledged."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier_client import errors
from kvtierd import ledger
from kvtierd.catalog.errors import CatalogFull
from kvtierd.catalog.rows import Op, SaveBlob
from kvtierd.catalog.store import Catalog
from kvtierd.tiers.locks import lock_directory
from tests.support import raw
from tests.support.raw import RawClient, u32
from tests.support.served import WAIT_S, Served
from tests.support.wait import until

LAYOUT = raw.layout(block_bytes=16384)
KNOWN = raw.fingerprint(LAYOUT)


@pytest.fixture
def served(tmp_path: Path) -> Served:
    return Served(tmp_path)


class Disk:
    """Where the catalog lies: it can be held up, and be full for all changes or for large ones."""

    def __init__(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        self.catalog = served.daemon.parts.catalog
        self._apply = self.catalog.apply
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.full_from_bytes: int | None = None
        monkeypatch.setattr(self.catalog, "apply", self.apply)

    def apply(self, ops: Sequence[Op]) -> None:
        self.reached.set()
        assert self.go_on.wait(WAIT_S)
        size_bytes = max((len(op.data) for op in ops if isinstance(op, SaveBlob)), default=0)
        if self.full_from_bytes is not None and size_bytes >= self.full_from_bytes:
            raise CatalogFull("cannot change it", "no room", "make some")
        self._apply(ops)

    def hold(self) -> None:
        """The next transaction does not end before `go_on` is set."""
        self.reached.clear()
        self.go_on.clear()


@pytest.fixture
def disk(served: Served, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(served, monkeypatch)


def come(client: RawClient) -> None:
    """What was sent has been carried out when this returns."""
    client.ask("cancel", 1)


def test_refused_changes_are_stored_in_their_order(served: Served, disk: Disk) -> None:
    token = os.urandom(16)

    def scene(served: Served) -> None:
        with served.client() as client:
            session = client.open(LAYOUT, token)
            disk.full_from_bytes = 0
            disk.hold()
            closing = client.send("close_session", session)
            assert disk.reached.wait(WAIT_S)
            opening = client.send("open_session", token, [KNOWN])
            come(client)
            disk.go_on.set()
            for request in (closing, opening):
                assert client.reply(request)[4] == errors.SpillFull.code
            disk.full_from_bytes = None
            client.ask("open_session", token, [KNOWN])
        [stored] = disk.catalog.load().sessions
        assert not stored.closed

    served.play(scene)


def test_a_blob_that_was_refused_does_not_replace_a_later_one(served: Served, disk: Disk) -> None:
    def scene(served: Served) -> None:
        with served.client() as client:
            session = client.open(LAYOUT)
            disk.full_from_bytes = 1000
            disk.hold()
            client.send("fork", session, 1, 0, 0)
            assert disk.reached.wait(WAIT_S)
            large = client.send("put_blob", session, 0, 1, bytes(5000))
            small = client.send("put_blob", session, 0, 2, b"small")
            come(client)
            disk.go_on.set()
            client.reply(large)
            client.reply(small)
            disk.full_from_bytes = None
            client.ask("put_blob", session, 0, 2, b"small")  # a repeat, until it is acknowledged
            until(lambda: not served.told("catalog"), "all is stored")
            assert client.ask("get_blob", session, 0)[4:] == [2, b"small"]

    served.play(scene)


def test_a_blob_is_read_behind_the_changes_before_it(served: Served, disk: Disk) -> None:
    def scene(served: Served) -> None:
        with served.client() as client:
            session = client.open(LAYOUT)
            disk.hold()
            client.send("fork", session, 1, 0, 0)
            assert disk.reached.wait(WAIT_S)
            client.send("put_blob", session, 0, 1, b"one")
            read = client.send("get_blob", session, 0)
            come(client)
            disk.go_on.set()
            assert client.reply(read)[4:] == [1, b"one"]

    served.play(scene)


def test_a_one_way_fold_is_acknowledged_when_it_is_stored(served: Served, disk: Disk) -> None:
    def scene(served: Served) -> None:
        with served.client() as client:
            session = client.open(LAYOUT)
            lease, _ = client.reserve(KNOWN, 3)
            client.ask("commit", lease, session, 0, u32(0, 1), u32(0, 1), u32(16, 16))
            disk.hold()
            client.send("fold", session, 0, 0, 1, 60.0, 0, 7)
            client.send("commit", lease, session, 0, u32(2), u32(2), u32(16), 1, 8)
            assert client.ask("cancel", 1)[3] == 6
            disk.go_on.set()
            until(lambda: client.ask("cancel", 1)[3] == 8, "both are acknowledged")
            disk.full_from_bytes = 0
            fold = client.send("fold", session, 0, 1, 1, 60.0, 0, 9)
            failed = client.push("failed")
            assert (failed[1], failed[4]) == (fold, errors.SpillFull.code)
            assert client.ask("cancel", 1)[3] == 9

    served.play(scene)


def test_what_would_add_to_too_many_changes_is_not_done(
    served: Served, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "WAITING_BYTES", 1 << 20)

    def scene(served: Served) -> None:
        with served.client() as client:
            session = client.open(LAYOUT)
            disk.full_from_bytes = 0
            for version in range(1, 9):
                assert client.code("put_blob", session, 0, version, bytes(300_000)) == 302
            told = served.on_loop(lambda: served.daemon.ledger.refused)
            assert told == 4, "the others would have been more than a mebibyte"
            assert client.code("fork", session, 1, 0, 0) == errors.SpillFull.code
            disk.full_from_bytes = None
            until(lambda: not served.told("catalog"), "what was taken is stored")
            assert client.ask("get_blob", session, 0)[4] == 4
            assert [node[0] for node in client.ask("describe", session)[8]] == [0]
            client.ask("fork", session, 1, 0, 0)

    served.play(scene)


def test_however_many_changes_were_refused_they_are_stored_when_there_is_room(
    served: Served, disk: Disk
) -> None:
    served.daemon.catalog._queue_ops = 20

    def scene(served: Served) -> None:
        with served.client() as client:
            session = client.open(LAYOUT)
            disk.full_from_bytes = 0
            for node in range(1, 50):
                assert client.code("fork", session, node, 0, 0) == errors.SpillFull.code
            disk.full_from_bytes = None
            until(lambda: not served.told("catalog"), "all is stored")
        [stored] = disk.catalog.load().sessions
        assert len(stored.nodes) == 50

    served.play(scene)


def test_what_waits_at_a_stop_is_stored(served: Served, disk: Disk) -> None:
    def scene(served: Served) -> None:
        with served.client() as client:
            session = client.open(LAYOUT)
            disk.hold()
            client.send("fork", session, 1, 0, 0)
            assert disk.reached.wait(WAIT_S)
            client.send("fork", session, 2, 0, 0)
            come(client)
        threading.Timer(0.3, disk.go_on.set).start()

    served.play(scene)
    directory = lock_directory(served.daemon.config.state_dir)
    catalog = Catalog.open_readonly(directory)
    [stored] = catalog.load().sessions
    assert sorted(node.node for node in stored.nodes) == [0, 1, 2]
    catalog.close()
    directory.close()
