"""`python -m tests.sim SEED` replays a seed; `--seeds N` or `--steps N` runs many and counts."""

import time
from collections import Counter

import click

from tests.sim.many import complaint, outcomes
from tests.sim.run import STEPS

PROGRESS_S = 30.0


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
    digest = 0
    began_s = said_s = time.monotonic()
    failure = ""
    runs = outcomes(seed, 0 if steps else seeds, length, jobs, check_every)
    for outcome in runs:
        total += outcome.counts
        killed_at += outcome.killed_at
        digest ^= outcome.digest
        if outcome.problem:
            failure = complaint(outcome, length)
            break
        now_s = time.monotonic()
        if now_s - said_s > PROGRESS_S:
            said_s = now_s
            rate = total["steps"] / (now_s - began_s)
            click.echo(f"{total['steps']:>14,} steps, {total['seeds']:,} seeds, {rate:,.0f}/s")
        if steps and total["steps"] >= steps:
            break
    runs.close()
    for name, value in sorted(total.items()):
        click.echo(f"{value:>14,}  {name}")
    click.echo(f"{len(killed_at):>14,}  callbacks and awaits of the daemon at which it was killed")
    for place, value in sorted(killed_at.items()) if places else ():
        click.echo(f"{value:>14,}    {place}")
    click.echo(f"{digest:>14x}  digest of what ran when: the same whenever these seeds run")
    click.echo(f"{time.monotonic() - began_s:14.1f}  seconds, seeds from {seed} on")
    if failure:
        raise click.ClickException(failure)


if __name__ == "__main__":
    main()
