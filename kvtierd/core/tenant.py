"""A tenant, its layout pools, and the arithmetic of admission.

Admission is one inequality per pool: its demand (HELD blocks, slots being written, quarantined
slots, promises) must fit the slabs that it has in both tiers, less the exchange headroom. It does
not depend on where blocks are now, so that eviction can always make it true.

    Whatever was admitted is backed by slabs that its pool has: `places >= demand`, and a pool with
    any demand has a DRAM slab.

So each admitted block has a slot to be stored in, and one through which it comes back to DRAM,
whatever other layouts and other tenants do: they get unassigned slabs, and the empty ones that
this inequality can spare. Who asks for more than its slabs hold takes slabs first (`secure`).
"""

import math
from typing import Final

from kvtier_client.wire import Layout
from kvtierd.core.leases import Group, Lease, Member, Ticket
from kvtierd.core.slabs import QUARANTINED, WRITING, Quota, SlabPool, Slabs
from kvtierd.core.tree import TOKENS_MAX, Session
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
        dram.spare, nvme.spare = self._spare_dram, self._spare_nvme
        self.slot_bytes = dram.slot_bytes
        self.pages_max = TOKENS_MAX // layout.block_tokens  # of a branch
        self.held = 0  # rows that may not be dropped: HELD or pinned
        self.clean = 0  # rows readable in DRAM that have an NVMe copy too
        self.promised = 0  # blocks promised to leases beyond their slots
        self.moving = 0  # rows being demoted: their DRAM slots will be free
        self._slack = 0  # slots that can be granted without looking again, in `_epoch`
        self._epoch = -1

    # ----------------------------------------------------------- admission

    @property
    def demand(self) -> int:
        """Blocks that must have a place: HELD, being written, quarantined or promised."""
        counts = self.dram.counts
        return self.held + counts[WRITING] + counts[QUARANTINED] + self.promised

    @property
    def surplus(self) -> int:
        """Blocks beyond its demand that its slabs in either tier have places for."""
        return self.fitting(self.dram.capacity) + self.nvme.total - self.demand

    def fitting(self, slots: int) -> int:
        """How many of so many DRAM slots may have a block without an NVMe copy: the others are the
        headroom through which the tiers exchange blocks."""
        return slots - max(1, math.ceil(self.tenant.headroom * slots))

    @property
    def anchored(self) -> bool:
        """Whether its blocks have a way to DRAM: it has a slab there, or can take one."""
        return self.dram.capacity > 0 or self.tenant.arena.takeable(self.dram) > 0

    def admits(self, n: int) -> bool:
        """Whether slabs can be had in which `n` more blocks have places."""
        short = n - self.surplus
        if short > 0:
            short -= self.tenant.nvme.takeable(self.nvme) * self.nvme.slots_per_slab
        return short <= 0 or short <= self.dirty_max - self.fitting(self.dram.capacity)

    def secure(self, n: int, writing: int = 0) -> bool:
        """Take slabs until `n` more blocks have places, with DRAM slots for `writing` of them.

        False, and nothing taken, when there are not so many."""
        arena, nvme, had = self.tenant.arena, self.tenant.nvme, self.slabs
        there = True
        while there and (not self.dram.capacity or self._writable < writing > 0):
            there = arena.take(self.dram)
        while there and self.surplus < n:
            there = nvme.take(self.nvme) or arena.take(self.dram)
        if not there:
            self.give_back(had)
        return there

    @property
    def slabs(self) -> tuple[int, int]:
        """How many slabs it has in DRAM and in NVMe."""
        return len(self.dram.free), len(self.nvme.free)

    def give_back(self, had: tuple[int, int]) -> None:
        """Let go of slabs that it took after it had so many, and that nothing is in yet."""
        self.tenant.arena.give_back(self.dram, had[0])
        self.tenant.nvme.give_back(self.nvme, had[1])

    def can_leave_slab(self) -> bool:
        """Whether it could do without one of its DRAM slabs, once it has more slabs of NVMe."""
        slots, nvme = self.dram.slots_per_slab, self.nvme
        left = self.dram.capacity - slots
        lost = self.fitting(left + slots) - self.fitting(left)
        more = self.tenant.nvme.takeable(nvme) * nvme.slots_per_slab
        return not self.demand or (left > 0 and self.surplus + more >= lost)

    def _spare_dram(self) -> int:
        slots, empty = self.dram.slots_per_slab, len(self.dram.empty)
        if not self.demand:
            return empty
        return max(0, min(empty, self.dram.capacity // slots - 1, self.surplus // slots))

    def _spare_nvme(self) -> int:
        empty = len(self.nvme.empty)
        if not self.demand:
            return empty
        return max(0, min(empty, self.surplus // self.nvme.slots_per_slab))

    # ---------------------------------------------------------------- room

    @property
    def dirty(self) -> int:
        """DRAM slots in use whose blocks have no NVMe copy, or are being written."""
        return self.dram.used - self.clean

    @property
    def dram_capacity(self) -> int:
        """DRAM slots of the slabs that the pool has or could still take."""
        more = self.tenant.arena.takeable(self.dram)
        return self.dram.capacity + more * self.dram.slots_per_slab

    @property
    def dirty_max(self) -> int:
        """How many of these may have a block without an NVMe copy."""
        return self.fitting(self.dram_capacity)

    @property
    def nvme_available(self) -> int:
        """NVMe slots that can be allocated now, within the tenant's quota."""
        return self.tenant.nvme.available(self.nvme)

    @property
    def write_room(self) -> int:
        """Slots that writers may take now without touching the exchange headroom."""
        return min(self.tenant.arena.available(self.dram), self.dirty_max - self.dirty)

    @property
    def _writable(self) -> int:
        """The same, of the slabs that the pool has."""
        return min(self.dram.vacant, self.fitting(self.dram.capacity) - self.dirty)

    def take_slack(self, n: int) -> bool:
        """Whether `n` more slots may be granted; the short path, that seldom looks closely.

        False does not mean that there is no room, only that `admits` and `write_room` must say."""
        tenant = self.tenant
        if self._epoch != tenant.epoch or self._slack < n:
            self._slack = min(self._writable, self.surplus, max(n, SLACK_MAX))
            if self._slack < n or tenant.quarantined_bytes():
                self._epoch = -1
                return False
            self._epoch = tenant.epoch
        self._slack -= n
        return True


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
        self.nvme_quota = Quota(0)
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
    def epoch(self) -> int:
        """Another number when a pool may have less room than it had."""
        return self.arena.epoch + self.nvme.epoch

    @property
    def nvme_quota_bytes(self) -> int:
        """How much of the spill files the tenant may use, in whole slabs."""
        return self._nvme_quota_bytes

    @nvme_quota_bytes.setter
    def nvme_quota_bytes(self, quota_bytes: int) -> None:
        self._nvme_quota_bytes = quota_bytes
        self.nvme_quota.slabs = quota_bytes // self.nvme.slab_bytes

    def keeps(self, extra: dict[int, int]) -> bool:
        """Whether so many stored blocks more, wherever they are, may be kept from now on; they are
        backed then. `extra` is by pool number."""
        pools = [pool for pool in self.pools.values() if extra.get(pool.number)]
        backed: list[tuple[Pool, tuple[int, int]]] = []
        for pool in pools:
            n, had = extra[pool.number], pool.slabs
            if not (pool.anchored and pool.admits(n) and pool.secure(n)):
                break
            pool.promised += n  # so that the next pool does not take what this one needs
            backed.append((pool, had))
        for pool, had in backed:
            pool.promised -= extra[pool.number]
            if len(backed) < len(pools):
                pool.give_back(had)
        return len(backed) == len(pools)

    def back_what_is_there(self) -> None:
        """After a restart: every pool with a demand gets the slabs that it needs, as far as there
        are any; first of all those without a way to DRAM."""
        pools = [pool for pool in self.pools.values() if pool.demand]
        for pool in sorted(pools, key=lambda pool: pool.dram.capacity > 0):
            pool.secure(0)

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
