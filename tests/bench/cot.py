"""Long reasoning sessions with a fixed budget of KV: full KV, full KV with swap, folded steps.

Three engines get the same problems, the same weights and the same bytes of KV, all sessions in the
queue from the beginning, and take turns: in each round every engine generates as many tokens. So a
slow minute hits all of them. Figures of a whole run include its end, when the queue is empty and
few sessions are left.

python -m tests.bench.cot [--sessions N] [--rounds N]
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded

import numpy as np
import torch

import kvtier_client as kv
from kvtier_worker.cot.contest import Contest, Entrant, Policy, bound
from kvtier_worker.cot.policy import KEEP
from kvtier_worker.cot.shipped import shipped_model_path
from kvtier_worker.cot.task import SESSION_1K, SESSION_4K, sample_problem
from kvtier_worker.daemon import OwnDaemon, sizes_for
from kvtier_worker.load import load_model
from kvtier_worker.metrics import TICK_S, RunFigures
from kvtierd.bench.figures import Figure, middle, table
from kvtierd.bench.plan import Plan

SESSIONS: Final = 200
ROUNDS: Final = 20
BUDGET_TOKENS: Final = 8400
"""Of KV in the pool: two sessions of 4k tokens and a bit."""
DRAM_POOLS: Final = 16
"""The daemon's DRAM holds the pool's bytes so many times over; what is more, it spills."""
SEED: Final = 4_000_037
POLICIES: Final = (Policy.FULL, Policy.SWAP, Policy.UNFOLD)


@dataclass(slots=True)
class Turn:
    """What one engine did in one round."""

    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens, not those computed again."""
        return self.tokens / max(self.seconds, TICK_S)


def measure(plan: Plan, sessions: int = SESSIONS, rounds: int = ROUNDS) -> list[Figure]:
    """All figures; a quick run takes fewer and shorter sessions."""
    torch.set_num_threads(1)
    model = load_model(shipped_model_path(), torch.device("cpu")).model
    size = SESSION_1K if plan.quick else SESSION_4K
    random = np.random.default_rng(SEED)
    problems = tuple(sample_problem(random, size) for _ in range(plan.part(sessions)))
    contest = Contest(model, problems, BUDGET_TOKENS * size.tokens // SESSION_4K.tokens)
    with ExitStack() as stack:
        entrants = {
            policy: contest.enter(policy, stack.enter_context(_client(plan, contest)))
            for policy in POLICIES
        }
        turns = _take_turns(entrants, plan.rounds(rounds))
        return _figures(contest, entrants, turns)


@contextmanager
def _client(plan: Plan, contest: Contest) -> Iterator[kv.Client]:
    """A client of a daemon that nobody else uses."""
    sizes = sizes_for(
        contest.shape.block_bytes,
        DRAM_POOLS * contest.budget_bytes,
        len(contest.problems) * contest.session_bytes,
    )
    with (
        tempfile.TemporaryDirectory(prefix="kvtierd-bench-", dir=plan.directory) as directory,
        OwnDaemon(directory, sizes) as daemon,
        kv.Client(daemon.socket_path, name="bench") as client,
    ):
        client.connect()
        yield client


def _take_turns(entrants: dict[Policy, Entrant], rounds: int) -> dict[Policy, list[Turn]]:
    turns: dict[Policy, list[Turn]] = {policy: [] for policy in entrants}
    for part in range(1, rounds + 1):
        for policy, entrant in entrants.items():
            tokens, seconds = entrant.engine.clock.tokens, entrant.busy_s
            entrant.advance(part / rounds)
            turn = Turn(entrant.engine.clock.tokens - tokens, entrant.busy_s - seconds)
            turns[policy].append(turn)
            print(
                f"cot: round {part} of {rounds}, {policy}: {turn.tokens_per_s:.0f} tokens/s,"
                f" {turn.seconds:.0f} s",
                flush=True,
            )
    return turns


def _figures(
    contest: Contest, entrants: dict[Policy, Entrant], turns: dict[Policy, list[Turn]]
) -> list[Figure]:
    runs = {policy: entrant.engine.figures(policy) for policy, entrant in entrants.items()}
    full, swap, fold = (runs[policy] for policy in POLICIES)
    size, sessions = contest.problems[0].size, len(contest.problems)
    what = f"{sessions} sessions of {size.tokens} tokens in a pool of {contest.budget_tokens}"
    figures = [
        Figure("cot.concurrency_x", fold.mean_running / full.mean_running, 6, note=what),
        Figure("cot.throughput_x", _speed_x(entrants, Policy.UNFOLD), 5.3, note="of whole runs"),
        middle("cot.rounds.throughput_x", _ratios(turns, Policy.UNFOLD)),
        Figure("cot.recomputed_tokens", fold.recomputed_tokens, 0, "lower"),
        Figure("cot.bound_x", bound(size, KEEP), note="what lengths alone allow"),
        Figure("cot.swap.concurrency_x", swap.mean_running / full.mean_running),
        Figure("cot.swap.throughput_x", _speed_x(entrants, Policy.SWAP)),
        middle("cot.swap.rounds.throughput_x", _ratios(turns, Policy.SWAP)),
        Figure("cot.swap.recomputed_tokens", swap.recomputed_tokens),
    ]
    names = {Policy.FULL: "full", Policy.SWAP: "swap", Policy.UNFOLD: "fold"}
    for policy, name in names.items():
        figures += _own_figures(f"cot.{name}", runs[policy], entrants[policy])
    busy_s, folding = entrants[Policy.UNFOLD].busy_s, fold.folding
    tail_s = folding.seconds - folding.archive_s
    archive_note = "copying the steps to the daemon, before they are folded"
    return [
        *figures,
        Figure("fold.tail.share_of_decode", tail_s / busy_s, 0.01, "lower"),
        Figure("fold.archive.share_of_decode", folding.archive_s / busy_s, note=archive_note),
    ]


def _own_figures(name: str, run: RunFigures, entrant: Entrant) -> list[Figure]:
    score = entrant.score()
    figures = [
        Figure(f"{name}.concurrency", run.mean_running, note=f"peak {run.peak_running}"),
        Figure(f"{name}.tokens_per_s", run.generated_tokens / entrant.busy_s),
        Figure(f"{name}.seconds", entrant.busy_s),
        Figure(f"{name}.preemptions", run.preemptions),
        Figure(f"{name}.right_share", score.right / score.problems),
    ]
    if name == "cot.full":
        figures.append(Figure(f"{name}.recomputed_tokens", run.recomputed_tokens))
    return figures


def _speed_x(entrants: dict[Policy, Entrant], policy: Policy) -> float:
    one, other = (
        entrant.engine.clock.tokens / entrant.busy_s
        for entrant in (entrants[policy], entrants[Policy.FULL])
    )
    return one / other


def _ratios(turns: dict[Policy, list[Turn]], policy: Policy) -> list[float]:
    pairs = zip(turns[policy], turns[Policy.FULL], strict=True)
    return [one.tokens_per_s / other.tokens_per_s for one, other in pairs]


@click.command()
@click.option("--sessions", default=SESSIONS, show_default=True, type=click.IntRange(1))
@click.option("--rounds", default=ROUNDS, show_default=True, type=click.IntRange(1))
def main(sessions: int, rounds: int) -> None:
    """Print the figures without keeping them."""
    print(table(measure(Plan(Path(tempfile.gettempdir())), sessions, rounds)))


if __name__ == "__main__":
    main()
