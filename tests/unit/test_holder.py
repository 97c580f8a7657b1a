"""Keepers of memory: what a killed daemon had put is there for the next one, and nothing leaks."""

import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtierd.tiers.arena import ArenaSettings, attach_arena
from kvtierd.tiers.errors import StartError
from kvtierd.tiers.holder import (
    SOCKET_NAME,
    HolderKeeper,
    KeeperError,
    Mode,
    NoKeeper,
    SystemdKeeper,
    open_keeper,
)
from kvtierd.tiers.holder_process import ITEMS_MAX
from kvtierd.tiers.scan import scan
from kvtierd.tiers.superblock import Expected, Kind
from tests.header_files import INSTANCE
from tests.support.descriptors import descriptors

ROOT = Path(__file__).parents[2]
DEADLINE_S = 30.0


def holder_pids(runtime_dir: Path) -> list[int]:
    """Processes that hold for this directory."""
    wanted = str(runtime_dir / SOCKET_NAME).encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted in arguments:
            found.append(int(path.parent.name))
    return found


def kill(pid: int) -> None:
    """Kill a process, and wait until it is gone."""
    handle = os.pidfd_open(pid)
    signal.pidfd_send_signal(handle, signal.SIGKILL)
    assert ends(handle)


def ends(handle: int) -> bool:
    """Whether the process behind a pidfd ends before the deadline."""
    readable, _, _ = select.select([handle], [], [], DEADLINE_S)
    os.close(handle)
    return bool(readable)


def readable(keeper: HolderKeeper, timeout_s: float) -> bool:
    """Whether the keeper says in time that it has ended."""
    return bool(select.select([keeper.fileno()], [], [], timeout_s)[0])


@pytest.fixture
def runtime_dir(tmp_path: Path) -> Iterator[Path]:
    """A runtime directory whose holders end with the test."""
    yield tmp_path
    for pid in holder_pids(tmp_path):
        kill(pid)


def memfd(contents: bytes) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.pwrite(fd, contents, 0)
    return fd


def put(keeper: HolderKeeper, name: str, contents: bytes) -> None:
    fd = memfd(contents)
    keeper.put(name, fd)
    os.close(fd)


def held(keeper: HolderKeeper) -> dict[str, bytes]:
    """Contents of everything that is held."""
    found = {}
    for name, fd in keeper.take_all().items():
        assert not os.get_inheritable(fd)
        found[name] = os.pread(fd, 100, 0)
        os.close(fd)
    return found


def test_the_next_daemon_finds_what_was_put(runtime_dir: Path) -> None:
    keeper = HolderKeeper(str(runtime_dir))
    put(keeper, "a", b"one")
    put(keeper, "b", b"two")
    put(keeper, "a", b"three")
    put(keeper, "c", b"four")
    keeper.drop("b")
    keeper.drop("unknown")
    keeper.close()
    keeper = HolderKeeper(str(runtime_dir))
    assert held(keeper) == {"a": b"three", "c": b"four"}
    assert held(keeper) == {"a": b"three", "c": b"four"}
    keeper.stop()


DAEMON = """
    import os, sys
    from kvtierd.tiers.arena import ArenaSettings, create_arena
    from kvtierd.tiers.holder import HolderKeeper
    from kvtierd.tiers.superblock import Kind
    from tests.header_files import entry, publish, superblock
    arena = create_arena("test", superblock(Kind.ARENA), ArenaSettings("off", "off", False))
    keeper = HolderKeeper(sys.argv[1])
    keeper.put("payload", arena.payload_fd)
    keeper.put("headers", arena.headers.fd)
    arena.headers.assign_slab(entry(1))
    arena.payload[1 << 20 : (1 << 20) + 5] = list(b"bytes")
    publish(arena.headers, [16])
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_blocks_outlive_a_daemon_that_is_killed_with_its_whole_group(runtime_dir: Path) -> None:
    daemon = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DAEMON), str(runtime_dir)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/client"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    with daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == b"ready\n"
        os.killpg(daemon.pid, signal.SIGINT)
        os.killpg(daemon.pid, signal.SIGKILL)
    keeper = HolderKeeper(str(runtime_dir))
    fds = keeper.take_all()
    settings = ArenaSettings("off", "off", prefault=False)
    expected = Expected(Kind.ARENA, INSTANCE)
    arena = attach_arena("test", fds["payload"], fds["headers"], expected, settings)
    assert scan(arena.headers).slots.tolist() == [16]
    assert arena.payload[1 << 20 : (1 << 20) + 5].tobytes() == b"bytes"
    arena.close()
    keeper.stop()


def test_restarts_leave_nothing_behind(runtime_dir: Path) -> None:
    keeper = HolderKeeper(str(runtime_dir))
    put(keeper, "payload", b"0")
    keeper.close()
    (pid,) = holder_pids(runtime_dir)

    before = descriptors(), descriptors(pid)
    for life in range(50):
        keeper = HolderKeeper(str(runtime_dir))
        for fd in keeper.take_all().values():
            keeper.put("payload", fd)
            os.close(fd)
        put(keeper, "headers", str(life).encode())
        put(keeper, "headers", b"again")
        keeper.drop("headers")
        keeper.close()
    keeper = HolderKeeper(str(runtime_dir))
    assert held(keeper) == {"payload": b"0"}
    keeper.close()
    assert holder_pids(runtime_dir) == [pid]
    # the holder may not have seen the last connection end; a new one waits until it has
    HolderKeeper(str(runtime_dir)).close()
    assert descriptors().items() <= before[0].items()
    assert len(descriptors(pid)) <= len(before[1]) + 1


def test_the_socket_of_a_dead_holder_is_replaced(runtime_dir: Path) -> None:
    keeper = HolderKeeper(str(runtime_dir))
    put(keeper, "a", b"lost")
    keeper.close()
    (pid,) = holder_pids(runtime_dir)
    kill(pid)
    assert (runtime_dir / SOCKET_NAME).exists()
    keeper = HolderKeeper(str(runtime_dir))
    assert held(keeper) == {}
    keeper.stop()


def test_a_holder_that_ends_is_noticed_and_replaced_at_the_next_put(runtime_dir: Path) -> None:
    keeper = HolderKeeper(str(runtime_dir))
    put(keeper, "a", b"lost")
    assert not readable(keeper, 0)
    (pid,) = holder_pids(runtime_dir)
    kill(pid)
    assert readable(keeper, DEADLINE_S)
    put(keeper, "a", b"put again")
    assert held(keeper) == {"a": b"put again"}
    keeper.stop()


def test_starters_at_the_same_time_share_one_holder(runtime_dir: Path) -> None:
    def start(number: int) -> None:
        keeper = HolderKeeper(str(runtime_dir), deadline_s=DEADLINE_S)
        put(keeper, f"from-{number}", b"x")
        keeper.close()

    threads = [threading.Thread(target=start, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(holder_pids(runtime_dir)) == 1
    keeper = HolderKeeper(str(runtime_dir))
    assert sorted(held(keeper)) == [f"from-{number}" for number in range(6)]
    keeper.stop()


def test_two_daemons_cannot_own_one_holder(runtime_dir: Path) -> None:
    first = HolderKeeper(str(runtime_dir))
    with pytest.raises(KeeperError, match=r"another daemon may be connected"):
        HolderKeeper(str(runtime_dir), deadline_s=0.1)
    put(first, "a", b"still mine")
    first.close()
    second = HolderKeeper(str(runtime_dir))
    assert held(second) == {"a": b"still mine"}
    second.stop()


def test_a_holder_with_nothing_to_hold_ends(runtime_dir: Path) -> None:
    keeper = HolderKeeper(str(runtime_dir), idle_s=1.0)
    put(keeper, "a", b"x")
    (pid,) = holder_pids(runtime_dir)
    handle = os.pidfd_open(pid)
    keeper.drop("a")
    keeper.close()
    assert ends(handle)
    assert not (runtime_dir / SOCKET_NAME).exists()


def test_a_holder_that_nobody_can_reach_any_more_ends(runtime_dir: Path) -> None:
    keeper = HolderKeeper(str(runtime_dir), idle_s=1.0)
    fd = os.memfd_create("held")
    keeper.put("held", fd)
    os.close(fd)
    (pid,) = holder_pids(runtime_dir)
    handle = os.pidfd_open(pid)
    keeper.close()
    os.unlink(runtime_dir / SOCKET_NAME)
    assert ends(handle)


def test_what_a_holder_does_not_understand_harms_nothing(runtime_dir: Path) -> None:
    keeper = HolderKeeper(str(runtime_dir))
    put(keeper, "a", b"x")
    keeper.close()
    fd = memfd(b"y")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.settimeout(DEADLINE_S)
        raw.connect(str(runtime_dir / SOCKET_NAME))
        for packet, fds in [
            (b"X", []),
            (b"Pname without a descriptor", []),
            (b"P", [fd]),
            (b"Ptwo", [fd, fd]),
            (b"Pmany", [fd] * 50),
            (b"P" + b"n" * 129, [fd]),
            (b"P" + b"n" * 5000, [fd]),
        ]:
            socket.send_fds(raw, [packet], fds)
            assert raw.recv(100) == b"not understood", packet[:20]
        socket.send_fds(raw, [b"G"], [fd])
        (passed,) = socket.recv_fds(raw, 100, 1)[1]
        os.close(passed)
        assert raw.recv(100) == b"."
    os.close(fd)
    keeper = HolderKeeper(str(runtime_dir))
    assert held(keeper) == {"a": b"x"}
    keeper.stop()


def test_a_holder_holds_a_limited_number(runtime_dir: Path) -> None:
    keeper = HolderKeeper(str(runtime_dir))
    fd = memfd(b"x")
    for number in range(ITEMS_MAX):
        keeper.put(f"n{number}", fd)
    with pytest.raises(KeeperError, match="too many"):
        keeper.put("one-more", fd)
    keeper.put("n0", fd)
    os.close(fd)
    assert len(held(keeper)) == ITEMS_MAX
    keeper.stop()


def test_a_directory_where_no_holder_can_live_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"holder\.sock.*missing is not there"):
        HolderKeeper(str(tmp_path / "missing"))
    far = tmp_path / ("long" * 40)
    far.mkdir()
    with pytest.raises(KeeperError, match="too long"):
        HolderKeeper(str(far))


def test_a_stopped_holder_is_not_waited_for_beyond_the_deadline(runtime_dir: Path) -> None:
    keeper = HolderKeeper(str(runtime_dir))
    (pid,) = holder_pids(runtime_dir)
    os.kill(pid, signal.SIGSTOP)
    keeper._deadline_s = 0.1
    keeper._socket.settimeout(0.1)
    try:
        with pytest.raises(KeeperError, match="did not answer within"):
            keeper.take_all()
    finally:
        os.kill(pid, signal.SIGCONT)
    keeper.close()


# ---------------------------------------------------------------- choice


def choose(mode: Mode, runtime_dir: Path) -> object:
    keeper = open_keeper(mode, str(runtime_dir))
    keeper.close()
    return type(keeper)


def test_the_configuration_chooses_the_keeper(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert choose("auto", runtime_dir) is HolderKeeper
    assert choose("holder", runtime_dir) is HolderKeeper
    assert choose("off", runtime_dir) is NoKeeper
    with pytest.raises(KeeperError, match="FileDescriptorStoreMax"):
        open_keeper("systemd", str(runtime_dir))
    monkeypatch.setenv("NOTIFY_SOCKET", str(runtime_dir / "notify"))
    monkeypatch.setenv("FDSTORE", "16")
    assert choose("auto", runtime_dir) is SystemdKeeper
    assert choose("systemd", runtime_dir) is SystemdKeeper
    assert choose("holder", runtime_dir) is HolderKeeper
    monkeypatch.setenv("FDSTORE", "0")
    assert choose("auto", runtime_dir) is HolderKeeper


def test_switching_it_off_frees_what_a_holder_held(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    keeper = HolderKeeper(str(runtime_dir))
    put(keeper, "a", b"x")
    keeper.close()
    (pid,) = holder_pids(runtime_dir)
    handle = os.pidfd_open(pid)
    assert open_keeper("off", str(runtime_dir)).take_all() == {}
    assert ends(handle)
    assert "memory a of an earlier run is let go" in caplog.text


def test_no_keeper_keeps_nothing() -> None:
    keeper = NoKeeper()
    keeper.put("a", 0)
    keeper.drop("a")
    assert (keeper.take_all(), keeper.fileno()) == ({}, None)
    keeper.close()
