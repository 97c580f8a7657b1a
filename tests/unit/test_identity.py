"""Names: what differs has another name everywhere, what is the same has the same one for ever."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest

from kvtier_client import errors, wire
from kvtier_client.layout import Layout
from kvtier_client.wire import CACHED
from tests.model.harness import layout, refused
from tests.unit.core_host import TOKEN, Fixture, Host, pack, u64

ROOT = Path(__file__).parents[2]
BASE = msgspec.structs.replace(layout(), tp_size=2)
CHANGES: dict[str, dict[str, Any]] = {
    "model": {"model": "m "},
    "dtype": {"dtype": "float8_e4m3"},
    "layers": {"layers": 2},
    "kv_heads": {"kv_heads": 2},
    "head_dim": {"head_dim": 2},
    "block_tokens": {"block_tokens": 8},
    "block_bytes": {"block_bytes": BASE.block_bytes - 1},
    "latent": {"latent": 1},
    "group": {"group": 1},
    "tp_rank": {"tp_rank": 1},
    "tp_size": {"tp_size": 4},
    "replicated": {"replicated": True},
    "codec": {"codec": "sim2"},
    "extra": {"extra": "rope_theta=1e6"},
}
KEYS = b"k" * 16 + b"l" * 16


@pytest.fixture
def core() -> Iterator[Fixture]:
    core = Fixture(Host({"a": (3, 2), "b": (3, 2)}, spill_slabs=4))
    core.print = core.register(BASE)
    core.session = core.open(b"i" * 16)
    yield core
    core.host.check()
    core.host.close()


def put_keys(core: Fixture) -> None:
    lease = core.client.do(wire.ReserveKeys, core.client.counter(), core.print, KEYS, 30.0)
    for value, offset in enumerate(u64(lease.offsets), 700):
        core.client.write(offset, 1, value)
    core.client.do(wire.CommitKeys, lease.lease, pack(0, 1), KEYS, pack(0, 1), pack(4, 4))


def test_every_field_of_a_layout_is_looked_at_here() -> None:
    assert tuple(CHANGES) == Layout.__struct_fields__


@pytest.mark.parametrize("field", CHANGES)
def test_whatever_differs_in_a_layout_is_another_name(core: Fixture, field: str) -> None:
    """Keys, pages and leases of one layout are nothing in another."""
    put_keys(core)
    core.store([0, 1])
    known, client = core.print, core.client
    other = core.register(msgspec.structs.replace(BASE, **CHANGES[field]))
    assert other != known
    assert client.do(wire.Lookup, [known, other], KEYS).hits == [2, 0]
    assert client.do(wire.AcquireKeys, 70, other, KEYS).lease == 0
    assert client.do(wire.Hold, core.session, other, KEYS).count == 0
    assert client.do(wire.Remove, other, KEYS).count == 0
    with refused(errors.LayoutMismatch):
        client.do(wire.Acquire, 71, core.session, 0, other, 0, 1)
    with refused(errors.LayoutMismatch):
        client.do(wire.OpenSession, b"i" * 16, [other])
    lease = client.do(wire.Reserve, 72, other, 1)
    with refused(errors.LayoutMismatch):
        client.do(wire.Commit, lease.lease, core.session, 0, pack(0), pack(2), pack(4))
    core.print = known
    assert client.do(wire.Lookup, [known], KEYS).hits == [2]
    assert core.read(0, 2) == [100, 101]


def test_names_are_those_of_the_specification() -> None:
    fields = msgspec.structs.astuple(BASE)
    spelled = hashlib.sha256(b"kvtierd-layout-1" + msgpack.packb(list(fields))).digest()[:16]
    assert BASE.fingerprint() == spelled
    assert BASE.fingerprint().hex() == "277610298a3127c434dc28f7a3308618"


SAY = """
from kvtier_client.layout import Layout
from kvtierd.core.sessions import token_hash
from kvtierd.start import tenant_number
layout = Layout("a model", "float16", 1, 2, 3, 4, 5, codec="packed")
print(layout.fingerprint().hex(), token_hash(b"t" * 16).hex(), tenant_number("a tenant"))
"""


def test_names_are_the_same_in_every_process() -> None:
    said = [
        subprocess.run(
            [sys.executable, "-c", SAY], cwd=ROOT, capture_output=True, text=True, check=True,
            env=os.environ | {
                "PYTHONPATH": f"{ROOT}:{ROOT}/client", "PYTHONHASHSEED": seed,
            },
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert said[0] == said[1] != ""


def test_a_tenant_under_pressure_takes_nothing_from_another(core: Fixture) -> None:
    """Neither from DRAM nor from NVMe, and not even what may be dropped."""
    put_keys(core)
    core.store(list(range(12)), retention=CACHED)
    core.evict(8)
    before = core.tiers()
    loud = core.host.spawn("b")
    loud.do(wire.RegisterLayout, BASE)
    session = loud.do(wire.OpenSession, TOKEN, [core.print]).session
    for start in range(0, 120, 12):
        lease = loud.do(wire.Reserve, loud.counter(), core.print, 12, wait_s=30.0)
        every = pack(*range(12))
        pages = pack(*range(start, start + 12))
        loud.do(wire.Commit, lease.lease, session, 0, every, pages, pack(*[4] * 12), CACHED)
        core.host.settle(2)
    assert core.host.tenant("b").pools[core.print].nvme.total == 16, "it has used its quota up"
    assert core.tiers() == before
    assert core.read(0, 12) == [100 + page for page in range(12)]
    assert core.client.do(wire.Lookup, [core.print], KEYS).hits == [2]
