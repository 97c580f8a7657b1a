"""Swapped KV comes back bit by bit from a real daemon, and what does not is never used."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest

import kvtier_client as kv
from kvtier_client.admin import AdminClient
from kvtier_worker.daemon import OwnDaemon, Sizes, sizes_for
from kvtier_worker.engine import Engine
from kvtier_worker.errors import CannotSuspend, DaemonFailed
from kvtier_worker.pool import PagedPool
from kvtier_worker.sequence import Sequence, State
from kvtier_worker.swap import DaemonStore
from tests.worker.tiny import (
    BLOCK_TOKENS,
    ROOMY,
    SHAPE,
    WAIT_S,
    random_prompts,
    sampling_of,
    tiny_engine,
    tiny_model,
    tiny_pool,
)

MODEL = tiny_model()
PROMPTS = random_prompts(8)
NEW_TOKENS: Final = 60
PAGES: Final = 14


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What every session generates without memory pressure."""
    return finish(tiny_engine(MODEL, 1000))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[OwnDaemon]:
    """One for each test: some leave sessions in it."""
    with OwnDaemon(str(tmp_path), ROOMY, memory="holder") as daemon:
        yield daemon


def swap_engine(client: kv.Client, pool: PagedPool | None = None) -> Engine:
    pool = pool or tiny_pool(MODEL, PAGES)
    return Engine(MODEL, pool, DaemonStore(client, pool, MODEL.config.name, WAIT_S))


def submit_all(engine: Engine) -> list[Sequence]:
    return [engine.submit(prompt, NEW_TOKENS, sampling_of(i)) for i, prompt in enumerate(PROMPTS)]


def finish(engine: Engine) -> list[list[int]]:
    sequences = submit_all(engine)
    engine.run()
    return [sequence.generated for sequence in sequences]


def step_until(engine: Engine, reached: Callable[[], bool]) -> None:
    while not reached():
        assert engine.step(), "everything ended before what the test waits for"


def test_outputs_under_swap_are_those_without_pressure_and_nothing_is_recomputed(
    client: kv.Client, expected: list[list[int]]
) -> None:
    engine = swap_engine(client)
    assert finish(engine) == expected
    figures = engine.figures("swap")
    assert figures.preemptions > 4
    assert figures.recomputed_tokens == 0
    assert figures.swap.swap_outs == figures.swap.swap_ins == figures.preemptions
    assert figures.swap.hashes_checked == figures.swap.in_blocks > 0
    assert figures.swap.hashes_wrong == figures.swap.lost == figures.swap.refused == 0


def test_a_second_swap_out_writes_only_what_was_computed_since(client: kv.Client) -> None:
    engine = swap_engine(client)
    sequence = engine.submit(list(range(40)), NEW_TOKENS, sampling_of(0))
    step_until(engine, lambda: sequence.computed_tokens >= 44)
    store = engine.store
    assert store.save(sequence) == sequence.computed_tokens
    assert store.figures().out_blocks == 3
    assert store.save(sequence) == sequence.computed_tokens
    assert store.figures().out_blocks == 3
    step_until(engine, lambda: sequence.computed_tokens >= 50)
    assert store.save(sequence) == sequence.computed_tokens
    assert store.figures().out_blocks == 3 + 2  # the grown tail again, and the new block


def test_ended_sessions_leave_nothing_in_the_daemon(
    daemon: OwnDaemon, client: kv.Client, expected: list[list[int]]
) -> None:
    assert finish(swap_engine(client)) == expected
    with AdminClient(daemon.admin_path) as admin:
        tenant = admin.call("stats")["tenants"]["worker"]
    assert tenant["sessions"] == 0
    assert tenant["held_blocks"] == 0


@pytest.mark.parametrize("generated", [1, 17, 59])
@pytest.mark.parametrize("session", [0, 1], ids=["greedy", "seeded"])
def test_a_session_goes_on_in_another_worker_with_its_very_next_token(
    daemon: OwnDaemon, expected: list[list[int]], session: int, generated: int
) -> None:
    with kv.Client(daemon.socket_path, name="first") as client:
        engine = swap_engine(client)
        sequence = engine.submit(PROMPTS[session], NEW_TOKENS, sampling_of(session))
        step_until(engine, lambda: len(sequence.generated) == generated)
        token = engine.suspend(sequence)
        assert sequence.state is State.SUSPENDED
        assert engine.pool.free_pages == engine.pool.pages
        assert not engine.step()
    daemon.stop()
    daemon.start()
    with kv.Client(daemon.socket_path, name="second") as client:
        engine = swap_engine(client)
        sequence = engine.resume(token)
        engine.run()
        assert sequence.generated == expected[session]
        assert engine.figures("swap").recomputed_tokens == 0


def test_waiting_sessions_can_be_suspended_too(
    client: kv.Client, expected: list[list[int]]
) -> None:
    engine = swap_engine(client)
    sequences = submit_all(engine)
    step_until(engine, lambda: any(s.state is State.SWAPPED for s in sequences))
    states = {s.state for s in sequences}
    assert {State.RUNNING, State.SWAPPED} <= states
    tokens = [engine.suspend(sequence) for sequence in sequences]
    resumed_in = swap_engine(client)
    resumed = [resumed_in.resume(token) for token in tokens]
    resumed_in.run()
    assert [sequence.generated for sequence in resumed] == expected
    assert resumed_in.figures("swap").recomputed_tokens == 0


def test_a_session_of_another_model_is_not_resumed(client: kv.Client) -> None:
    engine = swap_engine(client)
    sequence = engine.submit(PROMPTS[0], NEW_TOKENS, sampling_of(0))
    engine.step()
    token = engine.suspend(sequence)
    pool = tiny_pool(MODEL, PAGES)
    other = Engine(MODEL, pool, DaemonStore(client, pool, "another model", WAIT_S))
    with pytest.raises(CannotSuspend, match="another model"):
        other.resume(token)


def test_tokens_that_name_no_suspended_session_are_refused(client: kv.Client) -> None:
    engine = swap_engine(client)
    with pytest.raises(CannotSuspend, match="32 hex digits"):
        engine.resume("xyz")
    with pytest.raises(kv.UnknownSession):
        engine.resume("00" * 16)


def test_a_session_that_no_worker_suspended_is_refused(client: kv.Client) -> None:
    pool = tiny_pool(MODEL, PAGES)
    store = DaemonStore(client, pool, MODEL.config.name, WAIT_S)
    session = client.open_session(layouts=[store.layout])
    session.put_blob(b"something else", version=1)
    with pytest.raises(CannotSuspend, match="not a suspended session"):
        store.resume(session.token.hex(), sequence_id=1)


def test_without_room_in_the_daemon_tokens_are_recomputed_and_counted(
    tmp_path: Path, expected: list[list[int]]
) -> None:
    least = sizes_for(SHAPE.block_bytes, 0, 0)
    with (
        OwnDaemon(str(tmp_path), least) as daemon,
        kv.Client(daemon.socket_path, name="test") as client,
        kv.Client(daemon.socket_path, name="hog") as hog,
    ):
        fill_up(hog)
        pool = tiny_pool(MODEL, PAGES)
        engine = Engine(MODEL, pool, DaemonStore(client, pool, MODEL.config.name, wait_s=0.0))
        assert finish(engine) == expected
        figures = engine.figures("swap")
        assert figures.swap.refused > 0
        assert figures.recomputed_tokens > 0


def fill_up(client: kv.Client) -> kv.Session:
    """Hold blocks until the daemon takes no more; the session that holds them."""
    store = DaemonStore(client, tiny_pool(MODEL, PAGES), "hog", WAIT_S)
    session = client.open_session(layouts=[store.layout])
    record = np.zeros((1, SHAPE.block_bytes), np.uint8)

    def fill() -> None:
        for page in range(10_000):
            session.swap_out(record, (page, page + 1), BLOCK_TOKENS, wait_s=1.0)

    with pytest.raises(kv.CapacityError):
        fill()
    return session


def test_a_daemon_that_goes_away_for_good_costs_recomputation_only(
    tmp_path: Path, expected: list[list[int]]
) -> None:
    with OwnDaemon(str(tmp_path), ROOMY) as daemon:
        client = kv.Client(daemon.socket_path, name="test", deadline_s=WAIT_S)
        pool = tiny_pool(MODEL, PAGES)
        engine = Engine(MODEL, pool, DaemonStore(client, pool, MODEL.config.name, wait_s=0.1))
        sequences = submit_all(engine)
        step_until(engine, lambda: any(s.state is State.SWAPPED for s in sequences))
        client._core.deadline_s = 0.2
        daemon.kill()
        engine.run()
        client.close()
    assert [sequence.generated for sequence in sequences] == expected
    assert engine.figures("swap").swap.lost > 0


def test_a_daemon_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(DaemonFailed, match="arena_bytes"):
        OwnDaemon(str(tmp_path), Sizes(2 << 20, 1234, 8 << 20)).start()
