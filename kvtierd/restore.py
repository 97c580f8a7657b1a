"""From what the media and the catalog hold to what the core rebuilds its tables from."""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvtier_client.wire import HELD
from kvtierd.catalog.errors import CatalogDamaged
from kvtierd.catalog.rows import CatalogSnapshot, SessionRecord
from kvtierd.core.blocks import Slots
from kvtierd.core.found import Found, FoundNode, FoundSession
from kvtierd.core.leases import Member
from kvtierd.core.reclaim import FoundMember
from kvtierd.core.recover import Outcome, Recovery
from kvtierd.core.slabs import CLEARING, Slabs, word
from kvtierd.core.state import State
from kvtierd.core.tenant import Pool, Tenant
from kvtierd.core.tree import Fold, FoldState
from kvtierd.server import process_start_time
from kvtierd.tiers import bodies as b
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.records import SlabEntry
from kvtierd.tiers.scan import Scan, scan_parts, word_readers
from kvtierd.tiers.spill_files import SpillFiles

log = logging.getLogger(__name__)

STRANGER = 0xFFFFFFFE
"""In place of a pool's number: the slab is of a tenant that the configuration does not name."""
NO_POOL = 0xFFFFFFFF
"""The slab is of a layout that the catalog does not know."""
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


@dataclass(slots=True)
class _Tier:
    """The slabs of one payload that an earlier life had assigned, and what waits for its pool."""

    slabs: Slabs
    entries: list[SlabEntry]
    pool_of: NDArray[np.uint32]  # number of each slab's pool, NO_POOL or STRANGER
    unclaimed: list[Found] = field(default_factory=list)

    def of(self, tenant: Tenant) -> dict[bytes, list[int]]:
        """A tenant's slabs by layout."""
        found: dict[bytes, list[int]] = {}
        for entry in self.entries:
            if entry.tenant == tenant.number:
                found.setdefault(entry.fingerprint, []).append(entry.slab)
        return found

    def claim(self, numbers: list[int], pool: Pool) -> list[int]:
        """Some slabs are of this pool; returns them without those that are not cut as its slabs
        are, which nobody gets and nobody reads."""
        part = pool.dram if self.slabs is pool.tenant.arena else pool.nvme
        cut = part.slot_bytes, part.slots_per_slab, pool.layout.block_bytes
        misfits = {
            entry.slab for entry in self.entries
            if entry.fingerprint == pool.fingerprint and entry.tenant == pool.tenant.number
            and (entry.slot_bytes, entry.slots, entry.block_bytes) != cut
        }  # fmt: skip
        if misfits:
            log.error("%d slabs are not cut as their layout says; they are set aside", len(misfits))
            self.pool_of[sorted(misfits)] = STRANGER
            self.entries = [entry for entry in self.entries if entry.slab not in misfits]
            set_aside(self.slabs, sorted(misfits))
        fitting = [slab for slab in numbers if slab not in misfits]
        self.pool_of[fitting] = pool.number
        return fitting

    def pools(self, slots: Slots) -> NDArray[np.uint32]:
        """The pool of each slot."""
        return self.pool_of[slots // self.slabs.max_slots]


class Restore:
    """Reads arenas, spill files and catalog once, at start."""

    def __init__(self, state: State, arenas: dict[str, Arena], spill: SpillFiles) -> None:
        self.state, self.arenas, self.spill = state, arenas, spill
        self.recovery = Recovery(state)
        tenants = state.world.tenants
        self._nvme = _tier(state.world.nvme, spill.slabs(), tenants)
        self._dram = {
            name: _tier(tenant.arena, arenas[name].headers.slab_table().entries(), tenants)
            for name, tenant in tenants.items()
        }
        self._bad: Slots = np.empty(0, np.int64)  # NVMe slots that cannot be blocks

    def run(self, snapshot: CatalogSnapshot) -> tuple[Outcome, list[Member]]:
        """Rebuild everything; returns what was found and which processes must be watched."""
        laps = [("", time.monotonic())]
        sessions = self._sessions(snapshot)
        laps.append(("sessions", time.monotonic()))
        tenants = self.state.world.tenants
        for tenant in tenants.values():
            for tier in (self._nvme, self._dram[tenant.name]):
                for fingerprint, numbers in tier.of(tenant).items():
                    if fingerprint in tenant.pools:
                        tier.claim(numbers, tenant.pools[fingerprint])
        self._scan_nvme()
        marks = {name: self._scan_arena(tenant) for name, tenant in tenants.items()}
        laps.append(("headers", time.monotonic()))
        for tenant in tenants.values():
            self._leave_damaged(tenant)
            self._adopt_all(tenant)
        self.recovery.settle()
        self._clear_bad()
        laps.append(("tables", time.monotonic()))
        watched: list[Member] = []
        for name, tenant in tenants.items():
            watched += self._clients(tenant, *marks[name])
            self.recovery.finish(tenant, [found for owner, found in sessions if owner == name])
        spans = (f"{name} {end - begun:.2f} s" for (_, begun), (name, end) in pairwise(laps))
        log.info("restored: %s", ", ".join(spans))
        return self.recovery.outcome, watched

    def _sessions(self, snapshot: CatalogSnapshot) -> list[tuple[str, FoundSession]]:
        """Put back the layouts and sessions of the catalog."""
        tenants = self.state.world.tenants
        for record in snapshot.layouts:
            if record.tenant in tenants:
                self.state.sessions.add_pool(tenants[record.tenant], record.layout)
        world = self.state.world
        world.ran_offset_s = snapshot.ran_s - world.now_s
        sessions = [
            (s.tenant, _session(s, world.ran_offset_s))
            for s in snapshot.sessions if s.tenant in tenants
        ]  # fmt: skip
        for name, session in sessions:
            if not session.closed and not tenants[name].pools.keys() >= set(session.layouts):
                raise CatalogDamaged(
                    "cannot restore the sessions of the catalog",
                    f"session {session.token_hash.hex()} has a layout that the catalog lacks",
                    "restore the catalog from a backup, or move it away, which loses the sessions",
                )
            self.recovery.session(tenants[name], session)
        return sessions

    # --------------------------------------------------------------- media

    def _scan_nvme(self) -> None:
        """Take the blocks of all spill files; what cannot be a block is cleared later."""
        words = self.state.world.nvme.words
        bad = [self._bad]
        for part in self.spill.scan():
            scan = part.found
            self._add(self._nvme, scan, part.lost, in_dram=False)
            bad += [scan.busy_slots, scan.damaged]
            if len(scan.damaged):
                log.error("spill: %d headers are damaged; their blocks are lost", len(scan.damaged))
        self._bad = np.concatenate(bad)
        words[self._bad] = word(CLEARING)

    def _scan_arena(self, tenant: Tenant) -> tuple[Slots, Slots]:
        """Take the blocks of an arena; returns the slots that are busy, and those being read."""
        busy, read = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for scan in scan_parts(self.arenas[tenant.name].headers):
            lost = np.zeros(len(scan.slots), np.bool_)
            self._add(self._dram[tenant.name], scan, lost, in_dram=True)
            busy.append(scan.busy_slots)
            read.append(scan.slots[word_readers(scan.words) > 0])
            tenant.arena.words[scan.damaged] = 0
            if len(scan.damaged):
                log.error("arena %s: %d headers are damaged", tenant.name, len(scan.damaged))
        return np.concatenate(busy), np.concatenate(read)

    def _add(self, tier: _Tier, scan: Scan, lost: NDArray[np.bool_], *, in_dram: bool) -> None:
        found = _found(scan, tier.pools(scan.slots), lost, in_dram)
        known = found.pool < STRANGER
        if not known.all():
            tier.unclaimed.append(found.take(found.pool == NO_POOL))
            found = found.take(known)
        self.recovery.add(found)

    def _clear_bad(self) -> None:
        """Clear the NVMe slots of pools that cannot be blocks."""
        pools = self._nvme.pools(self._bad)
        for number in np.unique(pools[pools < STRANGER]).tolist():
            mine = self._bad[pools == number]
            self.state.copies.clear(self.state.world.pools[number], mine, CLEARING)
        self._bad = self._bad[pools == NO_POOL]

    # ------------------------------------------------------------- tenants

    def _leave_damaged(self, tenant: Tenant) -> None:
        """Nobody gets an arena's slabs whose entries are damaged: a client of an earlier life may
        still write there."""
        damaged = np.flatnonzero(self.arenas[tenant.name].headers.slab_table().damaged).tolist()
        if damaged:
            log.error("arena %s: %d slabs have damaged entries", tenant.name, len(damaged))
            set_aside(tenant.arena, damaged)

    def _adopt_all(self, tenant: Tenant) -> None:
        """Give the tenant's pools their slabs; those of unknown layouts nobody gets."""
        dram, nvme = self._dram[tenant.name].of(tenant), self._nvme.of(tenant)
        for fingerprint in {**dram, **nvme}:
            pool = tenant.pools.get(fingerprint)
            slabs = dram.get(fingerprint, []), nvme.get(fingerprint, [])
            if pool is not None:
                self._adopt(pool, *slabs)
            else:
                self._set_aside(tenant, fingerprint, *slabs)

    def _adopt(self, pool: Pool, dram: list[int], nvme: list[int]) -> None:
        pool.tenant.arena.adopt(dram, pool.dram)
        self.state.world.nvme.adopt(nvme, pool.nvme)

    def _set_aside(
        self, tenant: Tenant, fingerprint: bytes, dram: list[int], nvme: list[int]
    ) -> None:
        """Keep the slabs of a layout that the catalog does not know until it is registered."""
        tiers = ((self._dram[tenant.name], dram), (self._nvme, nvme))
        for tier, numbers in tiers:
            set_aside(tier.slabs, numbers)
        log.warning(
            "tenant %s: %d slabs of layout %s, which the catalog does not know, are kept until a "
            "client registers it", tenant.name, len(dram) + len(nvme), fingerprint.hex(),
        )  # fmt: skip

        def adopt(pool: Pool) -> None:
            claimed = []
            for tier, numbers in tiers:
                claimed.append(tier.claim(numbers, pool))
                tier.slabs.free_slabs.extend(claimed[-1])
                for found in tier.unclaimed:
                    found.pool = tier.pools(found.slots)
                    mine = found.pool == pool.number
                    self.recovery.add(found.take(mine))
                tier.unclaimed = [found.take(found.pool == NO_POOL) for found in tier.unclaimed]
            self._adopt(pool, *claimed)
            self.recovery.settle()
            self._clear_bad()
            tenant.back_what_is_there()

        self.state.unclaimed[tenant.number, fingerprint] = adopt

    def _clients(self, tenant: Tenant, busy: Slots, read: Slots) -> list[Member]:
        """Put back the client groups and what they may still write or read."""
        members = [
            FoundMember(
                r.index, r.pid, r.start_time, r.uid, r.group, r.secret_hash,
                process_start_time(r.pid) == r.start_time,
            )
            for r in self.arenas[tenant.name].headers.clients()
        ]  # fmt: skip
        return self.state.reclaim.clients(tenant, members, busy, read)


def set_aside(slabs: Slabs, numbers: list[int]) -> None:
    """Let nobody have some slabs."""
    mine = set(numbers)
    slabs.free_slabs = [slab for slab in slabs.free_slabs if slab not in mine]


def strangers(entries: list[SlabEntry], tenants: dict[str, Tenant]) -> list[int]:
    """Slabs of tenants that the configuration does not name; they stay as they are."""
    known = {tenant.number for tenant in tenants.values()}
    return [entry.slab for entry in entries if entry.tenant not in known]


def _tier(slabs: Slabs, entries: Iterable[SlabEntry], tenants: dict[str, Tenant]) -> _Tier:
    tier = _Tier(slabs, list(entries), np.full(slabs.slabs, NO_POOL, np.uint32))
    tier.pool_of[strangers(tier.entries, tenants)] = STRANGER
    return tier


def _found(scan: Scan, pools: NDArray[np.uint32], lost: NDArray[np.bool_], in_dram: bool) -> Found:
    bodies = scan.bodies
    node, sizes, fork = (
        bodies[:, word] for word in (b.W_NODE_PAGE, b.W_VALID_LENGTH, b.W_PARENT_FORK)
    )
    kinds = bodies[:, b.W_FLAGS] >> _32
    return Found(
        slots=scan.slots,
        pool=pools,
        owner0=bodies[:, b.W_OWNER0],
        owner1=bodies[:, b.W_OWNER1],
        node=node & _LOW,
        page=node >> _32,
        valid=sizes & _LOW,
        checksum=bodies[:, b.W_PAYLOAD_SUM],
        seq=bodies[:, b.W_SEQ],
        parent=fork & _LOW,
        fork_tokens=fork >> _32,
        keyed=kinds.astype(np.uint8) == b.BLOCK_KEYED,
        held=(kinds >> np.uint64(8)).astype(np.uint8) == HELD,
        lost=lost,
        in_dram=in_dram,
    )


def _session(record: SessionRecord, ran_offset_s: float) -> FoundSession:
    nodes = [
        FoundNode(n.node, n.parent, n.fork_tokens, n.retention, n.retention_seq, n.ended)
        for n in record.nodes
    ]
    folds = [
        (f.node, Fold(
            f.first, f.end, f.seq, FoldState(f.state), f.grace_s, f.until_s - ran_offset_s, f.kept
        ))
        for f in record.folds
    ]  # fmt: skip
    return FoundSession(
        record.session, record.name, record.priority, list(record.layouts), record.since_seq,
        record.idle_s, record.closed, nodes, record.pruned, record.blob_versions, record.holds,
        folds,
    )  # fmt: skip
