"""Pages read one by one are leased ahead, and nothing that this makes wrong is ever read."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier_client import wire
from kvtier_client.ahead import AHEAD_ARENA_SHARE, AHEAD_LIFE_S, STREAMS_LIMIT
from kvtier_client.client import Client
from kvtier_client.errors import BlockLost, KvtierError
from tests.client.scripted import ScriptedDaemon
from tests.client.shells import Shells

PAGES = 24
TOKENS = 4
SLOTS = AHEAD_ARENA_SHARE * 16
"""So large an arena that windows of 16 blocks are read ahead."""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ScriptedDaemon]:
    with ScriptedDaemon(tmp_path / "kv.sock", slots=SLOTS) as scripted:
        yield scripted


def records(n: int = PAGES, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (n, 4096), dtype=np.uint8)


def stored(client: Any, layout: wire.Layout, valid: Any = TOKENS) -> Any:
    session = client.open_session([layout])
    session.swap_out(records(), range(PAGES), valid)
    return session


def read(session: Any, *pages: int) -> list[bytes]:
    row = np.zeros(4096, np.uint8)
    found = []
    for page in pages:
        session.swap_in(row, page)
        found.append(row.tobytes())
    return found


def expected(*pages: int) -> list[bytes]:
    return [records()[page].tobytes() for page in pages]


def settle(client: Any) -> None:
    """Everything that was to be given back has arrived there, late grants too."""
    for _ in range(2):  # a grant that comes late goes back with the next call
        client.flush()
        client.lookup([], [])


# ------------------------------------------------------------------- reading


def test_pages_read_in_order_cost_few_requests(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    session = stored(client, layout)
    assert read(session, *range(PAGES)) == expected(*range(PAGES))
    assert client.stats.read_ahead_blocks == PAGES - 2
    assert daemon.seen["Acquire"] <= 7  # two pages, then windows of 2, 4, 8, 16 and what is behind
    assert client.stats.swapped_in_bytes == PAGES * 4096


def test_pages_read_out_of_order_are_not_read_ahead(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    session = stored(client, layout)
    pages = [0, 2, 4, 3, 1, 7, 7, 9]
    assert read(session, *pages) == expected(*pages)
    assert client.stats.read_ahead_blocks == 0
    assert daemon.seen["Acquire"] == len(pages)


def test_the_end_of_a_branch_is_told_as_without_reading_ahead(
    client: Any, layout: wire.Layout
) -> None:
    session = stored(client, layout)
    read(session, *range(PAGES))
    with pytest.raises(BlockLost):
        read(session, PAGES)
    assert read(session, *range(PAGES)) == expected(*range(PAGES))


def test_windows_shorter_than_asked_are_used(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    session = stored(client, layout)
    daemon.window = 3
    assert read(session, *range(PAGES)) == expected(*range(PAGES))


def test_several_branches_are_read_ahead_side_by_side(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    sessions = [stored(client, layout) for _ in range(STREAMS_LIMIT + 2)]
    for page in range(6):
        for session in sessions:
            assert read(session, page) == expected(page)
    assert len(daemon.reading) <= 2 * STREAMS_LIMIT
    first = sessions[0]
    assert read(first, *range(PAGES)) == expected(*range(PAGES))


def test_a_small_arena_is_not_read_ahead(
    shells: Shells, tmp_path: Path, layout: wire.Layout
) -> None:
    with ScriptedDaemon(tmp_path / "small.sock", slots=64) as small:
        client = shells.open(small.path)
        session = stored(client, layout)
        assert read(session, *range(PAGES)) == expected(*range(PAGES))
        assert small.seen["Acquire"] == PAGES
        client.close()


def test_pages_that_may_still_grow_are_not_read_from_a_window(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    session = stored(client, layout, [TOKENS] * 10 + [TOKENS - 1] + [TOKENS] * 13)
    read(session, *range(10))
    asked = daemon.seen["Acquire"]
    session.swap_in(np.zeros(4096, np.uint8), 10)
    assert daemon.seen["Acquire"] > asked
    assert read(session, 11) == expected(11)


def test_threads_may_read_the_same_branch(daemon: ScriptedDaemon, layout: wire.Layout) -> None:
    with Client(daemon.path) as client:
        session, wrong = stored(client, layout), []

        def worker() -> None:
            rounds = [read(session, *range(PAGES)) for _ in range(5)]
            wrong.extend(pages for pages in rounds if pages != expected(*range(PAGES)))

        threads = [threading.Thread(target=worker) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert wrong == []
        client._core.ahead.drop()
        settle(client)
        assert daemon.reading == []


# ------------------------------------------------------------ what ends a window


def restart(client: Any, session: Any, daemon: ScriptedDaemon) -> None:
    lives = ["kill"]
    daemon.fault = lambda request: (
        lives.pop() if lives and isinstance(request, wire.Describe) else ""
    )
    session.nodes()


def push(client: Any, daemon: ScriptedDaemon, *pushes: wire.Reply) -> None:
    daemon.push(*pushes)
    client.lookup([], [])


Event = Callable[[Any, Any, ScriptedDaemon], object]
EVENTS: dict[str, Event] = {
    "commit": lambda client, session, daemon: session.swap_out(records(1), PAGES, TOKENS),
    "one-way commit": lambda client, session, daemon: session.swap_out(
        records(1)[0], PAGES, TOKENS, ack=False
    ),
    "commit of many": lambda client, session, daemon: session.swap_out(
        records(20), range(PAGES, PAGES + 20), TOKENS
    ),
    "fork": lambda client, session, daemon: session.fork(1, 0, TOKENS),
    "prune of another node": lambda client, session, daemon: session.prune(1),
    "retention": lambda client, session, daemon: session.set_retention(0, wire.CACHED),
    "pressure": lambda client, session, daemon: push(
        client, daemon, wire.Pressure(0, 1, 0, 1, 4096)
    ),
    "revocation": lambda client, session, daemon: push(
        client, daemon, *(wire.Revoke(0, 1, 0, lease) for lease in daemon.reading)
    ),
    "another order": lambda client, session, daemon: read(session, 20),
    "restart": restart,
}


@pytest.mark.parametrize("event", EVENTS)
def test_a_window_is_given_back_when_it_could_be_wrong_or_unwanted(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout, event: str
) -> None:
    session = stored(client, layout)
    read(session, *range(4))
    settle(client)  # the next window has been granted too
    assert daemon.reading != []
    before = daemon.reading
    EVENTS[event](client, session, daemon)
    settle(client)
    assert not set(before) & set(daemon.reading)
    asked = daemon.seen["Acquire"]
    assert read(session, 4, 5) == expected(4, 5)
    assert daemon.seen["Acquire"] > asked


@pytest.mark.parametrize("pages", [2, 3, 4, 7])
def test_a_session_of_its_own_is_never_read_after_its_end(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout, pages: int
) -> None:
    for end in ("prune", "close"):
        session = stored(client, layout)
        read(session, *range(pages))
        if end == "prune":
            session.prune(0)
        else:
            session.close()
        with pytest.raises(KvtierError):
            read(session, pages)
    settle(client)
    assert daemon.reading == []


def test_another_sessions_windows_stay(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    session, other = stored(client, layout), stored(client, layout)
    read(session, *range(4))
    other.swap_out(records(1), PAGES, TOKENS)
    asked = daemon.seen["Acquire"]
    assert read(session, 4) == expected(4)
    assert daemon.seen["Acquire"] == asked


def test_a_window_still_on_its_way_is_given_back_when_it_comes(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    session = stored(client, layout)
    read(session, 0, 1)  # page 1 asks for a window that nobody has read the answer of
    session.prune(0)
    settle(client)
    assert daemon.reading == []


@pytest.mark.usefixtures("patience")
def test_close_gives_windows_back(
    shells: Shells, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    client = shells.open(daemon.path)
    read(stored(client, layout), *range(5))
    client.close()
    assert daemon.reading == []


def test_no_window_is_read_when_its_time_is_over(
    daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    now_s = [100.0]
    with Client(daemon.path) as client:
        client._core.now_s = lambda: now_s[0]
        session = stored(client, layout)
        read(session, *range(4))
        read_ahead = client.stats.read_ahead_blocks
        now_s[0] += AHEAD_LIFE_S + 0.1
        assert read(session, 4, 5) == expected(4, 5)
        assert client.stats.read_ahead_blocks == read_ahead


def test_an_idle_client_gives_its_windows_back(daemon: ScriptedDaemon, layout: wire.Layout) -> None:
    now_s = [100.0]
    with Client(daemon.path) as client:
        client._core.now_s = lambda: now_s[0]
        read(stored(client, layout), *range(5))
        client._driver.tend()
        settle(client)
        assert daemon.reading != []
        now_s[0] += AHEAD_LIFE_S + 0.1
        client._driver.tend()
        settle(client)
        assert daemon.reading == []


def test_a_daemon_killed_at_a_window_changes_nothing(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    session = stored(client, layout)
    for what in ("drop", "lose", "kill", "stop"):
        faults = [what]
        daemon.fault = lambda request, faults=faults: (
            faults.pop()
            if faults and isinstance(request, wire.Acquire) and request.pages > 1
            else ""
        )
        assert read(session, *range(PAGES)) == expected(*range(PAGES))
        assert faults == []
        read(session, 0)
    client._core.ahead.drop()
    settle(client)
    assert daemon.reading == []
