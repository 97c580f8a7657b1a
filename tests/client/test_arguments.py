"""What callers may hand over, the same in all calls, and what they are told when it is refused."""

import math
from typing import Any

import numpy as np
import pytest

from kvtier_client import wire
from kvtier_client.errors import InvalidArgument
from tests.client.scripted import ScriptedDaemon
from tests.client.shells import Caller, Shells
from tests.client.test_shells import once, records
from tests.support.wait import until

TOO_LARGE = 2**70
"""Fits no MessagePack integer."""
KEYS = [bytes([i]) * 16 for i in range(6)]


def test_numbers_of_numpy_are_numbers(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    one, two, four = np.int64(1), np.uint32(2), np.int32(4)
    session = client.open_session([layout], priority=np.uint8(3))
    session.fork(one, np.int64(0), four)
    session.swap_out(records(1), two, four, node=one)
    session.swap_out(records(2), (two, four), np.array(4), node=one, wait_s=np.float64(1.0))
    back = np.zeros((2, 4096), np.uint8)
    session.swap_in(back, (two, four), node=one)
    assert (back == records(2)).all()
    with session.acquire((two, four), node=one, ttl_s=np.float64(9.0)) as lease:
        assert len(lease.blocks) == 2
    session.fold(one, (two, four), np.float32(1.5))
    assert next(r for r in daemon.log if isinstance(r, wire.Fold)).grace_s == 1.5


@pytest.mark.parametrize("pages", [(3, 5), range(3, 5)])
def test_neighbouring_pages_are_named_alike_in_all_calls(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout, pages: Any
) -> None:
    session = client.open_session([layout])
    session.swap_out(records(2), pages, 4)
    with session.acquire(pages) as lease:
        assert len(lease.blocks) == 2
    session.prefetch(pages)
    session.fold(0, pages, 1.0)
    assert session.unfold(0, pages).pages == (3, 5)
    asked = [r for r in daemon.log if isinstance(r, wire.Acquire | wire.Prefetch | wire.Fold)]
    assert [(r.first, r.pages) for r in asked] == [(3, 2)] * 3
    with session.acquire(4) as lease:
        assert len(lease.blocks) == 1


@pytest.mark.parametrize("pages", [(0.0, 2.0), (2, 2), [0, 1], range(0, 4, 2), (-1, 1), (1, 2, 3)])
def test_what_is_no_window_is_refused_before_anything_is_sent(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout, pages: Any
) -> None:
    session = client.open_session([layout])
    for ask in (session.acquire, session.prefetch, lambda pages: session.unfold(0, pages)):
        with pytest.raises(InvalidArgument, match="pages"):
            ask(pages)
    assert daemon.seen["Acquire"] == daemon.seen["Prefetch"] == daemon.seen["Unfold"] == 0


@pytest.mark.parametrize("valid", [4.0, np.float64(3.7), [4.0, 4.0], "4"])
def test_valid_tokens_are_integers(client: Any, layout: wire.Layout, valid: Any) -> None:
    session = client.open_session([layout])
    with pytest.raises(InvalidArgument, match="integers"):
        session.swap_out(records(2), (0, 2), valid)


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("node", [TOO_LARGE, object()])
def test_what_cannot_be_sent_is_refused_and_costs_no_slot(
    shells: Shells, daemon: ScriptedDaemon, layout: wire.Layout, node: Any
) -> None:
    client = shells.open(daemon.path)
    session = client.open_session([layout])
    session.swap_out(records(1), 0, 4)
    with client.reserve(layout, 2) as lease:
        with pytest.raises(InvalidArgument, match="cannot be sent"):
            lease.commit(session, node, (0, 2), 4)
        lease.commit(session, 0, (1, 3), 4)  # its slots have no name yet
    for n, ack in [(1, True), (1, False), (2, True), (2, False), (24, True), (24, False)]:
        with pytest.raises(InvalidArgument, match="cannot be sent"):
            session.swap_out(records(n)[0] if n == 1 else records(n), (9, 9 + n), 4, node, ack=ack)
    with pytest.raises(InvalidArgument, match="cannot be sent"):
        session.swap_out(records(1)[0], 9, 4, node=node, ack=False)
    client.close()
    assert client._core.leases == client._core.protocol.held == daemon.leases == {}
    assert len(daemon.free) == daemon.slots - 3


def test_what_cannot_be_sent_does_not_stop_a_client_that_comes_back(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    session = client.open_session([layout])
    daemon.fault = lambda request: "drop"
    caller = Caller(session.nodes)
    until(lambda: daemon.seen["Hello"] >= 3, "it tries to come back")
    session.fold(TOO_LARGE, (0, 1), 1.0, ack=False)
    daemon.fault = lambda request: ""
    assert caller.end() is None
    with pytest.raises(InvalidArgument, match="cannot be sent"):
        client.flush()


def test_waits_may_be_endless(shells: Shells, daemon: ScriptedDaemon, layout: wire.Layout) -> None:
    client = shells.open(daemon.path, deadline_s=math.inf)
    session = client.open_session([layout])
    daemon.fault = once(wire.Reserve, "drop")
    out, back = records(24), np.zeros((24, 4096), np.uint8)
    session.swap_out(out, (0, 24), 4, wait_s=math.inf)
    session.swap_in(back, (0, 24), wait_s=math.inf)
    assert (back == out).all()
    session.swap_out(out[0], 0, 4, ack=False)
    client.flush(math.inf)
    daemon.push(wire.Ready(0, 1, 0, 1, 2, 0))
    ticket = session.prefetch((0, 2))
    assert ticket.wait(math.inf).loaded == 2


def test_records_of_keys_may_be_in_one_piece(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    out = records(6)
    assert client.put_keys(layout, [KEYS[1], KEYS[4]], out[[1, 4]]) == 2
    assert client.put_keys(layout, KEYS, bytearray(out.tobytes())) == 4  # of three runs
    back = np.zeros(6 * 4096, np.uint8)
    assert client.get_keys(layout, KEYS, back) == 6
    assert back.tobytes() == out.tobytes()


@pytest.mark.parametrize("n", [5, 7])
def test_keys_have_one_record_each(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout, n: int
) -> None:
    for some in (records(n), list(records(n))):
        with pytest.raises(InvalidArgument, match="one"):
            client.put_keys(layout, KEYS, some)
    assert daemon.seen["ReserveKeys"] == 0


@pytest.mark.parametrize("keys", [["a" * 16], bytearray(32), [b"short"], b"0" * 17, [b"a" * 32]])
def test_keys_are_whole_strings_of_bytes(client: Any, layout: wire.Layout, keys: Any) -> None:
    with pytest.raises(InvalidArgument, match="16 bytes"):
        client.lookup(keys, layout)
