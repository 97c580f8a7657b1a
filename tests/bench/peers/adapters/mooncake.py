"""Mooncake Store: a master, a process that owns the memory, and this process as its client.

Variant "shm": the client is a thin one whose buffers the owner maps (its shared-memory sidecar).
Variant "tcp": the client is a full one, and blocks travel to the owner over TCP.
"""

import ctypes
import importlib.metadata
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import mooncake
import numpy as np
from mooncake.store import MooncakeDistributedStore

from tests.bench.peers.adapters.peer import (
    Bytes,
    Order,
    Peer,
    Setup,
    Unavailable,
    free_port,
    listens,
    plain_memory,
    serve,
    server,
)

PACKAGE: Final = "mooncake-transfer-engine-non-cuda"
HOST: Final = "127.0.0.1"
SEGMENT: Final = "1GB"
LOCAL_BYTES: Final = 64 << 20
DEADLINES: Final = {
    "MC_STORE_CLIENT_SETUP_RETRIES": "1", "MC_TCP_PROGRESS_TIMEOUT_SEC": "10",
    "MC_TCP_STATUS_TIMEOUT_SEC": "10",
}  # fmt: skip


class Mooncake(Peer):
    """Blocks are objects with one replica; all are removed after the round."""

    version = importlib.metadata.version(PACKAGE)

    def __init__(self, store: Any, variant: str) -> None:
        self.store = store
        self.variant = variant
        self.round = 0
        self.names: list[str] = []

    def memory(self, size_bytes: int) -> Bytes:
        """Registered memory; with the sidecar it must come from the client's shared pool."""
        if self.variant == "tcp":
            memory = plain_memory(size_bytes)
        else:
            address = self.store.alloc_from_mem_pool(size_bytes)
            assert address, "Mooncake's shared pool gave no memory"
            memory = np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))
            memory.fill(1)
        assert self.store.register_buffer(memory.ctypes.data, size_bytes) == 0
        return memory

    def begin(self, order: Order, blocks: int) -> None:
        self.round += 1
        self.names = [f"{self.round}.{i}" for i in range(blocks)]

    def put(self, first: int, blocks: Sequence[Bytes]) -> None:
        if len(blocks) == 1:
            block = blocks[0]
            code = self.store.put_from(self.names[first], block.ctypes.data, block.nbytes)
            assert code == 0, f"put_from returned {code}"
            return
        codes = self.store.batch_put_from(*self.request(first, blocks))
        assert not any(codes), f"batch_put_from returned {codes}"

    def get(self, first: int, blocks: Sequence[Bytes]) -> None:
        if len(blocks) == 1:
            block = blocks[0]
            got = self.store.get_into(self.names[first], block.ctypes.data, block.nbytes)
            assert got == block.nbytes, f"get_into returned {got}"
            return
        request = self.request(first, blocks)
        got = self.store.batch_get_into(*request)
        assert got == request[2], f"batch_get_into returned {got}"

    def request(
        self, first: int, blocks: Sequence[Bytes]
    ) -> tuple[list[str], list[int], list[int]]:
        """Names, addresses and sizes of a batch."""
        names = self.names[first : first + len(blocks)]
        return names, [block.ctypes.data for block in blocks], [block.nbytes for block in blocks]

    def end(self) -> None:
        codes = self.store.batch_remove(self.names, True)
        assert not any(codes), f"batch_remove returned {codes}"


@contextmanager
def start(setup: Setup) -> Iterator[Peer]:
    """Master and owner; the client contributes no memory."""
    os.environ.update(DEADLINES)
    programs = Path(mooncake.__file__).parent
    master, metrics, owner = free_port(), free_port(), free_port()
    master_command = [
        f"{programs}/mooncake_master", f"--rpc_address={HOST}", f"--rpc_port={master}",
        f"--metrics_host={HOST}", f"--metrics_port={metrics}", "--logtostderr",
    ]  # fmt: skip
    owner_command = [
        f"{programs}/mooncake_client", f"--host={HOST}", f"--port={owner}", "--protocol=tcp",
        f"--master_server_address={HOST}:{master}", "--metadata_server=P2PHANDSHAKE",
        f"--global_segment_size={SEGMENT}", "--logtostderr",
    ]  # fmt: skip
    with (
        server(master_command, lambda: listens((HOST, master))),
        server(owner_command, lambda: listens((HOST, owner))),
    ):
        store = MooncakeDistributedStore()
        if setup.variant == "tcp":
            where = (HOST, "P2PHANDSHAKE", 0, LOCAL_BYTES, "tcp", "", f"{HOST}:{master}")
            code = store.setup(*where)
        else:
            code = store.setup_dummy(4 * setup.round_bytes, LOCAL_BYTES, f"{HOST}:{owner}")
        if code:
            raise Unavailable(f"Mooncake's client could not be set up: code {code}")
        try:
            yield Mooncake(store, setup.variant)
        finally:
            store.close()


if __name__ == "__main__":
    serve(start)
