"""Many histories in several processes, and what to say of one that fails."""

import os
from collections.abc import Generator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context

from tests.sim.run import Outcome, run_seeds

CHUNK_STEPS = 30_000
"""Steps that a worker takes before it reports."""
END_STEPS = 700
"""About as many steps has the end of a history, however short it is."""
CHUNKS_PER_PROCESS = 100
"""A worker is replaced after so many chunks: whatever it has leaked goes with it."""


def outcomes(
    first: int, count: int, length: int, jobs: int, check_every: int = 0
) -> Generator[Outcome, None, None]:
    """What became of seeds from `first` on: of `count`, or without end where that is 0."""
    end = first + count if count else 1 << 62
    if jobs == 1 or count == 1:
        for seed in range(first, end):
            yield run_seeds(seed, seed + 1, length, check_every)
        return
    chunk = max(1, CHUNK_STEPS // (length + END_STEPS))
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


def complaint(outcome: Outcome, length: int) -> str:
    """What went wrong, and how to see it again."""
    return (
        f"{outcome.problem}{os.linesep}seed {outcome.seed} failed; replay with\n"
        f"  python -m tests.sim {outcome.seed} --length {length} --check-every 1"
    )
