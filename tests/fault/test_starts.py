"""Starts that cannot succeed: each says why and what to do, and leaves nothing behind."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtierd import config as configuration
from kvtierd.config import ConfigError
from kvtierd.start import start
from kvtierd.tiers.errors import StartError
from tests.fault.checker import KNOWN, Promises
from tests.support.daemon import ARENA_BYTES, DaemonProcess
from tests.support.fixtures import MakeDaemon
from tests.support.wait import until


def everything_below(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


def give_up(daemon: DaemonProcess) -> str:
    """What a start in this process says when it gives up."""
    with pytest.raises((StartError, ConfigError)) as refused:
        start(configuration.load(daemon.config_path))
    return str(refused.value)


def assert_refused_without_a_trace(
    daemon: DaemonProcess, *words: str, how: Callable[[DaemonProcess], str] = give_up
) -> None:
    """It gives up with these words, and files, memory and processes are as they were."""
    daemon.write_config()
    daemon.log_path.touch()
    before = everything_below(daemon.directory)
    said = how(daemon)
    for word in words:
        assert word in said, said
    assert "Traceback" not in said, said
    until(lambda: not daemon.holders(), "no holder stays")
    assert everything_below(daemon.directory) == before


def test_memlock_too_small_for_what_is_required(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(arena={"mlock": "require"})
    daemon.wrapper = ["prlimit", "--memlock=65536:65536"]
    if os.geteuid() == 0:  # the limit does not bind root unless it has given up its powers
        daemon.wrapper += ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    assert_refused_without_a_trace(
        daemon, "cannot be locked", "LimitMEMLOCK", "arena.mlock", how=DaemonProcess.refuse
    )


def test_huge_pages_required_without_a_pool(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(
        arena={"huge_pages": "require", "slab_bytes": 2 << 20},
        tenants=[{"name": "t", "uids": ["self"], "arena_bytes": 1 << 40}],
    )
    assert_refused_without_a_trace(daemon, "huge page", "vm.nr_hugepages")


def test_an_arena_larger_than_memory(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(
        arena={"slab_bytes": 256 << 20},
        tenants=[{"name": "t", "uids": ["self"], "arena_bytes": 1 << 45}],
    )
    daemon.sections["arena"]["min_block_bytes"] = 1 << 20
    assert_refused_without_a_trace(daemon, "arena of t", "lower arena_bytes")


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("arena", "mlokc", "try"), ("limits", "leases_per_group", 0)],
)
def test_wrong_keys_are_named(
    make_daemon: MakeDaemon, section: str, key: str, value: object
) -> None:
    daemon = make_daemon(**{section: {key: value}})
    assert_refused_without_a_trace(daemon, f"{section}.{key}", how=DaemonProcess.refuse)


def test_direct_io_required_where_there_is_none(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    place = Path("/proc/self")  # no file can be made there at all
    daemon.sections["spill"] |= {"direct_io": "require", "paths": [str(place / "spill")]}
    assert_refused_without_a_trace(daemon, str(place))


def link(place: Path, aside: Path) -> None:
    aside.mkdir(mode=0o700)
    place.symlink_to(aside)


def open_to_all(place: Path, aside: Path) -> None:
    place.mkdir()
    place.chmod(0o777)


def a_file(place: Path, aside: Path) -> None:
    place.write_text("not a directory")


def foreign(place: Path, aside: Path) -> None:
    place.mkdir(mode=0o700)
    os.chown(place, 65534, 65534)


UNUSABLE: list[Callable[[Path, Path], None]] = [link, open_to_all, a_file]
if os.geteuid() == 0:
    UNUSABLE.append(foreign)


@pytest.mark.parametrize("make", UNUSABLE, ids=lambda make: make.__name__)
@pytest.mark.parametrize("which", ["state", "run", "spill"])
def test_directories_that_are_not_ours_alone(
    make_daemon: MakeDaemon, which: str, make: Callable[[Path, Path], None]
) -> None:
    daemon = make_daemon()
    place = daemon.directory / which
    make(place, daemon.directory / "aside")
    daemon.sections["spill"]["paths"] = [str(daemon.directory / "spill")]
    assert_refused_without_a_trace(daemon, str(place))


@pytest.mark.parametrize("shared", ["run", "state", "spill"])
def test_a_second_daemon_is_refused_and_the_first_unharmed(
    make_daemon: MakeDaemon, shared: str
) -> None:
    first, second = make_daemon("1"), make_daemon("2")
    first.sections["spill"]["paths"] = [str(first.directory / "spill")]
    first.start()
    promises = Promises()
    with first.client() as client:
        session = promises.open(client)
        for _ in range(16):
            promises.swap_out(client, session, 16)
        link_name = first.directory / shared
        second.sections["spill"]["paths"] = [str(second.directory / "spill")]
        if shared == "run":
            second.top["runtime_dir"] = str(link_name)
        elif shared == "state":
            second.top["state_dir"] = str(link_name)
        else:
            second.sections["spill"]["paths"] = [str(link_name)]
        before = everything_below(first.directory)
        assert_refused_without_a_trace(second, str(link_name), how=DaemonProcess.refuse)
        assert everything_below(first.directory) == before
        promises.check(client)
        first.restart()
        client.come_back()
        promises.check(client)


def test_a_start_that_fails_after_a_life_keeps_that_life(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    promises = Promises()
    with daemon.client() as client:
        session = promises.open(client)
        for _ in range(16):
            promises.swap_out(client, session, 16)
        daemon.stop()
        daemon.sections["spill"]["slab_bytes"] = 2 << 20  # not what the files were made with
        assert "slab" in daemon.refuse()
        daemon.sections["spill"]["slab_bytes"] = 1 << 20
        daemon.tenants[0]["arena_bytes"] = 2 * ARENA_BYTES
        assert "arena" in daemon.refuse()
        daemon.tenants[0]["arena_bytes"] = ARENA_BYTES
        daemon.start()
        client.come_back()
        promises.check(client)
        found = client.swap_in(KNOWN, session, 0, 0, 1)
        assert len(found) == 1
