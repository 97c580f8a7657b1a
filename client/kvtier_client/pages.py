"""How callers name pages: one number, `(first, last)`, a range or any sequence of numbers."""

import itertools
from typing import Any, Final

import numpy as np

from kvtier_client.arena import pack_u32
from kvtier_client.errors import InvalidArgument

_INTEGER: Final = (int, np.integer)


def page_range(pages: Any) -> tuple[int, int]:
    """Checked first and last page, the last excluded. Errors: InvalidArgument."""
    run = neighbours(pages)
    if run is None or run[1] == 0:
        raise InvalidArgument(f"pages {pages}: give (first, last), last excluded")
    return run[0], sum(run)


def neighbours(pages: Any) -> tuple[int, int] | None:
    """The first page and how many, when it is plain that they are neighbours; else None.

    Errors: InvalidArgument for a page that is no u32.
    """
    if isinstance(pages, _INTEGER):
        first, last = int(pages), int(pages) + 1
    elif type(pages) is tuple and len(pages) == 2:
        first, last = pages
        if not (isinstance(first, _INTEGER) and isinstance(last, _INTEGER)):
            raise InvalidArgument(f"pages {pages} must be integers")
        first, last = int(first), int(last)
    elif type(pages) is range and pages.step == 1:
        first, last = pages.start, pages.stop
    else:
        return None
    if last <= first:
        return 0, 0
    if first < 0 or last > 0x1_0000_0000:
        raise InvalidArgument(f"pages {first}..{last} are not in 0..2**32-1")
    return first, last - first


def page_numbers(pages: Any) -> tuple[int, bytes]:
    """How many pages are meant, and their packed numbers.

    A tuple of two means first and last (excluded); one int is one page; else a sequence of
    numbers. Errors: InvalidArgument.
    """
    run = neighbours(pages)
    if run is not None:
        pages = range(run[0], sum(run))
    if isinstance(pages, range):
        pages = np.arange(pages.start, pages.stop, pages.step)
    packed = pack_u32(pages if len(pages) else np.empty(0, np.uint32), "pages")
    return len(packed) // 4, packed


def page_runs(pages: Any) -> list[tuple[int, int]]:
    """Runs of neighbours among pages: the first of each and how many."""
    run = neighbours(pages)
    if run is not None:
        return [run]
    n, packed = page_numbers(pages)
    if n == 0:
        return []
    numbers = np.frombuffer(packed, "<u4")
    starts = np.flatnonzero(np.diff(numbers.astype(np.int64)) != 1) + 1
    bounds = [0, *starts.tolist(), n]
    return [(int(numbers[i]), j - i) for i, j in itertools.pairwise(bounds)]
