"""Kill -9 of a daemon and its clients, again and again; after each kill all promises are judged.

    house ─ a daemon under one configuration, four client processes, and what they were promised
      cycle ─ let them work ► strike ► stop the clients where they are ► `kvtierctl check`
              ► start again ► read back every block that was acknowledged ► let them go on
      end   ─ the clients close all they have: nothing may be left in any tier

A house lives for some cycles; then the next one, with another configuration, takes its place.
"""

import contextlib
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

import numpy as np

from kvtier_client.client import Client
from kvtier_client.client import Session as Handle
from kvtier_client.errors import InvalidArgument, UnknownSession
from kvtierd.ctl.check import check_files
from tests.fault.ledger import BLOCK_BYTES, BLOCK_TOKENS, LAYOUT, Ledger, Session, contents, key_of
from tests.support.daemon import DaemonProcess
from tests.support.wait import until

HOUSE_CYCLES: Final = 25
EVENTS_MAX: Final = 120
"""A strike comes after so many lines in the clients' ledgers, at random."""
ARENA_BYTES: Final = 4 << 20
SPILL_BYTES: Final = 24 << 20
START_S: Final = 0.5
STOP_S: Final = 0.2
KEEPER_S: Final = 60.0
LOST: Final = 255
NVME: Final = 2

STRIKES: Final = {
    "daemon": 8, "clients": 3, "both": 4, "starting": 4, "stopping": 2, "reloading": 2,
    "keeper": 1, "restart": 1,
}  # fmt: skip
"""What is killed, and how often: `starting` kills it during its next starts too, `stopping` in a
graceful stop, `keeper` kills the holder process first, `restart` is a graceful stop to its end."""


@dataclass(frozen=True)
class Setting:
    """What differs from house to house."""

    durability: str
    integrity: str
    memory: str
    directories: int

    @staticmethod
    def all() -> list["Setting"]:
        """The usual ones, and one whose memory ends with the daemon."""
        return [
            Setting("process", "spill", "holder", 1),
            Setting("power", "end_to_end", "holder", 2),
            Setting("power", "spill", "off", 1),
            Setting("process", "end_to_end", "holder", 1),
            Setting("power", "spill", "holder", 1),
        ]


@dataclass
class Totals:
    """What has been done so far."""

    cycles: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    read_blocks: int = 0
    sure_blocks: int = 0
    lost_blocks: int = 0
    checks: int = 0

    def lines(self) -> list[str]:
        """For people."""
        return [
            *(f"{count:>12,}  cycles: {name}" for name, count in sorted(self.cycles.items())),
            f"{self.cycles.total():>12,}  cycles",
            *(f"{count:>12,}  kill -9 of {name}" for name, count in sorted(self.kills.items())),
            f"{self.requests:>12,}  requests noted by clients",
            f"{self.checks:>12,}  checks of all files",
            f"{self.sure_blocks:>12,}  acknowledged HELD blocks looked for",
            f"{self.lost_blocks:>12,}  of them reported as gone with their memory, as configured",
            f"{self.read_blocks:>12,}  blocks read back, {self.read_blocks * BLOCK_BYTES:,} bytes",
        ]


class WorkerProcess:
    """A client process, its ledger, and its successors."""

    def __init__(self, house: "House", number: int, *options: str) -> None:
        self.house, self.number, self.options = house, number, options
        self.ledger = Ledger(house.ledger_path(number))
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, or its successor."""
        command = [
            sys.executable, "-m", "tests.fault.worker", self.house.daemon.client_path,
            str(self.ledger.path), "--number", str(self.number + 1),
            "--seed", str(self.house.chance.getrandbits(32)),
            "--until", str(self.house.last_call), *self.options,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self.house.log, stderr=self.house.log,
            start_new_session=True,  # else the end of our shell sends SIGCONT to who is stopped
        )  # fmt: skip

    def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def send(self, number: signal.Signals) -> None:
        """Send a signal; a client that has ended by itself has met what it must not meet."""
        if self.process is not None:
            assert self.process.poll() is None, (
                f"client {self.number} has ended: {self.house.said()}"
            )
            self.process.send_signal(number)


class House:
    """A daemon, its clients, and what happens to them."""

    def __init__(
        self, directory: Path, setting: Setting, chance: random.Random, totals: Totals
    ) -> None:
        directory.mkdir()
        self.directory, self.setting, self.chance, self.totals = directory, setting, chance, totals
        self.log: IO[bytes] = open(directory / "clients.log", "ab")  # noqa: SIM115
        spill = [str(directory / f"spill{number}") for number in range(setting.directories)]
        self.spill = spill
        self.last_call = directory / "last_call"
        self.daemon = DaemonProcess(
            directory,
            [{"name": "t", "uids": ["self"], "arena_bytes": ARENA_BYTES}],
            arena={"slab_bytes": 256 << 10},
            spill={
                "durability": setting.durability, "paths": spill, "slab_bytes": 512 << 10,
                "capacity_bytes": SPILL_BYTES // setting.directories,
            },
            recovery={"memory": setting.memory},
        )  # fmt: skip
        self.daemon.top["integrity"] = setting.integrity
        self.daemon.start()
        self.judge_client = Client(self.daemon.client_path)
        self.judge_client.register_layout(LAYOUT)
        self.on_nvme: set[tuple[str, int, int]] = set()
        self.present: set[tuple[str, int, int]] = set()
        self.workers: list[WorkerProcess] = []
        gone = ("--memory-may-go",) if self.memory_may_go else ()
        group = os.urandom(16).hex()
        for number, options in enumerate([
            (), ("--tasks", "3"),
            ("--group", group, "--partner", str(self.ledger_path(3))),
            ("--group", group, "--partner", str(self.ledger_path(2))),
        ]):  # fmt: skip
            self.workers.append(WorkerProcess(self, number, *options, *gone))

    @property
    def memory_may_go(self) -> bool:
        """The arena ends with the daemon."""
        return self.setting.memory == "off"

    def ledger_path(self, number: int) -> Path:
        """Where a client notes what it was promised."""
        return self.directory / f"client{number}.ledger"

    def said(self) -> str:
        """What the clients have said."""
        return (self.directory / "clients.log").read_text()

    # --------------------------------------------------------------- cycles

    def cycle(self, kind: str) -> None:
        """One strike and its judgement."""
        self.work()
        getattr(self, f"strike_{kind}")()
        for worker in self.workers:
            worker.send(signal.SIGSTOP)
        if self.daemon.process is None:
            self.check()
            self.daemon.start()
        self.judge(nothing_new_lost=kind in ("clients", "restart"))
        for worker in self.workers:
            worker.send(signal.SIGCONT)
            if worker.process is None:
                worker.start()
        self.totals.cycles[kind] += 1

    def work(self) -> None:
        """Let the clients work until they have noted some events."""
        goal = self.events() + self.chance.randint(1, EVENTS_MAX)

        def enough() -> bool:
            for worker in self.workers:
                worker.send(signal.SIGCONT)
            return self.events() >= goal

        until(enough, "the clients work")

    def events(self) -> int:
        return sum(worker.ledger.read().events for worker in self.workers)

    def kill_daemon(self) -> None:
        self.totals.kills["the daemon"] += 1
        self.daemon.kill()

    def kill_clients(self) -> None:
        for worker in self.chance.sample(self.workers, self.chance.randint(1, len(self.workers))):
            self.totals.kills["a client"] += 1
            worker.kill()

    def strike_daemon(self) -> None:
        self.kill_daemon()

    def strike_clients(self) -> None:
        self.kill_clients()

    def strike_both(self) -> None:
        first, second = self.chance.sample([self.kill_daemon, self.kill_clients], 2)
        first()
        second()

    def strike_starting(self) -> None:
        self.kill_daemon()
        for _ in range(self.chance.randint(1, 2)):
            self.check()
            self.daemon.launch()
            time.sleep(self.chance.uniform(0.0, START_S))
            self.kill_daemon()

    def strike_stopping(self) -> None:
        assert self.daemon.process is not None
        self.daemon.process.send_signal(signal.SIGTERM)
        time.sleep(self.chance.uniform(0.0, STOP_S))
        self.kill_daemon()

    def strike_reloading(self) -> None:
        assert self.daemon.process is not None
        self.daemon.sections["limits"]["sessions_per_tenant"] = self.chance.randint(1000, 2000)
        self.daemon.write_config()
        self.daemon.process.send_signal(signal.SIGHUP)
        time.sleep(self.chance.uniform(0.0, STOP_S / 4))
        self.kill_daemon()

    def strike_keeper(self) -> None:
        """The holder first; the daemon gives its memory to another one, and is killed then."""
        old = self.daemon.holders()
        for pid in old:
            self.totals.kills["the holder"] += 1
            os.kill(pid, signal.SIGKILL)
        if old:
            until(lambda: set(self.daemon.holders()) - set(old), "another holder", KEEPER_S)
            self.daemon.admin("stats")  # its loop has put all there before it answers
        self.kill_daemon()

    def strike_restart(self) -> None:
        for worker in self.workers:
            worker.send(signal.SIGSTOP)
        self.judge(nothing_new_lost=True)
        self.daemon.stop()

    # ---------------------------------------------------------------- judge

    def check(self) -> None:
        """What `kvtierctl check` says."""
        report = check_files(str(self.daemon.state_path), self.spill, True)
        assert report.ok, report.problems
        self.totals.checks += 1

    def judge(self, *, nothing_new_lost: bool) -> None:
        """Read back everything that was acknowledged; the clients stand still."""
        before, self.present = self.present, set()
        before_nvme, self.on_nvme = self.on_nvme, set()
        ledgers = [worker.ledger.read() for worker in self.workers]
        known = {token for ledger in ledgers for token in (*ledger.sessions, *ledger.closed)}
        ids = {hashlib.sha256(b"kvtierd-session" + bytes.fromhex(t)).digest()[:8] for t in known}
        numbers = {int.from_bytes(each, "little") for each in ids}
        sure: set[tuple[str, int, int]] = set()
        client = self.judge_client
        for ledger in ledgers:
            for token, session in ledger.sessions.items():
                sure |= self.judge_session(client, token, session)
            self.judge_keys(client, ledger)
        for token in [token for ledger in ledgers for token in list(ledger.closed)[-2:]]:
            assert resume(client, token) is None, f"closed session {token} is back"
        listed = self.daemon.admin("sessions")["sessions"]
        assert {int(each["session"], 16) for each in listed} <= numbers, (
            "a session that nobody opened"
        )
        missing = sure - self.present
        if not self.memory_may_go:
            assert not missing, f"lost: {sorted(missing)}"
        self.totals.lost_blocks += len(missing)
        must = before if nothing_new_lost else before_nvme
        assert not (must & sure) - self.present, f"lost: {sorted((must & sure) - self.present)}"

    def judge_session(
        self, client: Client, token: str, session: Session
    ) -> set[tuple[str, int, int]]:
        """Read back a session; returns the blocks that must be there."""
        handle = resume(client, token)
        if handle is None:
            assert not session.sure, f"session {token} is gone"
            return set()
        sure = {
            (token, number, page)
            for number, node in session.nodes.items()
            for page, each in node.pages.items()
            if each.sure
        }
        for node in handle.nodes():
            if node.node in session.gone_nodes:
                assert not len(node.pages[0]), f"pruned node {node.node} of {token} is back"
                continue
            expected = session.nodes[node.node].pages
            stored = node.pages[0][node.tiers[0] != LOST].tolist()
            assert set(stored) <= set(expected), f"blocks that nobody wrote: {token} {node}"
            assert set(node.valid[0].tolist()) <= {BLOCK_TOKENS}
            firm = [page for page in stored if expected[page].sure]
            self.read(handle, node.node, firm, session)
            for page in set(stored) - set(firm):  # may be dropped while we read
                with contextlib.suppress(InvalidArgument):
                    self.read(handle, node.node, [page], session)
            self.present |= {(token, node.node, page) for page in firm}
            slow = node.pages[0][node.tiers[0] == NVME].tolist()
            self.on_nvme |= {(token, node.node, page) for page in slow}
        self.judge_blob(handle, session)
        self.totals.sure_blocks += len(sure)
        return sure

    def read(self, handle: Handle, node: int, pages: list[int], session: Session) -> None:
        """Read pages of a node and compare every byte."""
        if pages:
            wanted = contents([session.nodes[node].pages[page].seed for page in pages])
            into = np.zeros_like(wanted)
            handle.swap_in(into, pages, node)
            assert (into == wanted).all(), f"foreign bytes: node {node}, pages {pages}"
            self.totals.read_blocks += len(pages)

    def judge_blob(self, handle: Handle, session: Session) -> None:
        version, data = handle.get_blob()
        assert version >= session.blob_version
        assert data == (contents([session.blobs[version]]).tobytes() if version else b"")

    def judge_keys(self, client: Client, ledger: Ledger) -> None:
        """Keyed blocks are right or missing; held ones are there."""
        held = {seed for session in ledger.sessions.values() for seed in session.held}
        for seed in ledger.keys:
            into = np.zeros((1, BLOCK_BYTES), np.uint8)
            found = client.get_keys(LAYOUT, [key_of(seed)], into)
            if found:
                assert (into == contents([seed])).all(), f"foreign bytes under key {seed}"
                self.totals.read_blocks += 1
            assert found or seed not in held or self.memory_may_go, f"held key {seed} is gone"

    # ------------------------------------------------------------------ end

    def end(self) -> None:
        """The clients end well: nothing of theirs is left."""
        self.last_call.touch()
        for worker in self.workers:
            assert worker.process is not None
            assert worker.process.wait(60.0) == 0, self.said()
            worker.process = None
            self.totals.requests += worker.ledger.read().last_number
        until(self.is_empty, lambda: f"all is given back: {self.daemon.tenant()}")
        self.daemon.stop()
        self.check()
        self.daemon.assert_no_faults()

    def is_empty(self) -> bool:
        tenant = self.daemon.tenant()
        names = ("sessions", "leases", "held_blocks", "keyed_blocks", "promised_blocks", "waiting")
        used = tenant["dram"]["used_bytes"], tenant["nvme"]["used_bytes"]
        return used == (0, 0) and not any(tenant[name] for name in names)

    def close(self) -> None:
        """Whatever state all is in."""
        for worker in self.workers:
            if worker.process is not None:
                worker.kill()
        self.judge_client.close()
        self.daemon.end()
        self.log.close()


def resume(client: Client, token: str) -> Handle | None:
    """A session, or nothing when the daemon has none of this token."""
    try:
        return client.resume_session(bytes.fromhex(token))
    except UnknownSession:
        return None


def run(
    directory: Path, cycles: int, seed: int, totals: Totals, house_cycles: int = HOUSE_CYCLES
) -> None:
    """Kill so often, and count. Errors: AssertionError, with the files left as they are."""
    chance, settings = random.Random(seed), Setting.all()
    for number in range(-(-cycles // house_cycles)):
        setting = settings[number % len(settings)]
        place = f"seed {seed}, house {number} ({setting})"
        house = House(directory / f"house{number}", setting, chance, totals)
        try:
            for _ in range(min(house_cycles, cycles - number * house_cycles)):
                (kind,) = chance.choices(list(STRIKES), list(STRIKES.values()))
                with noted(f"{place}, strike {kind!r}"):
                    house.cycle(kind)
            with noted(place):
                house.end()
        finally:
            house.close()
        shutil.rmtree(house.directory)


@contextlib.contextmanager
def noted(place: str) -> Iterator[None]:
    """An error says where it happened."""
    try:
        yield
    except Exception as error:
        error.add_note(place)
        raise
