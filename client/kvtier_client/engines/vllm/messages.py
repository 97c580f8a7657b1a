"""What the scheduler's side and the workers tell each other; pickled by the engine.

Orders go out with a step and are carried out by every rank; reports come back with its output and
are added up over the ranks.
"""

from dataclasses import dataclass, field
from typing import Self


@dataclass(slots=True)
class Part:
    """Blocks of one KV-cache group: content keys, and where they lie in the engine's pool.

    `first` is the place of the first block in its request; the last holds `tail_tokens` tokens.
    """

    group: int
    keys: bytes
    ids: list[int]
    first: int
    tail_tokens: int


@dataclass(slots=True)
class Save:
    """Blocks to store. Its number comes back in the reports."""

    number: int
    parts: list[Part]


@dataclass(slots=True)
class Load:
    """Blocks to bring back for a request; `whole` is False when it cannot succeed."""

    request_id: str
    parts: list[Part]
    whole: bool


@dataclass
class Orders:
    """What the workers do in one step."""

    rescues: list[Save] = field(default_factory=list)
    """Blocks of preempted requests, to be stored before anything overwrites them."""
    writes: list[Save] = field(default_factory=list)
    """Blocks that are full after the step."""
    loads: list[Load] = field(default_factory=list)


@dataclass
class Report:
    """What ranks have done since their last reports."""

    ended: dict[int, int] = field(default_factory=dict)
    """Save number → how many ranks are done with it."""
    failed: set[int] = field(default_factory=set)
    """Saves that some rank could not store."""
    short: dict[str, int] = field(default_factory=dict)
    """Request → tokens before the first block that could not be loaded."""

    def __bool__(self) -> bool:
        return bool(self.ended or self.short)

    def aggregate(self, other: "Report") -> Self:
        """Add another rank's report to this one."""
        for number, ranks in other.ended.items():
            self.ended[number] = self.ended.get(number, 0) + ranks
        self.failed |= other.failed
        for request_id, tokens in other.short.items():
            self.short[request_id] = min(tokens, self.short.get(request_id, tokens))
        return self
