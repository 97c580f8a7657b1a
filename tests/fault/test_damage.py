"""Damage at random places of any file while no daemon runs: never a wrong byte, never in silence.

The daemon either refuses to start and says why, or serves what is right and reports the rest.
`KVTIERD_FAULT_DAMAGES` sets how many damages are tried; `make fault` tries many.
"""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvtier_client.client import Client, Session
from kvtier_client.errors import DataError, InvalidArgument, UnknownBranch, UnknownSession
from kvtierd.ctl.check import check_files
from tests.fault.ledger import LAYOUT, contents, key_of
from tests.support.daemon import DaemonProcess
from tests.support.descriptors import memfds
from tests.support.fixtures import MakeDaemon
from tests.support.seeds import drawn_seed
from tests.support.wait import until

DAMAGES = int(os.environ.get("KVTIERD_FAULT_DAMAGES", "2"))
PAGES = 48
KEYS = list(range(9000, 9012))
USED_BYTES = 3 << 20
"""Damage is done within the part of a file that is in use."""
ARENA = {"arena_bytes": 4 << 20}


def tokens(seed: int) -> list[bytes]:
    """On NVMe only, in DRAM only, and on both."""
    return [random.Random(seed * 3 + i).randbytes(16) for i in range(3)]


def seeds_of(session: int) -> list[int]:
    return [1000 * (session + 1) + page for page in range(PAGES)]


def new_daemon(make_daemon: MakeDaemon, name: str = "d") -> DaemonProcess:
    daemon = make_daemon(
        name, tenants=[{"name": "t", "uids": ["self"]} | ARENA], arena={"slab_bytes": 256 << 10}
    )
    daemon.sections["spill"]["paths"] = [str(daemon.directory / f"spill{i}") for i in range(2)]
    daemon.sections["spill"] |= {"slab_bytes": 512 << 10, "capacity_bytes": 8 << 20}
    daemon.top["integrity"] = "end_to_end"
    return daemon


def fill(daemon: DaemonProcess, names: list[bytes]) -> None:
    """Blocks in both tiers, then a graceful stop; the memory stays with its keeper."""
    with Client(daemon.client_path) as client:
        sessions = [client.open_session([LAYOUT], token=token) for token in names]
        for number in (0, 2):
            sessions[number].swap_out(contents(seeds_of(number)), range(PAGES), 16)
        client.put_keys(LAYOUT, [key_of(seed) for seed in KEYS], contents(KEYS))
        daemon.admin("evict", "t")
        until(lambda: daemon.tenant()["dram"]["blocks"] == 0, "all is on NVMe")
        sessions[2].swap_in(np.zeros((PAGES, LAYOUT.block_bytes), np.uint8), range(PAGES))
        sessions[1].swap_out(contents(seeds_of(1)), range(PAGES), 16)
    daemon.stop()


def files(daemon: DaemonProcess) -> list[str]:
    """Everything that a start reads: files of both directories, and the memory of both kinds."""
    found = [str(daemon.state_path / "catalog.db")]
    for path in daemon.sections["spill"]["paths"]:
        found += [f"{path}/headers.kv", f"{path}/blocks.kv"]
    (holder,) = daemon.holders()
    return found + list(memfds(holder))


def flip_bits(fd: int, size: int, chance: random.Random) -> None:
    for _ in range(chance.choice([1, 1, 30])):
        at = chance.randrange(size)
        old = os.pread(fd, 1, at)[0]
        os.pwrite(fd, bytes([old ^ 1 << chance.randrange(8)]), at)


def exchange(fd: int, size: int, chance: random.Random) -> None:
    """Two ranges change places: pages of headers, or whole blocks."""
    length = chance.choice([128, 4096, LAYOUT.block_bytes])
    first, second = (chance.randrange(max(size // length, 1)) * length for _ in range(2))
    one, two = os.pread(fd, length, first), os.pread(fd, length, second)
    os.pwrite(fd, two, first)
    os.pwrite(fd, one, second)


def blank(fd: int, size: int, chance: random.Random) -> None:
    at = chance.randrange(size) // 512 * 512
    os.pwrite(fd, bytes(min(chance.choice([512, 4096, 65536]), size - at)), at)


def cut(fd: int, size: int, chance: random.Random) -> None:
    os.ftruncate(fd, chance.randrange(size))


HARMS: list[Callable[[int, int, random.Random], None]] = [flip_bits, exchange, blank, cut]


def damage(daemon: DaemonProcess, chance: random.Random) -> tuple[str, str]:
    """Do one damage; returns the file and what was done."""
    path = chance.choice(files(daemon))
    harm = chance.choice(HARMS[:3] if path.startswith("/proc") else HARMS)
    fd = os.open(path, os.O_RDWR)
    try:
        harm(fd, min(os.fstat(fd).st_size, USED_BYTES), chance)
    finally:
        os.close(fd)
    return path, harm.__name__


def right_or_told(session: Session, wanted: list[int]) -> int:
    """Every page is right or an error; returns how many errors."""
    told = 0
    for page, seed in enumerate(wanted):
        into = np.zeros((1, LAYOUT.block_bytes), np.uint8)
        try:
            session.swap_in(into, [page])
        except (DataError, InvalidArgument, UnknownBranch):
            told += 1
        else:
            assert (into == contents([seed])).all(), f"page {page}: foreign bytes"
    return told


def lost_blocks(daemon: DaemonProcess, names: list[bytes]) -> list[int]:
    """How much of each session is gone, and reported so."""
    lost = []
    with Client(daemon.client_path) as client:
        client.register_layout(LAYOUT)
        for number, token in enumerate(names):
            try:
                session = client.resume_session(token)
            except UnknownSession:
                lost.append(PAGES)
                continue
            lost.append(right_or_told(session, seeds_of(number)))
        for seed in KEYS:
            into = np.zeros((1, LAYOUT.block_bytes), np.uint8)
            if client.get_keys(LAYOUT, [key_of(seed)], into):
                assert (into == contents([seed])).all(), f"key {seed}: foreign bytes"
    return lost


def start_or_say_why(daemon: DaemonProcess) -> str:
    """What it says when it refuses; empty when it serves."""
    before = len(daemon.log())
    process = daemon.launch()
    until(lambda: daemon._serves() or process.poll() is not None, "it serves or refuses")
    if process.poll() is None:
        return ""
    daemon.process = None
    said = daemon.log()[before:]
    assert "Traceback" not in said, said
    assert str(daemon.directory) in said or "arena" in said, said
    return said


def test_random_damage_is_refused_or_reported_and_never_served(make_daemon: MakeDaemon) -> None:
    seed = drawn_seed("KVTIERD_FAULT_DAMAGES")
    chance = random.Random(seed)
    for number in range(DAMAGES):
        names = tokens(number)
        daemon = new_daemon(make_daemon, f"d{number}").start()
        fill(daemon, names)
        path, how = damage(daemon, chance)
        where = f"seed {seed}, damage {number}: {how} in {path}"
        print(where)
        report = check_files(str(daemon.state_path), daemon.sections["spill"]["paths"], True)
        if start_or_say_why(daemon):
            assert path.startswith("/proc") or not report.ok, where
            daemon.end()
            continue
        lost = lost_blocks(daemon, names)
        print(lost)
        if "spill" in path and lost[0]:
            assert not report.ok, where
        daemon.kill()
        daemon.end()


def test_directories_that_changed_places_are_refused(make_daemon: MakeDaemon) -> None:
    daemon = new_daemon(make_daemon).start()
    names = tokens(0)
    fill(daemon, names)
    paths = daemon.sections["spill"]["paths"]
    daemon.sections["spill"]["paths"] = paths[::-1]
    assert "spill.paths" in daemon.refuse()
    command = [sys.executable, "-m", "kvtierd.ctl.main", "check", "--config"]
    checked = subprocess.run(
        [*command, str(daemon.config_path)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 40, checked
    assert "changed places" in checked.stdout + checked.stderr or "file" in checked.stdout
    daemon.sections["spill"]["paths"] = paths
    daemon.start()
    assert lost_blocks(daemon, names) == [0, 0, 0]


@pytest.mark.parametrize("name", ["blocks.kv", "headers.kv"])
def test_files_that_changed_places(make_daemon: MakeDaemon, name: str) -> None:
    daemon = new_daemon(make_daemon).start()
    names = tokens(0)
    fill(daemon, names)
    one, two = (Path(path) / name for path in daemon.sections["spill"]["paths"])
    aside = one.with_suffix(".aside")
    one.rename(aside)
    two.rename(one)
    aside.rename(two)
    report = check_files(str(daemon.state_path), daemon.sections["spill"]["paths"], True)
    assert not report.ok
    said = start_or_say_why(daemon)
    if not said:
        lost = lost_blocks(daemon, names)
        assert lost[1] == 0
        assert lost[0] + lost[2] > 0
