"""Runs the benchmarks, prints their figures against the budgets, and keeps them.

python -m tests.bench [NAME ...]
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Final

from tests.bench import control, dram, figures, nvme, spill_raw, starts
from tests.bench.figures import Figure
from tests.bench.fio import FioMissing

BENCHMARKS: Final[dict[str, Callable[[], list[Figure]]]] = {
    "import": starts.imports,
    "start": starts.start,
    "control": control.measure,
    "dram.single": dram.single,
    "dram.batch": dram.batch,
    "nvme": nvme.measure,
    "nvme.raw": spill_raw.measure,
}


def main(names: list[str]) -> None:
    """Run the named benchmarks, or all of them."""
    unknown = set(names) - set(BENCHMARKS)
    if unknown:
        raise SystemExit(
            f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}"
        )
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # installed programs have theirs compiled
    found: list[Figure] = []
    print(figures.load(), flush=True)
    for name in names or BENCHMARKS:
        begun = time.monotonic()
        try:
            measured = BENCHMARKS[name]()
        except FioMissing as missing:
            print(f"{name}: left out, it {missing}", flush=True)
            continue
        figures.merge(measured)
        found += measured
        print(f"{name}: {time.monotonic() - begun:.0f} s; {figures.load()}", flush=True)
    print(figures.table(found))


if __name__ == "__main__":
    main(sys.argv[1:])
