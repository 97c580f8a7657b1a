"""The emulated grid tells kernels whose threads wait for each other wrongly."""

import ctypes
from pathlib import Path

import pytest

from tests.kernels.conftest import HERE, build

KERNELS = """
#include "launch_grid.h"

// Each thread reads what its right neighbour has written.
void neighbours(const int* barrier, int* out) {
    __shared__ int written[64];
    written[threadIdx.x] = static_cast<int>(threadIdx.x);
    if (*barrier) {
        __syncthreads();
    }
    out[threadIdx.x] = written[(threadIdx.x + 1) % blockDim.x];
    __syncthreads();
    written[threadIdx.x] = -1;
}

// Some threads wait and the others end.
void strays() {
    if (threadIdx.x < 5) {
        __syncthreads();
    }
}

extern "C" int run_neighbours(bool backwards, int barrier, int* out) {
    return static_cast<int>(
        emulation::launch({1, 1, 1}, 64, backwards, [&] { neighbours(&barrier, out); }));
}

extern "C" int run_strays() {
    return static_cast<int>(emulation::launch({1, 1, 1}, 64, false, [] { strays(); }));
}
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    place = tmp_path_factory.mktemp("emulation")
    source, library = Path(place, "kernels.cpp"), Path(place, "kernels.so")
    source.write_text(KERNELS, "utf-8")
    options = ["-std=c++17", "-O1", "-shared", "-fPIC", f"-I{HERE}"]
    build(["g++", *options, str(source), "-o", str(library)])
    return ctypes.CDLL(str(library))


def neighbours(kernels: ctypes.CDLL, backwards: bool, barrier: bool) -> list[int]:
    out = (ctypes.c_int * 64)()
    assert kernels.run_neighbours(backwards, int(barrier), out) == 0
    return list(out)


def test_with_a_barrier_the_order_of_the_threads_changes_nothing(kernels: ctypes.CDLL) -> None:
    expected = [*range(1, 64), 0]
    assert neighbours(kernels, backwards=False, barrier=True) == expected
    assert neighbours(kernels, backwards=True, barrier=True) == expected


def test_a_forgotten_barrier_shows(kernels: ctypes.CDLL) -> None:
    assert neighbours(kernels, False, False) != neighbours(kernels, True, False)


def test_threads_that_wait_for_ended_ones_are_a_deadlock(kernels: ctypes.CDLL) -> None:
    assert kernels.run_strays() == 2
