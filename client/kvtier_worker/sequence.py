"""One request in flight: its tokens, how far its KV is computed, and where that KV is.

         admit                 finish
WAITING ───────▶ RUNNING ───────────────▶ FINISHED
   ▲              │    ▲
   │ preempt,     │    │ admit
   │ KV let go    │    │
   └──────────────┤    │
      preempt,    ▼    │
      KV kept   SWAPPED┘

Any but FINISHED ──suspend──▶ SUSPENDED: the daemon has it, this worker knows it no more.
"""

from dataclasses import dataclass, field
from enum import Enum

from kvtier_worker.sampler import Sampling


class State(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"
    SUSPENDED = "suspended"


@dataclass(slots=True, eq=False)
class Sequence:
    """A request; the scheduler alone changes `state`, `pages` and `computed_tokens`.

    `computed_tokens` is the KV now in `pages`; `reached_tokens` is the most that it ever was, so
    that what is computed below it is recomputation. `end_tokens` is the length at which it ends.
    """

    id: int
    tokens: list[int]
    prompt_tokens: int
    end_tokens: int
    sampling: Sampling
    stop_token: int | None = None
    arrival_step: int = 0
    state: State = State.WAITING
    pages: list[int] = field(default_factory=list)
    computed_tokens: int = 0
    reached_tokens: int = 0

    @property
    def generated(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[self.prompt_tokens :]

    @property
    def ended(self) -> bool:
        """Whether the last token is the last."""
        return len(self.tokens) >= self.end_tokens or (
            len(self.tokens) > self.prompt_tokens and self.tokens[-1] == self.stop_token
        )

    def rank(self) -> tuple[int, int, int]:
        """Who goes first: earlier arrival, then more progress. The last in rank is the victim."""
        return (self.arrival_step, self.prompt_tokens - len(self.tokens), self.id)
