"""With write-through, what one engine has computed is found by others, and by itself later on.

What is not exactly the same is not found, and what is damaged is not used.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import DaemonProcess
from tests.support.wait import until
from tests.vllm.engine import BLOCK_TOKENS, Engine, connector, engine
from tests.vllm.stage import (
    AT_ONCE,
    CONNECTIONS,
    NEW_TOKENS,
    PATIENCE_S,
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
LONG_TOKENS = 110
"""Of a prompt with 3 full blocks, which an engine can serve in the pool of these tests."""
FEW_TOKENS = 8


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """The daemon of all engines of this file."""
    daemon = small_daemon(tmp_path_factory.mktemp("prefixes") / "d")
    try:
        yield daemon.start()
    finally:
        daemon.end()
    daemon.assert_no_faults()


@pytest.fixture(scope="module")
def writer(daemon: DaemonProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine that stores every full block."""
    transfer = connector(daemon.client_path, write_through=True)
    with engine(tmp_path_factory.mktemp("writer"), transfer, **POOL) as running:
        wait_until_connected(daemon)
        yield running


@pytest.fixture(scope="module")
def told(writer: Engine) -> Run:
    """What it says to long prompts that are new."""
    return speak(writer, prompts(3, tokens=LONG_TOKENS), FEW_TOKENS)


def test_full_blocks_are_found_again(writer: Engine, told: Run, daemon: DaemonProcess) -> None:
    assert told.metric("prefix_hit_tokens") == 0
    assert told.metric("saved_blocks") >= 3 * (LONG_TOKENS // BLOCK_TOKENS)
    again = speak(writer, prompts(3, tokens=LONG_TOKENS), FEW_TOKENS)
    assert again.texts == told.texts
    assert again.metric("prefix_hit_tokens") == 3 * (LONG_TOKENS // BLOCK_TOKENS) * BLOCK_TOKENS
    assert again.counts.computed_tokens < told.counts.computed_tokens / 2
    assert_nothing_held(daemon)


def test_preempted_requests_come_back_beside_write_through(
    writer: Engine, plain: Run, daemon: DaemonProcess
) -> None:
    run = speak(writer, prompts(AT_ONCE), NEW_TOKENS)
    assert run.texts == plain.texts
    assert run.counts.recomputed_tokens <= run.counts.preemptions
    assert_nothing_held(daemon)


def test_damaged_blocks_are_computed_again(
    writer: Engine, told: Run, daemon: DaemonProcess
) -> None:
    spill_everything(daemon)
    flip_bits(daemon.state_path)
    run = speak(writer, prompts(3, tokens=LONG_TOKENS), FEW_TOKENS)
    assert run.texts == told.texts
    assert run.metric("load_failures") > 0
    again = speak(writer, prompts(3, tokens=LONG_TOKENS), FEW_TOKENS)
    assert again.texts == told.texts
    assert_nothing_held(daemon)


def spill_everything(daemon: DaemonProcess) -> None:
    """Move all blocks to NVMe, so that no copy is left in DRAM."""

    def is_spilled() -> bool:
        daemon.admin("evict", "t")
        return bool(daemon.tenant()["dram"]["blocks"] == 0)

    until(is_spilled, "all blocks are on NVMe", PATIENCE_S)


def flip_bits(state: Path) -> None:
    """Damage every 4 KiB of the payloads."""
    (payloads,) = state.glob("**/blocks.kv")
    with open(payloads, "r+b") as file:
        for place in range(100, payloads.stat().st_size, 4096):
            file.seek(place)
            (byte,) = file.read(1) or b"\0"
            file.seek(place)
            file.write(bytes([byte ^ 0x10]))


def test_two_engines_at_once_share_what_they_know(
    writer: Engine, told: Run, plain: Run, daemon: DaemonProcess, tmp_path: Path
) -> None:
    speak(writer, prompts(3, tokens=LONG_TOKENS), FEW_TOKENS)
    transfer = connector(daemon.client_path, write_through=True)
    with engine(tmp_path / "second", transfer, **POOL) as second:
        wait_until_connected(daemon, 2 * CONNECTIONS)
        found = speak(second, prompts(3, tokens=LONG_TOKENS), FEW_TOKENS)
        assert found.texts == told.texts
        assert found.metric("prefix_hit_tokens") > 0

        theirs: list[list[int]] = []

        def both() -> list[list[int]]:
            mine, other = (one.add(prompts(AT_ONCE), NEW_TOKENS) for one in (writer, second))
            theirs.extend(second.finish(other))
            return writer.finish(mine)

        assert observe(writer, both).texts == theirs == plain.texts
    assert_nothing_held(daemon)


def test_another_type_of_numbers_finds_nothing(
    told: Run, daemon: DaemonProcess, tmp_path: Path
) -> None:
    transfer = connector(daemon.client_path, write_through=True)
    with engine(tmp_path / "bf16", transfer, **POOL | {"dtype": "bfloat16"}) as other:
        wait_until_connected(daemon)
        run = speak(other, prompts(1, tokens=LONG_TOKENS), 1)
        assert run.metric("lookups") == 1
        assert run.metric("prefix_hit_tokens") == 0
        again = speak(other, prompts(1, tokens=LONG_TOKENS), 1)
        assert again.metric("prefix_hit_tokens") > 0
        assert again.texts == run.texts


def test_a_restarted_engine_finds_what_it_had_stored(
    writer: Engine, told: Run, daemon: DaemonProcess, tmp_path: Path
) -> None:
    writer.close()
    transfer = connector(daemon.client_path, write_through=True)
    with engine(tmp_path / "restarted", transfer, **POOL) as restarted:
        wait_until_connected(daemon)
        run = speak(restarted, prompts(3, tokens=LONG_TOKENS), FEW_TOKENS)
    assert run.texts == told.texts
    assert run.metric("prefix_hit_tokens") == 3 * (LONG_TOKENS // BLOCK_TOKENS) * BLOCK_TOKENS
