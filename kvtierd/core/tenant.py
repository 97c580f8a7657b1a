"""A tenant, its layout pools, and the arithmetic of admission.

Admission is one inequality per pool: HELD blocks + slots being written + quarantined slots +
promises must fit the pool's share of both tiers, less the exchange headroom. It does not depend on
where blocks are now, so that eviction can always make it true.

What a pool's own slabs do not hold of it, unused slabs must; so many of them are kept for it when
other pools allocate, and at least one for a pool with HELD blocks that has no DRAM slab in use:
whatever other layouts store, its blocks can be brought to DRAM one after the other.
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

    @property
    def stranded(self) -> bool:
        """Whether it has blocks that may not be dropped, and no slab through which to read them."""
        return self.held > 0 and not self.dram.occupied_total

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
        slots = self.dram.occupied_total + self.tenant.arena.unused_slabs * self.dram.slots_per_slab
        return max(1, math.ceil(self.tenant.headroom * slots))

    @property
    def nvme_available(self) -> int:
        """NVMe slots that can be allocated now, within the tenant's quota."""
        return self.nvme.free_in_use + self.tenant.unused_nvme_slabs * self.nvme.slots_per_slab

    @property
    def write_room(self) -> int:
        """Slots that writers may take now without touching the exchange headroom."""
        available = self.tenant.arena.available(self.dram)
        dirty = self.dram.used - self.clean
        return min(available, self.dram_capacity - self.headroom - dirty)

    def take_slack(self, n: int) -> bool:
        """Whether `n` more slots may be granted; the short path, that seldom looks closely.

        False does not mean that there is no room, only that `admits` and `write_room` must say."""
        tenant = self.tenant
        if self._epoch != tenant.epoch or self._slack < n:
            self._slack = min(self.write_room, max(n, SLACK_MAX))
            if self._slack < n or tenant.quarantined_bytes() or not self.admits(self._slack):
                self._epoch = -1
                return False
            self._epoch = tenant.epoch
        self._slack -= n
        return True

    @property
    def demand(self) -> int:
        """Blocks that must have a place: HELD, being written, quarantined or promised."""
        counts = self.dram.counts
        return self.held + counts[WRITING] + counts[QUARANTINED] + self.promised

    def _holds(self, n: int) -> bool:
        """Whether the slabs that the pool uses now have a place for `n` more blocks."""
        return self.demand + n <= self.own_places

    @property
    def own_places(self) -> int:
        """Blocks that the slabs in use can hold in either tier, so that exchange still goes on."""
        return self.dram.occupied_total + self.nvme.occupied_total - self.headroom

    def admits(self, n: int) -> bool:
        """Whether `n` more blocks can be promised a place in some tier."""
        return self._holds(n) or self.tenant.admits({self.number: n}, self.number)


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
        arena.kept = self._kept_slabs
        self.nvme_quota_bytes = nvme_quota_bytes
        self.headroom = headroom
        self.pools: dict[bytes, Pool] = {}
        self.sessions: dict[int, Session] = {}
        self.closed: dict[int, None] = {}  # recently closed sessions, for repeats
        self.groups: dict[bytes, Group] = {}
        self.members: dict[int, Member] = {}
        self.leases: dict[int, Lease] = {}
        self._shares = 0  # counts how often unused slabs were promised to another pool than before
        self._sharer = -1  # the number of the pool that they were last promised to
        self.waiting = Waiting()
        self.loading: list[Ticket] = []
        self.pressure = False
        self.calm_bytes = 0  # bytes that may be allocated before watermarks matter, in `calm_epoch`
        self.calm_epoch = -1
        self.spill_retry_s = 0.0  # no demotion before this time, after an I/O error
        self.spill_fails = False  # the last demotion could not write all its blocks

    @property
    def epoch(self) -> int:
        """Another number when a pool may have less room than it had."""
        return self.arena.epoch + self.nvme.epoch + self._shares

    @property
    def nvme_slabs_left(self) -> int:
        """NVMe slabs that the quota still allows."""
        have = sum(len(pool.nvme.free) for pool in self.pools.values())
        return self.nvme_quota_bytes // self.nvme.slab_bytes - have

    @property
    def unused_nvme_slabs(self) -> int:
        """NVMe slabs without a used slot that its pools may use, within the quota."""
        own = sum(len(pool.nvme.empty) for pool in self.pools.values())
        return min(self.nvme.unused_slabs, max(self.nvme_slabs_left, 0) + own)

    def admits(self, extra: dict[int, int], sharer: int = -1) -> bool:
        """Whether all pools' demands, and `extra` more blocks by pool number, have a place.

        A slab that is in use counts for its pool alone; unused ones go to whoever is short."""
        if self._missing_slabs(list(self.pools.values()), extra) > self.arena.unused_slabs:
            return False
        if sharer < 0 or sharer != self._sharer:
            self._sharer = sharer
            self._shares += 1
        return True

    def _missing_slabs(self, pools: list[Pool], extra: dict[int, int]) -> int:
        """Unused DRAM slabs that pools need for their demands, once NVMe's are shared out too."""
        nvme_slabs, dram_slabs = self.unused_nvme_slabs, 0
        for pool in pools:
            demand = pool.demand + extra.get(pool.number, 0)
            if not demand:
                continue
            short = demand - pool.own_places
            if pool.stranded:
                dram_slabs += 1
                short -= pool.dram.slots_per_slab
            if short <= 0:
                continue
            take = min(nvme_slabs, math.ceil(short / pool.nvme.slots_per_slab))
            nvme_slabs -= take
            short -= take * pool.nvme.slots_per_slab
            if short > 0:
                dram_slabs += math.ceil(short / pool.dram.slots_per_slab)
        return dram_slabs

    def _kept_slabs(self, dram: SlabPool) -> int:
        """Unused DRAM slabs that a pool must leave to the others; a stranded one leaves only those
        that others need to be no longer stranded."""
        if len(self.pools) < 2:
            return 0
        mine = next((pool for pool in self.pools.values() if pool.dram is dram), None)
        others = [pool for pool in self.pools.values() if pool is not mine]
        if mine is not None and mine.stranded:
            return sum(pool.stranded for pool in others)
        return self._missing_slabs(others, {})

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
