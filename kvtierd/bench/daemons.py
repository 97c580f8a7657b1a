"""A daemon process of its own for one benchmark, and what a client needs to move blocks there."""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import psutil

from kvtier_client import Client, Layout
from kvtier_client.admin import AdminClient
from kvtier_client.errors import DaemonError
from kvtierd.bench.plan import KIB, MIB, Plan

BLOCK_BYTES: Final = MIB
BLOCK_TOKENS: Final = 16
LAYER_BYTES: Final = 64 * KIB
"""Bytes of one layer in a block: keys and values of 16 tokens, 8 heads of 128 float16 values."""
TENANT: Final = "bench"
ARENA: Final[dict[str, Any]] = {
    "huge_pages": "try", "mlock": "try", "prefault": True, "slab_bytes": 64 * MIB,
    "min_block_bytes": LAYER_BYTES,
}  # fmt: skip
SPILL: Final[dict[str, Any]] = {"slab_bytes": 256 * MIB, "io_threads": 16}
PR_SET_PDEATHSIG: Final = 1
START_MAX_S: Final = 60.0
WAIT_S: Final = 60.0
POLL_S: Final = 0.002
LOG_TAIL_LINES: Final = 3


def layout(block_bytes: int = BLOCK_BYTES) -> Layout:
    """Blocks of exactly so many bytes, a multiple of LAYER_BYTES."""
    return Layout(
        model="bench", dtype="float16", layers=block_bytes // LAYER_BYTES, kv_heads=8,
        head_dim=128, block_tokens=BLOCK_TOKENS, block_bytes=block_bytes,
    )  # fmt: skip


class Daemon:
    """A running `python -m kvtierd`, its directory and its sockets."""

    def __init__(self, directory: Path, sockets: Path, config: dict[str, Any]) -> None:
        self.directory = directory
        self.client_path = str(sockets / "client.sock")
        self.admin_path = str(sockets / "admin.sock")
        self._log_path = directory / "kvtierd.log"
        config_path = directory / "kvtierd.toml"
        config_path.write_text(_toml({
            "": {"runtime_dir": f"{directory}/run", "state_dir": f"{directory}/state"},
            "socket": {"client_path": self.client_path, "admin_path": self.admin_path},
            **config,
        }))  # fmt: skip
        with open(self._log_path, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvtierd", "--config", str(config_path)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=_end_with_parent,  # noqa: PLW1509  (one call into libc)
            )  # fmt: skip

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def cpu_s(self) -> float:
        """CPU time that it has used, in user and kernel mode, all its threads."""
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)

    def wait_until_serving(self) -> None:
        """Errors: DaemonError when it ends instead, or takes too long."""
        deadline_s = time.monotonic() + START_MAX_S
        while not self._serves():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                said = " | ".join(self._log_path.read_text().splitlines()[-LOG_TAIL_LINES:])
                raise DaemonError(
                    f"the benchmark's own daemon did not start in {self.directory}: {said}"
                )
            time.sleep(POLL_S)

    def _serves(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            return probe.connect_ex(self.admin_path) == 0

    def client(self) -> Client:
        """A client that has touched the whole arena before it moves anything."""
        return Client(self.client_path, name="bench", prefault=True)

    def end(self) -> None:
        """Kill it: it keeps nothing that anybody needs."""
        self._process.kill()
        self._process.wait()


def _end_with_parent() -> None:
    """A benchmark that is killed leaves no daemon behind."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _toml(sections: dict[str, Any]) -> str:
    """Sections of plain values, which JSON writes as TOML does; a list of tables for tenants."""
    lines = []
    for name, section in sections.items():
        lines.append(f"[[{name}]]" if name == "tenants" else f"[{name}]" if name else "")
        lines += [f"{key} = {json.dumps(value)}" for key, value in section.items()]
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def daemon(
    plan: Plan, arena_bytes: int, spill_bytes: int = 1024 * MIB, **sections: dict[str, Any]
) -> Iterator[Daemon]:
    """A running daemon; it and its files are gone afterwards. Errors: DaemonError.

    `sections` are laid over the configuration that all benchmarks share.
    """
    config = {
        "arena": ARENA | sections.get("arena", {}),
        "spill": SPILL | {"capacity_bytes": spill_bytes} | sections.get("spill", {}),
        "recovery": {"memory": "off"} | sections.get("recovery", {}),
        "limits": sections.get("limits", {}),
        "tenants": {
            "name": TENANT, "uids": ["self"], "arena_bytes": arena_bytes,
            "spill_bytes": spill_bytes,
        },
    }  # fmt: skip
    # A socket's name may be 107 bytes long, which a deep directory would exceed.
    with (
        plan.empty_directory() as place,
        tempfile.TemporaryDirectory(prefix="kvtierd-bench-") as sockets,
    ):
        process = Daemon(place, Path(sockets), config)
        try:
            process.wait_until_serving()
            yield process
        finally:
            process.end()


def wait_for(
    admin: AdminClient,
    what: str,
    done: Callable[[dict[str, Any]], bool],
    poll_s: float = POLL_S,
) -> None:
    """Ask for the daemon's stats until `done` says yes. Errors: DaemonError."""
    deadline_s = time.monotonic() + WAIT_S
    while not done(stats := admin.call("stats")):
        if time.monotonic() > deadline_s:
            raise DaemonError(f"not within {WAIT_S:.0f} s: {what}; the daemon says {stats}")
        time.sleep(poll_s)


def pin(pid: int, cores: set[int]) -> None:
    """Let all threads of a process run on these cores only."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


@contextlib.contextmanager
def pinned(*pids: int) -> Iterator[None]:
    """This process and others on one core, and back."""
    before = os.sched_getaffinity(0)
    one = {max(before)}
    processes = (os.getpid(), *pids)
    try:
        for pid in processes:
            pin(pid, one)
        yield
    finally:
        for pid in processes:
            with contextlib.suppress(FileNotFoundError):
                pin(pid, before)
