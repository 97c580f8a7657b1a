"""Runs the benchmarks, those of `kvtierctl bench` and those for developers, and keeps the figures.

python -m tests.bench [NAME ...]
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from kvtier_client.errors import KvtierError
from kvtierd.bench import fio, plot, suite
from kvtierd.bench.figures import Figure, load, merge, table
from kvtierd.bench.plan import GIB, Plan
from kvtierd.bench.suite import Benchmark
from tests.bench import scale, spill_raw, starts


def cot(plan: Plan) -> list[Figure]:
    """Reasoning sessions, folded and not; torch is loaded by those only who run this."""
    from tests.bench.cot import measure

    return measure(plan)


BUILD: Final = Path(__file__).parents[2] / "build"
RESULTS: Final = BUILD / "bench.json"
PLOT: Final = BUILD / "bench.png"
BENCHMARKS: Final = {
    "import": Benchmark(starts.imports, GIB),
    "start": Benchmark(starts.start, 2 * GIB),
    **suite.BENCHMARKS,
    "nvme.raw": Benchmark(spill_raw.measure, GIB, 2 * GIB),
    "scale": Benchmark(scale.measure, 12 * GIB, 4 * GIB),
    "cot": Benchmark(cot, 2 * GIB, 4 * GIB),
}


def install_fio() -> None:
    """As root on Debian; what needs fio is left out otherwise."""
    if fio.installed() or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return
    print("installing fio with apt-get", flush=True)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(["apt-get", "update", "-q"], check=False, **quiet)
    install = ["apt-get", "install", "-q", "-y", "--no-install-recommends", "fio"]
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(install, check=False, env=environment, **quiet)


def main(names: list[str]) -> None:
    """Run the named benchmarks, or all of them."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # installed programs have theirs compiled
    BUILD.mkdir(exist_ok=True)
    found: list[Figure] = []
    try:
        benchmarks = suite.chosen(names, BENCHMARKS)
        install_fio()
        print(load(), flush=True)
        for _, figures in suite.run(benchmarks, Plan(BUILD), lambda line: print(line, flush=True)):
            merge(RESULTS, figures)
            found += figures
    except KvtierError as error:
        raise SystemExit(f"tests.bench: {type(error).__name__}: {error}") from None
    finally:
        if found:
            print(table(found))
    if plot.series(found):
        plot.draw(found, PLOT)
        print(f"plot: {PLOT}")


if __name__ == "__main__":
    main(sys.argv[1:])
