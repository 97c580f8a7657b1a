"""Directories, files and socket paths that somebody else has prepared: a start refuses each in
words, follows nothing, changes nothing, and does not hang."""

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtierd import config as configuration
from kvtierd.start import start
from tests.fault.checker import LAYOUT
from tests.fault.test_starts import give_up
from tests.support.daemon import DaemonProcess
from tests.support.fixtures import MakeDaemon
from tests.support.raw import RawClient
from tests.support.wait import until

NOBODY = 65534
SECRET = b"what nobody may change"

Plant = Callable[[Path, Path], None]
"""Puts something at a path; the second path is a file of the victim's."""


def a_link(place: Path, victim: Path) -> None:
    place.symlink_to(victim)


def a_dangling_link(place: Path, victim: Path) -> None:
    place.symlink_to(victim.with_name("to be created"))


def a_hard_link(place: Path, victim: Path) -> None:
    os.link(victim, place)


def a_fifo(place: Path, victim: Path) -> None:
    os.mkfifo(place)


def a_directory(place: Path, victim: Path) -> None:
    place.mkdir()


def a_socket(place: Path, victim: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(place))


def a_file_of_nobody(place: Path, victim: Path) -> None:
    place.write_bytes(SECRET)
    os.chown(place, NOBODY, NOBODY)


def a_socket_of_nobody(place: Path, victim: Path) -> None:
    a_socket(place, victim)
    os.chown(place, NOBODY, NOBODY)


PLANTS: list[Plant] = [a_link, a_dangling_link, a_hard_link, a_fifo, a_directory, a_socket]
AS_ROOT = os.geteuid() == 0
FILES = ["state/catalog.db", "state/catalog.db-wal", "spill/headers.kv", "spill/blocks.kv"]


def snapshot(directory: Path) -> dict[str, tuple[object, ...]]:
    """Everything below a directory, with contents and owners, as far as anybody could change it."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        target = str(path.readlink()) if path.is_symlink() else ""
        found[str(path.relative_to(directory))] = (
            status.st_mode, status.st_uid, status.st_nlink, content, target
        )  # fmt: skip
    return found


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a daemon leaves behind that has lived once; spill has its own place."""
    daemon = DaemonProcess(tmp_path_factory.mktemp("life"), recovery={"memory": "off"})
    daemon.sections["spill"]["paths"] = [str(daemon.directory / "spill")]
    daemon.start()
    daemon.stop()
    daemon.log_path.unlink()
    return daemon.directory


@pytest.fixture
def stopped(life: Path, make_daemon: MakeDaemon) -> DaemonProcess:
    """A daemon whose start would take that state over."""
    daemon = make_daemon(recovery={"memory": "off"})
    daemon.sections["spill"]["paths"] = [str(daemon.directory / "spill")]
    shutil.copytree(life, daemon.directory, dirs_exist_ok=True)
    return daemon


def starts(daemon: DaemonProcess) -> None:
    """A start succeeds."""
    daemon.write_config()
    parts = start(configuration.load(daemon.config_path))
    parts.spill.close(5.0)
    parts.catalog.close()
    for arena in parts.arenas.values():
        arena.close()
    parts.keeper.abandon()
    parts.close_locks()


@pytest.fixture
def victim(stopped: DaemonProcess) -> Iterator[Path]:
    """A file that a daemon could damage through a link; it must come out of the test unharmed."""
    path = stopped.directory / "victim"
    path.write_bytes(SECRET)
    yield path
    assert path.read_bytes() == SECRET
    assert not (stopped.directory / "to be created").exists()


def refuse(daemon: DaemonProcess, *words: str) -> None:
    """A start gives up with these words and has changed nothing."""
    daemon.write_config()
    before = snapshot(daemon.directory)
    said = give_up(daemon)
    assert all(word in said for word in words), said
    assert snapshot(daemon.directory) == before


PLANTED = [*PLANTS, a_file_of_nobody] if AS_ROOT else PLANTS


@pytest.mark.parametrize("name", FILES)
def test_a_file_exchanged_between_stop_and_start(
    stopped: DaemonProcess, victim: Path, name: str
) -> None:
    place = stopped.directory / name
    place.unlink(missing_ok=True)
    for plant in PLANTED:
        plant(place, victim)
        refuse(stopped, place.name)
        clear(place)


@pytest.mark.parametrize("name", ["catalog.db-shm", "catalog.db-journal"])
def test_links_where_sqlite_would_write(stopped: DaemonProcess, victim: Path, name: str) -> None:
    place = stopped.directory / "state" / name
    for plant in (a_link, a_dangling_link, a_hard_link):
        plant(place, victim)
        refuse(stopped, name)
        clear(place)


def clear(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        place.rmdir()
    else:
        place.unlink()


NOT_OURS = [a_socket_of_nobody] if AS_ROOT else []
NO_SOCKET = [plant for plant in PLANTED if plant is not a_socket]
NO_LOCK = [plant for plant in PLANTED if plant is not a_hard_link]  # nothing is written to it


@pytest.mark.parametrize(
    ("name", "plants"),
    [
        ("kvtierd.sock", NO_SOCKET + NOT_OURS), ("admin.sock", [a_link, *NOT_OURS]),
        ("holder.sock", NO_SOCKET + NOT_OURS), ("holder.sock.lock", NO_LOCK + NOT_OURS),
    ],
    ids=["client", "admin", "holder", "lock"],
)  # fmt: skip
def test_what_lies_where_a_socket_belongs(
    stopped: DaemonProcess, victim: Path, name: str, plants: list[Plant]
) -> None:
    place = stopped.directory / "run" / name
    stopped.sections["recovery"]["memory"] = "holder"
    for plant in plants:
        plant(place, victim)
        refuse(stopped, name)
        clear(place)
    until(lambda: not stopped.holders(), "no holder stays")


def test_a_stale_socket_is_no_obstacle(stopped: DaemonProcess) -> None:
    for name in ("kvtierd.sock", "admin.sock", "holder.sock"):
        a_socket(stopped.directory / "run" / name, stopped.directory)
    stopped.sections["recovery"]["memory"] = "holder"
    starts(stopped)


def test_the_socket_of_a_living_daemon_is_left_to_it(
    stopped: DaemonProcess, make_daemon: MakeDaemon
) -> None:
    living = make_daemon("living").start()
    with living.client() as client:
        for name, path in (("client_path", living.client_path), ("admin_path", living.admin_path)):
            stopped.sections["socket"] = {name: path}
            refuse(stopped, path, "another daemon serves there")
        session = client.open(LAYOUT)
        client.ask("close_session", session)
    with RawClient(living.client_path) as another:
        another.hello()


@pytest.mark.parametrize("which", ["state", "spill", "run"])
def test_modes_that_let_others_in(stopped: DaemonProcess, which: str) -> None:
    for mode in (0o777, 0o770, 0o722):
        (stopped.directory / which).chmod(mode)
        refuse(stopped, which)
    (stopped.directory / which).chmod(0o700)


@pytest.mark.parametrize("which", ["state", "spill", "run"])
def test_a_directory_above_in_which_everybody_may_exchange_names(
    stopped: DaemonProcess, which: str
) -> None:
    above = stopped.directory / "above"
    above.mkdir()
    shutil.move(stopped.directory / which, above / which)
    set_place(stopped, which, above / which)
    above.chmod(0o777)
    refuse(stopped, str(above), "everybody")
    above.chmod(0o1777)  # with the sticky bit, names are their owners'
    starts(stopped)


def set_place(daemon: DaemonProcess, which: str, place: Path) -> None:
    if which == "spill":
        daemon.sections["spill"]["paths"] = [str(place)]
    else:
        daemon.top[{"state": "state_dir", "run": "runtime_dir"}[which]] = str(place)
    if which == "run":
        daemon.client_path = str(place / "kvtierd.sock")
        daemon.admin_path = str(place / "admin.sock")


if AS_ROOT:  # only root can plant links of another user

    @pytest.mark.parametrize("which", ["state", "spill", "run"])
    def test_a_link_of_another_user_on_the_way(stopped: DaemonProcess, which: str) -> None:
        real, link = stopped.directory / "real", stopped.directory / "link"
        real.mkdir()
        shutil.move(stopped.directory / which, real / which)
        link.symlink_to(real)
        set_place(stopped, which, link / which)
        starts(stopped)  # a link of our own is fine
        os.lchown(link, NOBODY, NOBODY)
        refuse(stopped, str(link), f"a link of uid {NOBODY}")

    @pytest.mark.parametrize("which", ["state", "spill", "run"])
    def test_a_directory_of_another_user(stopped: DaemonProcess, which: str) -> None:
        os.chown(stopped.directory / which, NOBODY, NOBODY)
        refuse(stopped, which)
