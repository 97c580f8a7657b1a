"""What fails in the daemon's own work is seen in its health, and the rest of that work goes on."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from kvtier_client import errors
from kvtierd import daemon as daemons
from kvtierd.tiers.holder import KeeperError, open_keeper
from tests.support import raw
from tests.support.raw import RawClient, u32
from tests.support.served import WAIT_S, Served
from tests.support.wait import until
from tests.unit.test_daemon import Stuck

LAYOUT = raw.layout(block_bytes=16384)
KNOWN = raw.fingerprint(LAYOUT)


def fault(*_: object) -> None:
    raise ZeroDivisionError


def store(client: RawClient, session: int, pages: list[int]) -> None:
    lease, _ = client.reserve(KNOWN, len(pages))
    index = u32(*range(len(pages)))
    client.ask("commit", lease, session, 0, index, u32(*pages), u32(*[16] * len(pages)))


def evict(served: Served) -> None:
    with RawClient(served.admin_path) as operator:
        operator.ask("evict", "t")


def test_a_look_at_its_health_that_raises_does_not_end_the_ticks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scene(served: Served) -> None:
        tick, raised, again = served.daemon.state.tick, threading.Event(), threading.Event()

        def look(_: float) -> None:
            raised.set()
            raise OSError("the service manager does not read")

        def then(now_s: float) -> None:
            tick(now_s)
            if raised.is_set():
                again.set()

        monkeypatch.setattr(served.daemon.state, "tick", then)
        monkeypatch.setattr(served.daemon.health, "look", look)
        assert again.wait(WAIT_S)
        monkeypatch.undo()
        assert served.faults()

    Served(tmp_path).play(scene)


def test_a_move_whose_end_raises_is_seen_in_health_and_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scene(served: Served) -> None:
        disk = served.daemon.parts.spill_files.kernel = Stuck()
        state = served.daemon.state
        demoted = state.demoted

        def once(*result: Any) -> None:
            monkeypatch.setattr(state, "demoted", demoted)
            raise ZeroDivisionError

        monkeypatch.setattr(state, "demoted", once)
        with served.client() as client:
            session = client.open(LAYOUT)
            store(client, session, [0, 1, 2, 3])
            evict(served)
            store(client, session, [4, 5, 6, 7])
            evict(served)
            assert served.stats()["counters"]["mover_queued"] == 1
            disk.go_on.set()
            until(lambda: served.tenant()["nvme"]["blocks"] == 4, "what waited has moved")
        assert served.faults() == 1

    Served(tmp_path, spill={"queue_bytes": 64 << 10}).play(scene)


def test_a_one_way_request_whose_handler_raises_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scene(served: Served) -> None:
        with served.client() as client:
            with monkeypatch.context() as broken:
                broken.setattr(served.daemon.state, "handle", fault)
                asked = client.send("release", 1, 5)
                failed = client.push("failed")
            assert (failed[1], failed[4]) == (asked, errors.Internal.code)
            assert client.ask("cancel", 1)[3] == 5

    Served(tmp_path).play(scene)


class Keepers:
    """Opens no keeper before it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tried, self.may = threading.Event(), threading.Event()
        monkeypatch.setattr(daemons, "open_keeper", self.open)
        monkeypatch.setattr(daemons, "KEEPER_RETRY_S", 0.02)

    def open(self, *where: Any) -> Any:
        self.tried.set()
        if not self.may.is_set():
            raise KeeperError("keep memory", "there is no room for a process", "make some")
        return open_keeper(*where)


def test_who_has_the_number_of_a_lost_keepers_descriptor_is_still_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keepers = Keepers(monkeypatch)

    def scene(served: Served) -> None:
        daemon, heard = served.daemon, threading.Event()
        number = daemon.parts.keeper.fileno()
        assert number is not None
        served.on_loop(lambda: daemon._keeper_ended(number))
        assert keepers.tried.wait(WAIT_S)
        reader, writer = os.pipe()
        served.on_loop(lambda: os.dup2(reader, number))  # as the next client's pidfd would be
        served.on_loop(lambda: served._loop.add_reader(number, heard.set))
        keepers.may.set()
        until(lambda: not served.told("keeper"), "the memory is kept again")
        os.write(writer, b"!")
        assert heard.wait(WAIT_S)
        served.on_loop(lambda: served._loop.remove_reader(number))
        for fd in (reader, writer, number):
            os.close(fd)

    Served(tmp_path, recovery={"memory": "holder"}).play(scene)


def test_a_daemon_that_stops_while_nobody_keeps_its_memory_lets_go_of_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keepers = Keepers(monkeypatch)

    def scene(served: Served) -> None:
        number = served.daemon.parts.keeper.fileno()
        assert number is not None
        served.on_loop(lambda: served.daemon._keeper_ended(number))
        assert served.told("keeper")

    first = Served(tmp_path, recovery={"memory": "holder"})
    first.play(scene)
    keepers.may.set()
    Served(tmp_path, recovery={"memory": "holder"}).play(lambda served: None)
