"""How long a daemon takes to start, and a program that imports the client to begin."""

import subprocess
import sys
import time
from typing import Final

from tests.bench.daemons import MIB, RECOVERY, directory
from tests.bench.figures import Figure, middle
from tests.support.daemon import DaemonProcess
from tests.support.raw import RawClient

ROUNDS: Final = 7
WARM_ROUNDS: Final = 1
"""Not counted: the first process compiles the sources, as an installation does once."""
POLL_S: Final = 0.002
START_MAX_S: Final = 30.0
IMPORT: Final = (
    "import sys, time; begun = time.perf_counter(); import kvtier_client; "
    "print((time.perf_counter() - begun) * 1e3, 'torch' in sys.modules)"
)


def start() -> list[Figure]:
    """From the start of the process, without prefault, to the answer to HELLO."""
    rounds = []
    for _ in range(WARM_ROUNDS + ROUNDS):
        with directory() as place:
            tenants = [{"name": "bench", "uids": ["self"], "arena_bytes": 1024 * MIB}]
            arena = {"huge_pages": "try", "slab_bytes": 64 * MIB, "min_block_bytes": 64 << 10}
            process = DaemonProcess(place, tenants, arena=arena, recovery=RECOVERY)
            begun = time.perf_counter()
            process.launch()
            try:
                _hello(process, begun + START_MAX_S)
                rounds.append(time.perf_counter() - begun)
            finally:
                process.end()
    counted = rounds[WARM_ROUNDS:]
    return [middle("start.seconds", counted, 0.5, "lower", "arena of 1 GiB, no prefault")]


def _hello(process: DaemonProcess, deadline_s: float) -> None:
    while True:
        try:
            client = RawClient(process.client_path)
        except OSError:
            assert process.process is not None
            assert process.process.poll() is None, process.log()
            assert time.perf_counter() < deadline_s, process.log()
            time.sleep(POLL_S)
            continue
        with client:
            client.hello()
        return


def imports() -> list[Figure]:
    """`import kvtier_client` in a fresh interpreter, numpy and msgspec included."""
    rounds = []
    for _ in range(WARM_ROUNDS + ROUNDS):
        done = subprocess.run(
            [sys.executable, "-c", IMPORT], check=True, capture_output=True, text=True, timeout=60
        )
        took_ms, torch = done.stdout.split()
        assert torch == "False", "importing kvtier_client has imported torch"
        rounds.append(float(took_ms))
    counted = rounds[WARM_ROUNDS:]
    return [middle("import.client.ms", counted, 100.0, "lower", "numpy and msgspec included")]
