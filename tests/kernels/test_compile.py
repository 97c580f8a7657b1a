"""Every CUDA source compiles, without a warning, for every architecture that is supported."""

from pathlib import Path

import pytest

from tests.kernels.conftest import SOURCES, build

CUDA_SOURCES = sorted(SOURCES.glob("*.cu"))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("source", CUDA_SOURCES, ids=lambda path: path.stem)
def test_source_compiles(source: Path, architecture: str, nvcc: str, tmp_path: Path) -> None:
    cubin = tmp_path / f"{source.stem}.cubin"
    strict = ["-std=c++17", "-Werror", "all-warnings", f"-arch={architecture}"]
    build([nvcc, *strict, "-cubin", str(source), "-o", str(cubin)])
    assert cubin.read_bytes().startswith(b"\x7fELF")


def test_the_package_carries_its_sources() -> None:
    assert [path.name for path in CUDA_SOURCES] == ["gather_scatter.cu"]
