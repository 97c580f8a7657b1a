"""The stores that are compared: which adapter each has, and what it needs to be there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MOONCAKE: Final = (("mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy"),)
LMCACHE: Final = (
    (
        "torch==2.13.0", "setuptools>=77,<81", "aiofile", "aiofiles", "blake3", "aiohttp",
        "fastapi", "httpx", "msgspec", "numpy<=2.2.6", "nvtx", "opentelemetry-api<=1.40.0",
        "opentelemetry-sdk", "opentelemetry-exporter-otlp",
        "opentelemetry-exporter-prometheus<=0.61b0", "prometheus_client<=0.24.1", "psutil",
        "py-cpuinfo", "pyyaml", "pyzmq>=25", "protobuf<7", "grpcio>=1.78", "safetensors",
        "sortedcontainers", "uvicorn", "httptools", "cachetools", "setuptools_scm",
        "cryptography", "redis", "numba", "transformers>=5.4",
    ),
    ("--no-deps", "lmcache==0.5.6"),  # its own list of needs asks for a GPU
)  # fmt: skip


@dataclass(frozen=True)
class Store:
    """One row of the tables; `pip` and `programs` are what must be brought in."""

    name: str
    adapter: str
    variant: str = ""
    pip: Sequence[Sequence[str]] = ()
    programs: Sequence[str] = ()
    batches: bool = True
    """Whether a call of many blocks is another case for it."""
    ours: bool = False
    """Without it there is nothing to compare with."""


OURS: Final = Store("kvtierd", "kvtierd", ours=True)
ONE_WAY: Final = Store("kvtierd_oneway", "kvtierd", "oneway", batches=False, ours=True)
PEERS: Final = (
    Store("lmcache", "lmcache", pip=LMCACHE),
    Store("lmcache_found", "lmcache", "found", LMCACHE),
    Store("mooncake_shm", "mooncake", "shm", MOONCAKE),
    Store("mooncake_tcp", "mooncake", "tcp", MOONCAKE),
    Store("redis_unix", "redis", programs=("redis-server", "valkey-server")),
    Store("memcached_unix", "memcached", programs=("memcached",)),
    Store("tmpfs", "tmpfs"),
    Store("torch_save", "torch_file"),
)
