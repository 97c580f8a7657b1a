"""fio as the reference of the NVMe tier: same directory, block size, depth and syncing."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Final, Literal

from kvtier_client.errors import RequestError
from kvtierd.bench.daemons import BLOCK_BYTES

DEPTH: Final = 16
"""fio's queue depth, and the tier's threads."""
WAIT_S: Final = 120.0
ADVICE: Final = "fio is not installed; install it to compare (Debian: apt install fio)"

Direction = Literal["write", "read"]
Durability = Literal["process", "power"]
NAMES: Final[dict[Durability, str]] = {"process": "nvme", "power": "nvme.power"}


class FioMissing(Exception):
    """There is no fio to compare with."""


def installed() -> bool:
    """Whether there is fio."""
    return shutil.which("fio") is not None


def require() -> None:
    """Errors: FioMissing."""
    if not installed():
        raise FioMissing(ADVICE)


def bytes_per_s(
    directory: Path,
    direction: Direction,
    size_bytes: int,
    block_bytes: int = BLOCK_BYTES,
    sync_blocks: int = 0,
) -> float:
    """One round of fio over a file of its own; `sync_blocks` written between two fdatasync.

    Errors: RequestError when fio cannot work in this directory.
    """
    command = [
        "fio",
        "--name=reference",
        f"--filename={directory / 'fio.dat'}",
        f"--size={size_bytes}",
        f"--bs={block_bytes}",
        f"--rw={direction}",
        f"--iodepth={DEPTH}",
        "--ioengine=io_uring",
        "--direct=1",
        "--overwrite=1",
        "--output-format=json",
    ]
    if direction == "write" and sync_blocks:
        command.append(f"--fdatasync={sync_blocks}")
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=WAIT_S)
    if done.returncode:
        said = " | ".join((done.stderr or done.stdout).splitlines()[:3])
        raise RequestError(
            f"fio cannot {direction} in {directory} past the page cache ({said}); "
            "use a directory on the disk that spill files will have"
        )
    report = json.loads(done.stdout[done.stdout.index("{") :])
    return float(report["jobs"][0][direction]["bw_bytes"])
