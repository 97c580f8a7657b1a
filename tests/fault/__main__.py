"""`python -m tests.fault --cycles N` kills a daemon and its clients so often, and counts."""

import secrets
import tempfile
import time
from pathlib import Path

import click

from tests.fault.cycles import HOUSE_CYCLES, Totals, run


@click.command()
@click.option("--cycles", type=int, default=200, show_default=True, help="So many kills.")
@click.option("--seed", type=int, help="Of everything random; default: a new one.")
@click.option("--house", type=int, default=HOUSE_CYCLES, help="Cycles under one configuration.")
def main(cycles: int, seed: int | None, house: int) -> None:
    """Kill, check, start and read back; stops at the first broken promise and keeps its files."""
    seed = secrets.randbits(32) if seed is None else seed
    directory = Path(tempfile.mkdtemp(prefix="kvtierd-fault-"))
    click.echo(f"seed {seed}, files in {directory}")
    began_s = time.monotonic()
    totals, outcome = Totals(), "and the last cycle broke a promise"
    try:
        run(directory, cycles, seed, totals, house)
        directory.rmdir()
        outcome = "nothing lost, nothing foreign"
    finally:
        for line in totals.lines():
            click.echo(line)
        click.echo(f"{time.monotonic() - began_s:12.1f}  seconds; {outcome}")


if __name__ == "__main__":
    main()
