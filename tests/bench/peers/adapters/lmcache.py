"""LMCache's standalone server over shared memory, through its own engine-driven transfer context.

A put is PREPARE_STORE, a copy into the slots of the answer, COMMIT_STORE. A get is LOOKUP and the
wait for its result (the server answers no PREPARE_RETRIEVE without: the lookup takes the read
locks), PREPARE_RETRIEVE, a copy out of the slots, COMMIT_RETRIEVE. Copies are those of torch.
Variant "found": the lookups are done before the clock of the gets starts.
"""

import importlib.metadata
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc
from lmcache.v1.multiprocess.custom_types import (
    IPCCacheServerKey,
    RegisterEngineDrivenContextPayload,
)
from lmcache.v1.multiprocess.transfer_context.base import (
    EngineDrivenContext,
    EngineDrivenContextMetadata,
)
from lmcache.v1.multiprocess.transfer_context.shm import EngineDrivenContextShm
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

from tests.bench.peers.adapters.peer import (
    Bytes,
    Order,
    Peer,
    Setup,
    free_port,
    listens,
    serve,
    server,
)

HOST: Final = "127.0.0.1"
CHUNK_TOKENS: Final = 256
POOL_GIB: Final = 1
WAIT_S: Final = 30.0
QUIET: Final = {"LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_DISABLE_BANNER": "1"}


class Lmcache(Peer):
    """A registered model for each block size, whose chunk of 256 tokens is one block."""

    version = importlib.metadata.version("lmcache")

    def __init__(self, client: Any, setup: Setup) -> None:
        self.client = client
        self.contexts = {
            size: self.register(number, size) for number, size in enumerate(setup.sizes)
        }
        self.context: EngineDrivenContext
        self.instance = 0
        self.round = 0
        self.found_ahead = setup.variant == "found"
        self.keys: dict[int, IPCCacheServerKey] = {}

    def register(self, instance: int, size: int) -> EngineDrivenContext:
        """A model whose chunks have `size` bytes: one layer, one plane, as wide as it takes."""
        width = size // CHUNK_TOKENS
        payload = RegisterEngineDrivenContextPayload(
            instance_id=instance, model_name=f"bench-{size}", world_size=1,
            block_size=CHUNK_TOKENS, num_layers=1, hidden_dim_size=width, dtype_str="uint8",
            use_mla=True, num_physical_slots=CHUNK_TOKENS,
        )  # fmt: skip
        answer = self.client.register_kv_cache_engine_driven_context(payload).result(WAIT_S)
        shape = torch.Size([1, CHUNK_TOKENS, width])
        layout = MemoryLayoutDesc(shapes=[shape], dtypes=[torch.uint8])
        metadata = EngineDrivenContextMetadata(layout, CHUNK_TOKENS, True)
        return EngineDrivenContextShm(
            metadata, self.client, WAIT_S, answer.shm_name, answer.pool_size
        )

    def begin(self, order: Order, blocks: int) -> None:
        """A request for each call, with tokens of its own: the shortest keys that there can be."""
        self.round += 1
        self.instance = list(self.contexts).index(order.size)
        self.context = self.contexts[order.size]
        tokens = order.batch * CHUNK_TOKENS
        for first in range(0, blocks, order.batch):
            begin = (self.round * blocks + first) * CHUNK_TOKENS
            self.keys[first] = IPCCacheServerKey(
                model_name=f"bench-{order.size}", world_size=1, worker_id=0,
                token_ids=tuple(range(begin, begin + tokens)), start=0, end=tokens,
                request_id=f"{self.round}.{first}", num_kv_readers=1,
            )  # fmt: skip

    def put(self, first: int, blocks: Sequence[Bytes]) -> None:
        key = self.keys[first]
        prepared = self.context.prepare_store(key, self.instance)
        assert prepared is not None
        slots, places = prepared
        assert places == list(range(len(blocks))), f"the server wants chunks {places}"
        for slot, block in zip(slots, blocks, strict=True):
            slot.view(-1).copy_(torch.from_numpy(block))
        assert self.context.commit_store(key, self.instance, slots)

    def lookup(self, key: IPCCacheServerKey) -> None:
        """Find all chunks of a key, and lock them for one reader."""
        self.client.lookup(key.no_worker_id_version(), 1).result(WAIT_S)
        found = self.client.wait_prefetch_status(key.request_id, WAIT_S).result(WAIT_S)
        assert found == key.end // CHUNK_TOKENS, f"the lookup found {found} chunks"

    def find(self) -> None:
        if self.found_ahead:
            for key in self.keys.values():
                self.lookup(key)

    def get(self, first: int, blocks: Sequence[Bytes]) -> None:
        key = self.keys[first]
        if not self.found_ahead:
            self.lookup(key)
        slots = self.context.prepare_retrieve(key, self.instance)
        assert slots is not None
        for slot, block in zip(slots, blocks, strict=True):
            torch.from_numpy(block).copy_(slot.view(-1))
        assert self.context.commit_retrieve(key, self.instance)

    def end(self) -> None:
        for key in self.keys.values():
            self.client.end_session(key.request_id).result(WAIT_S)
        self.keys.clear()
        self.client.clear(True).result(WAIT_S)


@contextmanager
def start(setup: Setup) -> Iterator[Peer]:
    """A server whose pool is touched before it serves."""
    os.environ.update(QUIET)
    port, http = free_port(), free_port()
    pool = f"{os.path.basename(setup.shm)}-lmcache"
    command = [
        f"{Path(sys.executable).parent}/lmcache", "server", "--host", HOST, "--port", str(port),
        "--http-host", HOST, "--http-port", str(http), "--chunk-size", str(CHUNK_TOKENS),
        "--l1-size-gb", str(POOL_GIB), "--no-l1-use-lazy", "--eviction-policy", "LRU",
        "--supported-transfer-mode", "engine_driven", "--shm-name", pool,
        "--disable-observability",
    ]  # fmt: skip
    with (
        server(command, lambda: listens((HOST, http))),
        closing(RequestClientFactory.create(f"tcp://{HOST}:{port}")) as client,
    ):
        yield Lmcache(client, setup)


if __name__ == "__main__":
    serve(start)
