"""How long a subtree of 4096 blocks takes to go, until its slots can be used again.

In the core by itself, through a client, and beside them what a pool of Python objects needs.
"""

import os
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier_client import Client, wire
from kvtierd.bench.daemons import BLOCK_TOKENS, LAYER_BYTES, daemon, layout
from kvtierd.bench.figures import Figure, middle
from kvtierd.bench.memory import seconds
from kvtierd.bench.plan import MIB, Plan
from kvtierd.core.leases import Peer, pack_u32
from kvtierd.core.slabs import READY, Slabs
from kvtierd.core.state import State
from kvtierd.core.tenant import Tenant
from kvtierd.core.world import CoreLimits, World

BLOCKS: Final = 4096
TREE: Final = ((1, 0, 0, 2048), (2, 1, 2048, 1024), (3, 1, 2048, 1024))
"""Nodes of the subtree: id, parent, first page, blocks."""
OTHER: Final = (4, 0, 0, BLOCKS)
"""A node outside the subtree, whose blocks lie between those of the subtree when scattered."""
PIECE: Final = 16
"""Blocks of one commit when scattered."""
ROUNDS: Final = 61
WARM_ROUNDS: Final = 5
SLAB_BYTES: Final = 64 * MIB
SLABS: Final = 16
CLIENT_ARENA_BYTES: Final = 512 * MIB
LIMITS: Final = CoreLimits(
    blocks_per_request=65536, leases_per_group=1024, lease_ttl_s=30.0, lease_ttl_max_s=600.0,
    wait_max_s=60.0, sessions_per_tenant=1000, nodes_per_session=4096, blob_bytes=MIB, groups=16,
    layouts_per_tenant=8, waiting_per_tenant=64, quarantine_fraction=0.25, high_watermark=0.95,
    low_watermark=0.9, exchange_headroom=0.05, orphan_ttl_s=3600.0, power=False, end_to_end=False,
)  # fmt: skip


class NoHeaders:
    """The core's publisher where nothing outlives the core: header bodies stay as they are."""

    def publish(self, *_: object) -> None:
        """Write nothing."""

    publish_node = publish_one = publish


class Core:
    """The daemon's core over plain memory, with one client."""

    def __init__(self) -> None:
        self.arena, nvme = _slabs(), _slabs()
        world = World(LIMITS, nvme, boot=1, salt=1, generation=1)
        world.publisher = NoHeaders()
        self.tenant = Tenant("bench", 1, self.arena, nvme, SLABS * SLAB_BYTES, 0.05)
        world.tenants["bench"] = self.tenant
        self.world, self.state = world, State(world)
        hello = wire.Hello(0, 1, "bench", os.urandom(16), os.urandom(32))
        self.peer: Peer = self.state.hello(self, self.tenant, 0, 1, 1, hello, 0.0)[0]
        self.fingerprint = self.ask(wire.RegisterLayout, layout(LAYER_BYTES)).fingerprint
        self.lease = 0

    def ask(self, kind: type[wire.Request], *fields: Any) -> Any:
        """A request that is answered at once."""
        reply = self.state.handle(self.peer, kind(1, *fields), 0.0)
        self.state.take_actions()
        assert not isinstance(reply, wire.Error), reply
        return reply

    def open(self) -> int:
        """A session."""
        reply = self.ask(wire.OpenSession, os.urandom(16), [self.fingerprint])
        return int(reply.session)

    def reserve(self, blocks: int) -> int:
        """Write slots; returns the lease."""
        self.lease += 1
        return int(self.ask(wire.Reserve, self.lease, self.fingerprint, blocks).lease)

    @property
    def stored(self) -> int:
        """Slots in use for blocks."""
        return sum(pool.dram.counts[READY] for pool in self.tenant.pools.values())


def _slabs() -> Slabs:
    slots = SLAB_BYTES // LAYER_BYTES
    return Slabs(SLABS, SLAB_BYTES, slots, np.zeros(SLABS * slots, np.uint64), lambda *_: None)


def contiguous(core: Core, session: int) -> None:
    """Store the subtree node by node: its slots lie beside each other."""
    for node, _, page, blocks in TREE:
        _commit(core, session, node, core.reserve(blocks), np.arange(blocks), page)


def scattered(core: Core, session: int) -> None:
    """Store the subtree and another node in small pieces, in slots all over the arena."""
    random = np.random.default_rng(0)
    pieces = [
        (node, page)
        for node, _, first, blocks in (*TREE, OTHER)
        for page in range(first, first + blocks, PIECE)
    ]
    lease = core.reserve(2 * BLOCKS)
    slots = random.permutation(2 * BLOCKS).reshape(-1, PIECE)
    for at, index in zip(random.permutation(len(pieces)).tolist(), slots, strict=True):
        node, page = pieces[at]
        _commit(core, session, node, lease, index, page)


def _commit(
    core: Core, session: int, node: int, lease: int, index: NDArray[np.int64], page: int
) -> None:
    pages, valid = np.arange(page, page + len(index)), np.full(len(index), BLOCK_TOKENS)
    names = (pack_u32(index), pack_u32(pages), pack_u32(valid))
    core.ask(wire.Commit, lease, session, node, *names)


def core_us(core: Core, store: Callable[[Core, int], None]) -> float:
    """One round in the core: store and prune, of which only the prune is timed."""
    session = core.open()
    for node, parent, page, _ in (*TREE, OTHER):
        core.ask(wire.Fork, session, node, parent, page * BLOCK_TOKENS)
    store(core, session)
    before, request = core.stored, wire.Prune(1, session, TREE[0][0])
    taken_s = seconds(lambda: core.state.handle(core.peer, request, 0.0))
    assert before - core.stored == BLOCKS
    core.ask(wire.CloseSession, session)
    return taken_s * 1e6


class PythonPool:
    """Blocks as objects with a count of references and a list of free ones."""

    class Block:
        """One block."""

        __slots__ = ("references",)

        def __init__(self) -> None:
            self.references = 1

    def __init__(self) -> None:
        self.free: deque[PythonPool.Block] = deque()

    def release(self, blocks: "list[PythonPool.Block]") -> None:
        """Give blocks back, the last first."""
        for block in reversed(blocks):
            block.references -= 1
            if not block.references:
                self.free.append(block)


def python_us() -> float:
    """One round of such a pool."""
    pool, blocks = PythonPool(), [PythonPool.Block() for _ in range(BLOCKS)]
    return seconds(lambda: pool.release(blocks)) * 1e6


def client_us(client: Client, fingerprint: bytes) -> float:
    """One round through a client: until the daemon has answered."""
    session = client.open_session([fingerprint])
    for node, parent, page, blocks in TREE:
        session.fork(node, parent, page * BLOCK_TOKENS)
        with client.reserve(fingerprint, blocks) as lease:
            lease.commit(session, node, (page, page + blocks), BLOCK_TOKENS)
    taken_s = seconds(lambda: session.prune(TREE[0][0]))
    session.close()
    return taken_s * 1e6


def measure(plan: Plan) -> list[Figure]:
    """All of them in turns."""
    cores = {
        "core_4096": (Core(), contiguous),
        "core_4096_scattered": (Core(), scattered),
    }
    budgets = {"core_4096": 50.0, "core_4096_scattered": 250.0, "client_4096": 400.0}
    found: dict[str, list[float]] = {name: [] for name in (*budgets, "python_4096")}
    with (
        daemon(plan, CLIENT_ARENA_BYTES) as process,
        Client(process.client_path, name="bench") as client,
    ):
        fingerprint = client.register_layout(layout(LAYER_BYTES))
        for _ in range(WARM_ROUNDS + plan.rounds(ROUNDS)):
            for name, (core, store) in cores.items():
                found[name].append(core_us(core, store))
            found["client_4096"].append(client_us(client, fingerprint))
            found["python_4096"].append(python_us())
    notes = {"python_4096": "a pool of Python objects freeing as many"}
    return [
        middle(
            f"prune.{name}_us", values[WARM_ROUNDS:], budgets.get(name), "lower",
            notes.get(name, "a subtree of 3 nodes"),
        )
        for name, values in found.items()
    ]  # fmt: skip
