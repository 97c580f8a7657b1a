"""Continuous batching: who runs in the next step, on which pages, and who has to make room.

Sequences are ranked by arrival, then by progress. The first in rank is never preempted for
another, and the pool holds the longest sequence alone, so somebody always gets to the end. A
sequence enters with the pages for all its tokens at once, and only if a page is left over for
those that run: nobody is let into a state in which all wait for each other. (To leave a page for
each of them was tried: fewer preemptions, but more steps, and no fewer tokens computed in all.)
"""

from bisect import insort
from dataclasses import dataclass

from kvtier_worker.errors import PoolTooSmall, QueueFull
from kvtier_worker.pool import PagedPool
from kvtier_worker.sequence import Sequence, State
from kvtier_worker.store import KvStore


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one step does. `running` may not exceed `step_rows`, or somebody would starve."""

    step_rows: int = 32
    running: int = 32
    waiting: int = 4096

    def __post_init__(self) -> None:
        if not 0 < self.running <= self.step_rows:
            raise ValueError(f"running is {self.running}; it must be in 1..{self.step_rows}")


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `tokens` tokens of a sequence: one when it decodes, more when it prefills."""

    sequence: Sequence
    first: int
    tokens: int

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the sequence's last token, after which one is chosen."""
        return self.first + self.tokens == len(self.sequence.tokens)


@dataclass(slots=True)
class SchedulerCounters:
    """What preemption has cost so far."""

    preemptions: int = 0
    recomputed_tokens: int = 0
    peak_running: int = 0


class Scheduler:
    """Owns the queues and every sequence's pages."""

    def __init__(self, pool: PagedPool, store: KvStore, limits: Limits) -> None:
        self.pool = pool
        self.store = store
        self.limits = limits
        self.counters = SchedulerCounters()
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self._step = 0

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence. Errors: PoolTooSmall when it could never finish; QueueFull."""
        need = self.pool.shape.blocks(sequence.end_tokens)
        if need > self.pool.pages:
            raise PoolTooSmall(
                f"a sequence of {sequence.end_tokens} tokens takes {need} pages and the pool has"
                f" {self.pool.pages}; raise the pool's budget or ask for fewer tokens"
            )
        if len(self.waiting) >= self.limits.waiting:
            raise QueueFull(f"{self.limits.waiting} sequences wait already; submit it later")
        sequence.arrival_step = self._step
        insort(self.waiting, sequence, key=Sequence.rank)

    def plan(self) -> list[Chunk]:
        """Preempt, admit, and name the tokens of the next step: decodes first, then prefill."""
        self._step += 1
        if not self._grow():
            self._admit()
        self.counters.peak_running = max(self.counters.peak_running, len(self.running))
        room = self.limits.step_rows
        chunks = []
        for sequence in sorted(self.running, key=lambda s: (_todo(s) > 1, s.rank())):
            tokens = min(_todo(sequence), room)
            if tokens:
                chunks.append(Chunk(sequence, sequence.computed_tokens, tokens))
                room -= tokens
        return chunks

    def complete(self, chunk: Chunk, token: int | None) -> None:
        """The chunk's KV is in its pages; `token` is the one chosen if the chunk samples."""
        assert chunk.samples == (token is not None)
        sequence = chunk.sequence
        sequence.computed_tokens += chunk.tokens
        again = min(sequence.computed_tokens, sequence.reached_tokens) - chunk.first
        self.counters.recomputed_tokens += max(0, again)
        sequence.reached_tokens = max(sequence.reached_tokens, sequence.computed_tokens)
        if token is None:
            return
        sequence.tokens.append(token)
        if sequence.ended:
            self.remove(sequence)
            self.store.forget(sequence)
            sequence.state = State.FINISHED

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of its queue and its pages from it."""
        (self.running if sequence.state is State.RUNNING else self.waiting).remove(sequence)
        self.pool.give_back(sequence.pages)
        sequence.pages = []

    def _grow(self) -> bool:
        """Give every running sequence the page for its last token; true if that preempted one."""
        preempted = False
        for sequence in sorted(self.running, key=Sequence.rank):
            while sequence.state is State.RUNNING and self._missing(sequence):
                if self.pool.free_pages:
                    sequence.pages += self.pool.take(1)
                else:
                    self._preempt(max(self.running, key=Sequence.rank))
                    preempted = True
        return preempted

    def _missing(self, sequence: Sequence) -> bool:
        return self.pool.shape.blocks(len(sequence.tokens)) > len(sequence.pages)

    def _preempt(self, victim: Sequence) -> None:
        # The store answers before the pages go: what it could not keep is computed again.
        kept_tokens = self.store.save(victim) if victim.computed_tokens else 0
        self.remove(victim)
        victim.state = State.SWAPPED if kept_tokens else State.WAITING
        victim.computed_tokens = 0
        insort(self.waiting, victim, key=Sequence.rank)
        self.counters.preemptions += 1

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.limits.running:
            sequence = self.waiting[0]
            need = self.pool.shape.blocks(len(sequence.tokens))
            left_over = 1 if self.running else 0
            if need + left_over > self.pool.free_pages:
                if sequence.state is State.SWAPPED:
                    self.store.expect(sequence)
                return
            self.waiting.pop(0)
            sequence.pages = self.pool.take(need)
            if sequence.state is State.SWAPPED:
                sequence.computed_tokens = self.store.load(sequence)
            sequence.state = State.RUNNING
            self.running.append(sequence)


def _todo(sequence: Sequence) -> int:
    return len(sequence.tokens) - sequence.computed_tokens
