"""A kvtierd of the worker's own: started as a process in a directory, stopped when it is done."""

import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Final, Self

from kvtier_worker.errors import DaemonFailed

START_DEADLINE_S: Final = 60.0
STOP_DEADLINE_S: Final = 30.0
POLL_S: Final = 0.02
SLAB_UNIT_BYTES: Final = 4096
SLAB_BLOCKS: Final = 4
LOG_TAIL_BYTES: Final = 2000

_CONFIG = """\
runtime_dir = "{directory}/run"
state_dir = "{directory}/state"
[arena]
huge_pages = "off"
slab_bytes = {slab_bytes}
min_block_bytes = "4KiB"
[spill]
capacity_bytes = {spill_bytes}
slab_bytes = {slab_bytes}
[recovery]
memory = "{memory}"
[[tenants]]
name = "worker"
uids = ["self"]
arena_bytes = {arena_bytes}
spill_bytes = {spill_bytes}
"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the daemon gets of each medium; slabs are cut so that one holds a few blocks."""

    slab_bytes: int
    arena_bytes: int
    spill_bytes: int


def sizes_for(block_bytes: int, arena_bytes: int, spill_bytes: int) -> Sizes:
    """Round the wanted sizes up to whole slabs; the arena has at least two."""
    slab_bytes = _round_up(SLAB_BLOCKS * block_bytes, SLAB_UNIT_BYTES)
    return Sizes(
        slab_bytes=slab_bytes,
        arena_bytes=max(2 * slab_bytes, _round_up(arena_bytes, slab_bytes)),
        spill_bytes=max(2 * slab_bytes, _round_up(spill_bytes, slab_bytes)),
    )


class OwnDaemon:
    """A daemon process whose files are all in one directory.

    `memory` is how its arena outlives a restart: "off" for not at all, "holder" for a process
    that keeps it.
    """

    def __init__(self, directory: str, sizes: Sizes, memory: str = "off") -> None:
        self.socket_path = os.path.join(directory, "run", "kvtierd.sock")
        self.admin_path = os.path.join(directory, "run", "admin.sock")
        self._config_path = os.path.join(directory, "kvtierd.toml")
        self._log_path = os.path.join(directory, "kvtierd.log")
        self._process: subprocess.Popen[bytes] | None = None
        for name in ("run", "state"):
            os.makedirs(os.path.join(directory, name), mode=0o700, exist_ok=True)
        with open(self._config_path, "w", encoding="utf-8") as file:
            file.write(
                _CONFIG.format(
                    directory=directory,
                    memory=memory,
                    slab_bytes=sizes.slab_bytes,
                    arena_bytes=sizes.arena_bytes,
                    spill_bytes=sizes.spill_bytes,
                )
            )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it for good: without a runtime directory, what keeps its memory ends as well."""
        self.stop()
        shutil.rmtree(os.path.dirname(self.socket_path), ignore_errors=True)

    def start(self) -> None:
        """Start it and return when it accepts. Errors: DaemonFailed with its log's end."""
        assert self._process is None
        with open(self._log_path, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvtierd", "--config", self._config_path],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline_s = time.monotonic() + START_DEADLINE_S
        while not self._accepts():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.stop()
                raise DaemonFailed(f"kvtierd did not start; its log ends:\n{self._log_tail()}")
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Stop it gracefully, and by force past the deadline."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def kill(self) -> None:
        """End it at once, as a crash would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def _accepts(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            return probe.connect_ex(self.socket_path) == 0

    def _log_tail(self) -> str:
        with open(self._log_path, "rb") as log:
            log.seek(max(0, os.path.getsize(self._log_path) - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace")


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
