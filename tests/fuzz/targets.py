"""What is fuzzed: for each kind of input a way to draw, change, and take it.

`take` raises when a promise was broken; everything that is expected of hostile input it swallows.
"""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from tests.fuzz import grammar, machine, media, script, small
from tests.fuzz.grammar import Dice, Mutate


class Target(Protocol):
    """One kind of input."""

    unit: str
    """What is counted: frames, files, ..."""
    input_bytes: int
    """Longest input."""
    counts: Counter[str]
    """Totals so far: units, and what came of them."""

    def set_up(self) -> AbstractContextManager[None]:
        """What the whole run needs."""
        ...

    def draw(self, dice: Dice) -> bytes:
        """A plausible input."""
        ...

    def mutate(self, data: bytes, size: int, dice: Dice, change: Mutate) -> bytes:
        """Another input, made from this one."""
        ...

    def take(self, data: bytes) -> None:
        """Let the daemon have it. Errors: whatever a broken promise raises."""
        ...


class ProtocolTarget:
    """Scripts of many clients at a daemon in this process."""

    unit = "frames"
    input_bytes = 1 << 16

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._machine: machine.Machine | None = None

    def set_up(self) -> AbstractContextManager[None]:
        return machine.installed(self._current)

    def _current(self) -> machine.Machine:
        assert self._machine is not None
        return self._machine

    def draw(self, dice: Dice) -> bytes:
        return grammar.life(dice, dice.choice((20, 100, 200)))

    def mutate(self, data: bytes, size: int, dice: Dice, change: Mutate) -> bytes:
        return grammar.mutate(data, size, dice, change)

    def take(self, data: bytes) -> None:
        self._machine = machine.Machine()
        run = script.Run(self._machine)
        try:
            run.play(data)
        finally:
            self.counts["frames"] += run.frames
            self.counts["restarts"] += self._machine.restarts
            self.counts.update({f"reply {k}": n for k, n in self._machine.kinds.items()})
            self._machine.close()


class WireTarget(ProtocolTarget):
    """Long bursts of frames, most of them torn: many more of them, but not as deep."""

    def draw(self, dice: Dice) -> bytes:
        return grammar.bursts(dice)

    def mutate(self, data: bytes, size: int, dice: Dice, change: Mutate) -> bytes:
        return grammar.mutate_bursts(data, size, dice, change)


TARGETS: dict[str, Callable[[], Target]] = {
    "protocol": ProtocolTarget,
    "wire": WireTarget,
    "media": media.MediaTarget,
    "config": small.ConfigTarget,
    "holder": small.HolderTarget,
    "client": small.ClientTarget,
}


def without_coverage(target: Target, seed: int, units: int) -> None:
    """Draw and change inputs by dice alone until so many units were taken."""
    dice = random.Random(seed)
    with target.set_up():
        kept = [target.draw(dice)]
        while target.counts[target.unit] < units:
            target.take(kept[-1])
            if dice.random() < 0.3:
                kept.append(target.draw(dice))
            else:
                one = dice.choice(kept)
                kept.append(target.mutate(one, target.input_bytes, dice, grammar.scramble(dice)))
            del kept[:-64]
