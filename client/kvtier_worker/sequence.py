"""One request in flight: its tokens, how far its KV is computed, and where that KV is.

         admit                 finish
WAITING ───────▶ RUNNING ───────────────▶ FINISHED
   ▲              │    ▲
   │ preempt,     │    │ admit
   │ KV let go    │    │
   └──────────────┤    │
      preempt,    ▼    │
      KV kept   SWAPPED┘

Any but FINISHED ──park──▶ PARKED: out of the pool and of every queue, until it is woken.
Any but FINISHED ──suspend──▶ SUSPENDED: the daemon has it, this worker knows it no more.
Any ──prune──▶ PRUNED: a branch that nobody wants any more.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvtier_worker.budget import Course
from kvtier_worker.entries import Entries
from kvtier_worker.errors import WorkerError
from kvtier_worker.sampler import Sampling
from kvtier_worker.thoughts import Thoughts


class State(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    PARKED = "parked"
    FINISHED = "finished"
    SUSPENDED = "suspended"
    PRUNED = "pruned"


AT_REST: Final = (State.FINISHED, State.SUSPENDED, State.PRUNED)
"""The states that nothing comes after, in this worker."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request; the scheduler alone changes `state`, `kv`, `thoughts` and the token counts.

    `computed_tokens` is what the KV now in `kv` stands for; `reached_tokens` is the most that it
    ever was, so that what is computed below it is recomputation. `end_tokens` is the length at
    which it ends. While it is out of the pool, `saved_entries` of the `saved_tokens` that were
    computed are kept. While it is `paused` its newest token is not computed: it rests in the pool.
    `failure` says why it ended early, `course` what its budget is and why it landed, if it has one.
    Its newest token was chosen at `token_at_s`, if that was here.
    """

    id: int
    tokens: list[int]
    prompt_tokens: int
    end_tokens: int
    sampling: Sampling
    kv: Entries
    stop_token: int | None = None
    arrival_step: int = 0
    state: State = State.WAITING
    thoughts: Thoughts = field(default_factory=Thoughts)
    computed_tokens: int = 0
    reached_tokens: int = 0
    saved_entries: int = 0
    saved_tokens: int = 0
    paused: bool = False
    failure: WorkerError | None = None
    course: Course | None = None
    token_at_s: float | None = None

    @property
    def pages(self) -> list[int]:
        """The pool's pages that it refers to."""
        return self.kv.pages

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

    @property
    def behind(self) -> bool:
        """Whether tokens of it were computed that have to be computed again."""
        saved = self.saved_tokens if self.saved_entries else 0
        there = self.computed_tokens if self.state is State.RUNNING else saved
        return there < self.reached_tokens

    def rank(self) -> tuple[int, int]:
        """Who goes first; the last in rank is the victim.

        A generated token counts as much as having come a step earlier: what has taken long is
        protected, also if it was resumed or forked late. As no sequence can generate more tokens
        than its length, only so many that came later can ever go first, and nobody starves.
        """
        return (self.arrival_step - len(self.tokens) + self.prompt_tokens, self.id)
