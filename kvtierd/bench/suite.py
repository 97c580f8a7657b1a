"""All benchmarks of a host, what they need, and how they are run one after the other."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

import psutil

from kvtier_client.errors import CapacityError, InvalidArgument
from kvtierd.bench import (
    clients,
    control,
    cpu,
    dram,
    dram_sizes,
    fio,
    mixed,
    neighbours,
    nvme,
    prune,
)
from kvtierd.bench.figures import Figure, load
from kvtierd.bench.plan import GIB, MIB, Plan

CGROUP: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark and what it takes of the host; with less it is not begun."""

    measure: Callable[[Plan], list[Figure]]
    memory_bytes: int
    disk_bytes: int = 64 * MIB
    uses_fio: bool = False


BENCHMARKS: Final[Mapping[str, Benchmark]] = {
    "control": Benchmark(control.measure, GIB),
    "control.verbs": Benchmark(control.verbs, GIB),
    "prune": Benchmark(prune.measure, GIB),
    "dram.single": Benchmark(dram.single, GIB),
    "dram.batch": Benchmark(dram.batch, GIB),
    "dram.sweep": Benchmark(dram_sizes.sweep, 3 * GIB // 2),
    "dram.latency": Benchmark(dram_sizes.latency, 3 * GIB // 2),
    "clients": Benchmark(clients.measure, 4 * GIB),
    "nvme": Benchmark(nvme.measure, GIB, 2 * GIB, uses_fio=True),
    "nvme.sizes": Benchmark(nvme.sizes, GIB, 2 * GIB, uses_fio=True),
    "nvme.encrypted": Benchmark(nvme.encrypted, 2 * GIB, 3 * GIB),
    "under_spill": Benchmark(mixed.under_spill, GIB, 2 * GIB),
    "writer": Benchmark(mixed.writer, GIB, 3 * GIB, uses_fio=True),
    "neighbours": Benchmark(neighbours.measure, 2 * GIB, 2 * GIB),
    "cpu": Benchmark(cpu.measure, GIB, 2 * GIB),
}


def chosen(names: Iterable[str], known: Mapping[str, Benchmark]) -> dict[str, Benchmark]:
    """The named benchmarks, or all of them, in their order. Errors: InvalidArgument."""
    wanted = set(names)
    unknown = wanted - set(known)
    if unknown:
        raise InvalidArgument(
            f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(known)}"
        )
    return {name: one for name, one in known.items() if not wanted or name in wanted}


def require_room(directory: Path, benchmarks: Mapping[str, Benchmark]) -> None:
    """Errors: InvalidArgument without the directory; CapacityError when it or memory is short."""
    if not os.access(directory, os.W_OK | os.X_OK) or not directory.is_dir():
        raise InvalidArgument(
            f"cannot put files into {directory}; name a directory that you may write to"
        )
    parts = [
        ("memory", available_bytes(), "memory_bytes", "stop other programs"),
        (f"disk space in {directory}", shutil.disk_usage(directory).free, "disk_bytes",
         "name another directory"),
    ]  # fmt: skip
    for what, there, need, advice in parts:
        short = [name for name, one in benchmarks.items() if getattr(one, need) > there]
        if short:
            most = max(getattr(benchmarks[name], need) for name in short)
            raise CapacityError(
                f"{', '.join(short)} would need up to {most / GIB:.1f} GiB of {what}, and "
                f"{there / GIB:.1f} are free; {advice}, or leave these out"
            )


def available_bytes() -> int:
    """Memory that this process may still take, of the host and of its cgroup."""
    available = int(psutil.virtual_memory().available)
    try:
        limit, used = (
            int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current")
        )
    except (OSError, ValueError):  # no cgroup of ours, or "max"
        return available
    return min(available, limit - used)


def run(
    benchmarks: Mapping[str, Benchmark], plan: Plan, say: Callable[[str], None]
) -> Iterator[tuple[str, list[Figure]]]:
    """Run benchmarks; yields the figures of each as soon as it has ended.

    `say` gets one line about each. Errors: those of `require_room`, before anything is run;
    KvtierError.
    """
    require_room(plan.directory, benchmarks)
    with _ended_by_sigterm():
        for name, one in benchmarks.items():
            begun = time.monotonic()
            if one.uses_fio and not fio.installed():
                say(f"{name}: without ratios; {fio.ADVICE}")
            try:
                figures = one.measure(plan)
            except fio.FioMissing as missing:
                say(f"{name}: left out; {missing}")
                continue
            say(f"{name}: {time.monotonic() - begun:.0f} s; {load()}")
            yield name, figures


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end this process as an exception does: daemons are ended, files removed."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
