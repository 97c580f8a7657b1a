"""vLLM with the connector beside vLLM without it, on the same prompts in turns.

python -m tests.vllm.bench [NAME ...]   (`make bench-vllm`)
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from kvtierd.bench.daemons import Daemon, daemon
from kvtierd.bench.figures import Figure, load, merge, middle, table
from kvtierd.bench.plan import MIB, Plan
from tests.vllm.engine import BLOCK_TOKENS, ROOT, Engine, connector, engine
from tests.vllm.stage import Run, prompts, speak

RESULTS: Final = ROOT / "build" / "bench.json"
PAIRS: Final = 5
REQUESTS: Final = 8
PROMPT_TOKENS: Final = 64
NEW_TOKENS: Final = 192
POOL_BLOCKS: Final = 32
"""Less than half of what the requests need at their end."""
LONG_TOKENS: Final = 960
LONG_TEXTS: Final = 1000
"""The number of the first long text."""
ARENA_BYTES: Final = 1024 * MIB
ARGUMENTS: Final = {
    "num_gpu_blocks_override": POOL_BLOCKS, "max_model_len": (POOL_BLOCKS - 1) * BLOCK_TOKENS,
    "dtype": "float32",
}  # fmt: skip


class Pair(NamedTuple):
    """The same requests on both engines, and what a token of prefill takes just then."""

    plain: Run
    swapped: Run
    prefill_s: float

    @property
    def share(self) -> float:
        """Time in saves and loads, as a part of what computing the same tokens would take."""
        counts = self.swapped.counts
        spent_us = self.swapped.metric("save_us") + self.swapped.metric("load_us")
        return spent_us / 1e6 / ((counts.lost_tokens - counts.recomputed_tokens) * self.prefill_s)


def preemption(plain: Engine, served: Daemon, place: Path) -> list[Figure]:
    """Requests that do not fit into the pool together."""
    with engine(place / "swapper", connector(served.client_path), **ARGUMENTS) as swapper:
        return of_preemption(interleaved(plain, swapper))


def interleaved(plain: Engine, swapper: Engine) -> list[Pair]:
    """Pairs of runs; which engine is first alternates."""
    for one in (plain, swapper):  # a first request pays for more than itself
        speak(one, prompts(2, LONG_TEXTS), NEW_TOKENS // 8)
    pairs = []
    for i in range(PAIRS):
        asked = prompts(REQUESTS, REQUESTS * i, PROMPT_TOKENS)  # nobody has seen them before
        order = (plain, swapper) if i % 2 == 0 else (swapper, plain)
        found = {id(one): speak(one, asked, NEW_TOKENS) for one in order}
        long = prompts(1, LONG_TEXTS + i, LONG_TOKENS)
        prefill_s = speak(plain, long, 1).took_s / LONG_TOKENS
        pairs.append(Pair(found[id(plain)], found[id(swapper)], prefill_s))
        assert pairs[-1].plain.texts == pairs[-1].swapped.texts, "the texts differ"
        assert pairs[-1].swapped.metric("prefix_hit_tokens") == 0
        print(f"pair {i + 1}: {told(pairs[-1])}; {load()}", flush=True)
    return pairs


def told(pair: Pair) -> str:
    """One line about a pair."""
    return " | ".join(
        f"{name} {one.took_s:.1f} s, {one.counts}"
        for name, one in (("default", pair.plain), ("kvtierd", pair.swapped))
    )


def of_preemption(pairs: Sequence[Pair]) -> list[Figure]:
    """The figures of all pairs."""
    figures = []
    for suffix, runs, most in (
        ("", [pair.swapped for pair in pairs], 1.0),
        (".default", [pair.plain for pair in pairs], None),
    ):
        counts = [run.counts for run in runs]
        figures += [
            middle(
                f"vllm.recomputed_blocks_per_preemption{suffix}",
                [one.recomputed_tokens / BLOCK_TOKENS / one.preemptions for one in counts],
                most, "lower",
            ),
            middle(f"vllm.preemptions{suffix}", [one.preemptions for one in counts]),
            middle(f"vllm.steps{suffix}", [one.steps for one in counts]),
            middle(f"vllm.computed_tokens{suffix}", [one.computed_tokens for one in counts]),
        ]  # fmt: skip
    return [
        *figures,
        middle("vllm.prefill_tokens_s", [1 / pair.prefill_s for pair in pairs]),
        middle("vllm.saveload_share_of_recompute", [pair.share for pair in pairs], 0.05, "lower"),
        middle("vllm.end_to_end_x", [p.plain.took_s / p.swapped.took_s for p in pairs], 1.0),
    ]


def prefix_reload(plain: Engine, served: Daemon, place: Path) -> list[Figure]:
    """A long prompt on a restarted engine that finds it in the daemon, beside its prefill."""
    transfer = connector(served.client_path, write_through=True)
    asked = prompts(PAIRS + 1, LONG_TEXTS, LONG_TOKENS)
    with engine(place / "writer", transfer, **ARGUMENTS) as writer:
        stored = [speak(writer, [prompt], 1).texts for prompt in asked]
    factors = []
    with engine(place / "reader", transfer, **ARGUMENTS) as reader:
        for i, prompt in enumerate(asked):
            order = (plain, reader) if i % 2 == 0 else (reader, plain)
            found = {id(one): speak(one, [prompt], 1) for one in order}
            one, two = found[id(plain)], found[id(reader)]
            assert one.texts == two.texts == stored[i], "the texts differ"
            assert two.metric("prefix_hit_tokens") > LONG_TOKENS - 2 * BLOCK_TOKENS
            factors.append(one.took_s / two.took_s)
            print(f"prefill {one.took_s:.3f} s, reload {two.took_s:.3f} s; {load()}", flush=True)
    return [middle("vllm.prefix_reload_x", factors[1:], 10.0)]  # a first request pays for more


BENCHMARKS: Final = {"preemption": preemption, "prefix_reload": prefix_reload}


def main(names: Sequence[str]) -> None:
    """Measure what is named, or all; print and keep the figures."""
    if unknown := set(names) - set(BENCHMARKS):
        raise SystemExit(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    print(load(), flush=True)
    plan = Plan(RESULTS.parent)
    figures: list[Figure] = []
    with (
        plan.empty_directory() as place,
        daemon(plan, ARENA_BYTES) as served,
        engine(place / "plain", None, **ARGUMENTS) as plain,
    ):
        for name, measure in BENCHMARKS.items():
            if not names or name in names:
                figures += measure(plain, served, place)
                merge(RESULTS, figures)
    print(f"{load()}\n\n{table(figures)}")


if __name__ == "__main__":
    main(sys.argv[1:])
