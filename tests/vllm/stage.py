"""What the tests share: a small daemon, prompts, what an engine says to them, and what it did."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.support.daemon import DaemonProcess
from tests.support.wait import until
from tests.vllm.counting import Counts
from tests.vllm.engine import MODEL, Engine

SUBJECTS: Final = (
    "the sea", "railways", "bread", "volcanoes", "chess", "bees", "clocks", "the moon",
    "maps", "glass", "tea", "origami", "bridges", "salt", "wolves", "printing",
)  # fmt: skip
PROMPT_TOKENS: Final = 40
STAGGER_TOKENS: Final = 3
"""By how much lengths differ, so that requests fill their blocks at different times."""
NEW_TOKENS: Final = 56
POOL: Final = {"num_gpu_blocks_override": 12, "max_model_len": 128, "dtype": "float32"}
"""Room for 2 to 3 of the requests at their end, so that the others are preempted.

In float32 two ways to compute the same differ by far less than the likeliest tokens do, so every
schedule has to give the same text; in bfloat16 a batch of another size may round to another one.
"""
AT_ONCE: Final = 6
CONNECTIONS: Final = 2
"""Of one engine: its scheduler's and its worker's."""
PATIENCE_S: Final = 60.0
MIB: Final = 1 << 20


class Run(NamedTuple):
    """What an engine has said, and what it did for it."""

    texts: list[list[int]]
    counts: Counts
    metrics: dict[str, float]
    took_s: float

    def metric(self, name: str) -> float:
        """One of the connector's counters."""
        return self.metrics[f"vllm:kvtier_{name}_total"]


def prompts(count: int, first: int = 0, tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    """Beginnings of texts, numbered from `first`, of about so many tokens; no two are alike."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    lines = [
        "Notes about {0}, book {1}. What an old teacher once told us about {0}, how people came to "
        "it first, what they feared and hoped for, and what became of {0} in the end: ".format(
            SUBJECTS[i % len(SUBJECTS)], i // len(SUBJECTS) + 1
        )
        for i in range(first, first + count)
    ]
    ids = [tokenizer.encode(line).ids * (tokens // 16) for line in lines]
    return [ids[i][: tokens - STAGGER_TOKENS * (i % 4)] for i in range(count)]


def small_daemon(directory: Path, **sections: dict[str, Any]) -> DaemonProcess:
    """A daemon with room for some dozens of blocks, not started yet."""
    directory.mkdir()
    return DaemonProcess(
        directory,
        [{"name": "t", "uids": ["self"], "arena_bytes": 128 * MIB}],
        arena={"slab_bytes": 16 * MIB} | sections.get("arena", {}),
        spill={"capacity_bytes": 512 * MIB, "slab_bytes": 16 * MIB} | sections.get("spill", {}),
    )


def observe(engine: Engine, work: Callable[[], list[list[int]]]) -> Run:
    """Let it work, from an empty cache of its own, and see what it did."""
    engine.forget_prefixes()
    counts, metrics, begun_s = engine.counts(), engine.metrics(), time.perf_counter()
    texts = work()
    took_s, now = time.perf_counter() - begun_s, engine.metrics()
    difference = {name: value - metrics.get(name, 0.0) for name, value in now.items()}
    return Run(texts, engine.counts().since(counts), difference, took_s)


def speak(engine: Engine, asked: Sequence[Sequence[int]], tokens: int = NEW_TOKENS) -> Run:
    """What follows these prompts."""
    return observe(engine, lambda: engine.generate(asked, tokens))


def wait_until_connected(daemon: DaemonProcess, connections: int = CONNECTIONS) -> None:
    """All processes of the engines have greeted the daemon."""
    until(
        lambda: daemon.tenant()["clients"] >= connections, "the engine has greeted the daemon",
        PATIENCE_S,
    )  # fmt: skip


def assert_nothing_held(daemon: DaemonProcess) -> None:
    """The daemon keeps blocks only as a cache."""

    def is_free() -> bool:
        tenant = daemon.tenant()
        return not any(tenant[what] for what in ("held_blocks", "sessions", "leases", "waiting"))

    until(is_free, lambda: f"nothing is held: {daemon.tenant()}", PATIENCE_S)
