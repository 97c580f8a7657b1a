"""CUDA copies: registration in chunks with a fallback here, the copies themselves on a GPU."""

import gc
import os

import numpy as np
import pytest
import torch

from kvtier_client import cuda
from kvtier_client.arena import Arena
from kvtier_client.crew import Crew
from kvtier_client.records import Slots, copier

SIZE = 1 << 20


class Runtime:
    """Stands in for the CUDA runtime where there is none."""

    def __init__(self, refuse_from: int) -> None:
        self.refuse_from = refuse_from
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if len(self.registered) >= self.refuse_from:
            return 2
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


@pytest.fixture
def arena() -> Arena:
    return new_arena()


def new_arena() -> Arena:
    fd = os.memfd_create("arena", os.MFD_CLOEXEC)
    os.ftruncate(fd, SIZE)
    mapped = Arena(fd, b"a" * 16, SIZE)
    os.close(fd)
    return mapped


def test_the_mapping_is_registered_in_chunks(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "REGISTER_CHUNK_BYTES", SIZE // 2 - 4096)
    runtime = Runtime(refuse_from=9)
    assert cuda.Registration(arena, runtime).registered
    assert list(runtime.registered.values()) == [SIZE // 2 - 4096] * 2 + [8192]
    assert min(runtime.registered) == arena.address


def test_a_refused_registration_undoes_what_was_registered_and_says_so(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda, "REGISTER_CHUNK_BYTES", SIZE // 4)
    runtime = Runtime(refuse_from=3)
    assert not cuda.Registration(arena, runtime).registered
    assert runtime.registered == {}
    assert "memlock" in caplog.text


def test_a_registration_ends_with_its_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(refuse_from=9)
    monkeypatch.setattr(cuda, "_runtime", lambda: runtime)
    arenas = [new_arena(), new_arena()]  # the daemon's memory was lost: another one is mapped
    known = [cuda.registration(arena) for arena in arenas]
    assert [cuda.registration(arena) for arena in arenas] == known
    assert len(runtime.registered) == 2
    last = arenas.pop().address
    gc.collect()
    assert last not in runtime.registered and len(runtime.registered) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("registered", [True, False])
def test_cuda_tensors_make_the_round_trip(
    arena: Arena, registered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not registered:
        monkeypatch.setattr(cuda, "_runtime", lambda: Runtime(refuse_from=0))
        monkeypatch.setattr(cuda, "STAGING_BYTES", 3 * 4096)
    slots = Slots(arena, np.arange(20, dtype=np.uint64) * np.uint64(8192), 4096, 8192)
    out = torch.arange(20 * 1024, dtype=torch.float32, device="cuda").reshape(20, 1024)
    back = torch.zeros_like(out)
    copier(out, 20, 4096, writable=False).store(slots, 0, Crew(1))
    assert (arena.block(19 * 8192, 4096).view(np.float32) == np.arange(19 * 1024, 20 * 1024)).all()
    copier(back, 20, 4096, writable=True).load(slots, 0, Crew(1))
    assert torch.equal(out, back)
