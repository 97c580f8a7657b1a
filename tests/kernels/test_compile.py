"""Every CUDA source compiles for every supported architecture: no warning, no spilled register."""

from pathlib import Path

import pytest

from kvtier_kernels import plans
from tests.kernels.conftest import SOURCES, build
from tests.kernels.emulation import Emulator

CUDA_SOURCES = sorted(SOURCES.glob("*.cu"))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("source", CUDA_SOURCES, ids=lambda path: path.stem)
def test_source_compiles(source: Path, architecture: str, nvcc: str, tmp_path: Path) -> None:
    cubin = tmp_path / f"{source.stem}.cubin"
    strict = ["-std=c++17", "-Werror", "all-warnings", "-Xptxas", "--warn-on-spills"]
    strict.append(f"-arch={architecture}")
    build([nvcc, *strict, "-cubin", str(source), "-o", str(cubin)])
    assert cubin.read_bytes().startswith(b"\x7fELF")


def test_the_package_carries_its_sources() -> None:
    names = [path.name for path in CUDA_SOURCES]
    assert names == ["attention.cu", "move_entries.cu", "scatter.cu"]


def test_plans_count_as_the_sources_do(emulator: Emulator) -> None:
    for name in ("THREADS", "CHUNK_KEYS", "SCORE_QUERIES", "GROUP_MAX", "MOVE_STAGE_BYTES"):
        assert getattr(plans, name) == emulator.constant(name)
