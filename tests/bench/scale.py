"""A daemon with ten million blocks: how it restarts, what it weighs, and how fast it answers.

Blocks are headers without payloads (synthetic.py); the daemon that finds them is the real one.
"""

import contextlib
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from kvtierd.bench.figures import Figure, middle
from kvtierd.bench.plan import Plan
from tests.bench import synthetic
from tests.bench.starts import launched_s
from tests.support.daemon import DaemonProcess
from tests.support.raw import HELD, RawClient, u32

FEW: Final = 10_000
MANY: Final = 1_000_000
MOST: Final = 10_000_000
RESTARTS: Final = 3
START_MAX_S: Final = 300.0
POLL_S: Final = 0.002
ROUNDS: Final = 121
WARM_ROUNDS: Final = 10
BATCH: Final = 256
EVICTED: Final = 16
EVICTIONS: Final = 15
"""Few enough that the small daemon has as many clean blocks in DRAM."""
PINGS: Final = 1000
LAP: Final = re.compile(r"(\w+) ([0-9.]+) s")


class Host:
    """Media with so many blocks, and the daemon's process on them."""

    def __init__(self, place: Path, sockets: str, blocks: int) -> None:
        self.parts = synthetic.parts(blocks)
        self.blocks = sum(part.blocks for part in self.parts)
        tenants, sections = synthetic.sections(self.parts)
        self.daemon = DaemonProcess(place, tenants, **sections)
        paths = {"client_path": f"{sockets}/client.sock", "admin_path": f"{sockets}/admin.sock"}
        self.daemon.sections["socket"] = paths
        self.daemon.client_path, self.daemon.admin_path = paths.values()
        self.daemon.start()
        self.daemon.kill()
        synthetic.fill(self.parts, self.daemon.state_path, place / "run")

    def restart(self) -> float:
        """Seconds from the start of a process on what a killed one left to its answer to HELLO."""
        if self.daemon.process is not None:
            self.daemon.kill()
        return launched_s(self.daemon, START_MAX_S)

    def cpu_s(self) -> float:
        """CPU time that the daemon has used since it was started, in all its threads."""
        assert self.daemon.process is not None
        times = psutil.Process(self.daemon.process.pid).cpu_times()
        return float(times.user + times.system)

    def laps(self) -> dict[str, float]:
        """How long the parts of the last restart took, as the daemon's log says."""
        line = [line for line in self.daemon.log().splitlines() if "restored:" in line][-1]
        return {name: float(seconds) for name, seconds in LAP.findall(line)}

    def memory_bytes(self) -> tuple[int, int]:
        """Resident memory, now and at its peak; nobody has touched the arena's payload."""
        assert self.daemon.process is not None
        status = Path(f"/proc/{self.daemon.process.pid}/status").read_text()
        now = psutil.Process(self.daemon.process.pid).memory_info().rss
        peak = re.search(r"VmHWM:\s+(\d+)", status)
        assert peak is not None
        return int(now), int(peak[1]) * 1024


class Caller:
    """A client of the first tenant that asks for the same at every host."""

    def __init__(self, host: Host) -> None:
        self.client = RawClient(host.daemon.client_path)
        self.client.hello()
        self.client.socket.settimeout(None)
        self.admin = RawClient(host.daemon.admin_path)
        self.print = host.parts[0].layout.fingerprint()
        self.keys = synthetic.keys(host.parts[0], 0)
        self.random = np.random.default_rng(1)
        self.open()

    def open(self) -> None:
        """A new session."""
        token = self.random.bytes(16)
        self.session = self.client.ask("open_session", token, [self.print])[4]

    def wanted(self) -> bytes:
        """Keys of blocks that are stored, others at every call."""
        some = self.keys[self.random.integers(0, len(self.keys), BATCH)]
        return some.tobytes()

    def lookup(self, keys: bytes) -> None:
        """All of them are there."""
        assert self.client.ask("lookup", [self.print], keys)[4] == [BATCH]

    def store(self) -> None:
        """Reserve and commit."""
        granted = self.client.ask("reserve", self.client.lease(), self.print, BATCH)
        done = self.client.ask(
            "commit", granted[4], self.session, 0, PAGES, PAGES, FULL, HELD
        )  # fmt: skip
        assert done[4] == BATCH

    def drop(self) -> None:
        """End the session, so that what was stored is gone."""
        self.client.ask("close_session", self.session)
        self.open()

    def evict(self) -> None:
        """Have blocks leave DRAM of which NVMe has a copy: what it costs to choose them."""
        assert self.admin.ask("evict", "a", EVICTED)[4]["blocks"] == EVICTED

    def close(self) -> None:
        """Disconnect."""
        self.client.close()
        self.admin.close()


PAGES: Final = u32(*range(BATCH))
FULL: Final = u32(*[synthetic.BLOCK_TOKENS] * BATCH)


@contextlib.contextmanager
def hosts(plan: Plan, *blocks: int) -> Iterator[list[Host]]:
    """Hosts with so many blocks each; nothing of them is left afterwards."""
    with contextlib.ExitStack() as undo:
        found = []
        for number in blocks:
            place = undo.enter_context(plan.empty_directory())
            # A socket's name may be 107 bytes long, which a deep directory would exceed.
            sockets = undo.enter_context(tempfile.TemporaryDirectory(prefix="kvtierd-bench-"))
            found.append(Host(place, sockets, number))
            undo.callback(found[-1].daemon.end)
        yield found


def us(work: Callable[..., object], *args: Any) -> float:
    """How long a call takes."""
    begun = time.perf_counter()
    work(*args)
    return (time.perf_counter() - begun) * 1e6


def against(name: str, few: list[float], most: list[float], budget: float | None) -> list[Figure]:
    """The same calls with most and with few blocks."""
    ratios = [a / b for a, b in zip(most, few, strict=True)]
    return [
        middle(f"scale.{name}_10m_over_10k", ratios, budget, "lower"),
        middle(f"scale.{name}_10m_us", most, better="lower"),
        middle(f"scale.{name}_10k_us", few, better="lower"),
    ]


def _requests(plan: Plan, few: Caller, most: Caller) -> list[Figure]:
    """Look-ups, writes and evictions, in turns."""
    names = ("lookup256", "reserve_commit256", "evict16")
    taken: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}
    rounds = plan.rounds(ROUNDS)
    for turn in range(-WARM_ROUNDS, rounds):
        for index, caller in enumerate((few, most)):
            looked = us(caller.lookup, caller.wanted())
            stored = us(caller.store)
            caller.drop()
            evicted = us(caller.evict) if 0 <= turn < min(EVICTIONS, rounds) else 0.0
            for name, value in zip(names, (looked, stored, evicted), strict=True):
                if turn >= 0 and value:
                    taken[name][index].append(value)
    longest_us = 0.0
    for _ in range(plan.part(PINGS)):
        longest_us = max(longest_us, us(most.lookup, most.wanted()))
        time.sleep(POLL_S)
    return [
        *against("lookup256", *taken["lookup256"], 3.0),
        *against("reserve_commit256", *taken["reserve_commit256"], None),
        *against("evict16", *taken["evict16"], None),
        Figure(
            "scale.stall_10m_ms", longest_us / 1e3, better="lower", note="longest of 1000 look-ups"
        ),
        Figure(
            "scale.stats_10m_ms", us(most.admin.ask, "stats") / 1e3, better="lower",
            note="the loop stands still while an operator asks",
        ),
    ]  # fmt: skip


def measure(plan: Plan) -> list[Figure]:
    """Restarts with a million and ten million blocks; memory and requests with the latter."""
    restarts = plan.rounds(RESTARTS)
    with hosts(plan, plan.part(MANY)) as [many]:
        figures = [
            middle("scale.restart_1m_s", [many.restart() for _ in range(restarts)], 2.0, "lower")
        ]
    with hosts(plan, FEW, plan.part(MOST)) as [few, most]:
        taken_s = [most.restart() for _ in range(restarts)]
        figures.append(middle("scale.restart_10m_s", taken_s, 15.0, "lower"))
        figures.append(Figure("scale.restart_10m_cpu_s", most.cpu_s(), better="lower"))
        figures += [
            Figure(f"scale.restart_10m.{name}_s", seconds, better="lower")
            for name, seconds in most.laps().items()
        ]
        now, peak = most.memory_bytes()
        figures += [
            Figure("scale.bytes_per_block", now / most.blocks, 250.0, "lower"),
            Figure("scale.peak_bytes_per_block", peak / most.blocks, better="lower"),
        ]
        few.restart()
        callers = Caller(few), Caller(most)
        figures += _requests(plan, *callers)
        for caller in callers:
            caller.close()
    return figures
