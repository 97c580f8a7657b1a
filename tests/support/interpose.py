"""Faults of the disk and jumps of the wall clock, for a real daemon process (interpose.c).

The process runs with a library in front of its C library, and reads from a mapped file what shall
go wrong; so faults come and go while it runs. It sees errors, short transfers and calls that do
not return as a failing disk would give them. (The kernel's own device-mapper targets for this are
missing on many hosts, and cannot be had in a container.)
"""

import hashlib
import mmap
import os
import struct
import subprocess
from functools import cache
from pathlib import Path
from typing import Final

from tests.support.daemon import DaemonProcess

READ: Final = 1
WRITE: Final = 2
SYNC: Final = 4
EVERYWHERE: Final = (0, (1 << 64) - 1)
_LAYOUT: Final = struct.Struct("<qIiIIQQQ64s")
_CLOCK_AND_CALLS: Final = struct.Struct("<qI")


@cache
def library() -> Path:
    """The compiled library."""
    source = Path(__file__).with_name("interpose.c")
    name = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    built = Path(__file__).parents[2] / "build" / f"interpose-{name}.so"
    if not built.exists():
        built.parent.mkdir(exist_ok=True)
        new = built.with_suffix(f".{os.getpid()}")
        command = ["cc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", str(source), "-o", str(new)]
        subprocess.run([*command, "-ldl"], check=True)
        new.rename(built)
    return built


class Faults:
    """What goes wrong for one daemon: nothing at first."""

    def __init__(self, daemon: DaemonProcess) -> None:
        path = daemon.directory / "faults"
        path.write_bytes(bytes(_LAYOUT.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _LAYOUT.size)
        self._clock_jump_s = 0
        daemon.wrapper = ["env", f"LD_PRELOAD={library()}", f"KVTIERD_FAULTS={path}"]

    def fail(
        self, calls: int, part: str, *, error: int = 0, short_bytes: int = 0, stuck: bool = False,
        within: tuple[int, int] = EVERYWHERE,
    ) -> None:  # fmt: skip
        """From now on, calls on files whose path has this part fail, come short, or do not return.

        `within`: only those that touch these bytes of the file.
        """
        self.heal()
        packed = _LAYOUT.pack(
            self._clock_jump_s, 0, error, short_bytes, stuck, *within, 0, part.encode()
        )
        self._map[:] = packed
        _CLOCK_AND_CALLS.pack_into(self._map, 0, self._clock_jump_s, calls)

    def heal(self) -> None:
        """All is well again; calls that were stuck go on."""
        self._map[:] = _LAYOUT.pack(self._clock_jump_s, 0, 0, 0, 0, 0, 0, 0, b"")

    def hits(self) -> int:
        """How many calls have met the present fault."""
        return int(_LAYOUT.unpack(self._map[:])[7])

    def jump(self, by_s: int) -> None:
        """Move the wall clock."""
        self._clock_jump_s += by_s
        struct.pack_into("<q", self._map, 0, self._clock_jump_s)
