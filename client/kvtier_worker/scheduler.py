"""Continuous batching: who runs in the next step, on which pages, and who has to make room.

The first in rank is never preempted for another, and the pool holds the longest sequence alone, so
somebody always gets to the end. A sequence enters with the pages for all its tokens at once, and
only if those that run are expected to find theirs for a while (see `admission.py`): nobody is let
into a state in which all wait for each other. To let one that finds no page wait in the pool, in
place of preempting the last in rank, was tried: fewer tokens were computed per step, as those that
waited kept their pages. What is due to a sequence's steps happens here, between two of its tokens.
"""

from bisect import insort
from dataclasses import dataclass

from kvtier_worker.admission import Admission
from kvtier_worker.errors import PoolTooSmall, QueueFull
from kvtier_worker.folding import Folder
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
    """What has ended and was computed so far, and what preemption has cost."""

    finished: int = 0
    preemptions: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    peak_running: int = 0


class Scheduler:
    """Owns the queues and every sequence's pages."""

    def __init__(self, pool: PagedPool, store: KvStore, folder: Folder, limits: Limits) -> None:
        self.pool = pool
        self.store = store
        self.folder = folder
        self.admission = Admission(pool, folder)
        self.limits = limits
        self.counters = SchedulerCounters()
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self._step = 0

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence. Errors: PoolTooSmall when it could never finish; QueueFull."""
        peak = self.folder.peak_tokens(sequence.prompt_tokens, sequence.end_tokens)
        need = self.pool.shape.blocks(peak)
        if need > self.pool.pages:
            raise PoolTooSmall(
                f"a sequence of {sequence.end_tokens} tokens takes {need} pages and the pool has"
                f" {self.pool.pages}; raise the pool's budget or ask for fewer tokens"
            )
        if len(self.waiting) >= self.limits.waiting:
            raise QueueFull(f"{self.limits.waiting} sequences wait already; submit it later")
        sequence.arrival_step = self._step
        self.folder.accept(sequence)
        insort(self.waiting, sequence, key=Sequence.rank)

    def plan(self) -> list[Chunk]:
        """Preempt, admit, and name the tokens of the next step: decodes first, then prefill."""
        self._step += 1
        if not self._settle() and self._admit():
            self._settle()
        self.counters.peak_running = max(self.counters.peak_running, len(self.running))
        room = self.limits.step_rows
        chunks = []
        for sequence in sorted(self.running, key=lambda s: (_todo(s) > 1, s.rank())):
            tokens = min(_todo(sequence), room)
            if tokens:
                sequence.kv.append(tokens)
                chunks.append(Chunk(sequence, sequence.computed_tokens, tokens))
                room -= tokens
        return chunks

    def complete(self, chunk: Chunk, token: int | None) -> None:
        """The chunk's KV is in its slots; `token` is the one chosen if the chunk samples."""
        assert chunk.samples == (token is not None)
        sequence = chunk.sequence
        sequence.computed_tokens += chunk.tokens
        self.counters.computed_tokens += chunk.tokens
        again = min(sequence.computed_tokens, sequence.reached_tokens) - chunk.first
        self.counters.recomputed_tokens += max(0, again)
        sequence.reached_tokens = max(sequence.reached_tokens, sequence.computed_tokens)
        if token is None:
            return
        sequence.tokens.append(token)
        if sequence.ended:
            self._finish(sequence)
        else:
            self.folder.accept(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of its queue and its pages from it."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
        elif sequence.state in (State.WAITING, State.SWAPPED):
            self.waiting.remove(sequence)
        sequence.kv.release()

    def park(self, sequence: Sequence) -> None:
        """Take an unfinished sequence out of the pool and of its queue, its KV to the store."""
        if sequence.state is State.RUNNING:
            self._leave_pool(sequence)
        else:
            self.remove(sequence)
        sequence.state = State.PARKED

    def wake(self, sequence: Sequence) -> None:
        """Queue a parked sequence again. Errors: QueueFull."""
        if len(self.waiting) >= self.limits.waiting:
            raise QueueFull(f"{self.limits.waiting} sequences wait already; wake it later")
        sequence.state = State.SWAPPED if sequence.saved_entries else State.WAITING
        insort(self.waiting, sequence, key=Sequence.rank)

    def adopt(self, child: Sequence) -> None:
        """Take a fork over, in the queue of the sequence that it was forked from."""
        if child.state is State.RUNNING:
            self.running.append(child)
        elif child.state is not State.PARKED:
            insort(self.waiting, child, key=Sequence.rank)

    def _finish(self, sequence: Sequence) -> None:
        self.remove(sequence)
        self.store.forget(sequence)
        self.folder.forget(sequence)
        sequence.state = State.FINISHED
        self.counters.finished += 1

    def _settle(self) -> bool:
        """Let every running sequence's steps change that have to, and give it the pages that it
        needs for its next tokens; true if that preempted one."""
        for sequence in self.running:  # what gives pages back comes first
            while self.folder.due(sequence) == 0:
                self.folder.act(sequence)
        preempted = False
        for sequence in sorted(self.running, key=Sequence.rank):
            while sequence.state is State.RUNNING:
                due = self.folder.due(sequence)
                need = sequence.kv.missing_pages(_todo(sequence)) if due is None else due
                if due is None and not need:
                    break
                if need > self.pool.free_pages:
                    preempted |= self._make_room(sequence)
                    continue
                sequence.kv.provide(self.pool.take(need))
                if due is not None:
                    self.folder.act(sequence)
        return preempted

    def _make_room(self, sequence: Sequence) -> bool:
        """Preempt the last in rank for a sequence that needs pages; true if that was possible.

        Those that rest go first. The only one that runs has the pool to itself: it forgoes an
        unfold, or it has to end.
        """
        if self._park_paused():
            return True
        if len(self.running) > 1:
            self._preempt(max(self.running, key=Sequence.rank))
            return True
        if not self.folder.give_up(sequence):
            sequence.failure = PoolTooSmall(
                f"sequence {sequence.id} needs more than the pool's {self.pool.pages} pages at"
                f" token {sequence.computed_tokens}: its steps are longer than was expected; raise"
                " the pool's budget"
            )
            self._finish(sequence)
        return False

    def _park_paused(self) -> bool:
        """Park the last in rank of the paused that rest in the pool; true if there was one."""
        resting = [s for s in self.running if s.paused and not _todo(s)]
        if resting:
            self.park(max(resting, key=Sequence.rank))
        return bool(resting)

    def _preempt(self, victim: Sequence) -> None:
        self._leave_pool(victim)
        insort(self.waiting, victim, key=Sequence.rank)
        self.counters.preemptions += 1

    def _leave_pool(self, victim: Sequence) -> None:
        # The store answers before the pages go: what it could not keep is computed again.
        self.folder.pack(victim)
        victim.saved_entries = self.store.save(victim) if victim.computed_tokens else 0
        victim.saved_tokens = victim.computed_tokens
        self.remove(victim)
        victim.computed_tokens = 0
        if victim.saved_entries:
            victim.state = State.SWAPPED
        else:
            victim.state = State.WAITING
            victim.thoughts.lose(0, victim.saved_tokens)

    def _admit(self) -> bool:
        """Let in who waits, as long as there is room for a while; true if anybody came."""
        anybody = False
        while self.waiting and (len(self.running) < self.limits.running or self._park_paused()):
            sequence = self.waiting[0]
            need = self.pool.shape.blocks(sequence.thoughts.peak_entries(len(sequence.tokens)))
            need = min(need, self.pool.pages)
            sequences = len(self.running) + 1
            pages = self.admission.expected_pages(self.running, sequence, need)
            fits = pages <= self.pool.pages
            if not fits and self._park_paused():
                continue
            if not fits or not self.admission.takes_turn(pages, sequences, self._step):
                if sequence.state is State.SWAPPED:
                    self.store.expect(sequence)
                break
            sequence.kv.provide(self.pool.take(need))
            if sequence.state is State.SWAPPED:
                self._load(sequence)
            self.waiting.pop(0)
            sequence.state = State.RUNNING
            self.running.append(sequence)
            anybody = True
        return anybody

    def _load(self, sequence: Sequence) -> None:
        """Bring back what was saved; of what was lost, find out from which token to compute."""
        thoughts = sequence.thoughts
        sequence.kv.append(sequence.saved_entries)
        entries = self.store.load(sequence)
        sequence.saved_entries = 0
        if entries == sequence.saved_tokens - thoughts.folded_away():
            self.folder.unpacked(sequence)
            sequence.computed_tokens = sequence.saved_tokens
            return
        sequence.computed_tokens = thoughts.lose(entries, sequence.saved_tokens)
        sequence.kv.truncate(sequence.computed_tokens)
        if sequence.computed_tokens < entries:
            self.store.cut(sequence, sequence.computed_tokens)


def _todo(sequence: Sequence) -> int:
    """How many tokens may be computed before something has to happen to the sequence."""
    stop = sequence.thoughts.stop(sequence.computed_tokens)
    end = len(sequence.tokens) - sequence.paused
    return (end if stop is None else min(stop, end)) - sequence.computed_tokens
