"""Builds the kernels for the tests: by nvcc, and by g++ on the emulated launch grid."""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

import kvtier_kernels
from tests.kernels.emulation import Emulator

HERE = Path(__file__).parent
SOURCES = Path(kvtier_kernels.__file__).parent
BUILD_TIMEOUT_S = 120


def build(command: list[str]) -> None:
    """Runs a compiler and shows what it said when it fails."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


@pytest.fixture(scope="session")
def nvcc() -> str:
    """The CUDA compiler: a toolkit's, or the one that the dev extra's wheels bring."""
    wheel = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin", "nvcc")
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    for candidate in (shutil.which("nvcc"), toolkit, wheel):
        if candidate is not None and Path(candidate).is_file():
            return str(candidate)
    pytest.fail("no nvcc: install the dev extra (nvidia-cuda-nvcc) or a CUDA 13 toolkit")


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    """The kernels built for the CPU; undefined behaviour, misalignment included, aborts."""
    library = tmp_path_factory.mktemp("emulated") / "kernels.so"
    checks = ["-Wall", "-Wextra", "-Werror", "-fsanitize=undefined", "-fno-sanitize-recover=all"]
    checks.append("-Wno-unknown-pragmas")  # nvcc's
    source = str(HERE / "emulated.cpp")
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", *checks, f"-I{SOURCES}", source]
    build([*command, "-o", str(library)])
    return Emulator(library)
