"""A simulated host: the real core, mover, headers and recovery over simulated time, disk, clients.

`Host` is the machine: arenas and spill file outlive `crash`. `SimClient` is a client process with
one connection: it asks, and writes and reads the arena where its leases say.
"""

import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kvtier_client import wire
from kvtier_client.errors import KvtierError
from kvtier_client.wire import Layout
from kvtierd import restore
from kvtierd.catalog.rows import Op, SaveClock
from kvtierd.catalog.store import Catalog
from kvtierd.core import actions as act
from kvtierd.core.leases import Member, Peer
from kvtierd.core.slabs import SlabPool, Slabs
from kvtierd.core.state import State
from kvtierd.core.tenant import Tenant
from kvtierd.core.world import CoreLimits, World
from kvtierd.mover import Mover
from kvtierd.oplog import op_of
from kvtierd.start import tenant_number
from kvtierd.tiers.headers import ArenaHeaders, create, new_superblock, open_headers
from kvtierd.tiers.locks import lock_directory
from kvtierd.tiers.records import ClientRecord, SlabEntry
from kvtierd.tiers.spill_io import Status
from kvtierd.tiers.superblock import Expected, Geometry, Kind
from tests.model.disk import INSTANCE, PAGE, Clock, SimDisk, value_of

SLAB_BYTES = 8 * PAGE
LIMITS = CoreLimits(
    blocks_per_request=64, leases_per_group=64, lease_ttl_s=60.0, lease_ttl_max_s=600.0,
    wait_max_s=300.0, sessions_per_tenant=64, nodes_per_session=32, blob_bytes=64, groups=16,
    layouts_per_tenant=8, waiting_per_tenant=64, quarantine_fraction=0.5, high_watermark=0.9,
    low_watermark=0.7, exchange_headroom=0.05, orphan_ttl_s=3600.0, power=False, end_to_end=False,
)  # fmt: skip


def layout(pages: int = 1, name: str = "m", group: int = 0, tokens: int = 4) -> Layout:
    """A layout whose blocks have `pages` pages and `tokens` tokens."""
    return Layout(
        name, "uint8", layers=1, kv_heads=1, head_dim=1, block_tokens=tokens,
        block_bytes=pages * PAGE, group=group, codec="sim",
    )  # fmt: skip


@dataclass(slots=True, eq=False)
class SimArena:
    """A tenant's arena: the pages of its payload, and its headers on a memfd."""

    payload: np.ndarray
    headers: ArenaHeaders


class Host:
    """One machine and its daemon."""

    def __init__(
        self,
        tenants: dict[str, tuple[int, int]] | None = None,
        *,
        spill_slabs: int = 4,
        limits: CoreLimits = LIMITS,
        queue_jobs: int = 64,
    ) -> None:
        self.tenants = tenants or {"a": (3, spill_slabs)}
        """Name to slabs in the arena and quota in slabs of the spill file."""
        self.limits = limits
        self.clock = Clock()
        self.processes: dict[int, int] = {}  # pid -> start time, of the living
        self.next_pid = 100
        geometry = Geometry(spill_slabs, SLAB_BYTES, SLAB_BYTES // PAGE)
        self.disk = SimDisk(geometry, queue_jobs)
        self.arenas = {name: self._new_arena(name, n) for name, (n, _) in self.tenants.items()}
        self.generation = 0
        self.ops: list[Op] = []
        self.catalog: Catalog | None = None
        self.notes: list[act.Note] = []
        self.lose_ops = False
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._start()

    def _new_arena(self, name: str, slabs: int) -> SimArena:
        geometry = Geometry(slabs, SLAB_BYTES, SLAB_BYTES // PAGE)
        superblock = new_superblock(
            Kind.ARENA, geometry, instance=INSTANCE, generation=1, tenant=tenant_number(name)
        )
        fd = os.memfd_create("arena headers", os.MFD_CLOEXEC)
        headers = create(fd, superblock, "arena")
        assert isinstance(headers, ArenaHeaders)
        return SimArena(np.zeros(geometry.payload_bytes // PAGE, np.uint64), headers)

    # --------------------------------------------------------- life and death

    def _start(self) -> None:
        """Build the core as a start of the daemon does."""
        self.generation += 1
        worlds: list[World] = []

        def assigned(tenant: str | None) -> Callable[[int, SlabPool | None], None]:
            def on_assign(slab: int, part: SlabPool | None) -> None:
                world = worlds[0]
                owner = None if tenant is None else world.tenants[tenant]
                pool = None if part is None else world.pools[part.number]
                world.actions.append(act.AssignSlab(owner, slab, pool))

            return on_assign

        cut = self.disk.geometry
        nvme = Slabs(cut.slabs, cut.slab_bytes, cut.max_slots, self.disk.words, assigned(None))
        world = World(
            self.limits, nvme, boot=self.generation, salt=self.generation,
            generation=self.generation, now_s=self.clock.now_s, seq=self.generation << 40,
        )  # fmt: skip
        worlds.append(world)
        for name, (slabs, quota) in self.tenants.items():
            headers = self.arenas[name].headers
            arena = Slabs(
                slabs, SLAB_BYTES, headers.geometry.max_slots, headers.words, assigned(name)
            )
            world.tenants[name] = Tenant(
                name, tenant_number(name), arena, nvme, quota * SLAB_BYTES,
                self.limits.exchange_headroom,
            )  # fmt: skip
        self.world, self.state = world, State(world)
        self.mover = Mover(self.state, self.disk, self.arenas, self.clock, self.perform)  # type: ignore[arg-type]

    def crash(self) -> None:
        """The daemon is killed: what it knew is gone, the media are not."""
        self.clock.timers.clear()
        self.world.actions.clear()
        self.disk.restart()
        for name, arena in self.arenas.items():
            expected = Expected(Kind.ARENA, INSTANCE, arena.headers.geometry, tenant_number(name))
            headers = open_headers(os.dup(arena.headers.fd), expected, "arena")
            assert isinstance(headers, ArenaHeaders)
            arena.headers.close()
            arena.headers = headers

    def reboot(self) -> None:
        """The host goes down: processes and arenas are gone too."""
        self.processes.clear()
        self.crash()
        self.arenas = {name: self._new_arena(name, n) for name, (n, _) in self.tenants.items()}

    def recover(self) -> None:
        """The daemon starts again."""
        self._start()
        self._store()
        assert self.catalog is not None
        with mock.patch.object(restore, "process_start_time", self.processes.get):
            rebuilt = restore.Restore(self.state, self.arenas, self.disk)  # type: ignore[arg-type]
            self.outcome, self.watched = rebuilt.run(self.catalog.load())
        for arena in self.arenas.values():
            arena.headers.set_generation(self.generation)
        self.tick(0.0)

    def _store(self) -> None:
        """Write what the catalog was told."""
        if self.catalog is None:
            self._directory = tempfile.TemporaryDirectory()
            self._lock = lock_directory(self._directory.name + "/state")
            self.catalog = Catalog.open(self._lock)
        self.catalog.apply(self.ops)
        self.ops = []

    def close(self) -> None:
        """Let go of what the host has open."""
        self.disk.close(0.0)
        for arena in self.arenas.values():
            arena.headers.close()
        if self.catalog is not None and self._directory is not None:
            self.catalog.close()
            self._lock.close()
            self._directory.cleanup()

    # ------------------------------------------------------------- actions

    def perform(self) -> None:
        """Carry out the core's actions, as the daemon does."""
        while self.world.actions:
            for action in self.state.take_actions():
                self._perform(action)

    def _perform(self, action: Any) -> None:
        handler = self.mover.handlers.get(type(action))
        if handler is not None:
            handler(action)
        elif isinstance(action, act.Send):
            action.peer.conn.inbox.append(action.message)  # type: ignore[attr-defined]
        elif isinstance(action, act.HangUp):
            assert not action.peer.open
        elif isinstance(action, act.AssignSlab):
            self._assign(action)
        elif isinstance(action, act.RecordMember):
            self._record(action)
        elif isinstance(action, act.Note):
            self.notes.append(action)
        elif isinstance(action, act.LoadBlob):
            self._load_blob(action)
        elif not self.lose_ops:
            self.ops.append(op_of(action))

    def _assign(self, action: act.AssignSlab) -> None:
        pool, slab = action.pool, action.slab
        owner: Any = self.disk if action.tenant is None else self.arenas[action.tenant.name].headers
        if pool is None:
            owner.free_slab(slab)
            return
        part = pool.nvme if action.tenant is None else pool.dram
        owner.assign_slab(
            SlabEntry(
                slab, pool.fingerprint, pool.tenant.number, pool.slot_bytes, part.slots_per_slab,
                pool.layout.block_bytes,
            )
        )  # fmt: skip

    def _record(self, action: act.RecordMember) -> None:
        member, headers = action.member, self.arenas[action.tenant.name].headers
        record = ClientRecord(
            member.index, member.pid, member.start_time, member.uid, member.group.id,
            member.group.secret_hash,
        )  # fmt: skip
        headers.write_client(member.index, record if member.alive and member.listed else None)

    def _load_blob(self, action: act.LoadBlob) -> None:
        self._store()
        assert self.catalog is not None
        session = action.session
        found = self.catalog.get_blob(session.tenant.name, session.token_hash, action.node)
        version, data = (found.version, found.data) if found else (0, b"")
        reply = wire.Blob(action.id, self.world.boot, 0, version, data)
        self._perform(act.Send(action.peer, reply))

    # ---------------------------------------------------------------- time

    def tick(self, seconds: float = 0.1) -> None:
        """Let time pass; how long the daemon has run is stored, as now and then it is."""
        self.clock.advance(seconds)
        self.state.tick(self.clock.now_s)
        self.perform()
        if not self.lose_ops:
            self.ops.append(SaveClock(self.clock.now_s + self.world.ran_offset_s))

    def finish(self, at: int = 0, status: Status = Status.OK, only: int | None = None) -> None:
        """End one job of the disk."""
        self.disk.finish(at, status, only)

    def settle(self, ticks: int = 4) -> None:
        """Let all jobs succeed, and everything that waits for them go on."""
        for _ in range(ticks):
            while self.disk.pending:
                self.finish()
            self.tick(1.1)

    def check(self) -> None:
        """Everything that must be true at any time."""
        self.state.validate()

    # ------------------------------------------------------------- clients

    def tenant(self, name: str = "a") -> Tenant:
        return self.world.tenants[name]

    def spawn(self, tenant: str = "a", group: bytes | None = None) -> "SimClient":
        """A new process, connected."""
        self.next_pid += 1
        self.processes[self.next_pid] = self.next_pid * 10
        return SimClient(self, tenant, self.next_pid, group or secrets.token_bytes(16))

    def kill(self, client: "SimClient") -> None:
        """A client process dies."""
        self.processes.pop(client.pid, None)
        if client.peer is not None:
            client.disconnect()
        for member in self._members(client):
            if member.alive:
                self.state.process_died(member, self.clock.now_s)
        self.perform()

    def _members(self, client: "SimClient") -> list[Member]:
        tenant = self.tenant(client.tenant)
        return [m for m in tenant.members.values() if m.pid == client.pid]


class SimClient:
    """A client process with one connection."""

    def __init__(self, host: Host, tenant: str, pid: int, group: bytes) -> None:
        self.host, self.tenant, self.pid, self.group = host, tenant, pid, group
        self.secret = b"secret of " + group
        self.member = -1
        self.peer: Peer | None = None
        self.inbox: list[Any] = []
        self.next_id = 1
        self.next_lease = 1
        self.lost: list[int] = []
        self.hello([])

    def hello(self, leases: list[wire.HeldLease]) -> list[int]:
        """Connect, saying which leases are held; returns those that are lost."""
        host = self.host
        req = wire.Hello(0, 1, "sim", self.group, self.secret, self.member, leases)
        self.peer, lost = host.state.hello(
            self, host.tenant(self.tenant), 0, self.pid, host.processes[self.pid], req,
            host.clock.now_s,
        )  # fmt: skip
        self.member = self.peer.member.index
        host.perform()
        return lost

    def disconnect(self) -> None:
        """The connection closes."""
        assert self.peer is not None
        self.host.state.closed(self.peer, self.host.clock.now_s)
        self.peer = None
        self.host.perform()

    def send(self, kind: type[wire.Request], *args: Any, **fields: Any) -> int:
        """Ask without waiting; the answer will be in the inbox. Returns the request's id."""
        assert self.peer is not None
        self.next_id += 1
        req = kind(self.next_id, *args, **fields)
        reply = self.host.state.handle(self.peer, req, self.host.clock.now_s)
        self.host.perform()
        if reply is not None:
            self.inbox.append(reply)
        return self.next_id

    def answer(self, request_id: int) -> Any:
        """The answer to a request, None while there is none."""
        for at, message in enumerate(self.inbox):
            if message.id == request_id:
                return self.inbox.pop(at)
        return None

    def ask(self, kind: type[wire.Request], *args: Any, **fields: Any) -> Any:
        """Ask and take the answer that comes at once, None when it comes later."""
        return self.answer(self.send(kind, *args, **fields))

    def do(self, kind: type[wire.Request], *args: Any, **fields: Any) -> Any:
        """Ask and take the answer, letting the disk work as long as that takes."""
        request_id = self.send(kind, *args, **fields)
        for _ in range(100):
            reply = self.answer(request_id)
            if reply is not None:
                if isinstance(reply, wire.Error):
                    raise Refused(reply)
                return reply
            if self.host.disk.pending:
                self.host.finish()
            else:
                self.host.tick(0.1)
        raise AssertionError(f"{kind.__name__} was never answered")

    def pushes(self, kind: type[Any]) -> list[Any]:
        """Take the pushes of one kind that have come."""
        found = [message for message in self.inbox if isinstance(message, kind)]
        self.inbox = [message for message in self.inbox if not isinstance(message, kind)]
        return found

    def counter(self) -> int:
        """A new lease counter."""
        self.next_lease += 1
        return self.next_lease - 1

    # ------------------------------------------------------------ the arena

    def write(self, offset: int, pages: int, value: int) -> None:
        """Write a block of `pages` pages into the arena."""
        first = offset // PAGE
        self.host.arenas[self.tenant].payload[first : first + pages] = value

    def read(self, offset: int, pages: int) -> int:
        """The value of a block in the arena."""
        return value_of(self.host.arenas[self.tenant].payload, offset // PAGE, pages)


class Refused(Exception):
    """An error reply."""

    def __init__(self, reply: wire.Error) -> None:
        super().__init__(reply.message)
        self.code = reply.code
        self.pages = u32(reply.pages)


@contextmanager
def refused(kind: type[KvtierError]) -> Iterator[None]:
    """What is asked inside must be refused with this error."""
    with pytest.raises(Refused) as caught:
        yield
    found = caught.value
    assert found.code == kind.code, f"expected {kind.__name__}, got {found.code}: {found}"


def u32(packed: bytes) -> list[int]:
    """Packed u32 values."""
    return np.frombuffer(packed, "<u4").tolist()


def u64(packed: bytes) -> list[int]:
    """Packed u64 values."""
    return np.frombuffer(packed, "<u8").tolist()


def pack(*values: int) -> bytes:
    """Values as packed u32."""
    return np.array(values, "<u4").tobytes()
