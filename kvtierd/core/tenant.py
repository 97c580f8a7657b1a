"""A tenant, its layout pools, and the arithmetic of admission.

Admission is one inequality per pool: HELD blocks + slots being written + quarantined slots +
promises must fit the pool's share of both tiers, less the exchange headroom. It does not depend on
where blocks are now, so that eviction can always make it true.

A pool with HELD blocks always has a DRAM slab, or is kept one (`SlabPool.wanted`): whatever other
layouts store, its blocks can be brought to DRAM one after the other.
"""

import math
from typing import Final

from kvtier_client.wire import Layout
from kvtierd.core.leases import Group, Lease, Member, Ticket
from kvtierd.core.slabs import QUARANTINED, WRITING, SlabPool, Slabs
from kvtierd.core.tree import Session
from kvtierd.core.waiting import Waiting

SLOT_ALIGN: Final = 4096
SLACK_MAX: Final = 512
"""Slots that the short path of admission grants before it looks again."""


class Pool:
    """All blocks of one layout of one tenant: a SlabPool in each tier and their accounting."""

    def __init__(
        self, number: int, tenant: "Tenant", layout: Layout, dram: SlabPool, nvme: SlabPool
    ) -> None:
        self.number, self.tenant, self.layout, self.dram, self.nvme = (
            number, tenant, layout, dram, nvme,
        )  # fmt: skip
        self.fingerprint = layout.fingerprint()
        self.layout0 = int.from_bytes(self.fingerprint[:8], "little")
        self.layout1 = int.from_bytes(self.fingerprint[8:], "little")
        self.slot_bytes = dram.slot_bytes
        self.held = 0  # rows that may not be dropped: HELD or pinned
        self.clean = 0  # rows readable in DRAM that have an NVMe copy too
        self.promised = 0  # blocks promised to leases beyond their slots
        self.moving = 0  # rows being demoted: their DRAM slots will be free
        self._slack = 0  # slots that can be granted without looking again, in `_epoch`
        self._epoch = -1
        dram.wanted = self._has_kept

    def _has_kept(self) -> bool:
        """Whether it has blocks that may not be dropped: they must always find a way to DRAM."""
        return self.held > 0

    @property
    def anchored(self) -> bool:
        """Whether blocks of it that are on NVMe only may be kept: it has, or gets, a DRAM slab."""
        return self.dram.occupied_total > 0 or self.tenant.arena.usable_slabs(self.dram) > 0

    @property
    def dram_capacity(self) -> int:
        """DRAM slots of the slabs that the pool uses or could still take."""
        usable = self.tenant.arena.usable_slabs(self.dram)
        return self.dram.occupied_total + usable * self.dram.slots_per_slab

    @property
    def headroom(self) -> int:
        """DRAM slots that only blocks with an NVMe copy may use, so that exchange goes on."""
        return max(1, math.ceil(self.tenant.headroom * self.dram_capacity))

    @property
    def nvme_available(self) -> int:
        """NVMe slots that can be allocated now, within the tenant's quota."""
        own = sum(len(pool.nvme.empty) for pool in self.tenant.pools.values())
        left = max(self.tenant.nvme_slabs_left, 0) + own
        slabs = min(self.tenant.nvme.usable_slabs(self.nvme), left)
        return self.nvme.free_in_use + slabs * self.nvme.slots_per_slab

    @property
    def write_room(self) -> int:
        """Slots that writers may take now without touching the exchange headroom."""
        available = self.tenant.arena.available(self.dram)
        dirty = self.dram.used - self.clean
        return min(available, self.dram_capacity - self.headroom - dirty)

    def take_slack(self, n: int) -> bool:
        """Whether `n` more slots may be granted; the short path, that seldom looks closely.

        False does not mean that there is no room, only that `admits` and `write_room` must say."""
        epoch = self.tenant.arena.epoch + self.tenant.nvme.epoch
        if self._epoch != epoch or self._slack < n:
            self._slack = min(self.write_room, max(n, SLACK_MAX))
            self._epoch = epoch
            if self._slack < n or self.tenant.quarantined_bytes() or not self.admits(self._slack):
                self._epoch = -1
                return False
        self._slack -= n
        return True

    @property
    def demand(self) -> int:
        """Blocks that must have a place: HELD, being written, quarantined or promised."""
        counts = self.dram.counts
        return self.held + counts[WRITING] + counts[QUARANTINED] + self.promised

    def admits(self, n: int) -> bool:
        """Whether `n` more blocks can be promised a place in some tier."""
        if self.demand + n <= self.dram.occupied_total + self.nvme.occupied_total - self.headroom:
            return True
        return self.tenant.admits({self.number: n})


class Tenant:
    """A security domain: its arena, quotas, sessions, groups and waiting requests."""

    def __init__(
        self,
        name: str,
        number: int,
        arena: Slabs,
        nvme: Slabs,
        nvme_quota_bytes: int,
        headroom: float,
    ) -> None:
        self.name, self.number, self.arena, self.nvme = name, number, arena, nvme
        self.nvme_quota_bytes = nvme_quota_bytes
        self.headroom = headroom
        self.pools: dict[bytes, Pool] = {}
        self.sessions: dict[int, Session] = {}
        self.closed: dict[int, None] = {}  # recently closed sessions, for repeats
        self.groups: dict[bytes, Group] = {}
        self.members: dict[int, Member] = {}
        self.leases: dict[int, Lease] = {}
        self.waiting = Waiting()
        self.loading: list[Ticket] = []
        self.pressure = False
        self.calm_bytes = 0  # bytes that may be allocated before watermarks matter, in `calm_epoch`
        self.calm_epoch = -1
        self.spill_retry_s = 0.0  # no demotion before this time, after an I/O error
        self.spill_fails = False  # the last demotion could not write all its blocks

    @property
    def nvme_slabs_left(self) -> int:
        """NVMe slabs that the quota still allows."""
        have = sum(len(pool.nvme.free) for pool in self.pools.values())
        return self.nvme_quota_bytes // self.nvme.slab_bytes - have

    def admits(self, extra: dict[int, int]) -> bool:
        """Whether all pools' demands, and `extra` more blocks by pool number, have a place.

        A slab that is in use counts for its pool alone; unused ones go to whoever is short."""
        dram_slabs = self.arena.unused_slabs
        own = sum(len(pool.nvme.empty) for pool in self.pools.values())
        nvme_slabs = min(self.nvme.unused_slabs, max(self.nvme_slabs_left, 0) + own)
        for pool in self.pools.values():
            demand = pool.demand + extra.get(pool.number, 0)
            have = pool.dram.occupied_total + pool.nvme.occupied_total - pool.headroom
            if pool.held and not pool.dram.occupied_total:
                have += pool.dram.slots_per_slab  # of the slab that it is kept
            short = demand - have
            if not demand or short <= 0:
                continue
            take = min(nvme_slabs, math.ceil(short / pool.nvme.slots_per_slab))
            nvme_slabs -= take
            short -= take * pool.nvme.slots_per_slab
            if short > 0:
                dram_slabs -= math.ceil(short / pool.dram.slots_per_slab)
        return dram_slabs >= 0

    def keeps(self, extra: dict[int, int]) -> bool:
        """Whether so many stored blocks more, wherever they are, may be kept from now on."""
        pools = [pool for pool in self.pools.values() if extra.get(pool.number)]
        return all(pool.anchored for pool in pools) and self.admits(extra)

    def arena_bytes(self) -> int:
        """Bytes of the whole arena."""
        return self.arena.slabs * self.arena.slab_bytes

    def used_bytes(self) -> int:
        """Bytes of DRAM slots that are not free."""
        return sum(pool.dram.used * pool.slot_bytes for pool in self.pools.values())

    def quarantined_bytes(self) -> int:
        """Bytes of DRAM slots whose writers ran out of time and may still be writing."""
        pools = self.pools.values()
        return sum(pool.dram.counts[QUARANTINED] * pool.slot_bytes for pool in pools)
