"""Any model's demo: the same sessions without memory pressure, with recomputation, with swap.

The unpressured run says how much KV the sessions need at their peak. The other two get a fraction
of it, so that sessions are preempted again and again, and must end with the very same tokens.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import msgspec

import kvtier_client as kv
from kvtier_client.admin import AdminClient
from kvtier_worker.daemon import OwnDaemon, Sizes, sizes_for
from kvtier_worker.engine import Engine, block_shape
from kvtier_worker.load import LoadedModel
from kvtier_worker.metrics import RunFigures
from kvtier_worker.pool import PagedPool
from kvtier_worker.sampler import Sampling
from kvtier_worker.scheduler import Limits
from kvtier_worker.store import KvStore, RecomputeStore
from kvtier_worker.swap import DaemonStore
from kvtier_worker.tiers import TierFigures, TierSample, TierWatch

SWAP_WAIT_S: Final = 30.0
ARENA_SHARE: Final = 4
"""The demo's own arena is this fraction (1/4) of the pool: most of what is swapped must spill."""

Progress = Callable[[str, int], None]
"""Told the policy and how many tokens it has generated so far."""


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """What the demo runs. The pool is 1/`pressure` of the unpressured peak."""

    prompts: tuple[str, ...]
    new_tokens: int
    block_tokens: int
    pressure: int
    socket_path: str | None = None
    admin_path: str | None = None


class DemoReport(msgspec.Struct, frozen=True):
    """All figures of the demo; `failures` is empty when it shows what it should."""

    model: str
    block_bytes: int
    policies: dict[str, RunFigures]
    tiers: TierFigures
    outputs_equal: dict[str, bool]
    spilled_share: float
    failures: list[str]
    samples: list[TierSample]


@dataclass(frozen=True, slots=True)
class _Run:
    figures: RunFigures
    outputs: list[list[int]]


class Demo:
    """One model and one plan, run under each policy."""

    def __init__(self, loaded: LoadedModel, plan: DemoPlan, progress: Progress) -> None:
        self._model = loaded.model
        self._prompts = [loaded.tokenizer.encode_prompt(prompt) for prompt in plan.prompts]
        self._plan = plan
        self._progress = progress
        self._shape = block_shape(loaded.model, plan.block_tokens)

    def run(self) -> DemoReport:
        """Run the three policies. Errors: those of the engine, the daemon and the client."""
        free = self._run("none", self._largest_pool(), lambda _: RecomputeStore())
        budget_bytes = self._pressed_pool(free.figures)
        recompute = self._run("recompute", budget_bytes, lambda _: RecomputeStore())
        sizes = sizes_for(
            self._shape.block_bytes, budget_bytes // ARENA_SHARE, 2 * self._largest_pool()
        )
        plan = self._plan
        with daemon_clients(plan.socket_path, plan.admin_path, sizes) as (client, admin):
            watch = TierWatch(admin)
            name = self._model.config.name
            swap = self._run(
                "swap",
                budget_bytes,
                lambda pool: DaemonStore(client, pool, name, SWAP_WAIT_S),
                watch.on_step,
            )
            tiers = watch.figures()
        runs = {"none": free, "recompute": recompute, "swap": swap}
        return DemoReport(
            model=self._model.config.name,
            block_bytes=self._shape.block_bytes,
            policies={name: run.figures for name, run in runs.items()},
            tiers=tiers,
            outputs_equal={name: run.outputs == free.outputs for name, run in runs.items()},
            spilled_share=tiers.spilled_bytes / max(1, swap.figures.swap.out_bytes),
            failures=find_failures(swap.figures, tiers, swap.outputs == free.outputs),
            samples=watch.samples,
        )

    def _run(
        self,
        policy: str,
        budget_bytes: int,
        store: Callable[[PagedPool], KvStore],
        on_step: Callable[[Engine], None] | None = None,
    ) -> _Run:
        pool = PagedPool(self._shape, budget_bytes, self._model.device)
        sessions = len(self._prompts)
        limits = Limits(step_rows=max(32, sessions), running=sessions)
        engine = Engine(self._model, pool, store(pool), limits)
        sequences = [
            # Every other session draws its tokens, so that samplers have to continue exactly too.
            engine.submit(prompt, self._plan.new_tokens, Sampling(0.8 if i % 2 else 0.0, seed=i))
            for i, prompt in enumerate(self._prompts)
        ]

        def step_done(engine: Engine) -> None:
            self._progress(policy, engine.clock.tokens)
            if on_step is not None:
                on_step(engine)

        engine.run(step_done)
        return _Run(engine.figures(policy), [sequence.generated for sequence in sequences])

    def _largest_pool(self) -> int:
        pages = sum(map(self._blocks, self._prompts)) + 1
        return pages * self._shape.block_bytes

    def _pressed_pool(self, free: RunFigures) -> int:
        """The fraction of the peak, but room for the longest session and one page beside it."""
        longest = max(map(self._blocks, self._prompts)) + 2
        return max(free.peak_pool_bytes // self._plan.pressure, longest * self._shape.block_bytes)

    def _blocks(self, prompt: list[int]) -> int:
        return self._shape.blocks(len(prompt) + self._plan.new_tokens)


def find_failures(swap: RunFigures, tiers: TierFigures, outputs_equal: bool) -> list[str]:
    """What the swap run should have shown and did not."""
    moved = swap.swap
    checks = {
        "outputs under swap differ from the unpressured ones": not outputs_equal,
        f"{swap.recomputed_tokens} tokens were recomputed under swap": swap.recomputed_tokens > 0,
        f"{moved.hashes_wrong} blocks came back with another hash": moved.hashes_wrong > 0,
        "no block's hash was compared": moved.hashes_checked == 0,
        "the DRAM tier was not used": tiers.dram_peak_bytes == 0,
        "less than half of the swapped bytes reached NVMe": 2 * tiers.spilled_bytes
        < moved.out_bytes
        or tiers.nvme_peak_bytes == 0,
    }
    return [failure for failure, failed in checks.items() if failed]


@contextmanager
def daemon_clients(
    socket_path: str | None, admin_path: str | None, sizes: Sizes
) -> Iterator[tuple[kv.Client, AdminClient]]:
    """Clients of the daemon that was named, or of one with these sizes that lives as long."""
    if socket_path is not None:
        beside = os.path.join(os.path.dirname(socket_path), "admin.sock")
        with _clients(socket_path, admin_path or beside) as clients:
            yield clients
        return
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-demo-") as directory,
        OwnDaemon(directory, sizes) as daemon,
        _clients(daemon.socket_path, daemon.admin_path) as clients,
    ):
        yield clients


@contextmanager
def _clients(socket_path: str, admin_path: str) -> Iterator[tuple[kv.Client, AdminClient]]:
    with kv.Client(socket_path, name="kvtier-worker") as client, AdminClient(admin_path) as admin:
        client.connect()
        yield client, admin
