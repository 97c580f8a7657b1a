"""Fuzzes one target, or all, until so many units were taken; prints totals, fails at a finding.

    python -m tests.fuzz.run --frames 200000 --target protocol --jobs 2
    python -m tests.fuzz.run --frames 3000000 --target protocol --jobs 2 --dice
    python -m tests.fuzz.run --target media --replay build/fuzz/media/findings/crash-...

Each job is a process under libFuzzer's guidance (`worker.py`) with a seed of its own; jobs share
the corpus in `--corpus`, which grows. A finding is saved there, and the command that replays it is
printed. With `--dice` inputs are drawn and changed without looking at coverage, which is several
times as fast. Without `--frames` every target gets the few seconds' worth that CI runs.
"""

import argparse
import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random

from tests.fuzz.targets import TARGETS, without_coverage

SEEDS = 24
"""Inputs that a new corpus begins with."""
INPUT_LIMIT_S = 60
"""An input that takes longer is a hang."""
MEMORY_LIMIT_MB = 4096
REGRESSIONS = Path(__file__).parent / "regressions"
CI_UNITS = {
    "protocol": 6000, "wire": 8000, "media": 150, "config": 400, "holder": 300, "client": 4000,
}  # fmt: skip
_STATUS = re.compile(rb"cov: (\d+) ft: (\d+) corp: (\d+)")


class Job:
    """One process that fuzzes."""

    def __init__(self, target: str, place: Path, units: int, seed: int) -> None:
        self.target, self.seed = target, seed
        self.totals_path = place / f"totals-{seed}.json"
        self.totals_path.unlink(missing_ok=True)
        self.log_path = place / f"log-{seed}.txt"
        corpus, findings = place / "corpus", place / "findings"
        options = [
            f"-artifact_prefix={findings}/", f"-seed={seed}", f"-timeout={INPUT_LIMIT_S}",
            f"-rss_limit_mb={MEMORY_LIMIT_MB}", f"-max_len={TARGETS[target]().input_bytes}",
            "-len_control=0", "-reduce_inputs=0", "-reload=30", str(corpus),
        ]  # fmt: skip
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", "tests.fuzz.worker", target, str(units),
                    str(self.totals_path), *options,
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def coverage(self) -> tuple[int, int, int]:
        """Edges, features and inputs of the corpus, as last reported."""
        found = _STATUS.findall(self.log_path.read_bytes())
        return tuple(int(number) for number in found[-1]) if found else (0, 0, 0)  # type: ignore[return-value]

    def totals(self) -> Counter[str]:
        """What it has taken, once it has ended well."""
        return Counter(json.loads(self.totals_path.read_text()))


def fuzz(target: str, units: int, jobs: int, seed: int, base: Path) -> bool:
    """Fuzz one target; whether nothing was found."""
    place = base / target
    for name in ("corpus", "findings"):
        (place / name).mkdir(parents=True, exist_ok=True)
    sow(target, place / "corpus", seed)
    before = set(os.listdir(place / "findings"))
    began_s, used_s = time.monotonic(), _cpu_s()
    running = [Job(target, place, -(-units // jobs), seed + number) for number in range(jobs)]
    failed = [job for job in running if job.process.wait() or not job.totals_path.exists()]
    took_s, used_s = time.monotonic() - began_s, _cpu_s() - used_s
    totals: Counter[str] = sum((job.totals() for job in running if job not in failed), Counter())
    edges, features, inputs = max(job.coverage() for job in running)
    unit = TARGETS[target]().unit
    done = totals.pop(unit, 0)
    print(f"{target}: {done} {unit} in {took_s:.0f} s ({done / took_s:.0f}/s, "
          f"{done / max(used_s, 0.001):.0f} per second of CPU), {edges} edges, "
          f"{features} features, {inputs} inputs in the corpus")  # fmt: skip
    print("  " + ", ".join(f"{name} {count}" for name, count in totals.most_common()))
    for job in failed:
        print(f"  FOUND by seed {job.seed}; the end of {job.log_path}:")
        tail = job.log_path.read_bytes()[-4000:].decode(errors="replace").splitlines()
        print("\n".join(f"    {line}" for line in tail[-40:]))
    for name in sorted(set(os.listdir(place / "findings")) - before):
        command = f"python -m tests.fuzz.run --target {target} --replay"
        print(f"  replay: {command} {place / 'findings' / name}")
    return not failed


def roll(target: str, units: int, jobs: int, seed: int, base: Path) -> bool:
    """Fuzz one target by dice alone; whether nothing was found."""
    findings = base / target / "findings"
    findings.mkdir(parents=True, exist_ok=True)
    began_s, totals = time.monotonic(), Counter[str]()
    throws = [(target, -(-units // jobs), seed + number, findings) for number in range(jobs)]
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for counts, problem in pool.imap_unordered(throw, throws):
            totals.update(counts)
            if problem:
                print(problem)
                return False
    took_s, unit = time.monotonic() - began_s, TARGETS[target]().unit
    done = totals.pop(unit)
    print(f"{target}, by dice: {done} {unit} in {took_s:.0f} s ({done / took_s:.0f}/s)")
    print("  " + ", ".join(f"{name} {count}" for name, count in totals.most_common()))
    return True


def throw(given: tuple[str, int, int, Path]) -> tuple[Counter[str], str]:
    """One process's share: what it has taken, and the first finding if there is one."""
    name, units, seed, findings = given
    target = TARGETS[name]()
    take = target.take

    def late(*_: object) -> None:
        raise TimeoutError(f"an input took more than {INPUT_LIMIT_S} s")

    def watched(data: bytes) -> None:
        signal.alarm(INPUT_LIMIT_S)
        try:
            take(data)
        except BaseException:
            (findings / f"dice-{seed}").write_bytes(data)
            raise
        finally:
            signal.alarm(0)

    signal.signal(signal.SIGALRM, late)
    target.take = watched  # type: ignore[method-assign]
    try:
        without_coverage(target, seed, units)
    except BaseException:
        command = f"python -m tests.fuzz.run --target {name} --replay {findings}/dice-{seed}"
        return target.counts, f"{traceback.format_exc()}  replay: {command}"
    return target.counts, ""


def sow(target: str, corpus: Path, seed: int) -> None:
    """Begin a corpus."""
    if not any(corpus.iterdir()):
        for number in range(SEEDS):
            drawn = TARGETS[target]().draw(Random(seed * SEEDS + number))
            (corpus / f"seed-{number}").write_bytes(drawn)
        for path in (REGRESSIONS / target).glob("*.hex"):
            (corpus / path.stem).write_bytes(saved(path))


def saved(path: Path) -> bytes:
    """An input that was kept; those in the source tree are written in hexadecimal."""
    return bytes.fromhex(path.read_text()) if path.suffix == ".hex" else path.read_bytes()


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def replay(target: str, paths: list[Path]) -> None:
    """Take saved inputs, without libFuzzer: what is found is raised."""
    one = TARGETS[target]()
    with one.set_up():
        for path in paths:
            one.take(saved(path))
            print(f"{path}: nothing is found")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", choices=[*TARGETS, "all"], default="all")
    parser.add_argument("--frames", "--units", type=int, dest="units", help="per target")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path, default=Path("build/fuzz"))
    parser.add_argument("--dice", action="store_true", help="without coverage, and faster")
    parser.add_argument("--replay", type=Path, nargs="+", metavar="FILE")
    given = parser.parse_args()
    if given.replay:
        replay(given.target, given.replay)
        return 0
    names = list(TARGETS) if given.target == "all" else [given.target]
    good = True
    for name in names:
        units = given.units or CI_UNITS[name]
        good &= (roll if given.dice else fuzz)(name, units, given.jobs, given.seed, given.corpus)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
