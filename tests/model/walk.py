"""A random walk over the machine's rules: longer and denser histories than Hypothesis makes.

A history is a list of steps, the same for the same seed; `replay` runs one again, so that a failing
one can be cut down by hand.
"""

import math
import random
from collections.abc import Callable
from typing import Any

from kvtierd.tiers.spill_io import Status
from tests.model.machine import Machine
from tests.model.reference import TOKENS

Step = tuple[str, dict[str, Any]]


class Walk:
    """Draws the steps of one history."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.makers = dict(self._makers())
        self.names = list(self.makers)
        self.weights = [self.makers[name][0] for name in self.names]

    def first(self) -> Step:
        """How the history begins."""
        pick = self.random.choice
        return "begin", {
            "power": pick([True, False]), "queue": pick([1, 64]), "slabs": pick([3, 5])
        }  # fmt: skip

    def step(self) -> Step:
        """What happens next."""
        [name] = self.random.choices(self.names, self.weights)
        return name, self.makers[name][1]()

    def _makers(self) -> list[tuple[str, tuple[int, Callable[[], dict[str, Any]]]]]:
        def n(low: int, high: int) -> Callable[[], int]:
            return lambda: self.random.randint(low, high)

        def one_of(*values: Any) -> Callable[[], Any]:
            return lambda: self.random.choice(values)

        def make(name: str, weight: int, **fields: Callable[[], Any]) -> Any:
            return name, (weight, lambda: {key: draw() for key, draw in fields.items()})

        small, few, coin = n(0, 7), n(0, 3), one_of(True, False)
        wait_s, tokens = one_of(0.0, 5.0), n(1, TOKENS)
        statuses = one_of(*[Status.OK] * 6, Status.FULL, Status.UNSURE, Status.LOST)
        lists = one_of([], [], [0], [1], [2], [0, 3])
        return [
            make("open", 2, w=small, t=few, parts=few),
            make("resume", 1, w=small, t=few),
            make("close", 1, w=small, s=few, twice=coin, sure=n(0, 1)),
            make("fork", 4, w=small, s=few, n=small, tokens=n(0, 24), twice=coin),
            make("prune", 2, w=small, s=few, n=small, subtree=coin, twice=coin),
            make("set_retention", 3, w=small, s=few, n=small, everything=coin, held=coin),
            make("fold", 4, w=small, s=few, n=small, first=few, count=n(1, 6),
                 grace_s=one_of(0.0, 5.0, 50.0, math.inf), twice=coin),
            make("unfold", 3, w=small, s=few, n=small, first=few, count=n(1, 6), twice=coin),
            make("set_priority", 1, w=small, s=few, priority=n(0, 255)),
            make("reserve", 5, w=small, which=n(0, 2), n=n(0, 8), ahead=one_of(0, 0, 1, 4),
                 draw=n(0, 5), wait_s=wait_s),
            make("swap_out", 10, w=small, s=few, n=small, part=few, first=n(0, 4), count=n(1, 8),
                 last=tokens, held=one_of(True, True, False)),
            make("swap_out_all", 3, w=small, s=few, n=small, first=n(0, 4), count=n(4, 12)),
            make("write", 4, w=small, lease=small, index=small),
            make("commit", 7, w=small, lease=small, s=few, n=small, first=n(0, 6), count=n(1, 6),
                 last=tokens, held=coin, twice=coin),
            make("abort", 3, w=small, lease=small, twice=coin),
            make("draw_promise", 1, w=small),
            make("acquire", 12, w=small, s=few, n=small, part=few, first=n(0, 8), count=n(1, 12),
                 wait_s=wait_s),
            make("release", 8, w=small, lease=small, twice=coin),
            make("prefetch", 3, w=small, s=few, n=small, part=few, first=few, count=n(1, 12),
                 cancel=few),
            make("reserve_keys", 3, w=small, k=small, count=n(1, 4), wait_s=wait_s),
            make("commit_keys", 3, w=small, lease=small),
            make("lookup", 2, w=small, k=small, count=n(1, 4), lease=coin),
            make("acquire_keys", 3, w=small, k=small, count=n(1, 4), wait_s=wait_s),
            make("hold", 3, w=small, s=few, k=small, count=n(1, 4), hold=one_of(True, True, False)),
            make("remove", 1, w=small, k=small, count=n(1, 4)),
            make("finish_job", 8, at=small, status=statuses, only=one_of(None, 0, 1, 2)),
            make("disk_catches_up", 3),
            make("corrupt", 1, slot=n(0, 39)),
            make("tick", 4, seconds=one_of(0.1, 1.0, 6.0, 61.0)),
            make("evict", 3, n=n(1, 30), tenant=one_of("a", "b")),
            make("fate", 2, w=small, what=one_of(2, 3, 4, 5, 6, 7), dead=lists),
            make("reconnect", 6, w=small),
        ]  # fmt: skip


def history(seed: int, steps: int) -> list[Step]:
    """The steps of a seed."""
    walk = Walk(seed)
    return [walk.first(), *(walk.step() for _ in range(steps)), ("teardown", {})]


def replay(steps: list[Step]) -> None:
    """Run a history, checking everything after every step."""
    machine = Machine()
    for name, fields in steps:
        getattr(machine, name)(**fields)
        if name != "teardown":
            machine.holds_true()
