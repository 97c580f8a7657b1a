"""`python -m tests.sim SEED` replays a seed; `--seeds N` or `--steps N` runs many and counts."""

import os
import time
from collections import Counter
from collections.abc import Generator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context

import click

from tests.sim.run import STEPS, Outcome, run_seeds

PROGRESS_S = 30.0
CHUNK_STEPS = 30_000
"""Steps that a worker takes before it reports."""
END_STEPS = 700
"""About as many steps has the end of a history, however short it is."""
CHUNKS_PER_PROCESS = 100
"""A worker is replaced after so many chunks: whatever it has leaked goes with it."""


@click.command()
@click.argument("seed", type=int, default=0)
@click.option("--seeds", type=int, default=1, help="So many seeds, from SEED on.")
@click.option("--steps", type=int, default=0, help="Seeds until so many steps were taken.")
@click.option("--length", type=int, default=STEPS, help="Steps of the longest history.")
@click.option("--jobs", type=int, default=1, help="Processes.")
@click.option("--check-every", type=int, default=0, help="Recount after so many events (0: a few).")
@click.option("--places", is_flag=True, help="List where the daemon was killed.")
def main(
    seed: int, seeds: int, steps: int, length: int, jobs: int, check_every: int, places: bool
) -> None:
    """Run histories of the simulated machine, and stop at the first seed that fails."""
    total: Counter[str] = Counter()
    killed_at: Counter[str] = Counter()
    began_s = said_s = time.monotonic()
    failure = ""
    chunk = max(1, CHUNK_STEPS // (length + END_STEPS))
    outcomes = _outcomes(seed, 0 if steps else seeds, chunk, length, jobs, check_every)
    for outcome in outcomes:
        total += outcome.counts
        killed_at += outcome.killed_at
        if outcome.problem:
            failure = (
                f"{outcome.problem}{os.linesep}seed {outcome.seed} failed; replay with\n"
                f"  python -m tests.sim {outcome.seed} --length {length} --check-every 1"
            )
            break
        now_s = time.monotonic()
        if now_s - said_s > PROGRESS_S:
            said_s = now_s
            rate = total["steps"] / (now_s - began_s)
            click.echo(f"{total['steps']:>14,} steps, {total['seeds']:,} seeds, {rate:,.0f}/s")
        if steps and total["steps"] >= steps:
            break
    outcomes.close()
    for name, value in sorted(total.items()):
        click.echo(f"{value:>14,}  {name}")
    click.echo(f"{len(killed_at):>14,}  callbacks and awaits of the daemon at which it was killed")
    for place, value in sorted(killed_at.items()) if places else ():
        click.echo(f"{value:>14,}    {place}")
    click.echo(f"{time.monotonic() - began_s:14.1f}  seconds, seeds from {seed} on")
    if failure:
        raise click.ClickException(failure)


def _outcomes(
    first: int, count: int, chunk: int, length: int, jobs: int, check_every: int
) -> Generator[Outcome, None, None]:
    """What became of seeds from `first` on: of `count`, or without end where that is 0."""
    end = first + count if count else 1 << 62
    if jobs == 1 or count == 1:
        for seed in range(first, end):
            yield run_seeds(seed, seed + 1, length, check_every)
        return
    pool = ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), max_tasks_per_child=CHUNKS_PER_PROCESS
    )
    pending: set[Future[Outcome]] = set()
    try:
        while first < end or pending:
            while first < end and len(pending) < 2 * jobs:
                stop = min(first + chunk, end)
                pending.add(pool.submit(run_seeds, first, stop, length, check_every))
                first = stop
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for each in done:
                yield each.result()
    finally:
        pool.shutdown(cancel_futures=True)


if __name__ == "__main__":
    main()
