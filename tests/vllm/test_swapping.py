"""Preempted requests come back from the daemon, whatever becomes of it, and say the same."""

import errno
import random
from collections.abc import Iterator

import pytest

from tests.support.daemon import DaemonProcess
from tests.support.interpose import READ, Faults
from tests.vllm.engine import BLOCK_TOKENS, Engine, connector, engine
from tests.vllm.stage import (
    AT_ONCE,
    NEW_TOKENS,
    POOL,
    Run,
    assert_nothing_held,
    observe,
    prompts,
    small_daemon,
    speak,
    wait_until_connected,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
ABORTS = 200
WAVE = 10
SEED = 5


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DaemonProcess, Faults]]:
    """A daemon that is not started yet, and what shall go wrong for it."""
    daemon = small_daemon(tmp_path_factory.mktemp("house") / "d")
    faults = Faults(daemon)
    yield daemon, faults
    daemon.end()
    daemon.assert_no_faults()


@pytest.fixture(scope="module")
def swapper(
    house: tuple[DaemonProcess, Faults], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """An engine that has been started without a daemon."""
    transfer = connector(house[0].client_path)
    with engine(tmp_path_factory.mktemp("swapper"), transfer, **POOL) as running:
        yield running


@pytest.fixture
def daemon(house: tuple[DaemonProcess, Faults], swapper: Engine) -> DaemonProcess:
    """The daemon, running and known to the engine."""
    daemon, faults = house
    faults.heal()
    if daemon.process is None:
        daemon.start()
    wait_until_connected(daemon)
    return daemon


@pytest.fixture
def faults(house: tuple[DaemonProcess, Faults], daemon: DaemonProcess) -> Iterator[Faults]:
    """Faults of the daemon's disk, healed afterwards."""
    yield house[1]
    house[1].heal()


def spilled(daemon: DaemonProcess, swapper: Engine) -> Run:
    """A run during which everything is moved to NVMe again and again."""

    def work() -> list[list[int]]:
        names = swapper.add(prompts(AT_ONCE), NEW_TOKENS)
        while swapper.running():
            daemon.admin("evict", "t")
            swapper.step(1)
        return swapper.finish(names)

    return observe(swapper, work)


def test_an_engine_works_without_a_daemon(
    house: tuple[DaemonProcess, Faults], swapper: Engine, plain: Run
) -> None:
    if house[0].process is not None:
        house[0].stop()
    run = speak(swapper, prompts(AT_ONCE))
    assert run.texts == plain.texts
    assert run.counts.preemptions > 0
    assert run.metric("restored_tokens") == 0


def test_preempted_requests_come_back(daemon: DaemonProcess, swapper: Engine, plain: Run) -> None:
    run = speak(swapper, prompts(AT_ONCE))
    assert run.texts == plain.texts
    assert run.counts.preemptions > 0
    assert plain.counts.recomputed_tokens > BLOCK_TOKENS * plain.counts.preemptions / 2
    assert run.counts.recomputed_tokens <= run.counts.preemptions
    assert run.metric("restored_tokens") >= run.counts.lost_tokens - run.counts.recomputed_tokens
    assert run.metric("load_failures") == run.metric("save_failures") == 0
    assert_nothing_held(daemon)


def test_only_what_is_preempted_is_stored(daemon: DaemonProcess, swapper: Engine) -> None:
    run = speak(swapper, prompts(1))
    assert run.counts.preemptions == 0
    assert run.metric("saved_blocks") == 0


def test_they_come_back_from_nvme(daemon: DaemonProcess, swapper: Engine, plain: Run) -> None:
    run = spilled(daemon, swapper)
    assert run.texts == plain.texts
    assert run.metric("loaded_nvme_bytes") > 0
    assert run.counts.recomputed_tokens <= run.counts.preemptions
    assert_nothing_held(daemon)


def test_what_cannot_be_read_is_computed_again(
    daemon: DaemonProcess, faults: Faults, swapper: Engine, plain: Run
) -> None:
    faults.fail(READ, "/spill/blocks.kv", error=errno.EIO)
    run = spilled(daemon, swapper)
    assert faults.hits() > 0
    assert run.texts == plain.texts
    assert run.metric("load_failures") > 0
    assert run.counts.recomputed_tokens > BLOCK_TOKENS
    faults.heal()
    assert_nothing_held(daemon)


def test_a_storm_of_aborts_leaves_nothing_held(
    daemon: DaemonProcess, swapper: Engine, plain: Run
) -> None:
    dice = random.Random(SEED)
    before = swapper.counts()
    aborted = 0
    while aborted < ABORTS:
        swapper.add(prompts(WAVE, dice.randrange(4)), dice.randint(20, NEW_TOKENS))
        swapper.step(dice.randint(1, 120))
        running = swapper.running()
        victims = dice.sample(running, dice.randint(len(running) // 2, len(running)))
        swapper.abort(victims)
        aborted += len(victims)
    swapper.abort(swapper.running())
    assert swapper.counts().since(before).preemptions > 0
    assert_nothing_held(daemon)
    swapper.do("take")
    assert speak(swapper, prompts(AT_ONCE)).texts == plain.texts


def test_a_killed_daemon_costs_only_time(
    daemon: DaemonProcess, swapper: Engine, plain: Run
) -> None:
    begun = swapper.counts()

    def work() -> list[list[int]]:
        names = swapper.add(prompts(AT_ONCE), NEW_TOKENS)
        while not swapper.counts().since(begun).preemptions:
            swapper.step(1)
        daemon.kill()
        return swapper.finish(names)

    run = observe(swapper, work)
    assert run.texts == plain.texts
    daemon.start()
    wait_until_connected(daemon)
    run = speak(swapper, prompts(AT_ONCE))
    assert run.texts == plain.texts
    assert run.metric("restored_tokens") > 0
    assert_nothing_held(daemon)


def test_a_daemon_that_restarts_again_and_again_costs_only_time(
    daemon: DaemonProcess, swapper: Engine, plain: Run
) -> None:
    def work() -> list[list[int]]:
        names = swapper.add(prompts(AT_ONCE), NEW_TOKENS)
        while swapper.running():
            swapper.step(60)
            daemon.restart()
        return swapper.finish(names)

    assert observe(swapper, work).texts == plain.texts
    wait_until_connected(daemon)
    assert_nothing_held(daemon)


def test_a_daemon_that_hangs_costs_only_time(
    daemon: DaemonProcess, swapper: Engine, plain: Run
) -> None:
    names = swapper.add(prompts(AT_ONCE), NEW_TOKENS)
    swapper.step(60)
    daemon.freeze()
    try:
        assert swapper.finish(names) == plain.texts
    finally:
        daemon.thaw()
    wait_until_connected(daemon)
    assert_nothing_held(daemon)
