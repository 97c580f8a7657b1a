"""Waiting for a condition with a deadline."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

DEADLINE_S = 60.0
POLL_S = 0.005


def until(
    condition: Callable[[], T], what: str | Callable[[], str], deadline_s: float = DEADLINE_S
) -> T:
    """The condition's first true value. Errors: AssertionError at the deadline."""
    pause = threading.Event()
    end_s = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() > end_s:
            told = what if isinstance(what, str) else what()
            raise AssertionError(f"not within {deadline_s} s: {told}")
        pause.wait(POLL_S)
    return value
