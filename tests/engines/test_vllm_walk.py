"""The vLLM connector in a small engine on a real daemon: nothing foreign, nothing left behind."""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from kvtier_client.client import Client
from kvtier_client.engines.vllm.config import Settings
from kvtier_client.engines.vllm.groups import Group
from kvtier_client.engines.vllm.link import Job, Link
from kvtier_client.errors import ArenaFull, Timeout
from tests.engines.small_vllm import SmallEngine
from tests.support.daemon import DaemonProcess
from tests.support.fixtures import shared_daemon  # noqa: F401
from tests.support.wait import until

T = TypeVar("T")
FULL = [Group(4)]
HYBRID = [Group(4), Group(4, window_tokens=9)]
UNEVEN = [Group(4), Group(8), Group(4, window_tokens=6)]
SETTINGS = Settings(deadline_s=20.0)
RUN_S = 60.0


class Unlucky(Link):
    """A link of which some calls and jobs fail, as those to a daemon that is busy or full."""

    luck = random.Random(0)
    odds = 0.0

    def call(self, work: Callable[[Client], T]) -> T:
        if self.luck.random() < self.odds:
            raise self.luck.choice([Timeout("made up"), ArenaFull("made up")])
        return super().call(work)

    def submit(self, job: Job) -> None:
        if not job.owed and self.luck.random() < self.odds:
            job.fail()
        else:
            super().submit(job)


class House:
    """Engines on one daemon."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon
        self.links: list[Unlucky] = []

    def engine(
        self, groups: list[Group], ranks: int, blocks: int, settings: Settings = SETTINGS
    ) -> SmallEngine:
        links = [self._link() for _ in range(1 + ranks)]
        for link in links:
            until(lambda link=link: link.up, "the link is up")
        return SmallEngine(groups, ranks, blocks, links, settings)

    def _link(self) -> Unlucky:
        client = Client(self.daemon.client_path, "small", SETTINGS.deadline_s)
        self.links.append(Unlucky(client, lambda client: client.connect()))
        return self.links[-1]

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.links = []


@pytest.fixture
def house(shared_daemon: DaemonProcess) -> Iterator[House]:  # noqa: F811
    opened = House(shared_daemon)
    yield opened
    opened.close()
    until(lambda: _idle(shared_daemon), "nothing is held, leased or open")


def _idle(daemon: DaemonProcess) -> bool:
    gauges = daemon.tenant()
    return not (gauges["sessions"] or gauges["leases"] or gauges["held_blocks"])


def prompts(seed: int, count: int) -> list[list[int]]:
    luck = random.Random(seed)
    return [[luck.randrange(251) for _ in range(luck.randrange(3, 21))] for _ in range(count)]


def run(engine: SmallEngine) -> None:
    """Step until every request is over."""
    deadline_s = time.monotonic() + RUN_S
    while engine.requests:
        assert time.monotonic() < deadline_s, f"after {RUN_S} s: {engine.requests}"
        engine.step()


def taken(engine: SmallEngine) -> dict[str, float]:
    counts = engine.side.tally.take()
    for rank in engine.ranks:
        for name, count in rank.side.take_stats().items():
            counts[name] = counts.get(name, 0) + count
    return counts


def alive(engine: SmallEngine) -> list[str]:
    return sorted(name for name, request in engine.requests.items() if request.state != "over")


def answered(engine: SmallEngine) -> bool:
    entries = engine.side._entries.values()
    return all(entry.offer is None or entry.offer.tokens is not None for entry in entries)


CASES = pytest.mark.parametrize(
    ("groups", "ranks"), [(FULL, 1), (FULL, 2), (HYBRID, 2), (UNEVEN, 1)]
)


@CASES
def test_what_a_preemption_takes_comes_back_whole(
    house: House, groups: list[Group], ranks: int
) -> None:
    engine = house.engine(groups, ranks, blocks=16)
    for number, prompt in enumerate(prompts(1, 12)):
        engine.add(str(number), prompt[:8], output=32)
    until(lambda: answered(engine), "all lookups are answered")
    run(engine)
    counts = taken(engine)
    assert engine.preemptions == counts["preemptions"] > 3
    assert counts["restored_tokens"] == counts["recompute_avoided_tokens"] == counts["lost_tokens"]
    assert "recomputed_tokens" not in counts
    assert engine.computed_tokens == sum(len(tokens) for tokens in engine.output.values())
    assert all(len(free) == engine.blocks - 1 for free in engine.free)


@CASES
def test_a_prefix_that_was_written_through_is_found_by_another_engine(
    house: House, groups: list[Group], ranks: int
) -> None:
    through = Settings(deadline_s=20.0, write_through=True)
    prompt = [7 + ranks + len(groups), *range(40)]
    first = house.engine(groups, ranks, blocks=32, settings=through)
    first.add("writes", prompt, output=4)
    run(first)
    second = house.engine(groups, ranks, blocks=32)
    second.add("finds", prompt, output=4)
    run(second)
    step = max(group.block_tokens for group in groups)
    assert taken(second)["prefix_hit_tokens"] == 40 // step * step
    assert second.output["finds"] == first.output["writes"]


@CASES
@pytest.mark.parametrize("seed", range(3))
def test_bad_luck_and_aborts_cost_time_and_nothing_else(
    house: House, groups: list[Group], ranks: int, seed: int
) -> None:
    luck = random.Random(seed)
    settings = Settings(deadline_s=20.0, write_through=bool(seed % 2))
    engine = house.engine(groups, ranks, blocks=16, settings=settings)
    for link in house.links:
        link.luck, link.odds = luck, 0.2
    wanted: dict[str, tuple[list[int], int]] = {}
    for number, prompt in enumerate(prompts(seed, 40)):
        wanted[str(number)] = prompt, 24
        engine.add(str(number), prompt, output=24)
        for _ in range(luck.randrange(12)):
            engine.step()
        if luck.random() < 0.4 and alive(engine):
            engine.abort(luck.choice(alive(engine)))
        if luck.random() < 0.05:
            engine.side.reset()
    run(engine)
    for name, tokens in engine.output.items():
        prompt, output = wanted[name]
        assert tokens[: len(prompt)] == prompt and len(tokens) == len(prompt) + output
    assert not engine.side._entries and not engine.side._saves
    assert all(len(free) == engine.blocks - 1 for free in engine.free)


def test_an_abort_storm_leaves_nothing_behind(house: House) -> None:
    engine = house.engine(FULL, 1, blocks=16)
    luck = random.Random(5)
    for number, prompt in enumerate(prompts(5, 220)):
        engine.add(str(number), prompt[:6], output=40)
        until(lambda: answered(engine), "all lookups are answered")
        for _ in range(4):
            engine.step()
        while len(names := alive(engine)) > 8:
            engine.abort(luck.choice(names))
    for name in alive(engine):
        engine.abort(name)
    run(engine)
    assert engine.preemptions > 10
    assert not engine.side._entries and not engine.side._saves


def test_the_end_of_an_engine_lets_go_of_what_it_has_suspended(house: House) -> None:
    engine = house.engine(FULL, 1, blocks=16)
    for number, prompt in enumerate(prompts(2, 6)):
        engine.add(str(number), prompt, output=40)

    def suspended() -> bool:
        engine.step()
        return any(entry.suspension is not None for entry in engine.side._entries.values())

    until(suspended, "a request is held")
    engine.side.close()


def test_a_reset_forgets_what_was_stored(house: House) -> None:
    through = Settings(deadline_s=20.0, write_through=True)
    engine = house.engine(FULL, 1, blocks=32, settings=through)
    prompt = [99, *range(40)]
    for number in range(2):
        engine.add(str(number), prompt, output=4)
        run(engine)
        engine.side.reset()
    counts: dict[str, Any] = taken(engine)
    assert counts["lookups"] == counts["misses"] == 2
