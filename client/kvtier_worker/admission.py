"""Who may enter the pool: whoever is expected to fit beside those that run, for a while.

A sequence that does not fold only grows: each is counted with what `1 / AHEAD_SHARE` of its length
adds to it. One whose steps fold grows little, by what is kept of each, but its open step rises from
nothing to a whole step and falls back. All of them together, each at a moment of its own, seldom
have much more open than the mean. So room is kept for the mean of what will be open, given the
lengths of the steps so far, and for `SPREAD` standard deviations of the sum; what is ever above
that is preempted.

Sequences that enter together would fold together, step after step, and all peak at once. So they
enter one after the other, as many in the length of a step as fill the pool.
"""

from collections.abc import Sequence as Seq
from math import inf
from typing import Final

from kvtier_worker.folding import Folder
from kvtier_worker.pool import PagedPool
from kvtier_worker.sequence import Sequence

AHEAD_SHARE: Final = 16
"""Twice the look-ahead was tried: fewer run. Half of it: as many run, and more are preempted."""

SPREAD: Final = 2.0
"""With 3, about 2 % fewer run. With 1, 2 % more, and three times as many are preempted."""


class Admission:
    """Predicts what sequences will take of a pool."""

    def __init__(self, pool: PagedPool, folder: Folder) -> None:
        self._pool = pool
        self._folder = folder
        self._last_step = -inf
        """When the last one entered, if they had all come as evenly as they should."""

    def expected_pages(self, running: Seq[Sequence], sequence: Sequence, need: int) -> float:
        """What will be taken of the pool soon if a sequence enters, which takes `need` pages now.

        Alone it has the pool to itself; otherwise those that run find a page left over at least.
        """
        taken = self._pool.pages - self._pool.free_pages + need
        if not running:
            return taken
        growth = self._growth([*running, sequence]) / self._pool.shape.block_tokens
        return taken + max(1.0, growth)

    def takes_turn(self, pages: float, sequences: int, step: int) -> bool:
        """Whether the next one may enter at a step; so many will take so many pages then."""
        lengths = self._folder.lengths
        if not lengths.known:
            return True
        share = pages / sequences / self._pool.pages
        turn = self._last_step + lengths.mean_tokens * share
        if turn > step and sequences > 1:
            return False
        self._last_step = max(turn, step - 1)
        return True

    def _growth(self, sequences: Seq[Sequence]) -> float:
        """How many entries more than now the sequences are expected to have."""
        lengths = self._folder.lengths
        growth, folding = 0.0, 0
        for sequence in sequences:
            if sequence.paused:
                continue
            rest = sequence.end_tokens - len(sequence.tokens)
            ahead = min(rest, sequence.end_tokens / AHEAD_SHARE)
            now_open = self._folder.open_tokens(sequence)
            if lengths.known and now_open <= lengths.longest_tokens:
                folding += 1
                growth += ahead * self._folder.keep / lengths.mean_tokens - now_open
            else:  # nobody knows when it will fold, if it ever does
                growth += ahead
        return growth + (lengths.open_tokens(folding, SPREAD) if folding else 0.0)
