"""After many operations and many dead clients everything is as it was: nothing grows.

`KVTIERD_FAULT_OPERATIONS` sets how many operations; one client in a hundred of them is aborted.
"""

import asyncio
import gc
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil

from kvtier_client.aio import AsyncClient
from kvtier_client.client import Client
from tests.fault.ledger import LAYOUT, content, contents, key_of
from tests.fault.test_kill_daemon import assert_books_balance
from tests.support.daemon import DaemonProcess
from tests.support.descriptors import descriptors
from tests.support.fixtures import MakeDaemon
from tests.support.raw import RawClient
from tests.support.seeds import drawn_seed
from tests.support.wait import until

OPERATIONS = int(os.environ.get("KVTIERD_FAULT_OPERATIONS", "2000"))
ABORTED = OPERATIONS // 100
GROWTH_BYTES = 12 << 20
"""What the daemon's memory may vary by: allocators keep some, and tables double."""
CATALOG_GROWTH_BYTES = 1 << 20
KEYS = 24
GROUPS = 6
"""So many are remembered for a while, of a process that makes one after another: a pidfd each."""


class Size:
    """What a daemon occupies."""

    def __init__(self, daemon: DaemonProcess) -> None:
        assert daemon.process is not None
        process = psutil.Process(daemon.process.pid)
        opened = descriptors(daemon.process.pid).values()
        self.pidfds = sum("[pidfd]" in each for each in opened)
        self.fds = len(opened) - self.pidfds
        self.threads = process.num_threads()
        self.rss_bytes = process.memory_info().rss - process.memory_info().shared
        self.files = sorted(
            str(path) for path in daemon.directory.rglob("*") if "catalog.db-" not in path.name
        )
        self.in_shm = [each.path for each in process.open_files() if "/dev/shm" in each.path]
        self.holder_fds = [psutil.Process(pid).num_fds() for pid in daemon.holders()]
        self.children = len(process.children(recursive=True))
        self.catalog_bytes = (daemon.state_path / "catalog.db").stat().st_size


async def mixed_load(daemon: DaemonProcess, operations: int, seed: int) -> None:
    """So many calls of both clients, in all their kinds."""
    chance, done = random.Random(seed), 0
    record = np.zeros((1, LAYOUT.block_bytes), np.uint8)
    while done < operations:
        async with AsyncClient(daemon.client_path) as loop_client:
            with Client(daemon.client_path) as client:
                for _ in range(10):
                    done += await one_session(loop_client, chance)
                    done += one_sync_session(client, chance, record)


async def one_session(client: AsyncClient, chance: random.Random) -> int:
    """Open, store, fork, read, prune, fetch ahead, close."""
    session = await client.open_session([LAYOUT])
    count = chance.randint(1, 40)
    await session.swap_out(contents(list(range(count))), range(count), 16)
    await session.fork(1, 0, 0)
    await session.swap_out(contents([5]), 0, 16, node=1)
    into = np.zeros((count, LAYOUT.block_bytes), np.uint8)
    await session.swap_in(into, range(count))
    ticket = await session.prefetch((0, count))
    await (ticket.wait() if chance.random() < 0.5 else ticket.cancel())
    await session.prune(1)
    await session.put_blob(bytes(1000), version=1)
    await session.close()
    return 9


def one_sync_session(client: Client, chance: random.Random, record: np.ndarray) -> int:
    """Keyed blocks, holds, single blocks one way, leases that are given back unused."""
    session = client.open_session([LAYOUT])
    seeds = chance.sample(range(1000, 1000 + KEYS), 6)
    client.put_keys(LAYOUT, [key_of(seed) for seed in seeds], contents(seeds))
    session.hold(LAYOUT, [key_of(seeds[0])])
    client.get_keys(LAYOUT, [key_of(seeds[0])], record)
    for page in range(6):
        session.swap_out(content(page), page, 16, ack=False)
    client.flush()
    for page in range(6):
        session.swap_in(record[0], page)
    with client.reserve(LAYOUT, 3):
        pass
    session.set_retention(None, 2)
    session.close()
    return 19


def abort_clients(daemon: DaemonProcess, count: int, seed: int) -> None:
    command = [sys.executable, "-m", "tests.fault.aborter", daemon.client_path]
    subprocess.run([*command, str(count), str(seed)], check=True)


def settle(daemon: DaemonProcess) -> None:
    """End what the dead have left, and wait until all is given back."""
    with Client(daemon.client_path) as client:
        client.remove(LAYOUT, [key_of(seed) for seed in range(1000, 1000 + KEYS)])

    def quiet() -> bool:
        tenant = daemon.tenant()
        return tenant["clients"] == tenant["leases"] == tenant["sessions"] == 0

    until(quiet, lambda: f"all is given back: {daemon.tenant()}")
    assert_books_balance(daemon, 0)
    counters = daemon.counters()
    assert counters["mover_queued"] == counters["spill_jobs_in_flight"] == 0
    gc.collect()


def size_of(daemon: DaemonProcess) -> Size:
    """Measured beside one connection, when the daemon has closed all that ended before."""
    with RawClient(daemon.admin_path) as operator:
        for _ in range(5):
            operator.ask("stats")
        return Size(daemon)


def test_nothing_grows(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    daemon = make_daemon(
        recovery={"orphan_ttl": "100ms"},
        limits={"groups": GROUPS},
    ).start()
    seed = drawn_seed("KVTIERD_FAULT_OPERATIONS")
    warm_up = max(OPERATIONS // 4, 1000)
    asyncio.run(mixed_load(daemon, warm_up, seed))
    abort_clients(daemon, max(ABORTED // 4, 10), seed)
    settle(daemon)
    before = size_of(daemon)
    asyncio.run(mixed_load(daemon, OPERATIONS, seed + 1))
    abort_clients(daemon, ABORTED, seed + 1)
    settle(daemon)
    after = size_of(daemon)
    print(vars(before), vars(after))
    for name in ("fds", "threads", "files", "in_shm", "holder_fds", "children"):
        assert getattr(after, name) == getattr(before, name), name
    assert after.pidfds <= GROUPS
    assert after.rss_bytes - before.rss_bytes < GROWTH_BYTES
    assert after.catalog_bytes - before.catalog_bytes < CATALOG_GROWTH_BYTES
