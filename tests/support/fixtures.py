"""Fixtures around a real daemon; a folder's conftest imports those that it offers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import DaemonProcess
from tests.support.raw import RawClient

MakeDaemon = Callable[..., DaemonProcess]


@pytest.fixture
def make_daemon(tmp_path: Path) -> Iterator[MakeDaemon]:
    """Makes daemons that are not started yet; in the end none runs and none has had a fault."""
    made: list[DaemonProcess] = []

    def make(name: str = "d", **options: Any) -> DaemonProcess:
        directory = tmp_path / name
        directory.mkdir()
        made.append(DaemonProcess(directory, **options))
        return made[-1]

    yield make
    for daemon in made:
        daemon.end()
    for daemon in made:
        daemon.assert_no_faults()


@pytest.fixture
def daemon(make_daemon: MakeDaemon) -> DaemonProcess:
    """A running daemon with small media."""
    return make_daemon().start()


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A running daemon for a whole file of tests that leave nothing in it."""
    daemon = DaemonProcess(tmp_path_factory.mktemp("d"))
    try:
        yield daemon.start()
    finally:
        daemon.end()
    daemon.assert_no_faults()


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[RawClient]:
    """A client of it that has said HELLO."""
    with daemon.client() as client:
        yield client
        if daemon.process is not None:
            client.clean()
