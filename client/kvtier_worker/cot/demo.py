"""The main job: one reasoning model, the same problems and too little KV memory, four policies.

Full KV that is thrown away and recomputed, full KV that is swapped, steps that are folded, and
steps that are folded and come back when a question needs them.
"""

from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

import kvtier_client as kv
from kvtier_client.admin import AdminClient
from kvtier_worker.cot.contest import Contest, Policy, Score, bound
from kvtier_worker.cot.policy import KEEP
from kvtier_worker.cot.task import SESSION_1K, Size, sample_problem
from kvtier_worker.cot.vocabulary import STOP_TOKEN, text_of
from kvtier_worker.daemon import sizes_for
from kvtier_worker.demo import ARENA_SHARE, Progress, daemon_clients
from kvtier_worker.engine import Engine
from kvtier_worker.errors import UnsupportedModel
from kvtier_worker.load import LoadedModel
from kvtier_worker.metrics import RunFigures
from kvtier_worker.model import Llama
from kvtier_worker.tiers import TierFigures, TierSample, TierWatch

BUDGET_SESSIONS: Final = 2.6
"""The pool holds the whole KV of so many sessions."""
INTERNALS_SHARE: Final = 0.5
"""The share of problems that ask about a step's inside: more than in training, to see them all."""
SEED: Final = 11
LEAST_GAIN: Final = 1.5
WRONG_SHARE: Final = 0.05
"""Of the problems, so many more may be wrong with folded steps than with full KV."""


@dataclass(frozen=True, slots=True)
class ThoughtPlan:
    """What the demo runs, and where: a daemon that was named, or one of its own."""

    sessions: int
    size: Size = SESSION_1K
    socket_path: str | None = None
    admin_path: str | None = None

    @property
    def tokens(self) -> int:
        """Of all solutions."""
        return self.sessions * (self.size.tokens - self.size.prompt_tokens)


class ThoughtRun(msgspec.Struct, frozen=True):
    """One policy's run."""

    figures: RunFigures
    score: Score
    tiers: TierFigures
    samples: list[TierSample]


class ThoughtReport(msgspec.Struct, frozen=True):
    """All figures of the demo; `failures` is empty when it shows what it should.

    `bound_x` is how many times more sessions than with full KV could run at a time folded.
    """

    model: str
    session_tokens: int
    bound_x: float
    runs: dict[Policy, ThoughtRun]
    failures: list[str]


def knows_the_task(loaded: LoadedModel) -> bool:
    """Whether a model speaks the language of the reasoning task."""
    return loaded.tokenizer.decode([STOP_TOKEN]) == text_of(STOP_TOKEN)


def require_the_task(loaded: LoadedModel) -> None:
    """Errors: UnsupportedModel for a model of another task."""
    if not knows_the_task(loaded):
        raise UnsupportedModel(
            f"{loaded.model.config.name} does not know the reasoning task, whose solutions are"
            " judged here; take the shipped model"
        )


def run_thoughts(model: Llama, plan: ThoughtPlan, progress: Progress) -> ThoughtReport:
    """Run the four policies. Errors: those of the engine, the daemon and the client."""
    random = np.random.default_rng(SEED)
    problems = tuple(
        sample_problem(random, plan.size, INTERNALS_SHARE) for _ in range(plan.sessions)
    )
    contest = Contest(model, problems, int(BUDGET_SESSIONS * plan.size.tokens))
    sizes = sizes_for(
        contest.shape.block_bytes,
        contest.budget_bytes // ARENA_SHARE,
        2 * plan.sessions * contest.session_bytes,
    )
    runs, outputs = {}, {}
    with daemon_clients(plan.socket_path, plan.admin_path, sizes) as (client, admin):
        for policy in Policy:
            runs[policy], outputs[policy] = _run(contest, policy, client, admin, progress)
    return ThoughtReport(
        model=model.config.name,
        session_tokens=plan.size.tokens,
        bound_x=bound(plan.size, KEEP),
        runs=runs,
        failures=find_failures(runs, outputs[Policy.SWAP] == outputs[Policy.FULL]),
    )


def _run(
    contest: Contest, policy: Policy, client: kv.Client, admin: AdminClient, progress: Progress
) -> tuple[ThoughtRun, list[list[int]]]:
    entrant = contest.enter(policy, client)
    watch = TierWatch(admin)

    def step_done(engine: Engine) -> None:
        progress(policy, engine.clock.tokens)
        watch.on_step(engine)

    entrant.engine.run(step_done)
    run = ThoughtRun(
        entrant.engine.figures(policy), entrant.score(), watch.figures(), watch.samples
    )
    return run, [sequence.generated for sequence in entrant.sequences]


def find_failures(runs: dict[Policy, ThoughtRun], swap_is_exact: bool) -> list[str]:
    """What the runs should have shown and did not."""
    full, swap, fold, unfold = (runs[policy] for policy in Policy)
    folding, score = unfold.figures.folding, unfold.score
    lost = full.score.right - score.right
    gain = unfold.figures.mean_running / max(full.figures.mean_running, 1.0)
    checks = {
        "full KV was never preempted: there was no pressure": not full.figures.preemptions,
        "outputs under swap differ from those of full KV": not swap_is_exact,
        f"folded steps let only {gain:.2f} times as many sessions run": gain < LEAST_GAIN,
        "folded steps made it slower": unfold.figures.tokens_per_s <= full.figures.tokens_per_s,
        f"folded steps and unfolds got {lost} answers less right": lost
        > WRONG_SHARE * score.problems,
        "no step was unfolded": not folding.unfolds,
        f"{folding.misses + folding.crowded} unfolds found no KV or no room": folding.misses
        + folding.crowded
        > 0,
        "questions about a step's inside were answered without it": 2 * fold.score.internals_right
        > fold.score.internals,
        "the DRAM or the NVMe tier was not used": not all(
            run.tiers.dram_peak_bytes and run.tiers.nvme_peak_bytes for run in (swap, unfold)
        ),
    }
    for policy, run in ((Policy.SWAP, swap), (Policy.UNFOLD, unfold)):
        again, wrong = run.figures.recomputed_tokens, run.figures.swap.hashes_wrong
        checks[f"{again} tokens were recomputed under {policy}"] = again > 0
        checks[f"{wrong} blocks came back with another hash under {policy}"] = wrong > 0
    return [failure for failure, failed in checks.items() if failed]
