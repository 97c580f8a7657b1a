"""fio as the reference of the NVMe tier: same directory, block size, depth and syncing."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final, Literal

from tests.bench.daemons import BLOCK_BYTES

DEPTH: Final = 16
"""fio's queue depth, and the tier's threads."""
WAIT_S: Final = 120.0

Direction = Literal["write", "read"]
Durability = Literal["process", "power"]
NAMES: Final[dict[Durability, str]] = {"process": "nvme", "power": "nvme.power"}


class FioMissing(Exception):
    """fio is not installed, and could not be."""


def require() -> None:
    """See that there is fio; as root it is installed. Errors: FioMissing."""
    if shutil.which("fio") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        print("installing fio with apt-get", flush=True)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run(["apt-get", "update", "-q"], check=False, **quiet)
        install = ["apt-get", "install", "-q", "-y", "--no-install-recommends", "fio"]
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(install, check=False, env=environment, **quiet)
    if shutil.which("fio") is None:
        raise FioMissing("compares with fio: install it (Debian: apt-get install fio)")


def bytes_per_s(
    directory: Path, direction: Direction, size_bytes: int, sync_blocks: int = 0
) -> float:
    """One round of fio over a file of its own; `sync_blocks` written between two fdatasync."""
    command = [
        "fio",
        "--name=reference",
        f"--filename={directory / 'fio.dat'}",
        f"--size={size_bytes}",
        f"--bs={BLOCK_BYTES}",
        f"--rw={direction}",
        f"--iodepth={DEPTH}",
        "--ioengine=io_uring",
        "--direct=1",
        "--overwrite=1",
        "--output-format=json",
    ]
    if direction == "write" and sync_blocks:
        command.append(f"--fdatasync={sync_blocks}")
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=WAIT_S)
    report = json.loads(done.stdout[done.stdout.index("{") :])
    return float(report["jobs"][0][direction]["bw_bytes"])
