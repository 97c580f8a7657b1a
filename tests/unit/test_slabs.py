"""Slabs: slots are given once, slabs go to who needs them, and the words are the truth."""

import numpy as np
import pytest

from kvtierd.core.blocks import NONE
from kvtierd.core.slabs import (
    FREE,
    NO_OWNER,
    QUARANTINED,
    READY,
    WRITING,
    Quota,
    SlabPool,
    Slabs,
    ready_words,
    word,
)

SLAB_BYTES = 8 * 4096


class Tier:
    """A payload of a few slabs and what was assigned."""

    def __init__(self, slabs: int = 3) -> None:
        self.assigned: list[tuple[int, int | None]] = []
        words = np.zeros(slabs * 8, np.uint64)
        self.slabs = Slabs(slabs, SLAB_BYTES, 8, words, self.note)
        self.small = SlabPool(0, 4096, 8)
        self.large = SlabPool(1, 8192, 4)

    def note(self, slab: int, pool: SlabPool | None) -> None:
        self.assigned.append((slab, None if pool is None else pool.number))

    def take(self, pool: SlabPool, n: int) -> np.ndarray:
        slots = self.slabs.alloc(pool, n, WRITING, 1, 1)
        assert slots is not None
        return slots


@pytest.fixture
def tier() -> Tier:
    return Tier()


def test_slots_are_given_once_and_side_by_side(tier: Tier) -> None:
    slots = np.concatenate([tier.take(tier.small, 5), tier.take(tier.small, 6)])
    assert slots.tolist() == list(range(11))


def test_neighbours_are_found_behind_what_is_scattered(tier: Tier) -> None:
    tier.take(tier.small, 8)
    tier.slabs.free(tier.small, np.array([1, 3, 5, 6, 7]), WRITING)
    assert tier.take(tier.small, 3).tolist() == [5, 6, 7]
    assert tier.take(tier.small, 2).tolist() == [1, 3], "scattered ones when no others are left"


def test_a_request_larger_than_a_slab_is_given_neighbours_too(tier: Tier) -> None:
    slots = tier.take(tier.small, 20)
    tier.slabs.free(tier.small, slots[:16], WRITING)
    assert tier.take(tier.small, 16).tolist() == list(range(16)), "a higher slab was open before"


def test_a_request_beyond_the_payload_takes_nothing(tier: Tier) -> None:
    assert tier.slabs.alloc(tier.small, 25, WRITING, 1, 1) is None
    assert tier.assigned == []
    assert tier.small.counts == [0] * 6


def test_slots_of_two_sizes_never_share_a_slab(tier: Tier) -> None:
    small, large = tier.take(tier.small, 3), tier.take(tier.large, 3)
    assert set(small // 8).isdisjoint(large // 8)
    ends = tier.slabs.offsets(tier.large, large) + np.uint64(8192)
    assert (ends <= (large // 8 + 1) * SLAB_BYTES).all()


def test_an_empty_slab_goes_to_another_pool(tier: Tier) -> None:
    slots = tier.take(tier.small, 24)
    tier.slabs.free(tier.small, slots[8:16], WRITING)
    assert tier.slabs.available(tier.large) == 4
    assert (tier.take(tier.large, 4) // 8 == 1).all()
    assert tier.slabs.alloc(tier.large, 1, WRITING, 1, 1) is None


@pytest.mark.parametrize("order", [[3, 2, 1, 0, 7], [7, 3, 4, 5, 6], [0, 2, 4], [5]])
def test_freeing_frees_these_slots_and_no_others(tier: Tier, order: list[int]) -> None:
    slots = tier.take(tier.small, 8)
    tier.slabs.row_of[slots] = slots + 1
    tier.slabs.free(tier.small, slots[order], WRITING)
    kept = [i for i in range(8) if i not in order]
    assert np.flatnonzero(tier.slabs.words).tolist() == kept
    assert np.flatnonzero(tier.slabs.row_of).tolist() == kept
    assert tier.slabs.recount(tier.small) == tier.small.counts


def test_freeing_passes_over_what_is_no_slot(tier: Tier) -> None:
    slots = tier.take(tier.small, 4)
    for some in ([NONE], [NONE, slots[0]], [slots[1], NONE, slots[3]]):
        tier.slabs.free(tier.small, np.array(some), WRITING)
    assert np.flatnonzero(tier.slabs.words).tolist() == [2]
    assert tier.slabs.recount(tier.small) == tier.small.counts


def test_a_drained_slab_gives_no_more_slots_and_goes_when_it_is_empty(tier: Tier) -> None:
    slots = tier.take(tier.small, 4)
    tier.slabs.drain(tier.small, 0)
    assert (tier.take(tier.small, 4) // 8 != 0).all()
    assert tier.slabs.alloc_one(tier.small, word(WRITING, 1, 1)) < 0
    tier.slabs.free(tier.small, slots, WRITING)
    assert 0 in tier.slabs.free_slabs
    assert (0, None) in tier.assigned


def test_an_empty_slab_that_its_pool_needs_is_its_own(tier: Tier) -> None:
    slots = tier.take(tier.small, 24)
    tier.slabs.free(tier.small, slots[:16], WRITING)
    tier.small.spare = lambda: len(tier.small.empty) - 1  # something was promised one of them
    assert tier.slabs.available(tier.large) == 4
    assert len(tier.take(tier.large, 4)) == 4
    assert tier.slabs.alloc(tier.large, 1, WRITING, 1, 1) is None
    assert not tier.slabs.take(tier.large)
    assert len(tier.take(tier.small, 8)) == 8


def test_a_slab_that_was_taken_is_not_unassigned_any_more(tier: Tier) -> None:
    assert [tier.slabs.take(tier.small) for _ in range(4)] == [True, True, True, False]
    tier.small.spare = lambda: 0
    assert tier.slabs.available(tier.large) == 0
    assert tier.slabs.available(tier.small) == 24
    assert [number for _, number in tier.assigned] == [0, 0, 0]


def test_a_quota_is_of_all_its_pools_and_what_one_spares_costs_another_nothing() -> None:
    tier, quota = Tier(slabs=4), Quota(2)
    tier.small.quota = tier.large.quota = quota
    slots = tier.take(tier.small, 16)
    assert tier.slabs.alloc(tier.small, 1, WRITING, 1, 1) is None
    assert tier.slabs.alloc(tier.large, 1, WRITING, 1, 1) is None
    tier.slabs.free(tier.small, slots[8:], WRITING)
    assert tier.slabs.available(tier.large) == 4
    tier.take(tier.large, 4)
    assert tier.slabs.alloc(tier.large, 1, WRITING, 1, 1) is None
    assert quota.have == len(tier.small.free) + len(tier.large.free) == 2


def test_what_leaves_less_room_changes_the_epoch(tier: Tier) -> None:
    slots = tier.take(tier.small, 24)
    tier.slabs.free(tier.small, slots[:8], WRITING)
    before = tier.slabs.epoch
    tier.take(tier.large, 1)  # the slab is no longer there for the other
    assert tier.slabs.epoch > before
    before = tier.slabs.epoch
    tier.slabs.drain(tier.small, 1)
    assert tier.slabs.epoch > before


def test_one_slot_is_found_again_where_one_came_free(tier: Tier) -> None:
    tier.take(tier.small, 8)
    tier.slabs.free(tier.small, np.array([2]), WRITING)
    assert tier.slabs.alloc_one(tier.small, word(WRITING, 1, 1)) == 2
    assert tier.slabs.alloc_one(tier.small, word(WRITING, 1, 1)) < 0
    assert tier.slabs.recount(tier.small) == tier.small.counts


def test_states_are_counted(tier: Tier) -> None:
    slots = tier.take(tier.small, 6)
    tier.slabs.set_state(tier.small, slots[:2], WRITING, ready_words(np.array([5, 6], np.uint64)))
    values = np.full(1, word(QUARANTINED, NO_OWNER, 1), np.uint64)
    tier.slabs.set_state(tier.small, slots[2:3], WRITING, values)
    counts = tier.small.counts
    assert (counts[FREE], counts[WRITING], counts[READY], counts[QUARANTINED]) == (2, 3, 2, 1)
    assert tier.slabs.recount(tier.small) == counts


def test_a_slab_of_an_earlier_life_is_counted_from_its_words() -> None:
    tier = Tier()
    tier.take(tier.small, 10)
    later = Slabs(3, SLAB_BYTES, 8, tier.slabs.words, tier.note)
    pool = SlabPool(0, 4096, 8)
    later.adopt([0, 1], pool)
    assert pool.counts == tier.small.counts
    assert later.available(pool) == tier.slabs.available(tier.small)


def test_offsets_lead_back_to_slots(tier: Tier) -> None:
    slots = tier.take(tier.large, 7)
    offsets = tier.slabs.offsets(tier.large, slots)
    found = tier.slabs.slots_at(offsets)
    assert found is not None
    assert found.tolist() == slots.tolist()
    assert [tier.slabs.offset(tier.large, int(slot)) for slot in slots] == offsets.tolist()


@pytest.mark.parametrize("offset", [1, 4096, SLAB_BYTES * 2, SLAB_BYTES * 3, 2**64 - 4096])
def test_offsets_that_are_no_slots_are_refused(tier: Tier, offset: int) -> None:
    tier.take(tier.large, 1)
    assert tier.slabs.slots_at(np.array([offset], np.uint64)) is None


def test_a_free_word_that_was_torn_is_a_free_slot_like_any_other(tier: Tier) -> None:
    words = tier.slabs.words
    words[:8] = ready_words(np.arange(1, 9, dtype=np.uint64))
    words[2] = 0x6EAE_9524_0000_0000  # its state was cleared, the other half was not
    words[6:8] = 0
    tier.slabs.adopt([0], tier.small)
    slots = tier.take(tier.small, 3)
    assert sorted(slots.tolist()) == [2, 6, 7]
    assert tier.slabs.recount(tier.small) == tier.small.counts
