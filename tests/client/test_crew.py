"""Copies shared by threads: every byte is copied once, and nothing goes on when a call is over."""

import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier_client import crew as crew_module
from kvtier_client import wire
from kvtier_client.client import Client
from kvtier_client.crew import SHARED_BYTES, Crew, Share, Work
from kvtier_client.errors import ConnectionLost, InvalidArgument, KvtierError
from tests.client.scripted import ScriptedDaemon
from tests.client.shells import Shells
from tests.support.wait import until

WAIT_S = 30.0
MIB = 1 << 20
LARGE = wire.Layout(
    model="large", dtype="uint8", layers=1, kv_heads=8, head_dim=8192, block_tokens=16,
    block_bytes=2 * MIB,
)  # fmt: skip


@pytest.fixture
def four() -> Any:
    crew = Crew(4)
    yield crew
    crew.close()


def helpers() -> set[threading.Thread]:
    """All of this process; those of earlier tests may be ending."""
    return {thread for thread in threading.enumerate() if thread.name == "kvtier-copy"}


@pytest.fixture
def large(tmp_path: Path) -> Any:
    """A daemon of 16 slots of 2 MiB."""
    with ScriptedDaemon(tmp_path / "large.sock", slots=16, slot_bytes=2 * MIB) as daemon:
        yield daemon


def records(n: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (n, 2 * MIB), dtype=np.uint8)


# -------------------------------------------------------------------- a crew


def test_every_piece_is_copied_once(four: Crew) -> None:
    done: Counter[int] = Counter()
    lock = threading.Lock()

    def work(piece: int) -> None:
        with lock:
            done[piece] += 1

    for pieces in (1, 2, 3, 5, 100):
        done.clear()
        four.run(pieces, SHARED_BYTES, work)
        assert done == Counter(range(pieces))


def test_threads_copy_at_the_same_time(four: Crew) -> None:
    together = threading.Barrier(4)
    four.run(4, SHARED_BYTES, lambda _: together.wait(WAIT_S) and None)


def test_small_copies_wake_nobody(four: Crew) -> None:
    who: set[int] = set()
    before = helpers()
    four.run(100, SHARED_BYTES - 1, lambda _: who.add(threading.get_ident()))
    assert who == {threading.get_ident()}
    assert helpers() <= before


def test_one_thread_copies_alone() -> None:
    who: set[int] = set()
    Crew(1).run(100, SHARED_BYTES, lambda _: who.add(threading.get_ident()))
    assert who == {threading.get_ident()}


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> list[Share]:
    """The copies that are shared from now on."""
    begun: list[Share] = []

    class Noted(Share):
        def __init__(self, pieces: int, work: Work) -> None:
            super().__init__(pieces, work)
            begun.append(self)

    monkeypatch.setattr(crew_module, "Share", Noted)
    return begun


@pytest.mark.parametrize("whose", ["the caller's", "a helper's"])
def test_an_error_of_any_thread_reaches_the_caller_when_nobody_copies_any_more(
    whose: str, shares: list[Share]
) -> None:
    me, together = threading.get_ident(), threading.Barrier(2)
    source, target = np.ones(16 * MIB, np.uint8), np.zeros(16 * MIB, np.uint8)
    copying: set[int] = set()
    begun: list[int] = []

    def work(piece: int) -> None:
        mine = threading.get_ident()
        begun.append(piece)
        copying.add(mine)
        pieces = shares[0]._pieces
        try:
            together.wait(WAIT_S)
            if (mine == me) == (whose == "the caller's"):
                raise ZeroDivisionError(piece)
            until(lambda: shares[0]._pieces is not pieces, "the other one's error is known")
            np.copyto(target, source)
        finally:
            copying.discard(mine)

    two = Crew(2)
    with pytest.raises(ZeroDivisionError):
        two.run(1000, SHARED_BYTES, work)
    assert copying == set()
    assert sorted(begun) == [0, 1]  # what was begun when it failed
    two.run(3, SHARED_BYTES, lambda _: None)
    two.close()


def test_a_call_ends_only_when_the_last_helper_has() -> None:
    me, started, go_on = threading.get_ident(), threading.Event(), threading.Event()
    ended: list[bool] = []

    def work(_: int) -> None:
        if threading.get_ident() == me:
            assert started.wait(WAIT_S)
            threading.Timer(0.1, go_on.set).start()
        else:
            started.set()
            assert go_on.wait(WAIT_S)
            ended.append(True)

    Crew(2).run(2, SHARED_BYTES, work)
    assert ended == [True]


def test_a_signal_that_interrupts_a_call_does_not_end_it_before_its_helpers() -> None:
    me, started, go_on = threading.get_ident(), threading.Event(), threading.Event()
    ended: list[bool] = []

    def interrupt(*_: object) -> None:
        go_on.set()
        raise KeyboardInterrupt

    def work(_: int) -> None:
        if threading.get_ident() == me:
            assert started.wait(WAIT_S)
            return
        started.set()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        assert go_on.wait(WAIT_S)
        ended.append(True)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            Crew(2).run(2, SHARED_BYTES, work)
        assert ended == [True]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_callers_share_the_helpers(four: Crew) -> None:
    wrong: list[int] = []

    def caller(k: int) -> None:
        source = np.full(8 * MIB, k, np.uint8)
        target = np.zeros_like(source)

        def work(piece: int) -> None:
            np.copyto(target[piece * MIB : (piece + 1) * MIB], source[piece * MIB :][:MIB])

        for _ in range(5):
            target[:] = 0
            four.run(8, len(source), work)
            if not (target == k).all():
                wrong.append(k)

    callers = [threading.Thread(target=caller, args=(k + 1,)) for k in range(6)]
    for one in callers:
        one.start()
    for one in callers:
        one.join(WAIT_S)
    assert wrong == []


def test_close_sends_helpers_home_and_copies_go_on_without_them() -> None:
    before, crew = helpers(), Crew(3)
    crew.run(8, SHARED_BYTES, lambda _: None)
    assert len(helpers() - before) == 2
    crew.close()
    crew.close()
    assert helpers() <= before
    done: list[int] = []
    crew.run(8, SHARED_BYTES, done.append)
    assert done == list(range(8))


def test_a_crew_that_nobody_holds_ends() -> None:
    crew = Crew(2)
    crew.run(2, SHARED_BYTES, lambda _: None)
    (helper,) = crew._helpers
    del crew
    helper.join(WAIT_S)
    assert not helper.is_alive()


def test_without_more_threads_the_callers_own_copies_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(crew_module.threading.Thread, "start", refuse)
    done: list[int] = []
    Crew(4).run(8, SHARED_BYTES, done.append)
    assert done == list(range(8))
    assert "1 threads only" in caplog.text


# ------------------------------------------------------------------ a client


def test_large_blocks_make_the_round_trip(large: ScriptedDaemon, shells: Shells) -> None:
    client = shells.open(large.path, copy_threads=3)
    session = client.open_session([LARGE])
    out = records(5)
    session.swap_out(out, range(5), 16)
    session.swap_out(list(out[:3]), [9, 7, 12], 16)
    session.swap_out(out[0], 20, 16)
    back = np.zeros_like(out)
    session.swap_in(back, range(5))
    assert (back == out).all()
    rows = [np.zeros(2 * MIB, np.uint8) for _ in range(4)]
    session.swap_in(rows, [7, 9, 12, 20])
    assert all((row == out[k]).all() for row, k in zip(rows, (1, 0, 2, 0), strict=True))
    keys = [bytes([k]) * 16 for k in range(3)]
    assert client.put_keys(LARGE, keys, out[:3]) == 3
    back[:] = 0
    assert client.get_keys(LARGE, keys, back[:3]) == 3
    assert (back[:3] == out[:3]).all()
    client.close()


def test_close_joins_the_copy_threads(large: ScriptedDaemon, shells: Shells) -> None:
    before = helpers()
    client = shells.open(large.path, copy_threads=3)
    session = client.open_session([LARGE])
    session.swap_out(records(4), range(4), 16)
    assert len(helpers() - before) == 2
    client.close()
    assert helpers() <= before


def test_a_client_has_at_least_the_callers_own_thread(shells: Shells, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="copy_threads 0"):
        shells.open(tmp_path / "none.sock", copy_threads=0)


class Gate:
    """Records whose copy stops at one row until it may go on: a pair of slow pages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._left = at
        self._copyto = np.copyto
        monkeypatch.setattr("kvtier_client.records.np.copyto", self)

    def __call__(self, target: Any, source: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self.reached.set()
            assert self.go_on.wait(WAIT_S)
        self._copyto(target, source)


@pytest.mark.parametrize("way", ["out", "in"])
def test_a_daemon_that_restarts_in_the_middle_of_a_copy(
    large: ScriptedDaemon, shells: Shells, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    client = shells.open(large.path, copy_threads=2)
    session = client.open_session([LARGE])
    out, back = records(6), np.zeros((6, 2 * MIB), np.uint8)
    if way == "in":
        session.swap_out(out, range(6), 16)
    gate = Gate(monkeypatch, at=3)
    swap = session.swap_out if way == "out" else session.swap_in
    arguments = (out, range(6), 16) if way == "out" else (back, range(6))
    problems: list[BaseException] = []

    def run() -> None:
        try:
            swap(*arguments)
        except BaseException as problem:
            problems.append(problem)

    copying = threading.Thread(target=run)
    copying.start()
    assert gate.reached.wait(WAIT_S)
    lives = ["kill"]
    large.fault = lambda request: (
        lives.pop() if lives and isinstance(request, wire.Describe) else ""
    )
    session.nodes()
    gate.go_on.set()
    copying.join(WAIT_S)
    assert problems == []
    session.swap_in(back, range(6))
    assert (back == out).all()
    assert client.boot_id == 2


def test_close_waits_for_a_copy_and_its_slots_are_not_given_away_before(
    large: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(large.path, copy_threads=2)
    session = client.open_session([LARGE])
    gate = Gate(monkeypatch, at=2)
    asked, copying_now = threading.Event(), client._core.copying
    monkeypatch.setattr(client._core, "copying", lambda: asked.set() or copying_now())
    ended: list[object] = []

    def run() -> None:
        try:
            ended.append(session.swap_out(records(6), range(6), 16))
        except KvtierError as problem:
            ended.append(problem)

    copying, closing = threading.Thread(target=run), threading.Thread(target=client.close)
    copying.start()
    assert gate.reached.wait(WAIT_S)
    closing.start()
    assert asked.wait(WAIT_S)
    assert large.seen["Abort"] == 0
    assert ended == []
    gate.go_on.set()
    for thread in (copying, closing):
        thread.join(WAIT_S)
    assert len(ended) == 1
    assert ended[0] is None or isinstance(ended[0], ConnectionLost)
    with pytest.raises(ConnectionLost, match="closed"):
        session.swap_in(records(6), range(6))
