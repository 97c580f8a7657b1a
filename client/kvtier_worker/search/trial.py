"""Problems of the reasoning task, each searched by several strategies, beside a single sample."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import msgspec
import numpy as np

import kvtier_client as kv
from kvtier_client.admin import AdminClient
from kvtier_worker.cot.policy import RULES, by_token
from kvtier_worker.cot.task import Problem, Size, sample_problem
from kvtier_worker.cot.verifier import answer_of, share_of_right_steps
from kvtier_worker.cot.vocabulary import STOP_TOKEN
from kvtier_worker.daemon import sizes_for
from kvtier_worker.demo import SWAP_WAIT_S, daemon_clients
from kvtier_worker.engine import Engine, block_shape
from kvtier_worker.errors import SearchFailed
from kvtier_worker.metrics import SwapFigures, plus
from kvtier_worker.model import Llama
from kvtier_worker.pool import PagedPool
from kvtier_worker.search.beam import Beam
from kvtier_worker.search.best_of_n import BestOfN
from kvtier_worker.search.mcts import Mcts
from kvtier_worker.search.outcome import Outcome, SearchFigures
from kvtier_worker.search.question import Question, Strategy
from kvtier_worker.search.vote import MajorityVote
from kvtier_worker.swap import DaemonStore
from kvtier_worker.tiers import TierFigures, TierWatch

SINGLE: Final = "single sample"
BLOCK_TOKENS: Final = 16
ARENA_SESSIONS: Final = 2
"""A daemon of its own has DRAM for so many whole solutions: most of what is parked must spill."""
SPILL_POOLS: Final = 4
"""And so many times the pool's bytes on disk."""


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """Which strategies search how many problems, with how many branches, and where KV goes."""

    names: tuple[str, ...]
    problems: int
    size: Size
    n: int
    width: int
    expand: int
    visits: int
    rollouts: int
    temperature: float
    seed: int
    pool_bytes: int
    socket_path: str | None = None
    admin_path: str | None = None

    def strategies(self) -> dict[str, Strategy]:
        """By name; a single sample is a vote of one. Errors: BadSearch."""
        verifier = share_of_right_steps
        every: dict[str, Strategy] = {
            "vote": MajorityVote(answer_of, self.n),
            "best-of-n": BestOfN(verifier, self.n),
            "beam": Beam(verifier, RULES, self.width, self.expand),
            "mcts": Mcts(verifier, RULES, self.expand, self.visits, self.rollouts),
        }
        return {SINGLE: MajorityVote(answer_of, 1)} | {name: every[name] for name in self.names}


class StrategyRun(msgspec.Struct, frozen=True):
    """All searches of one strategy. `failed` are those without any answer; `last` is the last
    search that found one. `computed_tokens` are all that the model computed, prompts included."""

    problems: int
    right: int
    failed: int
    figures: SearchFigures
    swap: SwapFigures
    tiers: TierFigures
    computed_tokens: int
    recomputed_tokens: int
    wall_s: float
    last: Outcome | None


def run_trial(
    model: Llama, plan: TrialPlan, progress: Callable[[str], None]
) -> dict[str, StrategyRun]:
    """Let every strategy search the same problems; `progress` is told which one is done.

    Errors: BadSearch; those of the engine, the daemon and the client.
    """
    strategies = plan.strategies()
    random = np.random.default_rng(plan.seed)
    problems = [sample_problem(random, plan.size) for _ in range(plan.problems)]
    shape = block_shape(model, BLOCK_TOKENS)
    session_bytes = shape.blocks(plan.size.tokens) * shape.block_bytes
    sizes = sizes_for(
        shape.block_bytes, ARENA_SESSIONS * session_bytes, SPILL_POOLS * plan.pool_bytes
    )
    runs = {}
    with daemon_clients(plan.socket_path, plan.admin_path, sizes) as (client, admin):
        for name, strategy in strategies.items():
            engine = _engine(model, plan, client)
            runs[name] = _run(engine, plan, strategy, problems, admin)
            progress(name)
    return runs


def _engine(model: Llama, plan: TrialPlan, client: kv.Client) -> Engine:
    pool = PagedPool(block_shape(model, BLOCK_TOKENS), plan.pool_bytes, model.device)
    store = DaemonStore(client, pool, model.config.name, SWAP_WAIT_S)
    return Engine(model, pool, store, folding=by_token(plan.size.step_tokens))


def _run(
    engine: Engine,
    plan: TrialPlan,
    strategy: Strategy,
    problems: list[Problem],
    admin: AdminClient,
) -> StrategyRun:
    watch, began_s = TierWatch(admin), perf_counter()
    right, failed, last = 0, 0, None
    figures = SearchFigures(0, 0, 0, 0, 0, 0, 0, 0)
    for number, problem in enumerate(problems):
        question = Question(
            problem.prompt, len(problem.solution), STOP_TOKEN, plan.temperature, plan.seed + number
        )
        try:
            last = strategy.search(engine, question)
        except SearchFailed as error:
            failed, took = failed + 1, error.figures
        else:
            right, took = right + problem.is_right(last.winner.generated), last.figures
        if took is not None:
            figures = plus(figures, msgspec.structs.asdict(took))
    counters = engine.scheduler.counters
    return StrategyRun(
        problems=len(problems),
        right=right,
        failed=failed,
        figures=figures,
        swap=engine.store.figures(),
        tiers=watch.figures(),
        computed_tokens=counters.computed_tokens,
        recomputed_tokens=counters.recomputed_tokens,
        wall_s=perf_counter() - began_s,
        last=last,
    )
