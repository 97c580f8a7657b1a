"""`python -m tests.sim SEED` replays a seed; `--seeds N` or `--steps N` runs many and counts."""

import multiprocessing
import os
import time
from collections import Counter

import click

from tests.sim.run import STEPS, run_one


@click.command()
@click.argument("seed", type=int, default=0)
@click.option("--seeds", type=int, default=1, help="So many seeds, from SEED on.")
@click.option("--steps", type=int, default=0, help="Seeds until so many steps were taken.")
@click.option("--length", type=int, default=STEPS, help="Steps of one history before its end.")
@click.option("--jobs", type=int, default=1, help="Processes.")
def main(seed: int, seeds: int, steps: int, length: int, jobs: int) -> None:
    """Run histories of the simulated machine; a seed that fails is printed with its trace."""
    count = -(-steps // length) if steps else seeds
    total: Counter[str] = Counter()
    failed: list[int] = []
    began_s = time.monotonic()
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=200) as pool:
        pairs = [(each, length) for each in range(seed, seed + count)]
        for number, problem, counts in pool.imap_unordered(run_one, pairs):
            total += counts
            if problem:
                failed.append(number)
                click.echo(f"seed {number} of {length} steps failed:{os.linesep}{problem}")
            if steps and total["steps"] >= steps:
                break
        pool.terminate()
    for name, value in sorted(total.items()):
        click.echo(f"{value:>12,}  {name}")
    click.echo(f"{time.monotonic() - began_s:12.1f}  seconds")
    if failed:
        raise SystemExit(f"failed: {failed}; replay one with python -m tests.sim SEED")


if __name__ == "__main__":
    main()
