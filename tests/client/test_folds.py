"""Folding through either shell: what callers get, and that broken connections change nothing."""

from typing import Any

import pytest

from kvtier_client import Unfolded, wire
from kvtier_client.errors import InvalidArgument, ProtocolError, UnknownSession
from tests.client.scripted import ScriptedDaemon
from tests.client.test_shells import once, records


def stored(client: Any, layout: wire.Layout, *pages: int) -> Any:
    session = client.open_session([layout])
    session.swap_out(records(len(pages)), list(pages), 4)
    return session


def test_an_unfold_says_what_is_there_from_the_first_page_on(
    client: Any, layout: wire.Layout
) -> None:
    session = stored(client, layout, 4, 5, 7)
    assert session.fold(0, (4, 8), 60.0, kept=2) == 4
    assert session.unfold(0, (4, 8)) == Unfolded((4, 8), 2, (6,), 0)
    assert session.unfold(0, (4, 6)) == Unfolded((4, 6), 2, (), 0)
    assert session.unfold(0, (6, 7)) == Unfolded((6, 7), 0, (6,), 0)


def test_a_fold_without_an_answer_is_acknowledged_by_a_flush(
    client: Any, layout: wire.Layout, daemon: ScriptedDaemon
) -> None:
    session = stored(client, layout, 0)
    assert session.fold(0, (0, 1), 60.0, kept=2, ack=False) == 0
    client.flush()
    [request] = [each for each in daemon.log if isinstance(each, wire.Fold)]
    assert (request.grace_s, request.kept, request.oneway > 0) == (60.0, 2, True)


def test_the_failure_of_one_is_told_by_the_flush(
    client: Any, layout: wire.Layout, daemon: ScriptedDaemon
) -> None:
    session = stored(client, layout, 0)
    daemon.on_Fold = lambda request: daemon._error(request, InvalidArgument("no"))  # type: ignore[method-assign]
    session.fold(0, (0, 1), 60.0, ack=False)
    with pytest.raises(InvalidArgument):
        client.flush()


@pytest.mark.parametrize("fault", ["drop", "lose", "kill"])
def test_folds_are_repeated_after_a_broken_connection(
    client: Any, layout: wire.Layout, daemon: ScriptedDaemon, fault: str
) -> None:
    session = stored(client, layout, 0, 1)
    daemon.fault = once(wire.Fold, fault)
    assert session.fold(0, (0, 2), 60.0) == 2
    daemon.fault = once(wire.Unfold, fault)
    assert session.unfold(0, (0, 2)).gone == ()
    assert (daemon.seen["Fold"], daemon.seen["Unfold"]) == (2, 2)


@pytest.mark.parametrize("pages", [(3, 3), (4, 3), (-1, 3)])
def test_pages_that_are_none_are_refused_here(
    client: Any, layout: wire.Layout, pages: tuple[int, int]
) -> None:
    session = stored(client, layout, 0)
    with pytest.raises(InvalidArgument):
        session.fold(0, pages, 1.0)
    with pytest.raises(InvalidArgument):
        session.unfold(0, pages)


def test_an_answer_that_makes_no_sense_is_a_protocol_error(
    client: Any, layout: wire.Layout, daemon: ScriptedDaemon
) -> None:
    session = stored(client, layout, 0)
    daemon.on_Unfold = lambda request: wire.Unfolded(request.id, daemon.boot, 0, b"odd")  # type: ignore[method-assign]
    with pytest.raises(ProtocolError):
        session.unfold(0, (0, 1))


def test_a_closed_session_is_not_folded(client: Any, layout: wire.Layout) -> None:
    session = stored(client, layout, 0)
    session.close()
    for verb in (lambda: session.fold(0, (0, 1), 1.0), lambda: session.unfold(0, (0, 1))):
        with pytest.raises(UnknownSession):
            verb()
