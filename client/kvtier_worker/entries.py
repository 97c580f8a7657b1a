"""A sequence's KV in the pool: which slot each of its entries has, in attention order.

An entry is what attention sees as one key and value. At first a sequence has one entry per token,
side by side in its pages. A fold keeps a few entries of a step, in the first of the step's own
slots, and gives pages back; an unfold puts a step's entries back, in new pages; a fork shares all
pages, and a shared page is copied before one of its owners writes to it.
"""

from collections.abc import Iterable
from typing import Final

import numpy as np

from kvtier_worker.pool import PagedPool
from kvtier_worker.tile import Slots

_NO_SLOTS: Final = np.zeros(0, np.int64)
_GROWTH: Final = 2


class Entries:
    """The slots and pages of one sequence; empty while it has no KV in the pool.

    `pages` are the pool's pages that it refers to, once each. Those that no entry needs yet are
    spare: promised to it, so that it does not meet an empty pool on the way. Slots in one page
    rise in attention order, and behind the last entry's slot its page is free.
    """

    def __init__(self, pool: PagedPool) -> None:
        self._pool = pool
        self._block_tokens = pool.shape.block_tokens
        self._data = _NO_SLOTS
        self._length = 0
        self._used: list[int] = []
        self._spare: list[int] = []
        self._parked: dict[int, Slots] = {}
        self._next = 0  # the slot behind the last one; a multiple of block_tokens: in a new page

    def __len__(self) -> int:
        return self._length

    @property
    def slots(self) -> Slots:
        """Every entry's slot. Shapes: [entries]; a view, good until the next change."""
        return self._data[: self._length]

    @property
    def pages(self) -> list[int]:
        """The pages that it refers to, in the order in which it came to them."""
        return self._used + self._spare

    # ------------------------------------------------------------------ growth

    def missing_pages(self, entries: int) -> int:
        """How many pages must be provided before so many entries can be appended."""
        room = -self._next % self._block_tokens
        need = self._pool.shape.blocks(max(0, entries - room))
        if entries and room and self._pool.is_shared(self._next // self._block_tokens):
            need += 1
        return max(0, need - len(self._spare))

    def provide(self, pages: list[int]) -> None:
        """Take over pages that were taken from the pool."""
        self._spare += pages

    def keep_spare(self, entries: int) -> None:
        """Give back what is spare beyond so many entries more."""
        surplus = len(self._spare) - self._pool.shape.blocks(entries)
        if surplus > 0:
            self._pool.give_back(self._spare[-surplus:])
            del self._spare[-surplus:]

    def append(self, entries: int) -> None:
        """Add slots behind the last; a partly filled page that is shared is copied first."""
        assert not self.missing_pages(entries)
        room = -self._next % self._block_tokens
        if entries and room:
            self._make_private([self._next // self._block_tokens])
        added = [np.arange(self._next, self._next + min(room, entries))]
        pages = self._pool.shape.blocks(max(0, entries - room))
        added += [self._open_page() for _ in range(pages)]
        slots = np.concatenate(added)[:entries]
        end = self._length + len(slots)
        if end > len(self._data):
            grown = np.empty(_GROWTH * end, np.int64)
            grown[: self._length] = self.slots
            self._data = grown
        self._data[self._length : end] = slots
        self._length = end
        self._find_next()

    def truncate(self, entries: int) -> None:
        """Forget all entries but the first; their pages stay spare."""
        self._length = entries
        needed = self._needed()
        self._spare = [page for page in self._used if page not in needed] + self._spare
        self._used = [page for page in self._used if page in needed]
        self._find_next()

    # --------------------------------------------------------- fold and unfold

    def shared_pages(self, first: int, end: int) -> int:
        """How many pages of these entries others refer to as well: what a fold has to copy."""
        return sum(map(self._pool.is_shared, self._pages_of(self.slots[first:end])))

    def missing_for_fold(self, first: int, keep: int) -> int:
        """How many pages must be provided before a fold to `keep` entries from `first` on."""
        return max(0, self.shared_pages(first, first + keep) - len(self._spare))

    def fold(self, first: int, end: int, keep: int) -> Slots:
        """Leave `keep` of the entries `first..end`; returns their slots, to be written.

        What they hold until then is nothing to rely on. Pages without an entry go back.
        """
        assert 0 <= first and 0 <= keep <= end - first and end <= self._length
        self._make_private(self._pages_of(self.slots[first : first + keep]))
        self._replace(first + keep, end, _NO_SLOTS)
        return self.slots[first : first + keep].copy()

    def missing_for_unfold(self, entries: int) -> int:
        """How many pages must be provided before an unfold to so many entries."""
        return max(0, self._pool.shape.blocks(entries) - len(self._spare))

    def unfold(self, key: int, first: int, keep: int, entries: int) -> Slots:
        """Put `entries` new slots, in pages of their own, in the place of the `keep` from `first`.

        The replaced ones are parked under `key`, pages and all, until `refold`. Returns the new
        slots, to be written.
        """
        assert key not in self._parked and not self.missing_for_unfold(entries)
        self._parked[key] = self.slots[first : first + keep].copy()
        fresh = [self._open_page() for _ in range(self._pool.shape.blocks(entries))]
        slots = np.concatenate(fresh)[:entries]
        self._replace(first, first + keep, slots)
        return slots

    def refold(self, key: int, first: int, entries: int) -> None:
        """Take the parked slots back in place of the unfolded entries, and give back pages."""
        parked = self._parked.pop(key)
        self._replace(first, first + entries, parked)

    # ---------------------------------------------------------- fork and release

    def fork(self) -> "Entries":
        """Another sequence's entries, the same as these, in the same pages."""
        other = Entries(self._pool)
        other._data, other._length = self.slots.copy(), self._length
        other._used = list(self._used)
        other._parked = {key: slots.copy() for key, slots in self._parked.items()}
        other._next = self._next
        self._pool.share(self._used)
        return other

    def release(self) -> None:
        """Give all pages back; it is empty then."""
        self._pool.give_back(self.pages)
        self._used, self._spare, self._parked = [], [], {}
        self._data, self._length, self._next = _NO_SLOTS, 0, 0

    # ---------------------------------------------------------------- internals

    def _open_page(self) -> Slots:
        page = self._spare.pop(0)
        self._used.append(page)
        return np.arange(page * self._block_tokens, (page + 1) * self._block_tokens)

    def _make_private(self, pages: Iterable[int]) -> None:
        """Copy those of the pages that are shared, and stand in the copies from now on."""
        for page in pages:
            if not self._pool.is_shared(page):
                continue
            copy = self._spare.pop(0)
            self._pool.copy_page(page, copy)
            self._pool.give_back([page])
            self._used[self._used.index(page)] = copy
            shift = (copy - page) * self._block_tokens
            for slots in (self.slots, *self._parked.values()):
                slots[slots // self._block_tokens == page] += shift
            if self._next % self._block_tokens and self._next // self._block_tokens == page:
                self._next += shift

    def _replace(self, first: int, end: int, slots: Slots) -> None:
        """Put slots in the place of the entries `first..end`, and give back what nobody needs."""
        self._data = np.concatenate([self.slots[:first], slots, self.slots[end:]])
        self._length = len(self._data)
        needed = self._needed()
        self._pool.give_back([page for page in self._used if page not in needed])
        self._used = [page for page in self._used if page in needed]
        self._find_next()

    def _needed(self) -> set[int]:
        return self._pages_of(np.concatenate([self.slots, *self._parked.values()]))

    def _pages_of(self, slots: Slots) -> set[int]:
        pages = slots // self._block_tokens
        ends = (pages[1:] != pages[:-1]).nonzero()[0]  # most neighbours are in one page
        return {*pages[ends].tolist(), *pages[-1:].tolist()}

    def _find_next(self) -> None:
        self._next = int(self._data[self._length - 1]) + 1 if self._length else 0
