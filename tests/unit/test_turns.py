"""Turns of the event loop: a flood or a slow client costs the others a slice and a request."""

import asyncio
import logging
from typing import Any

import msgspec
import pytest

from kvtier_client.wire import ClientRequest, Done, Lookup, Reply, frame
from kvtierd import turns as turns_module
from kvtierd.config import LimitsConfig
from kvtierd.connection import READ_AHEAD_BYTES, Connection
from kvtierd.turns import Served, Turns

DECODER = msgspec.msgpack.Decoder(ClientRequest)
ENCODER = msgspec.msgpack.Encoder()


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


class Transport:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.reading = True
        self.aborted = False
        self.closed = False
        self.written = 0

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        self.written += 1

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True


class Desk:
    """Takes some time for each request, and notes whose it was."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.limits = LimitsConfig()
        self.boot = 1
        self.turns = Turns()
        self.order: list[int] = []
        self.cost_s = {1: 0.00002, 2: 0.00002}

    def request(self, conn: Connection, req: Any) -> Reply | None:
        client = conn.flow[1]
        self.order.append(client)
        self.clock.now_s += self.cost_s[client]
        return Done(req.id, 1, 0, 0)

    admin = request

    def gone(self, conn: Connection) -> None: ...

    def connect(self, client: int) -> Connection:
        conn = Connection(self, DECODER, operator=False)
        conn.enter((1, client))
        conn.connection_made(Transport())  # type: ignore[arg-type]
        return conn


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(turns_module, "time", clock)
    return clock


def frames(first: int, count: int, keys: int = 1) -> bytes:
    requests = (Lookup(first + i, [b"l" * 16], b"k" * 16 * keys) for i in range(count))
    return b"".join(frame(request, ENCODER) for request in requests)


async def turn() -> None:
    """Let one turn of the loop pass."""
    await asyncio.sleep(0)


def test_a_request_is_answered_in_the_call_that_delivers_it(clock: Clock) -> None:
    async def work() -> None:
        desk = Desk(clock)
        conn = desk.connect(1)
        conn.data_received(frames(1, 2))
        assert desk.order == [1, 1]

    asyncio.run(work())


def test_what_is_closed_before_the_loop_has_its_socket_is_closed_then(clock: Clock) -> None:
    """Its process may die between the welcome and that moment; nothing is carried out for it."""
    desk, transport = Desk(clock), Transport()
    conn = Connection(desk, DECODER, operator=False)
    conn.enter((1, 1))
    conn.behind_hello(frames(1, 1))
    conn.close()
    conn.connection_made(transport)  # type: ignore[arg-type]
    assert transport.closed
    assert desk.order == []


def test_what_waits_for_its_turn_when_it_is_closed_is_not_carried_out(clock: Clock) -> None:
    async def work() -> None:
        desk = Desk(clock)
        flood = desk.connect(1)
        flood.data_received(frames(1, 200))
        before = len(desk.order)
        flood.close()
        for _ in range(3):
            await turn()
        assert len(desk.order) == before < 200

    asyncio.run(work())


def test_a_flood_costs_a_slice_and_then_the_other_client_is_served(clock: Clock) -> None:
    async def work() -> None:
        desk = Desk(clock)
        flood, light = desk.connect(1), desk.connect(2)
        flood.data_received(frames(1, 200))
        at_once = len(desk.order)
        assert 0 < at_once <= turns_module.SLICE_S / desk.cost_s[1] + 1
        light.data_received(frames(1, 1))
        await turn()
        assert desk.order[at_once] == 2
        assert len(desk.order) - at_once <= turns_module.SLICE_S / desk.cost_s[1] + 1

    asyncio.run(work())


def test_large_requests_get_no_more_time_than_small_ones(clock: Clock) -> None:
    async def work() -> None:
        desk = Desk(clock)
        desk.cost_s = {1: 0.01, 2: 0.0005}
        large, small = desk.connect(1), desk.connect(2)
        large.data_received(frames(1, 250))
        small.data_received(frames(1, 250))
        while desk.order.count(2) < 200:
            await turn()
        assert 8 <= desk.order.count(1) <= 12

    asyncio.run(work())


def test_many_connections_of_one_client_are_one_client(clock: Clock) -> None:
    async def work() -> None:
        desk = Desk(clock)
        many, single = [desk.connect(1) for _ in range(20)], desk.connect(2)
        for conn in [*many, single]:
            conn.data_received(frames(1, 50))
        desk.order.clear()
        while len(desk.order) < 60:
            await turn()
        assert abs(desk.order[:60].count(2) - 30) <= 5

    asyncio.run(work())


def test_what_waits_is_bounded_and_all_of_it_is_answered(clock: Clock) -> None:
    async def work() -> None:
        desk = Desk(clock)
        conn = desk.connect(1)
        transport = conn._transport
        assert isinstance(transport, Transport)
        data = frames(1, 4000, keys=16)
        asked = 0
        while transport.reading:
            conn.data_received(data[asked : asked + 65536])
            asked += 65536
        assert len(conn._buffer) <= 2 * READ_AHEAD_BYTES
        while not (transport.reading and asked >= len(data)):
            if transport.reading:
                conn.data_received(data[asked : asked + 65536])
                asked += 65536
            await turn()
        while conn._buffer:
            await turn()
        assert transport.written == len(desk.order) == 4000

    asyncio.run(work())


def test_a_client_that_does_not_read_its_replies_gets_no_turns(clock: Clock) -> None:
    async def work() -> None:
        desk = Desk(clock)
        conn = desk.connect(1)
        conn.data_received(frames(1, 100))
        conn.pause_writing()
        done = len(desk.order)
        for _ in range(20):
            await turn()
        assert len(desk.order) == done
        conn.resume_writing()
        for _ in range(100):
            await turn()
        assert len(desk.order) == 100

    asyncio.run(work())


def test_a_connection_that_fails_ends_and_takes_no_other_along(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        desk = Desk(clock)
        broken, well = desk.connect(1), desk.connect(2)
        desk.cost_s = {2: 0.00002}  # the desk knows nothing of the first client
        for conn in (broken, well):
            conn.data_received(frames(1, 20))
        for _ in range(20):
            await turn()
        assert isinstance(broken._transport, Transport) and broken._transport.aborted
        assert desk.order.count(2) == 20

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(work())


def test_waiting_behind_others_counts_as_time_inside_the_daemon(clock: Clock) -> None:
    async def work() -> None:
        desk = Desk(clock)
        desk.cost_s = {1: 0.01, 2: 0.001}
        slow, quick = desk.connect(1), desk.connect(2)
        slow.data_received(frames(1, 1))
        quick.data_received(frames(1, 1))  # read in the same turn, behind a request of 10 ms
        await turn()
        quick.data_received(frames(2, 1))  # it may have come while that turn lasted
        await turn()
        assert quick.served is not None
        assert quick.served.quantile_s(0.01) == pytest.approx(0.011, rel=0.07)
        assert quick.served.quantile_s(1.0) == pytest.approx(0.012, rel=0.07)
        assert quick.served.busy_s == pytest.approx(0.002)
        clock.now_s += 1.0
        quick.data_received(frames(3, 1))  # nothing went on before it came
        assert quick.served.quantile_s(0.01) == pytest.approx(0.001, rel=0.07)

    asyncio.run(work())


def test_quantiles_are_right_to_a_sixteenth() -> None:
    served = Served()
    durations = [3e-7 * 1.07**i for i in range(250)]
    for duration_s in durations:
        served.add(duration_s)
    for part in (0.1, 0.5, 0.9, 0.99, 1.0):
        exact_s = durations[max(round(part * len(durations)) - 1, 0)]
        assert exact_s <= served.quantile_s(part) <= exact_s * 1.07 + 1e-7
    assert Served().quantile_s(0.5) == 0.0
