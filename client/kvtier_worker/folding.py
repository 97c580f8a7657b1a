"""Folds, unfolds and folds again: what happens to the steps of each sequence, and when.

Everything happens between two tokens of a sequence, in the order in which it falls due: changes
that are repeated because KV was lost, then the fold of a step whose last token has been computed,
then unfolds that were asked for. The scheduler asks what is `due`, provides the pages that it
takes, and lets it happen by `act`; so a change never fails for want of room, and sequences under
pressure change at the same tokens as alone.
"""

import warnings
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier_kernels.plans import MOVE_ENTRIES_MAX
from kvtier_worker.errors import CannotUnfold, UnsupportedModel, UntrainedFold
from kvtier_worker.folds import Folded, FoldOperator, StepKv, Tail, relative_error
from kvtier_worker.lengths import StepLengths
from kvtier_worker.metrics import FoldFigures, plus
from kvtier_worker.model import Llama
from kvtier_worker.pool import PagedPool
from kvtier_worker.probe import probe_queries
from kvtier_worker.sequence import Sequence
from kvtier_worker.steps import StepRules, StepScanner
from kvtier_worker.store import KvStore
from kvtier_worker.thoughts import REPEATED, Event, Form, Step
from kvtier_worker.tile import Slots

NOTES_MAX: Final = 65_536
MEASURED_QUERIES: Final = 32
KEEP_MAX: Final = MOVE_ENTRIES_MAX
"""Entries that one launch moves on a GPU; the same everywhere, so that a policy runs everywhere."""
TAIL: Final = Tail()


class UnfoldTrigger(Protocol):
    """Says whether a token asks for a step."""

    def __call__(self, token: int, steps: Seq[Step]) -> int | None:
        """The number of the step to unfold before the token is computed, or None."""


@dataclass(frozen=True, slots=True)
class AttentionTrigger:
    """Unfold what decode attends to; experimental.

    A folded step whose summary gets more than `restore_share` of any head's attention is unfolded,
    and fetched ahead above `fetch_share`. An unfolded one is folded again when it has had less than
    `idle_share` for `idle_tokens` tokens, and then stays folded for `rest_tokens`.
    """

    restore_share: float = 0.5
    fetch_share: float = 0.25
    idle_share: float = 0.1
    idle_tokens: int = 16
    rest_tokens: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.idle_share < self.fetch_share <= self.restore_share <= 1:
            raise ValueError("shares must rise from idle over fetch to restore, within 0..1")


@dataclass(frozen=True, slots=True)
class FoldPolicy:
    """How one model's thoughts are folded.

    `keep` entries of each step stay, at most `KEEP_MAX`. Steps of the prompt are folded only with
    `fold_prompt`. What is unfolded is folded again at the end of the step in which that happened,
    unless it is pinned.
    `longest_step_tokens` is what is taken for a step's length until enough steps have been folded;
    without it, sequences are admitted at first as if they never folded, and none is accepted that
    the pool could not hold then. With `measure` every fold's error is measured.
    """

    rules: StepRules
    keep: int = 4
    operator: FoldOperator = TAIL
    fold_prompt: bool = False
    trigger: UnfoldTrigger | None = None
    attention: AttentionTrigger | None = None
    longest_step_tokens: int | None = None
    measure: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.keep <= KEEP_MAX:
            raise ValueError(
                f"keep is {self.keep}: a folded step needs an entry at least, and"
                f" may have {KEEP_MAX}"
            )


@dataclass(frozen=True, slots=True)
class UnfoldNote:
    """One unfold: of which step, before which token, why, and whether the KV was still there."""

    sequence: int
    step: int
    at: int
    cause: str
    restored: bool


class Folder:
    """Carries out a policy, and what callers ask for, on one pool and one store."""

    def __init__(
        self, model: Llama, pool: PagedPool, store: KvStore, policy: FoldPolicy | None
    ) -> None:
        """Errors: BadStepRules; UnsupportedModel when the pool has no biases for the operator."""
        if policy is not None:
            policy.rules.check(model.config.vocab)
            if policy.operator.biased and not pool.bias_pages:
                raise UnsupportedModel(
                    "this fold operator gives biases and the pool has none: make the pool with"
                    " biased=True"
                )
            if not model.config.folds_to(policy.keep):
                warnings.warn(UntrainedFold(model.config.name, policy.keep), stacklevel=3)
        self.policy = policy
        self.lengths = StepLengths(None if policy is None else policy.longest_step_tokens)
        self.figures = FoldFigures()
        self.notes: deque[UnfoldNote] = deque(maxlen=NOTES_MAX)
        self._model = model
        self._pool = pool
        self._store = store
        self._scanners: dict[int, StepScanner] = {}

    # ----------------------------------------------------------------- scanning

    def accept(self, sequence: Sequence) -> None:
        """Read the tokens that were accepted since the last time."""
        if self.policy is None:
            return
        scanner = self._scanners.get(sequence.id)
        if scanner is None:
            first = 0 if self.policy.fold_prompt else sequence.prompt_tokens
            scanner = self._scanners[sequence.id] = StepScanner(self.policy.rules, first)
        thoughts = sequence.thoughts
        fresh = sequence.tokens[scanner.scanned_tokens :]
        known = thoughts.steps[-1].end if thoughts.steps else 0
        for first, end in scanner.feed(fresh):
            if end > known:  # a session may have been resumed with other rules
                thoughts.add(max(first, known), end)
        if self.policy.trigger is not None and len(fresh) == 1:
            number = self.policy.trigger(fresh[0], thoughts.steps)
            if number is not None and self._can_unfold(sequence, number) is None:
                self._want(sequence, thoughts.steps[number], "trigger")

    def fork(self, sequence: Sequence, child: Sequence) -> None:
        """The child has read what the sequence has read."""
        scanner = self._scanners.get(sequence.id)
        if scanner is not None:
            self._scanners[child.id] = scanner.fork()

    def forget(self, sequence: Sequence) -> None:
        """The sequence is of no concern any more."""
        self._scanners.pop(sequence.id, None)

    # ----------------------------------------------------------------- requests

    def ask_unfold(self, sequence: Sequence, number: int, pinned: bool) -> None:
        """Have a step unfolded before the next token. Errors: CannotUnfold."""
        problem = self._can_unfold(sequence, number)
        if problem is not None:
            raise CannotUnfold(f"step {number} of sequence {sequence.id} {problem}")
        step = sequence.thoughts.steps[number]
        step.pinned = pinned
        self._want(sequence, step, "asked")

    def ask_refold(self, sequence: Sequence, number: int) -> None:
        """Fold an unfolded step again; nothing happens to one that is folded.

        Errors: CannotUnfold when there is no such step.
        """
        thoughts = sequence.thoughts
        if not 0 <= number < len(thoughts.steps):
            raise CannotUnfold(
                f"step {number} of sequence {sequence.id} does not exist: it has"
                f" {len(thoughts.steps)}"
            )
        step = thoughts.steps[number]
        step.pinned = False
        thoughts.take_back(number, sequence.reached_tokens)
        if sequence.behind:
            self._change_later(sequence, step, Form.UNFOLDED, Form.FOLDED)
        elif step.unfolded:
            self._refold(sequence, step)
        else:
            step.wanted = False

    def _can_unfold(self, sequence: Sequence, number: int) -> str | None:
        steps = sequence.thoughts.steps
        if not 0 <= number < len(steps):
            return f"does not exist: it has {len(steps)}"
        if not self._store.unfolds:
            return "cannot be unfolded: without a daemon nobody keeps it; start with --daemon"
        if sequence.thoughts.coming_form(steps[number]) is Form.WHOLE:
            return "was never folded"
        return None

    def _want(self, sequence: Sequence, step: Step, cause: str) -> None:
        if sequence.behind:
            step.cause = cause
            self._change_later(sequence, step, Form.FOLDED, Form.UNFOLDED)
        elif step.form is Form.FOLDED and not step.wanted:
            step.wanted, step.cause = True, cause

    def _change_later(self, sequence: Sequence, step: Step, old: Form, new: Form) -> None:
        """Have a step change where the sequence was when its KV was lost, and not before."""
        if sequence.thoughts.coming_form(step) is old:
            event = Event(sequence.reached_tokens, step.number, new)
            sequence.thoughts.replay.append(event)

    # ------------------------------------------------------------ what falls due

    def due(self, sequence: Sequence) -> int | None:
        """How many pages the next change takes that has fallen due; None when there is none."""
        event = self._repeated(sequence)
        if event is not None:
            step = sequence.thoughts.steps[event.step]
            if event.form is Form.UNFOLDED:
                return sequence.kv.missing_for_unfold(step.tokens)
            return 0 if step.unfolded else self._fold_pages(sequence, step)
        step_due = self._undecided(sequence)
        if step_due is not None:
            return self._fold_pages(sequence, step_due) if self._folds(step_due) else 0
        wanted = self._wanted(sequence)
        return None if wanted is None else sequence.kv.missing_for_unfold(wanted.tokens)

    def act(self, sequence: Sequence) -> None:
        """Let the next change happen; its pages have been provided."""
        event = self._repeated(sequence)
        if event is not None:
            self._repeat(sequence, event)
            return
        step = self._undecided(sequence)
        if step is not None:
            self._decide(sequence, step)
            return
        wanted = self._wanted(sequence)
        assert wanted is not None
        self._unfold(sequence, wanted)

    def give_up(self, sequence: Sequence) -> bool:
        """There is no room for the unfold that is due: go on without; false if it is another
        change."""
        thoughts, event = sequence.thoughts, self._repeated(sequence)
        if event is not None:
            if event.form is not Form.UNFOLDED:
                return False
            thoughts.replay.popleft()
            thoughts.steps[event.step].pinned = False
        else:
            wanted = self._wanted(sequence)
            if wanted is None or self._undecided(sequence) is not None:
                return False
            self._stay_folded(sequence, wanted)
        self._count(crowded=1)
        return True

    def _repeated(self, sequence: Sequence) -> Event | None:
        """The change that happens again now; what is unfolded waits for a fold that is new."""
        event = next(iter(sequence.thoughts.replay), None)
        if event is None or event.at > sequence.computed_tokens:
            return None
        new = event.form is Form.UNFOLDED and self._undecided(sequence) is not None
        return None if new else event

    def _undecided(self, sequence: Sequence) -> Step | None:
        thoughts = sequence.thoughts
        if thoughts.decided == len(thoughts.steps):
            return None
        step = thoughts.steps[thoughts.decided]
        return step if step.end <= sequence.computed_tokens else None

    def _wanted(self, sequence: Sequence) -> Step | None:
        return next((step for step in sequence.thoughts.steps if step.wanted), None)

    def _folds(self, step: Step) -> bool:
        return self.policy is not None and step.tokens > self.policy.keep

    def _fold_pages(self, sequence: Sequence, step: Step) -> int:
        assert self.policy is not None
        first = sequence.thoughts.first_entry(step)
        return sequence.kv.missing_for_fold(first, self.policy.keep)

    def _repeat(self, sequence: Sequence, event: Event) -> None:
        """Do again what had happened here before KV was lost."""
        thoughts = sequence.thoughts
        step = thoughts.steps[event.step]
        if event.form is Form.UNFOLDED and step.form is Form.FOLDED:
            self._unfold(sequence, step)
        elif event.form is Form.FOLDED and step.unfolded:
            self._refold(sequence, step)
        elif event.form is Form.FOLDED and step.form is Form.WHOLE:
            self._fold(sequence, step)
            self._count(repeated=1)
        if thoughts.replay and thoughts.replay[0] is event:
            thoughts.replay.popleft()  # it could not happen again
        if not thoughts.replay:
            sequence.kv.keep_spare(len(sequence.tokens) - sequence.computed_tokens)

    def _decide(self, sequence: Sequence, step: Step) -> None:
        """A step has ended: fold it, and again what was unfolded for its sake."""
        thoughts = sequence.thoughts
        thoughts.decided += 1
        if self._folds(step):
            self.lengths.add(step.tokens)
            self._fold(sequence, step)
        for other in thoughts.steps:
            if other.unfolded and not other.pinned:
                self._refold(sequence, other)

    # -------------------------------------------------------------- the changes

    def _fold(self, sequence: Sequence, step: Step) -> None:
        assert self.policy is not None
        thoughts, keep = sequence.thoughts, self.policy.keep
        started_s = perf_counter()
        first = thoughts.first_entry(step)
        slots = sequence.kv.slots[first : first + step.tokens].copy()
        if step.archived is None and not self._store.keep_step(sequence, step, slots):
            self._count(unkept=1)
        kept_s = perf_counter()
        folded, error = self._summarise(sequence, step, slots)
        worked_s = perf_counter()
        packed = thoughts.first_packed_entry(step)
        target = sequence.kv.fold(first, first + step.tokens, keep)
        if folded is None:
            self._pool.move_entries(slots[-keep:], target)
        else:
            self._pool.write_entries(target, folded.kv, folded.bias)
        step.kept = keep
        step.bias = None if folded is None or folded.bias is None else folded.bias.cpu()
        thoughts.change(step, Form.FOLDED, sequence.computed_tokens)
        self._store.cut(sequence, packed)
        self._store.folded(sequence, step)
        self._count(
            folds=1,
            folded_tokens=step.tokens,
            summary_entries=keep,
            measured=int(error is not None),
            error_sum=error or 0.0,
            archive_s=kept_s - started_s,
            operator_s=worked_s - kept_s,
            seconds=perf_counter() - started_s,
        )

    def _unfold(self, sequence: Sequence, step: Step) -> None:
        """Bring a step back; if the daemon has it no more, its summary has to do."""
        thoughts = sequence.thoughts
        started_s = perf_counter()
        first = thoughts.first_entry(step)
        slots = sequence.kv.unfold(step.number, first, step.kept, step.tokens)
        restored = self._store.bring_step(sequence, step, slots)
        cause, step.cause = step.cause, REPEATED
        if not step.away:
            note = UnfoldNote(sequence.id, step.number, sequence.computed_tokens, cause, restored)
            self.notes.append(note)
        if not restored:
            sequence.kv.refold(step.number, first, step.tokens)
            self._stay_folded(sequence, step)
            self._count(misses=1)
            return
        if not (step.away or sequence.behind):  # else it has been idle for as long as before
            step.idle_tokens = 0
        if step.away:
            step.form = Form.UNFOLDED
        else:
            thoughts.change(step, Form.UNFOLDED, sequence.computed_tokens)
        step.wanted = step.away = False
        self._count(unfolds=1, unfolded_tokens=step.tokens, unfold_s=perf_counter() - started_s)

    def _stay_folded(self, sequence: Sequence, step: Step) -> None:
        if step.away:  # tokens so far saw all of it, the next ones will not
            sequence.thoughts.change(step, Form.FOLDED, sequence.computed_tokens)
        step.wanted = step.away = step.pinned = False

    def _refold(self, sequence: Sequence, step: Step) -> None:
        if not step.away:
            first = sequence.thoughts.first_entry(step)
            sequence.kv.refold(step.number, first, step.tokens)
        at = sequence.computed_tokens or sequence.saved_tokens  # in the pool or out of it
        sequence.thoughts.change(step, Form.FOLDED, at)
        step.wanted = step.away = False
        if self.policy is not None and self.policy.attention is not None:
            step.rests_until = sequence.computed_tokens + self.policy.attention.rest_tokens
        self._store.folded(sequence, step)
        self._count(refolds=1)

    def _summarise(
        self, sequence: Sequence, step: Step, slots: Slots
    ) -> tuple[Folded | None, float | None]:
        """What stays of a step, and the error of that if it is measured.

        None stands for its last entries as they are: nobody has to look at them.
        """
        policy = self.policy
        assert policy is not None
        wanted = max(policy.operator.queries, MEASURED_QUERIES if policy.measure else 0)
        if policy.operator.copies_tail and not policy.measure:
            return None, None
        queries = (
            probe_queries(self._model, self._pool, sequence, step, min(wanted, step.tokens))
            if wanted
            else None
        )
        view = StepKv(self._pool.read_entries(slots), queries)
        folded = policy.operator.fold(view, policy.keep)
        return folded, relative_error(view, folded) if policy.measure else None

    # -------------------------------------------------------- leaving the pool

    def pack(self, sequence: Sequence) -> None:
        """Fold for the way out of the pool what is unfolded; it is unfolded on the way in."""
        for step in sequence.thoughts.steps:
            if step.form is Form.UNFOLDED:
                first = sequence.thoughts.first_entry(step)
                sequence.kv.refold(step.number, first, step.tokens)
                step.form = Form.FOLDED
                step.wanted = step.away = True

    def unpacked(self, sequence: Sequence) -> None:
        """The sequence is back in the pool: its summaries need their biases."""
        for step in sequence.thoughts.steps:
            if step.form is Form.FOLDED and step.bias is not None:
                first = sequence.thoughts.first_entry(step)
                slots = sequence.kv.slots[first : first + step.kept]
                self._pool.write_bias(slots, step.bias)

    # ----------------------------------------------------- attention's trigger

    def groups(self, sequence: Sequence, entries: int) -> NDArray[np.int64] | None:
        """For each of the first entries the number of its step plus one, if masses are measured.

        Steps that were never folded, and tokens of no step, are 0.
        """
        if self.policy is None or self.policy.attention is None or not self._store.unfolds:
            return None
        thoughts = sequence.thoughts
        groups = np.zeros(entries, np.int64)
        for step in thoughts.steps:
            if step.form is not Form.WHOLE:
                first = thoughts.first_entry(step)
                groups[first : first + step.tokens - step.saved_entries] = step.number + 1
        return groups

    def attended(self, sequence: Sequence, masses: NDArray[np.float32]) -> None:
        """The newest token gave so much of its attention to each group."""
        assert self.policy is not None and self.policy.attention is not None
        rule = self.policy.attention
        for step in sequence.thoughts.steps:
            mass = float(masses[step.number + 1]) if step.number + 1 < len(masses) else 0.0
            if step.form is Form.UNFOLDED and not step.pinned:
                step.idle_tokens = step.idle_tokens + 1 if mass < rule.idle_share else 0
                if step.idle_tokens >= rule.idle_tokens:
                    self._refold(sequence, step)
            elif step.form is Form.FOLDED and step.rests_until <= sequence.computed_tokens:
                if mass >= rule.restore_share:
                    self._want(sequence, step, "attention")
                elif mass >= rule.fetch_share:
                    self._store.expect_step(sequence, step)

    # ------------------------------------------------------------- predictions

    @property
    def keep(self) -> int:
        """How many entries stay of a step."""
        return 0 if self.policy is None else self.policy.keep

    def open_tokens(self, sequence: Sequence) -> float:
        """How many of its tokens are in the step that is open; infinite if none ever folds."""
        if self.policy is None:
            return inf
        thoughts = sequence.thoughts
        if thoughts.decided:
            return len(sequence.tokens) - thoughts.steps[thoughts.decided - 1].end
        return len(sequence.tokens) - (0 if self.policy.fold_prompt else sequence.prompt_tokens)

    def peak_tokens(self, prompt_tokens: int, end_tokens: int) -> int:
        """The most entries that a request is expected to have at once."""
        policy = self.policy
        if policy is None or policy.longest_step_tokens is None:
            return end_tokens
        new_tokens = end_tokens - prompt_tokens
        longest = policy.longest_step_tokens
        if new_tokens <= longest:
            return end_tokens
        steps = -(-new_tokens // longest)
        return min(end_tokens, prompt_tokens + steps * policy.keep + longest)

    def _count(self, **more: float) -> None:
        self.figures = plus(self.figures, more)
