"""What nobody waits for may wait for company: it is sent in its order, in time, and never lost."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier_client import blocking, looping, wire
from kvtier_client.errors import LeaseExpired, UnknownSession
from kvtier_client.protocol import LAZY_LIMIT
from kvtier_client.single import UNSETTLED_LIMIT
from tests.client.scripted import ScriptedDaemon
from tests.client.test_shells import once, records

STEP = 4
"""Blocks of a swap-out; a pool of this arena has 32."""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ScriptedDaemon]:
    with ScriptedDaemon(tmp_path / "kv.sock", slots=1024) as scripted:
        yield scripted


@pytest.fixture(autouse=True)
def nobody_tends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client sends nothing by itself: what is sent is sent by a call of the test."""
    monkeypatch.setattr(blocking, "TEND_PERIOD_S", 3600.0)
    monkeypatch.setattr(looping, "TEND_PERIOD_S", 3600.0)


def step(session: Any, number: int) -> None:
    """Store a step's blocks and fold them; nobody waits for a word."""
    pages = (number * STEP, (number + 1) * STEP)
    session.swap_out(records(STEP, number), pages, 4, ack=False)
    session.fold(0, pages, 60.0, kept=2, ack=False)


def folding(daemon: ScriptedDaemon) -> list[tuple[str, int]]:
    """What the daemon got of the steps: what, and the first page."""
    got = []
    for request in daemon.log:
        if isinstance(request, wire.Commit):
            got.append(("Commit", int.from_bytes(request.pages[:4], "little")))
        elif isinstance(request, wire.Fold):
            got.append(("Fold", request.first))
    return got


def in_order(steps: int) -> list[tuple[str, int]]:
    return [(what, n * STEP) for n in range(steps) for what in ("Commit", "Fold")]


def test_steps_wait_for_company_and_come_before_whatever_is_asked_next(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    session = client.open_session([layout])
    session.swap_out(records(1), 99, 4)  # slots are granted ahead from here on
    daemon.log.clear()
    for number in range(3):
        step(session, number)
    assert client._core.protocol.sending
    assert folding(daemon) == []
    back = np.zeros((3 * STEP, 4096), np.uint8)
    session.swap_in(back, (0, 3 * STEP))
    assert (back == np.concatenate([records(STEP, n) for n in range(3)])).all()
    assert folding(daemon) == in_order(3)
    assert [type(request) for request in daemon.log].index(wire.Acquire) == 2 * 3


def test_few_of_them_wait(client: Any, daemon: ScriptedDaemon, layout: wire.Layout) -> None:
    session = client.open_session([layout])
    most = 0
    for number in range(40):
        step(session, number)
        most = max(most, len(client._core.protocol._outbox))
    assert 2 < most <= LAZY_LIMIT
    client.flush()
    assert folding(daemon) == in_order(40)


def test_so_many_without_a_word_are_waited_for(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    session = client.open_session([layout])
    step(session, 0)
    unsettled = 0
    for _ in range(2 * UNSETTLED_LIMIT):
        session.fold(0, (0, STEP), 60.0, ack=False)
        unsettled = max(unsettled, client._core.protocol.unsettled)
    assert unsettled <= UNSETTLED_LIMIT + 1


def test_what_failed_is_told_by_the_flush_and_by_no_other_call(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    session, other = client.open_session([layout]), client.open_session([layout])
    step(session, 0)
    step(other, 0)
    del daemon.sessions[other.token]
    for number in range(1, UNSETTLED_LIMIT):
        step(session, number % 8)
    with pytest.raises(UnknownSession):
        client.flush()
    client.flush()


@pytest.mark.usefixtures("patience")
def test_a_close_sends_what_waits(shells: Any, daemon: ScriptedDaemon, layout: wire.Layout) -> None:
    client = shells.open(daemon.path)
    session = client.open_session([layout])
    step(session, 0)
    step(session, 1)
    client.close()
    assert folding(daemon) == in_order(2)


@pytest.mark.usefixtures("patience")
def test_a_failing_copy_to_slots_granted_ahead_publishes_nothing_and_costs_no_slot(
    shells: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    client = shells.open(daemon.path)
    session = client.open_session([layout])
    step(session, 0)

    def fail(views: Any, i: int, j: int) -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        session.swap_out(fail, (50, 50 + STEP), 4, ack=False)
    step(session, 1)
    client.close()
    assert sorted(page for _, _, page in daemon.blocks) == list(range(2 * STEP))
    assert len(daemon.free) == daemon.slots - 2 * STEP


def test_other_verbs_of_the_session_find_what_was_said_before(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    session = client.open_session([layout])
    for number, verb in enumerate(
        [
            lambda: session.fork(1, 0, 64),
            lambda: session.put_blob(b"state", version=1),
            lambda: session.prune(1),
            session.close,
        ]
    ):
        step(session, number)
        verb()
        assert folding(daemon) == in_order(number + 1)


def test_under_pressure_nothing_waits(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    session = client.open_session([layout])
    daemon.push(wire.Pressure(0, 1, 0, 1, 4096))
    session.nodes()
    step(session, 0)
    assert not client._core.protocol.sending


def test_what_a_dying_daemon_did_not_get_is_said_again(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    session = client.open_session([layout])
    daemon.fault = once(wire.Commit, "drop")
    step(session, 0)
    assert session.unfold(0, (0, STEP)).gone == ()
    client.flush()
    back = np.zeros((STEP, 4096), np.uint8)
    session.swap_in(back, (0, STEP))
    assert (back == records(STEP, 0)).all()


def test_what_lost_its_slots_is_gone_and_never_what_others_wrote_there(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    session = client.open_session([layout])
    daemon.lose_leases = True
    daemon.fault = once(wire.Commit, "drop")
    step(session, 0)
    assert session.unfold(0, (0, STEP)).gone == tuple(range(STEP))
    with pytest.raises(LeaseExpired):
        client.flush()
    assert daemon.blocks == {}
