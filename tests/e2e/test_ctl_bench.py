"""`kvtierctl bench` measures with daemons of its own, and leaves nothing behind however it ends."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.daemon import DaemonProcess
from tests.support.wait import until

WAIT_S = 100.0


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvtierd.ctl.main", "bench", *arguments]


def bench(place: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A quick run below `place`."""
    return subprocess.run(
        command("--quick", "--directory", str(place), *arguments),
        check=False, capture_output=True, text=True, timeout=WAIT_S,
        env=os.environ | environment,
    )  # fmt: skip


def daemons_in(place: Path) -> list[int]:
    """Processes whose command names a file below a directory."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                command = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"--config" in command and any(os.fsencode(place) in word for word in command):
                found.append(int(process.name))
    return found


def serves(place: Path) -> bool:
    """Whether a daemon whose files are below a directory has begun to serve."""
    return any("serving at" in log.read_text() for log in place.rglob("kvtierd.log"))


def test_a_run_prints_its_tables_and_keeps_its_figures(
    tmp_path: Path, daemon: DaemonProcess
) -> None:
    place, results = tmp_path / "place", tmp_path / "bench.json"
    place.mkdir()
    results.write_text('{"older": 1.5}')
    before = daemon.counters()
    only = [word for name in ("control.verbs", "prune", "clients") for word in ("--only", name)]
    done = bench(place, *only, "--json", str(results), KVTIERCTL_SOCKET=daemon.admin_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads(results.read_text())
    assert figures.pop("older") == 1.5
    assert {
        "control.hello.p50_us", "control.reserve.x256.p99_us", "control.release.x1.p50_us",
        "prune.core_4096_us", "prune.core_4096_scattered_us", "prune.client_4096_us",
        "dram.clients1.ratio_parallel_memcpy", "dram.clients4.gb_s",
    } <= set(figures)  # fmt: skip
    assert all(value > 0 for value in figures.values())
    assert "commit.x16" in done.stdout
    assert "prune.core_4096_us" in done.stdout
    assert os.listdir(place) == []
    assert daemon.counters() == before


def test_without_fio_the_daemons_speeds_stand_alone(tmp_path: Path) -> None:
    place, results = tmp_path / "place", tmp_path / "bench.json"
    place.mkdir()
    done = bench(place, "--only", "nvme.sizes", "--json", str(results), PATH=str(place))
    assert done.returncode == 0, done.stderr
    assert "nvme.sizes: without ratios; fio is not installed" in done.stderr
    assert set(json.loads(results.read_text())) == {
        "nvme.256k.spill.gb_s",
        "nvme.256k.restore.gb_s",
    }


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_ended_removes_its_daemon_and_its_files(
    tmp_path: Path, number: signal.Signals
) -> None:
    listening = ["env", "--default-signal=INT"]  # whatever runs in the background ignores it
    with subprocess.Popen(
        [*listening, *command("--directory", str(tmp_path), "--only", "dram.batch")],
        stderr=subprocess.DEVNULL,
    ) as process:
        until(lambda: serves(tmp_path), "the benchmark's daemon serves", WAIT_S)
        process.send_signal(number)
        assert process.wait(WAIT_S) == (143 if number == signal.SIGTERM else 1)
    assert daemons_in(tmp_path) == []
    assert os.listdir(tmp_path) == []


def test_a_run_that_is_killed_leaves_no_daemon() -> None:
    with tempfile.TemporaryDirectory() as place:  # for the sockets too: nobody removes those
        with subprocess.Popen(
            command("--directory", place, "--only", "dram.batch"),
            stderr=subprocess.DEVNULL, env=os.environ | {"TMPDIR": place},
        ) as process:  # fmt: skip
            until(lambda: serves(Path(place)), "the benchmark's daemon serves", WAIT_S)
            process.kill()
        until(lambda: not daemons_in(Path(place)), "the benchmark's daemon has ended", WAIT_S)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "dram"], "no benchmark dram; there are control, "),
        (["--json", "{place}/notes"], "is no map from name to number; name another file"),
        (["--plot", "{place}/nowhere/bench.png"], "name a file in a directory that exists"),
        (["--directory", "{place}/nowhere"], "name a directory that you may write to"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "notes").write_text("[]")
    done = bench(tmp_path, *(word.format(place=tmp_path) for word in arguments))
    assert (done.returncode, done.stdout) == (24, "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("kvtierctl: InvalidArgument: ")
    assert said in last
    assert os.listdir(tmp_path) == ["notes"]
