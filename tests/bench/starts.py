"""How long a daemon takes to start, and a program that imports the client to begin."""

import subprocess
import sys
import time
from typing import Final

from kvtierd.bench.figures import Figure, middle
from kvtierd.bench.plan import MIB, Plan
from tests.support.daemon import DaemonProcess
from tests.support.raw import Closed, RawClient

ROUNDS: Final = 7
WARM_ROUNDS: Final = 1
"""Not counted: the first process compiles the sources, as an installation does once."""
POLL_S: Final = 0.002
START_MAX_S: Final = 30.0
IMPORT: Final = (
    "import sys, time; begun = time.perf_counter(); {}; "
    "print((time.perf_counter() - begun) * 1e3, 'torch' in sys.modules)"
)
IMPORTS: Final = {
    "import.client.ms": "import kvtier_client",
    "import.client.used.ms": "from kvtier_client import Client",
}


def start(plan: Plan) -> list[Figure]:
    """From the start of the process, without prefault, to the answer to HELLO."""
    rounds = []
    for _ in range(WARM_ROUNDS + plan.rounds(ROUNDS)):
        with plan.empty_directory() as place:
            tenants = [{"name": "bench", "uids": ["self"], "arena_bytes": 1024 * MIB}]
            arena = {"huge_pages": "try", "slab_bytes": 64 * MIB, "min_block_bytes": 64 << 10}
            process = DaemonProcess(place, tenants, arena=arena, recovery={"memory": "off"})
            try:
                rounds.append(launched_s(process, START_MAX_S))
            finally:
                process.end()
    counted = rounds[WARM_ROUNDS:]
    return [middle("start.seconds", counted, 0.5, "lower", "arena of 1 GiB, no prefault")]


def launched_s(daemon: DaemonProcess, most_s: float) -> float:
    """Seconds from the start of a daemon's process to its answer to HELLO, at most `most_s`."""
    begun = time.perf_counter()
    process = daemon.launch()
    while True:
        try:
            with RawClient(daemon.client_path) as client:
                client.hello()
            return time.perf_counter() - begun
        except (OSError, Closed):
            assert process.poll() is None, daemon.log()
            assert time.perf_counter() - begun < most_s, daemon.log()
            time.sleep(POLL_S)


def imports(plan: Plan) -> list[Figure]:
    """An import in a fresh interpreter: of the package, and of what a program uses of it."""
    rounds: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for _ in range(WARM_ROUNDS + plan.rounds(ROUNDS)):
        for name, statement in IMPORTS.items():
            command = [sys.executable, "-c", IMPORT.format(statement)]
            done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
            took_ms, torch = done.stdout.split()
            assert torch == "False", f"{statement} has imported torch"
            rounds[name].append(float(took_ms))
    budgets = {"import.client.ms": 100.0}  # the rest is mostly numpy's own import
    return [
        middle(name, found[WARM_ROUNDS:], budgets.get(name), "lower", IMPORTS[name])
        for name, found in rounds.items()
    ]
