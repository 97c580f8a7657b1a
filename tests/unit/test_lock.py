"""Memory that cannot be had or locked: told before minutes have passed, and never ignored."""

import errno
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from kvtierd import start
from kvtierd.tiers import arena as arena_module
from kvtierd.tiers import memory
from kvtierd.tiers.arena import Arena, create_arena
from kvtierd.tiers.errors import StartError
from kvtierd.tiers.superblock import Geometry, Kind
from tests.header_files import superblock
from tests.unit.test_arena import GEOMETRY, PLAIN, left_behind

WANTED = replace(PLAIN, mlock="require", prefault=True)


def make(settings: object, geometry: Geometry = GEOMETRY) -> tuple[Arena, list[int]]:
    seen: list[int] = []
    arena = create_arena(
        "test",
        superblock(Kind.ARENA, geometry),
        settings,
        lambda done, _: seen.append(done),  # type: ignore[arg-type]
    )
    return arena, seen


def test_a_limit_that_is_too_small_is_told_before_any_page_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def populate(*_: object) -> None:
        raise AssertionError("a page was taken")

    monkeypatch.setattr(memory, "allow_memlock", lambda _: "RLIMIT_MEMLOCK allows 64 KiB")
    monkeypatch.setattr(arena_module, "_populate", populate)
    before = left_behind()
    with pytest.raises(StartError, match=r"64 KiB.*LimitMEMLOCK"):
        make(WANTED)
    assert left_behind() == before


def refuse(*_: object) -> None:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def test_a_lock_that_the_kernel_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "allow_memlock", lambda _: None)
    monkeypatch.setattr(memory, "lock", refuse)
    before = left_behind()
    with pytest.raises(StartError, match=r"mlock refused.*ENOMEM.*arena\.mlock"):
        make(WANTED)
    assert left_behind() == before
    arena, _ = make(replace(WANTED, mlock="try"))
    assert (arena.obtained.locked, len(arena.obtained.notes)) == (False, 1)
    assert "mlock refused" in arena.obtained.notes[0]
    arena.close()


def test_pages_that_the_kernel_does_not_give_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="Cannot allocate memory"):
        memory.advise(0, 4096, memory.MADV_POPULATE_WRITE)  # nothing is mapped there
    monkeypatch.setattr(arena_module, "_populate", refuse)
    before = left_behind()
    with pytest.raises(StartError, match=r"no page for it.*lower arena_bytes"):
        make(replace(PLAIN, prefault=True))
    assert left_behind() == before


def test_the_service_manager_is_told_how_far_prefaulting_is_and_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would end a start that says nothing for longer than its timeout."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(5.0)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        progress = start._progress("t")
        for done, percent in ((1, 25), (4, 100)):
            progress(done, 4)
            said = manager.recv(1000).decode()
            assert f"{percent} %" in said
            assert "EXTEND_TIMEOUT_USEC=" in said
