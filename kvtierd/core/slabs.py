"""Slabs and slots of one tier: who may use which, and the word of each slot.

    FREE ──alloc──► WRITING ──commit──► READY ──free──► FREE        (a client writes)
    FREE ──alloc──► FILLING ──done────► READY ──free──► FREE        (the daemon copies)
                    WRITING ──expiry──► QUARANTINED ──owner acknowledged or died──► FREE
    NVMe: READY or FILLING ──clear──► CLEARING ──header is clear on the medium──► FREE

A payload is cut into slabs; a slab in use belongs to one SlabPool (one layout of one tenant) and
is cut into its slots. Slot number = slab * max_slots + place. The word of a slot is the truth
about its state; counters follow it and `recount` checks them.

A slab that was left empty stays with its pool, which may need it for what it has been promised;
whatever it can `spare` goes to the first pool that takes it, as unassigned slabs do.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtierd.core.blocks import Places, Slots, not_none, span
from kvtierd.sparse import sparse_zeros

FREE: Final = 0
WRITING: Final = 1
READY: Final = 2
FILLING: Final = 3
QUARANTINED: Final = 4
CLEARING: Final = 5
STATES: Final = 6

NO_SLOT: Final = -1
NO_OWNER: Final = 0xFFFF
READERS_MAX: Final = 255
READER_BITS: Final = np.uint64(0xFFFFFF00)
"""The bits of a word that say who reads the slot: count and owner."""
_STATE_MASK: Final = np.uint64(0xFF)
GAP_SLABS: Final = 8
"""Slabs that are searched for neighbours before slots are taken wherever they are free."""


def word(state: int, owner: int = NO_OWNER, tag: int = 0, readers: int = 0) -> int:
    """The word of a slot; `tag` is a lease's counter (WRITING) or the low half of a seq (READY)."""
    return state | readers << 8 | owner << 16 | (tag & 0xFFFFFFFF) << 32


def ready_words(seqs: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Words of READY slots without readers whose bodies carry `seqs`."""
    words: NDArray[np.uint64] = (seqs << np.uint64(32)) | np.uint64(word(READY))
    return words


class Quota:
    """How many slabs of a tier some pools may have together, and how many they have."""

    def __init__(self, slabs: int) -> None:
        self.slabs, self.have = slabs, 0

    @property
    def left(self) -> int:
        """Slabs that they may still take; a quota that was lowered takes none away."""
        return max(self.slabs - self.have, 0)


class SlabPool:
    """The slabs of one layout of one tenant in one tier."""

    def __init__(
        self, number: int, slot_bytes: int, slots_per_slab: int, quota: Quota | None = None
    ) -> None:
        self.number = number
        self.slot_bytes = slot_bytes
        self.slots_per_slab = slots_per_slab
        self.quota = quota
        self.spare: Callable[[], int] = lambda: len(self.empty)  # empty slabs that others may take
        self.free: dict[int, int] = {}  # slab -> free slots, every slab of the pool
        self.open: list[int] = []  # slabs with a free slot, the lowest first
        self.empty: dict[int, None] = {}  # slabs with free slots only
        self.draining: set[int] = set()  # slabs being emptied for another pool
        self.counts = [0] * STATES  # slots by state
        self.next_slot = 0  # where the short path looks first

    @property
    def total(self) -> int:
        """Slots of all its slabs."""
        return len(self.free) * self.slots_per_slab

    @property
    def capacity(self) -> int:
        """Slots of its slabs, but for those that are being emptied for others."""
        return (len(self.free) - len(self.draining)) * self.slots_per_slab

    @property
    def vacant(self) -> int:
        """Free slots of these slabs."""
        return self.counts[FREE] - sum(self.free[slab] for slab in self.draining)

    @property
    def used(self) -> int:
        """Slots that are not free."""
        return self.total - self.counts[FREE]


class Slabs:
    """Allocation of the slots of one payload; `on_assign(slab, pool | None)` records a change."""

    def __init__(
        self,
        slabs: int,
        slab_bytes: int,
        max_slots: int,
        words: NDArray[np.uint64],
        on_assign: Callable[[int, SlabPool | None], None],
    ) -> None:
        assert len(words) == slabs * max_slots
        self.slabs, self.slab_bytes, self.max_slots = slabs, slab_bytes, max_slots
        self.words, self.word_view = words, words.data
        self.row_of = sparse_zeros(len(words), np.int32)  # row + 1
        self.row_view = self.row_of.data
        self.free_slabs = list(range(slabs - 1, -1, -1))
        self.pool_of: list[SlabPool | None] = [None] * slabs
        self._with_empty: dict[SlabPool, None] = {}  # pools that have empty slabs
        self.epoch = 0  # counts whatever may have left a pool less room than it had
        self._on_assign = on_assign

    def adopt(self, numbers: list[int], pool: SlabPool) -> None:
        """Take over slabs that an earlier life had assigned; the words say what is in them."""
        mine = set(numbers)
        self.free_slabs = [slab for slab in self.free_slabs if slab not in mine]
        for slab in numbers:
            words = self.words[slab * self.max_slots :][: pool.slots_per_slab]
            states = (words & _STATE_MASK).astype(np.uint8)
            words[states == FREE] = 0  # a torn write may have left the other bits
            counts = np.bincount(states, minlength=STATES).tolist()
            for state, n in enumerate(counts):
                pool.counts[state] += n
            self.pool_of[slab] = pool
            pool.free[slab] = counts[FREE]
            if counts[FREE]:
                insort(pool.open, slab)
            if counts[FREE] == pool.slots_per_slab:
                self._emptied(pool, slab)
        if pool.quota is not None:
            pool.quota.have += len(numbers)
        self.epoch += 1

    def takeable(self, pool: SlabPool) -> int:
        """Slabs that the pool does not have and can take: unassigned ones, within its quota, and
        what others can spare."""
        free, of_quota = len(self.free_slabs), 0
        for other in self._with_empty:
            if other is pool:
                continue
            if other.quota is pool.quota:
                of_quota += other.spare()
            else:
                free += other.spare()
        return of_quota + (free if pool.quota is None else min(free, pool.quota.left))

    def available(self, pool: SlabPool) -> int:
        """Slots that `alloc` can give the pool now."""
        return pool.vacant + self.takeable(pool) * pool.slots_per_slab

    def take(self, pool: SlabPool) -> bool:
        """Have the pool take one slab more; whether there was one."""
        if not self.takeable(pool):
            return False
        self._assign(pool)
        return True

    def give_back(self, pool: SlabPool, slabs: int) -> None:
        """Unassign the slabs that a pool took last, which are empty, until it has so many."""
        while len(pool.free) > slabs:
            self._unassign(pool, next(reversed(pool.free)))

    def alloc(self, pool: SlabPool, n: int, state: int, owner: int, tag: int) -> Slots | None:
        """Take `n` slots; None, and nothing taken, when there are not so many.

        Neighbours where there are any, so that copies and I/O coalesce; else the lowest places.
        """
        if n > self.available(pool):
            return None
        value = np.uint64(word(state, owner, tag))
        first = self._neighbours(pool, n)
        if first != NO_SLOT:
            slots = np.arange(first, first + n)
            self.words[first : first + n] = value
            pool.next_slot = first + n
            self._took(pool, first // self.max_slots, n)
        else:
            slots = self._lowest(pool, n)
            self.words[slots] = value
        pool.counts[FREE] -= n
        pool.counts[state] += n
        return slots

    def _neighbours(self, pool: SlabPool, n: int) -> int:
        """The first of `n` free slots beside each other; NO_SLOT when none were found."""
        first, slab = pool.next_slot, pool.next_slot // self.max_slots
        end = slab * self.max_slots + pool.slots_per_slab
        inside = pool.free.get(slab, 0) and slab not in pool.draining and first + n <= end
        if inside and not np.count_nonzero(self.words[first : first + n]):
            return first
        for slab in pool.open[:GAP_SLABS]:
            if pool.free[slab] < n or slab in pool.draining:
                continue
            base = slab * self.max_slots
            used = np.flatnonzero(self.words[base : base + pool.slots_per_slab])
            edges = np.concatenate(([-1], used, [pool.slots_per_slab]))
            gaps = np.flatnonzero(edges[1:] - edges[:-1] > n)
            if len(gaps):
                return base + int(edges[gaps[0]]) + 1
        return NO_SLOT

    def _lowest(self, pool: SlabPool, n: int) -> Slots:
        """The lowest free slots of the pool's slabs, and of more slabs if need be."""
        parts: list[Slots] = []
        while n:
            slab = next((s for s in pool.open if s not in pool.draining), None)
            if slab is None:
                slab = self._assign(pool)
            base = slab * self.max_slots
            words = self.words[base : base + pool.slots_per_slab]
            places = np.flatnonzero(words == 0)[:n]
            parts.append(places + base)
            n -= len(places)
            self._took(pool, slab, len(places))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def alloc_one(self, pool: SlabPool, value: int) -> int:
        """The short path for one slot, WRITING under the word `value`; NO_SLOT for all else."""
        slot = pool.next_slot
        slab = slot // self.max_slots
        words = self.word_view
        inside = pool.free.get(slab) and slot % self.max_slots < pool.slots_per_slab
        if not inside or words[slot]:
            if not pool.open:
                return NO_SLOT
            slab = pool.open[0]
            base = slab * self.max_slots
            slot = base + int(self.words[base : base + pool.slots_per_slab].argmin())
        if pool.draining or slab in pool.empty:
            return NO_SLOT
        words[slot] = value
        pool.next_slot = slot + 1
        self._took(pool, slab, 1)
        pool.counts[FREE] -= 1
        pool.counts[WRITING] += 1
        return slot

    def _took(self, pool: SlabPool, slab: int, n: int) -> None:
        if slab in pool.empty:
            self._not_empty(pool, slab)
        left = pool.free[slab] - n
        pool.free[slab] = left
        if not left:
            self._close(pool, slab)

    def _assign(self, pool: SlabPool) -> int:
        quota = pool.quota
        if not self.free_slabs or (quota is not None and not quota.left):
            self._unassign(*self._spared(pool))
        slab = self.free_slabs.pop()
        self.epoch += 1
        base = slab * self.max_slots
        self.words[base : base + self.max_slots] = 0  # a crash may have left some behind
        self.pool_of[slab] = pool
        pool.free[slab] = pool.slots_per_slab
        insort(pool.open, slab)
        self._emptied(pool, slab)
        pool.counts[FREE] += pool.slots_per_slab
        if quota is not None:
            quota.have += 1
        self._on_assign(slab, pool)
        return slab

    def _spared(self, pool: SlabPool) -> tuple[SlabPool, int]:
        """The empty slab of another pool that this one takes; one that costs no quota first."""
        others = [each for each in self._with_empty if each is not pool and each.spare()]
        other = min(others, key=lambda each: each.quota is not pool.quota)
        return other, min(other.empty)

    def _unassign(self, pool: SlabPool, slab: int) -> None:
        self._not_empty(pool, slab)
        del pool.free[slab]
        self._close(pool, slab)
        pool.draining.discard(slab)
        pool.counts[FREE] -= pool.slots_per_slab
        if pool.quota is not None:
            pool.quota.have -= 1
        self.pool_of[slab] = None
        self.free_slabs.append(slab)
        self._on_assign(slab, None)

    @staticmethod
    def _close(pool: SlabPool, slab: int) -> None:
        del pool.open[bisect_left(pool.open, slab)]

    def _emptied(self, pool: SlabPool, slab: int) -> None:
        pool.empty[slab] = None
        self._with_empty[pool] = None

    def _not_empty(self, pool: SlabPool, slab: int) -> None:
        del pool.empty[slab]
        if not pool.empty:
            del self._with_empty[pool]

    def set_state(
        self, pool: SlabPool, slots: Places, old: int, values: NDArray[np.uint64]
    ) -> None:
        """Give slots of one pool, all in state `old`, new words of one new state."""
        self.words[slots] = values
        new = values.item(0) & 0xFF
        pool.counts[old] -= len(values)
        pool.counts[new] += len(values)

    def free(self, pool: SlabPool, slots: Slots, old: int) -> None:
        """Give slots of one pool, all in state `old` or NONE, back. A slab left empty stays with
        its pool until another one needs it."""
        slots, at = not_none(slots)
        n = len(slots)
        if not n:
            return
        first = slots.item(0)
        if n == 1:
            self.word_view[first] = 0
            self.row_view[first] = 0
            self._gave(pool, first // self.max_slots, 1)
        else:
            self.words[at] = 0
            self.row_of[at] = 0
            if isinstance(at, slice):
                for slab in range(first // self.max_slots, (at.stop - 1) // self.max_slots + 1):
                    base = slab * self.max_slots
                    inside = min(at.stop, base + self.max_slots) - max(first, base)
                    self._gave(pool, slab, inside)
            else:
                counts = np.bincount(slots // self.max_slots)
                slabs = counts.nonzero()[0]
                for slab, count in zip(slabs.tolist(), counts[slabs].tolist(), strict=True):
                    self._gave(pool, slab, count)
                first = slabs.item(0) * self.max_slots
        pool.next_slot = min(pool.next_slot, first)
        pool.counts[old] -= n
        pool.counts[FREE] += n
        for slab in [s for s in pool.draining if s in pool.empty]:
            self._unassign(pool, slab)

    def _gave(self, pool: SlabPool, slab: int, n: int) -> None:
        free = pool.free[slab]
        if not free:
            insort(pool.open, slab)
        free += n
        pool.free[slab] = free
        if free == pool.slots_per_slab:
            self._emptied(pool, slab)

    def drain(self, pool: SlabPool, slab: int) -> None:
        """Allocate no more from a slab; it goes to all pools once it is empty."""
        pool.draining.add(slab)
        self.epoch += 1
        if slab in pool.empty:
            self._unassign(pool, slab)

    def slots_of(self, pool: SlabPool, slab: int | None = None) -> Slots:
        """All slots of a pool, or of one of its slabs, in whatever state."""
        places = np.arange(pool.slots_per_slab)
        slabs = np.array(sorted(pool.free) if slab is None else [slab], np.int64)
        slots: Slots = (slabs[:, None] * self.max_slots + places).ravel()
        return slots

    def offsets(self, pool: SlabPool, slots: Slots) -> NDArray[np.uint64]:
        """Byte offsets of slots of one pool in the payload."""
        at = span(slots)
        if isinstance(at, slice) and at.start // self.max_slots == (at.stop - 1) // self.max_slots:
            first, size = self.offset(pool, at.start), pool.slot_bytes
            return np.arange(first, first + len(slots) * size, size, dtype=np.uint64)
        slab, place = np.divmod(slots, self.max_slots)
        found: NDArray[np.uint64] = (slab * self.slab_bytes + place * pool.slot_bytes).astype("<u8")
        return found

    def offset(self, pool: SlabPool, slot: int) -> int:
        """Byte offset of one slot."""
        slab, place = divmod(slot, self.max_slots)
        return slab * self.slab_bytes + place * pool.slot_bytes

    def slots_at(self, offsets: NDArray[np.uint64]) -> Slots | None:
        """The slots at byte offsets, all of one pool; None when an offset is not a slot's."""
        slab, inside = np.divmod(offsets.astype(np.int64), self.slab_bytes)
        if not len(slab) or int(slab.min()) < 0 or int(slab.max()) >= self.slabs:
            return None
        pool = self.pool_of[int(slab[0])]
        if pool is None or any(self.pool_of[s] is not pool for s in np.unique(slab).tolist()):
            return None
        place, rest = np.divmod(inside, pool.slot_bytes)
        if rest.any() or int(place.max()) >= pool.slots_per_slab:
            return None
        return slab * self.max_slots + place

    def recount(self, pool: SlabPool) -> list[int]:
        """Slots by state, counted from the words."""
        if not pool.free:
            return [0] * STATES
        states = (self.words[self.slots_of(pool)] & _STATE_MASK).astype(np.int64)
        counts: list[int] = np.bincount(states, minlength=STATES).tolist()
        return counts
