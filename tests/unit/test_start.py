"""Starts and the memory of the life before: taken over, kept, and never made anew."""

import errno
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtierd.start import Parts, start
from kvtierd.tiers.errors import FormatError, StartError
from kvtierd.tiers.headers import SpillHeaders
from tests.support.daemon import DaemonProcess
from tests.support.descriptors import memfds
from tests.support.served import WAIT_S, small_config
from tests.support.wait import until

HELD = {"recovery": {"memory": "holder"}}
TENANTS = [
    {"name": name, "uids": [number], "arena_bytes": 1 << 20}
    for number, name in enumerate(("a", "b"), start=1)
]


def end(parts: Parts) -> None:
    """What the end of a daemon leaves: files, and the memory that its keeper has."""
    assert parts.spill.close(WAIT_S)
    parts.catalog.close()
    for arena in parts.arenas.values():
        arena.close()
    parts.keeper.close()
    parts.close_locks()


def life(place: Path, **sections: Any) -> dict[str, bytes]:
    """A life in which each arena's first bytes become its tenant's name; returns the arena ids."""
    parts = start(small_config(place, **(HELD | sections)))
    for name, arena in parts.arenas.items():
        arena.payload[:1] = ord(name)
    ids = {name: arena.arena_id for name, arena in parts.arenas.items()}
    end(parts)
    return ids


def found(place: Path, **sections: Any) -> dict[str, tuple[bytes, int]]:
    """What the next life finds: arena ids, and the first byte of each."""
    parts = start(small_config(place, **(HELD | sections)))
    seen = {name: (a.arena_id, int(a.payload[0])) for name, a in parts.arenas.items()}
    end(parts)
    return seen


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory whose holders end with the test."""
    daemon = DaemonProcess(tmp_path)
    yield tmp_path
    daemon.end()


def test_the_next_start_takes_over_the_memory_of_the_last(place: Path) -> None:
    ids = life(place)
    (holder,) = DaemonProcess(place).holders()
    memory = sorted(memfds(holder).values())
    for _ in range(5):
        assert found(place) == {"t": (ids["t"], ord("t"))}
    assert DaemonProcess(place).holders() == [holder]
    until(lambda: sorted(memfds(holder).values()) == memory, "the holder has what it had, once")


def test_memory_of_a_tenant_that_is_not_named_any_more_is_kept(place: Path) -> None:
    ids = life(place, tenants=TENANTS)
    assert found(place, tenants=TENANTS[:1]) == {"a": (ids["a"], ord("a"))}
    assert found(place, tenants=TENANTS) == {name: (ids[name], ord(name)) for name in "ab"}


def test_memory_of_another_size_is_let_go_of_when_it_is_empty_and_else_refused(place: Path) -> None:
    larger = [TENANTS[0] | {"arena_bytes": 2 << 20}]
    ids = life(place, tenants=TENANTS[:1])
    parts = start(small_config(place, **HELD, tenants=TENANTS[:1]))
    parts.arenas["a"].headers.write_word(3, 1)
    end(parts)
    for _ in range(2):
        with pytest.raises(FormatError, match="kvtierctl evict") as caught:
            start(small_config(place, **HELD, tenants=larger))
        assert caught.value.reason == "geometry"
    parts = start(small_config(place, **HELD, tenants=TENANTS[:1]))
    assert parts.arenas["a"].arena_id == ids["a"]
    parts.arenas["a"].headers.write_word(3, 0)
    end(parts)
    seen = found(place, tenants=larger)
    assert seen["a"][0] != ids["a"]
    assert found(place, tenants=larger) == seen


def test_a_start_that_fails_leaves_the_memory_to_the_next(place: Path) -> None:
    ids = life(place)
    catalog = sqlite3.connect(place / "state" / "catalog.db", isolation_level=None)
    catalog.execute("INSERT INTO layouts VALUES ('t', zeroblob(16), x'c1')")
    for _ in range(2):
        with pytest.raises(StartError, match=r"catalog\.db"):
            start(small_config(place, **HELD))
    catalog.execute("DELETE FROM layouts")
    catalog.close()
    assert found(place) == {"t": (ids["t"], ord("t"))}


def test_a_disk_that_cannot_be_read_refuses_the_start_and_changes_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    ids = life(place, tenants=TENANTS)
    with monkeypatch.context() as broken:
        broken.setattr(SpillHeaders, "_read", fails)
        with pytest.raises(StartError, match="Input/output error"):
            start(small_config(place, **HELD, tenants=TENANTS))
    assert found(place, tenants=TENANTS) == {name: (ids[name], ord(name)) for name in ids}


def test_a_runtime_directory_serves_one_daemon(place: Path) -> None:
    parts = start(small_config(place))
    before = sorted(os.listdir(place / "run"))
    with pytest.raises(StartError, match="another kvtierd runs in it"):
        start(small_config(place, state_dir=str(place / "elsewhere")))
    assert sorted(os.listdir(place / "run")) == before
    assert not (place / "elsewhere").exists()
    end(parts)
