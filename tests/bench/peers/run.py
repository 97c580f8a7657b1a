"""Interleaves the stores: in every round each one in turn, with the same amount of bytes."""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from tests.bench.peers import install
from tests.bench.peers.adapter_process import (
    ROUND_MAX_S,
    START_MAX_S,
    AdapterProcess,
    PeerFailed,
)
from tests.bench.peers.adapters.peer import Order, Setup, Times, Unavailable
from tests.bench.peers.stores import Store

MIB: Final = 1 << 20
SHM: Final = Path("/dev/shm")
WARM_ROUNDS: Final = 2
"""Rounds that count for nothing: memory is touched, connections and leases are there."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Case:
    """Blocks of `size` bytes, `batch` of them in each call; `shuffled` as for `Order`."""

    name: str
    size: int
    batch: int
    shuffled: bool = False


CASES: Final = (
    Case("single1m", MIB, 1),
    Case("shuffled1m", MIB, 1, shuffled=True),
    Case("single4m", 4 * MIB, 1),
    Case("single16m", 16 * MIB, 1),
    Case("batch1m", MIB, 16),
    Case("batch4m", 4 * MIB, 16),
    Case("batch16m", 16 * MIB, 8),
)


@dataclass(frozen=True)
class Extent:
    """How much is measured: the bytes of a round, the rounds, and the cases."""

    round_bytes: int = 128 * MIB
    rounds: int = 9
    cases: Sequence[Case] = CASES


@dataclass
class Found:
    """What was measured of a store: the rounds of each case."""

    store: Store
    version: str
    times: dict[str, list[Times]] = field(default_factory=dict)


@contextlib.contextmanager
def scratch(below: Path) -> Iterator[tuple[Path, Path]]:
    """A directory in shared memory and one on disk; both are gone afterwards, and so is whatever
    a store left in shared memory under the name of the first."""
    with tempfile.TemporaryDirectory(prefix="bench-peers-", dir=below) as disk:
        shm = Path(tempfile.mkdtemp(prefix="kvtierd-peers-", dir=SHM))
        try:
            yield shm, Path(disk)
        finally:
            for entry in SHM.glob(f"*{shm.name}*"):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def launch(store: Store, setup: Setup, log: Path) -> AdapterProcess:
    """Start a store's adapter with the Python that it needs. Errors: Unavailable."""
    # torch copies with so many threads; two were slower than one in every case on two cores
    python, environment = sys.executable, {"OMP_NUM_THREADS": "1"} | os.environ
    if store.pip:
        python = install.environment(store.adapter, store.pip)
        environment.pop("PYTHONPATH", None)
    if setup.program:
        environment |= install.libraries(setup.program)
    module = f"tests.bench.peers.adapters.{store.adapter}"
    return AdapterProcess([python, "-m", module], log, environment)


def compare(stores: Sequence[Store], extent: Extent, below: Path, say: Say) -> list[Found]:
    """Measure all stores that there are; `say` tells which are left out, and why.

    Errors: PeerFailed when kvtierd itself cannot be measured.
    """
    with contextlib.ExitStack() as ending:
        shm, disk = ending.enter_context(scratch(below))
        running: list[tuple[AdapterProcess, Found]] = []
        for store in stores:
            place = shm / store.name
            place.mkdir()
            try:
                setup = Setup(
                    extent.round_bytes, tuple(sorted({case.size for case in extent.cases})),
                    str(place), str(disk), variant=store.variant,
                    program=install.program(store.programs) if store.programs else "",
                )  # fmt: skip
                process = launch(store, setup, below / f"{store.name}.log")
                ending.callback(process.end)
                version = str(process.ask(asdict(setup), START_MAX_S)["version"])
            except (Unavailable, PeerFailed) as why:
                if store.ours:
                    raise
                say(f"{store.name}: left out: {why}")
                continue
            running.append((process, Found(store, version)))
            say(f"{store.name}: {version}")
        for turn in range(WARM_ROUNDS + extent.rounds):
            for case in extent.cases:
                running = [one for one in running if _measured(*one, case, turn, say)]
            say(f"round {turn + 1} of {WARM_ROUNDS + extent.rounds}")
        return [found for _, found in running]


def _measured(process: AdapterProcess, found: Found, case: Case, turn: int, say: Say) -> bool:
    """Measure one round of one case; False when the store must be left out from now on."""
    if case.batch > 1 and not found.store.batches:
        return True
    try:
        order = Order(turn, case.size, case.batch, case.shuffled)
        answer = process.ask(asdict(order), ROUND_MAX_S)
    except (Unavailable, PeerFailed) as why:
        if found.store.ours:
            raise
        say(f"{found.store.name}: left out from round {turn + 1}, {case.name}: {why}")
        return False
    if turn >= WARM_ROUNDS:
        found.times.setdefault(case.name, []).append(Times(**answer))
    return True
