"""A daemon process of its own for one benchmark, and what a client needs to move blocks there."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kvtier_client import Layout
from tests.bench.figures import BUILD
from tests.support.daemon import DaemonProcess

MIB: Final = 1 << 20
BLOCK_BYTES: Final = MIB
BLOCK_TOKENS: Final = 16
ARENA: Final[dict[str, Any]] = {
    "huge_pages": "try", "mlock": "try", "prefault": True, "slab_bytes": 64 * MIB,
    "min_block_bytes": 64 << 10,
}  # fmt: skip
SPILL: Final[dict[str, Any]] = {
    "capacity_bytes": 1024 * MIB, "slab_bytes": 256 * MIB, "io_threads": 16,
}  # fmt: skip
RECOVERY: Final[dict[str, Any]] = {"memory": "off"}


def layout() -> Layout:
    """Blocks of exactly 1 MiB."""
    return Layout(
        model="bench", dtype="float16", layers=16, kv_heads=8, head_dim=128,
        block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES,
    )  # fmt: skip


@contextlib.contextmanager
def directory(parent: Path | None = None) -> Iterator[Path]:
    """An empty directory below build/ (a file system that a deployment could use), then gone."""
    BUILD.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=parent or BUILD) as name:
        yield Path(name)


@contextlib.contextmanager
def daemon(
    arena_bytes: int, spill_bytes: int = 1024 * MIB, **sections: dict[str, Any]
) -> Iterator[DaemonProcess]:
    """A running daemon; it and its files are gone afterwards."""
    with directory() as place:
        tenants = [{
            "name": "bench", "uids": ["self"], "arena_bytes": arena_bytes,
            "spill_bytes": spill_bytes,
        }]  # fmt: skip
        process = DaemonProcess(
            place,
            tenants,
            arena=ARENA | sections.get("arena", {}),
            spill=SPILL | {"capacity_bytes": spill_bytes} | sections.get("spill", {}),
            recovery=RECOVERY | sections.get("recovery", {}),
        )
        # A socket's name may be 107 bytes long, which a deep checkout would exceed.
        with tempfile.TemporaryDirectory(prefix="kvtierd-bench-") as sockets:
            process.sections["socket"] = {
                "client_path": f"{sockets}/client.sock", "admin_path": f"{sockets}/admin.sock",
            }  # fmt: skip
            process.client_path = f"{sockets}/client.sock"
            process.admin_path = f"{sockets}/admin.sock"
            try:
                yield process.start()
            finally:
                process.end()


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
