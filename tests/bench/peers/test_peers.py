"""The comparison checks what comes back, says what is left out, and leaves nothing behind."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.bench.peers import install, run
from tests.bench.peers.__main__ import factors, figures
from tests.bench.peers.adapter_process import AdapterProcess, PeerFailed
from tests.bench.peers.adapters.peer import Bytes, Order, Peer, Rounds, Times, Unavailable
from tests.bench.peers.adapters.stream import Stream
from tests.bench.peers.run import MIB, Case, Extent, Found, compare
from tests.bench.peers.stores import ONE_WAY, OURS, PEERS, Store
from tests.support.wait import until

SMALL = Extent(8 * MIB, 2, (Case("single1m", MIB, 1), Case("batch1m", MIB, 4)))
TMPFS = next(store for store in PEERS if store.name == "tmpfs")


def entries() -> set[str]:
    return {entry.name for entry in run.SHM.glob("kvtierd-peers-*")}


def test_a_run_measures_all_stores_in_all_rounds_and_leaves_nothing(tmp_path: Path) -> None:
    before = entries()
    found = compare([OURS, ONE_WAY, TMPFS], SMALL, tmp_path, print)
    assert [one.store.name for one in found] == ["kvtierd", "kvtierd_oneway", "tmpfs"]
    assert {name: len(times) for name, times in found[0].times.items()} == {
        "single1m": 2, "batch1m": 2,
    }  # fmt: skip
    assert {figure.name for figure in figures(found)} >= {
        "peer.kvtierd.single1m.put_ratio_memcpy", "peer.tmpfs.batch1m.get_ratio_memcpy",
        "peer.tmpfs.single1m.put_x", "peer.tmpfs.single1m.put_oneway_x",
    }  # fmt: skip
    assert all(figure.value > 0 for figure in figures(found))
    assert entries() == before
    assert {path.suffix for path in tmp_path.iterdir()} == {".log"}


def test_a_store_that_cannot_be_had_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    said: list[str] = []
    missing = Store("nowhere", "redis", programs=("no-such-server",))
    found = compare([missing, TMPFS], replace(SMALL, rounds=1), tmp_path, said.append)
    assert [one.store.name for one in found] == ["tmpfs"]
    assert said[0].startswith("nowhere: left out: there is no no-such-server on the PATH, and apt")


def test_an_environment_whose_packages_are_not_to_be_had_is_not_ready(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="kvtierd-no-such-package"):
        install.environment("nowhere", [["--no-index", "kvtierd-no-such-package"]], tmp_path)
    assert (tmp_path / "nowhere" / "bin" / "python").exists()
    assert not (tmp_path / "nowhere" / "ready").exists()


def test_a_store_that_fails_in_a_round_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    said: list[str] = []
    uneven = Case("uneven", 3 * MIB, 2)  # the last 2 MiB of a round never come back
    extent = replace(SMALL, rounds=1, cases=(*SMALL.cases, uneven))
    found = compare([TMPFS, ONE_WAY], extent, tmp_path, said.append)
    assert [one.store.name for one in found] == ["kvtierd_oneway"]
    assert [len(times) for times in found[0].times.values()] == [1]
    assert any("tmpfs: left out from round 1, uneven: AssertionError" in line for line in said)


def test_an_adapter_that_cannot_start_is_left_out(tmp_path: Path) -> None:
    said: list[str] = []
    assert compare([Store("broken", "no_such_adapter")], SMALL, tmp_path, said.append) == []
    assert said[0].startswith("broken: left out: its adapter ended; see ")


class Forgetful(Peer):
    """Brings back the right bytes, except in the last block of a round when it forgets."""

    def __init__(self, forgets: bool) -> None:
        self.kept: dict[int, bytes] = {}
        self.forgets = forgets
        self.last = 0

    def begin(self, order: Order, blocks: int) -> None:
        self.last = blocks - 1

    def put(self, first: int, blocks: Sequence[Bytes]) -> None:
        for number, block in enumerate(blocks, first):
            if not (self.forgets and number == self.last and number in self.kept):
                self.kept[number] = block.tobytes()

    def get(self, first: int, blocks: Sequence[Bytes]) -> None:
        for number, block in enumerate(blocks, first):
            block[:] = np.frombuffer(self.kept[number], np.uint8)


@pytest.mark.parametrize("forgets", [False, True])
def test_a_get_that_brings_back_an_earlier_round_is_found_out(forgets: bool) -> None:
    rounds = Rounds(Forgetful(forgets), 4 * MIB)
    rounds.measure(Order(0, MIB, 2))
    if forgets:
        with pytest.raises(AssertionError, match="other bytes"):
            rounds.measure(Order(1, MIB, 2))
    else:
        rounds.measure(Order(1, MIB, 2))


def test_a_factor_is_the_quotient_of_ratios_to_memcpy_of_the_same_round() -> None:
    slow_minute = Times(memcpy_put_s=2.0, put_s=4.0, memcpy_get_s=2.0, get_s=2.0)
    ours = Found(OURS, "", {"single1m": [slow_minute, Times(1.0, 1.0, 1.0, 2.0)]})
    peer = Found(TMPFS, "", {"single1m": [Times(1.0, 4.0, 1.0, 4.0), Times(1.0, 4.0, 1.0, 4.0)]})
    put, get = factors(ours, peer, ("put", "get"))
    assert (put.name, list(put.rounds)) == ("peer.tmpfs.single1m.put_x", [2.0, 4.0])
    assert (get.name, list(get.rounds)) == ("peer.tmpfs.single1m.get_x", [4.0, 2.0])


def test_an_adapter_that_does_not_answer_is_ended_with_all_it_started(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('{\"child\": %d}' % child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = AdapterProcess([sys.executable, "-c", program], tmp_path / "log", dict(os.environ))
    child = process.ask({}, 30.0)["child"]
    with pytest.raises(PeerFailed, match="no answer within 0 s"):
        process.ask({}, 0.0)
    process.end()
    assert process.process.returncode is not None
    until(lambda: not alive(child), "the killed child is gone")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_ended_leaves_neither_processes_nor_shared_memory(number: int) -> None:
    before = entries()
    command = [sys.executable, "-m", "tests.bench.peers", "tmpfs"]
    with subprocess.Popen(command, cwd=install.ROOT, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        lines = iter(driver.stdout.readline, "")
        assert any(line.startswith("tmpfs: ") for line in lines)  # all adapters are there
        family = psutil.Process(driver.pid).children(recursive=True)
        assert len(family) >= 5  # three adapters, two of them with a daemon
        driver.send_signal(number)
        assert driver.wait(60) == 1
    until(lambda: not any(alive(one.pid) for one in family), "all processes are gone")
    assert entries() == before


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and not yet waited for does not."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_blocks_and_lines_are_told_apart_however_they_arrive(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        stream = Stream(path)
        server, _ = listener.accept()
    block = np.zeros(5000, np.uint8)
    with server:
        server.sendall(b"$5000\r\n" + b"x" * 5000 + b"\r\n+O")
        assert stream.line() == b"$5000"
        stream.fill(block)
        server.sendall(b"K\r\n")
        assert stream.line() == b"+OK"
        assert block.tobytes() == b"x" * 5000
        stream.send([b"a" * 10, block, b"\r\n"])
        assert server.recv(6000, socket.MSG_DONTWAIT)[:11] == b"a" * 10 + b"x"
    stream.close()
