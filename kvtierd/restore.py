"""From what the media and the catalog hold to what the core rebuilds its tables from."""

import logging
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvtier_client.wire import HELD
from kvtierd.catalog.rows import CatalogSnapshot, SessionRecord
from kvtierd.core.blocks import Slots
from kvtierd.core.leases import Member
from kvtierd.core.reclaim import FoundMember
from kvtierd.core.recover import (
    Found,
    FoundNode,
    FoundSession,
    Outcome,
    Recovery,
    adopt_slabs,
    join,
)  # fmt: skip
from kvtierd.core.slabs import CLEARING, Slabs, word
from kvtierd.core.state import State
from kvtierd.core.tenant import Pool, Tenant
from kvtierd.server import process_start_time
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.bodies import BLOCK_KEYED, split
from kvtierd.tiers.records import SlabEntry
from kvtierd.tiers.scan import Scan, scan_parts, word_readers
from kvtierd.tiers.spill_files import SpillFiles
from kvtierd.tiers.superblock import Kind

log = logging.getLogger(__name__)


class Restore:
    """Reads arenas, spill files and catalog once, at start."""

    def __init__(self, state: State, arenas: dict[str, Arena], spill: SpillFiles) -> None:
        self.state, self.arenas, self.spill = state, arenas, spill
        self.recovery = Recovery(state)
        self._nvme: list[Found] = []
        self._nvme_bad: list[Slots] = []

    def run(self, snapshot: CatalogSnapshot) -> tuple[Outcome, list[Member]]:
        """Rebuild everything; returns what was found and which processes must be watched."""
        world = self.state.world
        for record in snapshot.layouts:
            tenant = world.tenants.get(record.tenant)
            if tenant is not None:
                self.state.sessions.add_pool(tenant, record.layout)
        sessions = [(s.tenant, _session(s)) for s in snapshot.sessions]
        for name, session in sessions:
            if name in world.tenants:
                self.recovery.session(world.tenants[name], session)
        self._scan_nvme()
        watched: list[Member] = []
        for tenant in world.tenants.values():
            watched += self._tenant(tenant)
            mine = [session for name, session in sessions if name == tenant.name]
            self.recovery.finish(tenant, mine)
        return self.recovery.outcome, watched

    # ---------------------------------------------------------------- NVMe

    def _scan_nvme(self) -> None:
        """Collect the blocks of all spill files; what cannot be a block is cleared later."""
        words = self.state.world.nvme.words
        for part in self.spill.scan():
            scan = part.found
            self._nvme.append(_found(scan, Kind.SPILL, part.lost))
            bad = np.concatenate([scan.busy_slots, scan.damaged])
            words[bad] = word(CLEARING)
            self._nvme_bad.append(bad)
            if len(scan.damaged):
                log.error("spill: %d headers are damaged; their blocks are lost", len(scan.damaged))

    def _nvme_of(self, slabs: list[int]) -> Found:
        """The blocks found in some slabs of the spill files."""
        wanted = np.array(slabs, np.int64)
        max_slots = self.state.world.nvme.max_slots
        found = _nothing()
        for part in self._nvme:
            found = join(found, part.take(np.isin(part.slots // max_slots, wanted)))
        return found

    # ------------------------------------------------------------- tenants

    def _tenant(self, tenant: Tenant) -> list[Member]:
        headers = self.arenas[tenant.name].headers
        found, busy, read = _nothing(), [_no_slots()], [_no_slots()]
        for scan in scan_parts(headers):
            found = join(found, _found(scan, Kind.ARENA, np.zeros(len(scan.slots), np.bool_)))
            busy.append(scan.busy_slots)
            read.append(scan.slots[word_readers(scan.words) > 0])
            tenant.arena.words[scan.damaged] = 0
            if len(scan.damaged):
                log.error("arena %s: %d headers are damaged", tenant.name, len(scan.damaged))
        dram = _by_layout(headers.slab_table().entries(), tenant)
        nvme = _by_layout(self.spill.slabs(), tenant)
        for fingerprint in {**dram, **nvme}:
            pool = tenant.pools.get(fingerprint)
            slabs = dram.get(fingerprint, []), nvme.get(fingerprint, [])
            if pool is not None:
                self._adopt(pool, found, *slabs)
            else:
                self._set_aside(tenant, fingerprint, found, *slabs)
        members = [
            FoundMember(
                r.index, r.pid, r.start_time, r.uid, r.group, r.secret_hash,
                process_start_time(r.pid) == r.start_time,
            )
            for r in headers.clients()
        ]  # fmt: skip
        return self.state.reclaim.clients(
            tenant, members, np.concatenate(busy), np.concatenate(read)
        )

    def _adopt(self, pool: Pool, found: Found, dram: list[int], nvme: list[int]) -> None:
        """Give a pool its slabs and the blocks in them."""
        arena, world = pool.tenant.arena, self.state.world
        adopt_slabs(arena, pool, dram, dram=True)
        adopt_slabs(world.nvme, pool, nvme, dram=False)
        in_dram = found.take(np.isin(found.slots // arena.max_slots, np.array(dram, np.int64)))
        self.recovery.blocks(pool, join(in_dram, self._nvme_of(nvme)))
        for bad in self._nvme_bad:
            mine = bad[np.isin(bad // world.nvme.max_slots, np.array(nvme, np.int64))]
            if len(mine):
                self.state.copies.clear(pool, mine, CLEARING)

    def _set_aside(
        self, tenant: Tenant, fingerprint: bytes, found: Found, dram: list[int], nvme: list[int]
    ) -> None:
        """Keep the slabs of a layout that the catalog does not know until it is registered."""
        for slabs, numbers in ((tenant.arena, dram), (self.state.world.nvme, nvme)):
            set_aside(slabs, numbers)
        log.warning(
            "tenant %s: %d slabs of layout %s, which the catalog does not know, are kept until a "
            "client registers it", tenant.name, len(dram) + len(nvme), fingerprint.hex(),
        )  # fmt: skip

        def adopt(pool: Pool) -> None:
            for slabs, numbers in ((tenant.arena, dram), (self.state.world.nvme, nvme)):
                slabs.free_slabs.extend(numbers)
            self._adopt(pool, found, dram, nvme)

        self.state.unclaimed[tenant.number, fingerprint] = adopt


def set_aside(slabs: Slabs, numbers: list[int]) -> None:
    """Let nobody have some slabs."""
    for slab in numbers:
        slabs.free_slabs.remove(slab)


def strangers(entries: list[SlabEntry], tenants: dict[str, Tenant]) -> list[int]:
    """Slabs of tenants that the configuration does not name; they stay as they are."""
    known = {tenant.number for tenant in tenants.values()}
    return [entry.slab for entry in entries if entry.tenant not in known]


def _by_layout(entries: Iterable[SlabEntry], tenant: Tenant) -> dict[bytes, list[int]]:
    slabs: dict[bytes, list[int]] = {}
    for entry in entries:
        if entry.tenant == tenant.number:
            slabs.setdefault(entry.fingerprint, []).append(entry.slab)
    return slabs


def _no_slots() -> Slots:
    return np.empty(0, np.int64)


def _nothing() -> Found:
    u64, flags = np.empty(0, np.uint64), np.empty(0, np.bool_)
    return Found(
        _no_slots(), u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, flags, flags, flags, flags
    )


def _found(scan: Scan, kind: Kind, lost: NDArray[np.bool_]) -> Found:
    fields = split(scan.bodies, int(kind))

    def u64(column: object) -> NDArray[np.uint64]:
        return np.asarray(column, np.uint64)

    return Found(
        slots=scan.slots.astype(np.int64),
        owner0=u64(fields.owner0),
        owner1=u64(fields.owner1),
        node=u64(fields.node),
        page=u64(fields.page),
        valid=u64(fields.valid_tokens),
        checksum=u64(fields.payload_sum),
        seq=u64(fields.seq),
        lease=u64(fields.lease),
        parent=u64(fields.parent),
        fork_tokens=u64(fields.fork_tokens),
        keyed=np.asarray(fields.block_kind) == BLOCK_KEYED,
        held=np.asarray(fields.retention) == HELD,
        lost=lost,
        in_dram=np.full(len(scan.slots), kind is Kind.ARENA),
    )


def _session(record: SessionRecord) -> FoundSession:
    nodes = [
        FoundNode(n.node, n.parent, n.fork_tokens, n.retention, n.retention_seq, n.ended)
        for n in record.nodes
    ]
    return FoundSession(
        record.session, record.name, record.priority, list(record.layouts), record.since_seq,
        record.idle_s, record.closed, nodes, record.pruned, record.blob_versions, record.holds,
    )  # fmt: skip
