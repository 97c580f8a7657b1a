"""A run of benchmarks refuses what cannot be before it begins, and leaves out what has no fio."""

import os
from pathlib import Path

import numpy as np
import pytest

from kvtier_client.errors import CapacityError, InvalidArgument, RequestError
from kvtierd.bench import fio, suite
from kvtierd.bench.figures import Figure
from kvtierd.bench.memory import Buffers
from kvtierd.bench.plan import GIB, KIB, MIB, Plan, label, short
from kvtierd.bench.suite import Benchmark


def benchmark(name: str, memory_bytes: int = MIB, disk_bytes: int = MIB) -> Benchmark:
    return Benchmark(lambda _: [Figure(name, 1.0)], memory_bytes, disk_bytes)


def test_all_benchmarks_run_when_none_is_named() -> None:
    assert list(suite.chosen([], suite.BENCHMARKS)) == list(suite.BENCHMARKS)


def test_named_benchmarks_run_in_the_order_of_the_list() -> None:
    assert list(suite.chosen(["cpu", "control"], suite.BENCHMARKS)) == ["control", "cpu"]


def test_a_wrong_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidArgument, match=r"no benchmark dram; there are .*dram\.single"):
        suite.chosen(["dram", "nvme"], suite.BENCHMARKS)


def test_figures_come_as_each_benchmark_ends(tmp_path: Path) -> None:
    said: list[str] = []
    run = suite.run({"a": benchmark("x"), "b": benchmark("y")}, Plan(tmp_path), said.append)
    name, [figure] = next(run)
    assert (name, figure.name, len(said)) == ("a", "x", 1)
    assert [name for name, _ in run] == ["b"]


def test_a_benchmark_that_only_compares_with_fio_is_left_out_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(plan: Plan) -> list[Figure]:
        fio.require()
        return [Figure("x", 1.0)]

    monkeypatch.setenv("PATH", str(tmp_path))
    said: list[str] = []
    both = {"a": Benchmark(measure, MIB), "b": benchmark("y")}
    assert [name for name, _ in suite.run(both, Plan(tmp_path), said.append)] == ["b"]
    assert said[0].startswith("a: left out; fio is not installed")


@pytest.mark.parametrize(
    ("large", "what"),
    [
        (benchmark("x", memory_bytes=1 << 60), "memory, and .* stop other programs"),
        (benchmark("x", disk_bytes=1 << 60), "disk space in .* name another directory"),
    ],
)
def test_nothing_begins_where_there_is_too_little_room(
    tmp_path: Path, large: Benchmark, what: str
) -> None:
    said: list[str] = []
    with pytest.raises(CapacityError, match=f"b would need up to .*{what}"):
        next(suite.run({"a": benchmark("x"), "b": large}, Plan(tmp_path), said.append))
    assert said == []


def test_a_directory_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="nowhere"):
        suite.require_room(tmp_path / "nowhere", {"a": benchmark("x")})


@pytest.mark.parametrize(
    ("limit", "used", "available"),
    [("max", "5", None), (str(3 * MIB), str(MIB), 2 * MIB), (str(1 << 60), "0", None)],
)
def test_a_cgroup_may_leave_less_memory_than_the_host_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, used: str, available: int | None
) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    monkeypatch.setattr(suite, "CGROUP", tmp_path)
    found = suite.available_bytes()
    assert found == available if available else found > 3 * MIB


def test_a_quick_run_is_smaller_in_every_way(tmp_path: Path) -> None:
    usual, quick = Plan(tmp_path), Plan(tmp_path, quick=True)
    assert (usual.rounds(7), quick.rounds(7)) == (7, 2)
    assert (usual.part(64), quick.part(64), quick.part(64, least=8)) == (64, 4, 8)
    assert (usual.duration_s(1.0), quick.duration_s(1.0)) == (1.0, 0.25)
    assert (usual.some([1, 2, 4, 8]), quick.some([1, 2, 4, 8])) == ([1, 2, 4, 8], [1, 4])


def test_what_a_benchmark_writes_is_gone_when_it_ends(tmp_path: Path) -> None:
    with Plan(tmp_path).empty_directory() as place:
        assert place.parent == tmp_path
        (place / "blocks").write_bytes(b"x")
    assert os.listdir(tmp_path) == []


def test_sizes_have_one_name_for_people_and_one_in_figures() -> None:
    sizes = (64 * KIB, MIB, 16 * MIB, GIB)
    assert [label(size) for size in sizes] == ["64 KiB", "1 MiB", "16 MiB", "1 GiB"]
    assert [short(size) for size in sizes] == ["64k", "1m", "16m", "1g"]


# --------------------------------------------------------------------- fio


def install(place: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A program named fio that does this."""
    path = place / "fio"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")


def test_fios_speed_is_read_from_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = '{"jobs": [{"write": {"bw_bytes": 123456}}]}'
    install(tmp_path, monkeypatch, f"echo \"$@\" >$0.said; echo note: x; echo '{report}'")
    assert fio.bytes_per_s(tmp_path, "write", 8 * MIB, MIB, sync_blocks=4) == 123456.0
    said = (tmp_path / "fio.said").read_text().split()
    assert {f"--bs={MIB}", f"--size={8 * MIB}", "--fdatasync=4", "--direct=1"} <= set(said)


def test_a_directory_where_fio_cannot_work_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "echo 'fio: O_DIRECT not supported' >&2; exit 1")
    with pytest.raises(RequestError, match=r"O_DIRECT not supported.*use a directory on the disk"):
        fio.bytes_per_s(tmp_path, "read", MIB)


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize("copy", ["memcpy_batch", "memcpy_pairs"])
def test_memcpy_brings_every_block_back(copy: str) -> None:
    memory = Buffers(8, 4096, ends=3)
    getattr(memory, copy)()
    for source, between, target in memory.rows:
        assert np.array_equal(source, between)
        assert len(target) == 4096
    assert memory.round_bytes == 2 * 8 * 4096


def test_a_round_that_lost_bytes_is_noticed() -> None:
    memory = Buffers(2, 4096)
    memory.memcpy_batch()
    memory.targets[1][77] ^= 1
    with pytest.raises(AssertionError, match="not what went out"):
        memory.check()
