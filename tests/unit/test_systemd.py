"""The service manager's protocols, spoken over real sockets and real descriptors."""

import json
import logging
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtierd.systemd import LineFormatter, has_fd_store, listen_fds, notify
from kvtierd.tiers.holder import HolderKeeper, KeeperError, SystemdKeeper, open_keeper

ROOT = Path(__file__).parents[2]


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A service manager's notification socket, named in the environment."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("FDSTORE", "16")
        yield receiver


def received(manager: socket.socket) -> tuple[str, list[int]]:
    data, fds, _, _ = socket.recv_fds(manager, 1000, 10)
    return data.decode(), fds


def memfd(contents: bytes) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.pwrite(fd, contents, 0)
    return fd


def test_states_reach_the_service_manager(manager: socket.socket) -> None:
    assert notify("READY=1\nSTATUS=serving")
    assert received(manager) == ("READY=1\nSTATUS=serving", [])


def test_an_abstract_socket_is_reached_too() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(f"\0kvtierd-test-{os.getpid()}")
        assert notify("STOPPING=1", environ={"NOTIFY_SOCKET": f"@kvtierd-test-{os.getpid()}"})
        assert receiver.recv(100) == b"STOPPING=1"


def test_without_a_service_manager_nothing_is_told() -> None:
    assert not notify("READY=1", environ={})


@pytest.mark.parametrize(
    ("environ", "stored"),
    [
        ({}, False),
        ({"FDSTORE": "16"}, False),
        ({"NOTIFY_SOCKET": "/run/n"}, False),
        ({"NOTIFY_SOCKET": "/run/n", "FDSTORE": "16"}, True),
        ({"NOTIFY_SOCKET": "/run/n", "FDSTORE": "0", "INVOCATION_ID": "x"}, False),
        ({"NOTIFY_SOCKET": "/run/n", "INVOCATION_ID": "x"}, True),
    ],
)
def test_the_environment_says_whether_there_is_a_store(
    environ: dict[str, str], stored: bool
) -> None:
    assert has_fd_store(environ) is stored


LIFE = """
    import json, os, sys
    for place, fd in enumerate(json.loads(sys.argv[2]), start=3):
        os.dup2(os.dup(fd), place)
    os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": sys.argv[1]}
    os.environ["LISTEN_FDNAMES"] = sys.argv[3]
    from kvtierd.systemd import listen_fds
    found = [
        [name, fd, os.pread(fd, 9, 0).decode(), os.get_inheritable(fd)] for name, fd in listen_fds()
    ]
    left = [key for key in os.environ if key.startswith("LISTEN_")]
    print(json.dumps([found, left, listen_fds()]))
"""


def test_passed_descriptors_come_with_their_names_and_stay_with_us() -> None:
    first, second = memfd(b"one"), memfd(b"two")
    arguments = ["2", json.dumps([first, second]), "a:b"]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LIFE), *arguments],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/client"},
        pass_fds=(first, second),
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
    )
    found = [["a", 3, "one", False], ["b", 4, "two", False]]
    assert json.loads(done.stdout) == [found, [], []]
    os.close(first)
    os.close(second)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"LISTEN_PID": "1", "LISTEN_FDS": "2"},
        {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "many"},
    ],
)
def test_descriptors_for_somebody_else_are_not_taken(environ: dict[str, str]) -> None:
    assert listen_fds(environ) == []
    assert environ == {}


# ---------------------------------------------------------------- the keeper on top


def test_memory_is_stored_once_and_replaced_only_by_other_memory(manager: socket.socket) -> None:
    keeper = SystemdKeeper()
    first, second = memfd(b"one"), memfd(b"two")
    for fd in (first, first, second):
        keeper.put("arena", fd)
    keeper.drop("arena")
    told = []
    for _ in range(5):
        state, fds = received(manager)
        told.append((state, [os.pread(fd, 9, 0) for fd in fds]))
        for fd in fds:
            os.close(fd)
    store = "FDSTORE=1\nFDNAME=arena"
    remove = "FDSTOREREMOVE=1\nFDNAME=arena"
    assert told == [(store, [b"one"]), (store, [b"one"]), (remove, []), (store, [b"two"]),
                    (remove, [])]  # fmt: skip
    os.close(first)
    os.close(second)


def test_memory_moves_from_a_holder_into_the_store(manager: socket.socket, tmp_path: Path) -> None:
    holder = HolderKeeper(str(tmp_path))
    fd = memfd(b"one")
    holder.put("arena", fd)
    os.close(fd)
    holder.close()
    keeper = open_keeper("auto", str(tmp_path))
    state, fds = received(manager)
    taken = keeper.take_all()
    assert state == "FDSTORE=1\nFDNAME=arena"
    assert [os.pread(fd, 9, 0) for fd in (*fds, *taken.values())] == [b"one", b"one"]
    assert list(taken) == ["arena"]
    assert keeper.take_all() == {}
    for fd in (*fds, *taken.values()):
        os.close(fd)
    keeper.close()


def test_a_service_manager_that_is_gone_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "missing"))
    with pytest.raises(KeeperError, match=r"fd store.*does not take it"):
        SystemdKeeper().put("arena", 0)


def test_lines_have_their_priority_in_the_journal_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lines() -> list[str]:
        record = logging.LogRecord("part", logging.ERROR, "", 0, "first\nsecond", None, None)
        return LineFormatter().format(record).split("\n")

    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    assert lines() == ["ERROR part: first", "second"]
    monkeypatch.setenv("JOURNAL_STREAM", "1:1")
    assert lines() == ["ERROR part: first", "second"]
    stderr = os.fstat(2)
    monkeypatch.setenv("JOURNAL_STREAM", f"{stderr.st_dev}:{stderr.st_ino}")
    assert lines() == ["<3>ERROR part: first", "<3>second"]
