"""Slots and pages against plain lists: random appends, forks, folds, unfolds and prunes."""

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_worker.entries import Entries
from kvtier_worker.pool import BlockShape, PagedPool
from tests.worker.tiny import CPU

SHAPE = BlockShape(layers=2, block_tokens=4, kv_heads=1, head_dim=2)
PAGES = 60


def new_pool() -> PagedPool:
    bytes_ = (PAGES + 1) * (SHAPE.block_bytes + SHAPE.bias_bytes)
    return PagedPool(SHAPE, bytes_, CPU, biased=True)


@dataclass
class Branch:
    """A sequence as lists of numbers, one for each entry; every entry's KV is its number."""

    kv: Entries
    entries: list[int] = field(default_factory=list)
    parked: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)


class World:
    """Entries and what they should hold."""

    def __init__(self, seed: int) -> None:
        self.choice = random.Random(seed)
        self.pool = new_pool()
        self.branches = [Branch(Entries(self.pool))]
        self.last = 0

    def write(self, slots: np.ndarray, numbers: list[int]) -> None:
        kv = torch.tensor(numbers, dtype=torch.float32).view(1, 1, -1, 1, 1)
        bias = kv.view(1, -1, 1).expand(SHAPE.layers, -1, 1)
        self.pool.write_entries(slots, kv.expand(SHAPE.layers, 2, -1, 1, 2), bias)

    def provide(self, kv: Entries, pages: int) -> bool:
        if pages > self.pool.free_pages:
            return False
        kv.provide(self.pool.take(pages))
        return True

    def fresh(self, count: int) -> list[int]:
        self.last += count
        return list(range(self.last - count + 1, self.last + 1))

    def append(self, branch: Branch) -> None:
        count = self.choice.randrange(1, 11)
        if not self.provide(branch.kv, branch.kv.missing_pages(count)):
            return
        branch.kv.append(count)
        numbers = self.fresh(count)
        self.write(branch.kv.slots[-count:], numbers)
        branch.entries += numbers

    def fork(self, branch: Branch) -> None:
        parked = {key: (list(a), list(b)) for key, (a, b) in branch.parked.items()}
        self.branches.append(Branch(branch.kv.fork(), list(branch.entries), parked))

    def a_range(self, branch: Branch) -> tuple[int, int]:
        a, b = sorted(self.choice.randrange(len(branch.entries) + 1) for _ in range(2))
        return a, b

    def fold(self, branch: Branch) -> None:
        first, end = self.a_range(branch)
        if any(set(full) & set(branch.entries[first:end]) for full, _ in branch.parked.values()):
            return  # what is unfolded is folded again, not anew
        keep = self.choice.randrange(end - first + 1)
        if not self.provide(branch.kv, branch.kv.missing_for_fold(first, keep)):
            return
        numbers = self.fresh(keep)
        self.write(branch.kv.fold(first, end, keep), numbers)
        branch.entries[first:end] = numbers

    def unfold(self, branch: Branch) -> None:
        first, end = self.a_range(branch)
        count = end - first + self.choice.randrange(1, 9)
        inside = set(branch.entries[first:end])
        if not inside or any(set(full) & inside for full, _ in branch.parked.values()):
            return
        if not self.provide(branch.kv, branch.kv.missing_for_unfold(count)):
            return
        numbers, key = self.fresh(count), self.last
        self.write(branch.kv.unfold(key, first, end - first, count), numbers)
        branch.parked[key] = numbers, branch.entries[first:end]
        branch.entries[first:end] = numbers

    def refold(self, branch: Branch) -> None:
        if branch.parked:
            key = self.choice.choice(sorted(branch.parked))
            full, summary = branch.parked.pop(key)
            first = branch.entries.index(full[0])
            branch.kv.refold(key, first, len(full))
            branch.entries[first : first + len(full)] = summary

    def prune(self, branch: Branch) -> None:
        if len(self.branches) > 1:
            branch.kv.release()
            self.branches.remove(branch)

    def step(self) -> None:
        actions = [self.append] * 4 + [self.fork, self.fold, self.fold, self.unfold, self.refold]
        self.choice.choice([*actions, self.prune])(self.choice.choice(self.branches))
        self.check()

    def check(self) -> None:
        references = Counter(page for b in self.branches for page in b.kv.pages)
        assert self.pool.free_pages == PAGES - len(references)
        for page, count in references.items():
            assert self.pool.is_shared(page) == (count > 1)
        for branch in self.branches:
            assert len(set(branch.kv.pages)) == len(branch.kv.pages)
            slots = branch.kv.slots
            assert len(np.unique(slots)) == len(slots) == len(branch.entries)
            assert set((slots // SHAPE.block_tokens).tolist()) <= set(branch.kv.pages)
            kv = self.pool.read_entries(slots)
            assert kv.unique().tolist() == sorted(set(branch.entries))
            assert kv[0, 0, :, 0, 0].tolist() == kv[-1, 1, :, 0, 1].tolist() == branch.entries
            bias = self.pool.bias_pages[-1].view(-1)[torch.from_numpy(slots)]
            assert bias.tolist() == branch.entries


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_entries_are_what_plain_lists_are_and_every_slot_returns(seed: int) -> None:
    world = World(seed)
    for _ in range(60):
        world.step()
    for branch in world.branches:
        branch.kv.release()
    assert world.pool.free_pages == PAGES


def test_a_fork_copies_a_page_only_when_it_writes_to_it() -> None:
    pool = new_pool()
    one = Entries(pool)
    one.provide(pool.take(2))
    one.append(6)
    other = one.fork()
    assert pool.free_pages == PAGES - 2
    assert other.missing_pages(1) == one.missing_pages(1) == 1  # for the copy
    other.provide(pool.take(1))
    other.append(1)
    assert one.slots.tolist()[:4] == other.slots.tolist()[:4]
    assert not set(one.slots.tolist()[4:]) & set(other.slots.tolist()[4:])
    assert one.missing_pages(2) == 0  # its page is its own again
    one.release()
    other.release()
    assert pool.free_pages == PAGES


def test_a_fold_in_the_middle_leaves_drafts_behind_it_alone() -> None:
    pool = new_pool()
    kv = Entries(pool)
    kv.provide(pool.take(4))
    kv.append(16)
    drafts = kv.slots[12:].tolist()
    kv.fold(2, 12, 3)
    assert kv.slots.tolist()[5:] == drafts
    kv.provide(pool.take(kv.missing_pages(1)))
    kv.append(1)
    assert kv.slots.tolist()[5:9] == drafts


def test_appending_without_pages_is_a_programmer_s_error() -> None:
    with pytest.raises(AssertionError):
        Entries(new_pool()).append(1)


def test_spare_pages_go_back() -> None:
    pool = new_pool()
    kv = Entries(pool)
    kv.provide(pool.take(9))
    kv.append(3)
    kv.keep_spare(5)
    assert len(kv.pages) == 1 + 2
    kv.truncate(0)
    assert len(kv.pages) == 3
    kv.release()
    assert pool.free_pages == PAGES
