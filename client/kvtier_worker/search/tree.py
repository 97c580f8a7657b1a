"""The branches of one search: what all strategies do with them, and what becomes of them.

A branch rests while its newest token is not computed: at the prompt's last token, and where a step
has ended. There it is forked; what comes before is shared, and each fork draws with its own seed.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import dataclass
from math import isfinite
from types import TracebackType
from typing import Self, TypeVar

from kvtier_worker.engine import Engine
from kvtier_worker.errors import CannotFork, SearchFailed
from kvtier_worker.search.outcome import BranchReport, Fate, Outcome, SearchFigures
from kvtier_worker.search.question import BRANCHES_MAX, Question, Verifier
from kvtier_worker.sequence import AT_REST, Sequence, State
from kvtier_worker.steps import StepRules, StepScanner

Said = TypeVar("Said")


@dataclass(slots=True, eq=False)
class Branch:
    """One branch; without a `scanner` it grows to its end, whatever steps it has."""

    number: int
    parent: "Branch | None"
    sequence: Sequence
    forked_at: int
    scanner: StepScanner | None
    steps: int = 0
    score: float | None = None
    failure: str | None = None

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to grow or to fork."""
        return self.sequence.state in AT_REST

    @property
    def rests(self) -> bool:
        """Whether it waits to be forked."""
        return self.sequence.paused or self.sequence.state is State.PARKED

    def report(self) -> BranchReport:
        """What became of it."""
        fate = Fate.FINISHED if self.sequence.state is State.FINISHED else Fate.PRUNED
        return BranchReport(
            number=self.number,
            parent=None if self.parent is None else self.parent.number,
            forked_at=self.forked_at,
            generated=tuple(self.sequence.generated),
            steps=self.steps,
            fate=fate if self.failure is None else Fate.FAILED,
            score=self.score,
            failure=self.failure,
        )


class SearchTree:
    """Makes branches on an engine, and ends all of them on exit: nothing of them is left then."""

    def __init__(self, engine: Engine, question: Question, rules: StepRules | None = None) -> None:
        """Without `rules` branches grow to their ends. Errors: BadStepRules."""
        if rules is not None:
            rules.check(engine.model.config.vocab)
        self.question = question
        self._engine = engine
        self._rules = rules
        self._branches: list[Branch] = []
        self._growing: list[Branch] = []
        self._ends = ExitStack()
        self._parked = self._woken = self._pruned = self._shared_tokens = 0
        self._calls = self._failures = 0
        self._first_failure: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._first_failure = None  # its traceback leads back here
        self._ends.__exit__(kind, error, traceback)

    # -------------------------------------------------------------- making them

    def plant(self) -> Branch:
        """The first branch: it computes the prompt, once for all of them, and rests.

        Errors: BadPrompt; TooLong; PoolTooSmall; QueueFull.
        """
        asked, engine = self.question, self._engine
        sequence = engine.submit(
            asked.prompt, asked.new_tokens, asked.sampling(branch=0), asked.stop_token
        )
        trunk = self._add(None, sequence, 0, None)
        engine.pause(sequence)
        while not trunk.ended and sequence.computed_tokens < len(asked.prompt) - 1:
            self._step()
        if self._rules is not None:
            trunk.scanner = StepScanner(self._rules, len(asked.prompt))
            trunk.scanner.feed(asked.prompt)
        return trunk

    def fork(self, parent: Branch, *, to_end: bool = False) -> Branch:
        """Another branch from where one rests; `to_end` lets it grow beyond its next step.

        While as many run as may, the others grow on; those that rest are parked if nothing else
        helps. Errors: SearchFailed for too many branches; CannotFork; QueueFull.
        """
        if len(self._branches) >= BRANCHES_MAX:
            raise SearchFailed(
                f"the search has made {BRANCHES_MAX} branches and has not come to its end; let it"
                " try fewer ways at once",
                self._figures(),
            )
        sequence = self._forked(parent.sequence)
        scanner = None if to_end or parent.scanner is None else parent.scanner.fork()
        child = self._add(parent, sequence, len(parent.sequence.generated), scanner)
        child.steps = parent.steps
        if sequence.state is State.PARKED:
            self._woken += 1
        there = sequence.saved_tokens if sequence.saved_entries else sequence.computed_tokens
        self._shared_tokens += there
        self._engine.wake(sequence)
        return child

    def _forked(self, origin: Sequence) -> Sequence:
        while True:
            try:
                return self._engine.fork(origin, self.question.sampling(len(self._branches)))
            except CannotFork:
                if self._step():
                    continue
                resting = [b for b in self._branches if b.sequence.state is State.RUNNING]
                if not resting:
                    raise
                self.park(resting[-1])

    def _add(
        self, parent: Branch | None, sequence: Sequence, at: int, scanner: StepScanner | None
    ) -> Branch:
        branch = Branch(len(self._branches), parent, sequence, at, scanner)
        self._ends.callback(self._engine.prune, sequence)
        self._branches.append(branch)
        self._growing.append(branch)
        return branch

    def spread(self, n: int) -> list[Branch]:
        """So many branches from the prompt, each grown to its end."""
        trunk = self.plant()
        branches = [self.fork(trunk) for _ in range(n)]
        self.prune(trunk)
        self.grow(branches)
        return branches

    # ------------------------------------------------------------ growing, ending

    def grow(self, branches: Seq[Branch]) -> None:
        """Let the engine run until each of the branches rests or has ended."""
        while not all(branch.ended or branch.rests for branch in branches):
            self._step()

    def park(self, branch: Branch) -> None:
        """Take a branch that rests out of the pool while nobody visits it; its forks come back."""
        if branch.sequence.state is not State.PARKED:
            self._parked += 1
            self._engine.park(branch.sequence)

    def prune(self, branch: Branch) -> None:
        """End a branch at once; nothing happens to one that has ended."""
        if not branch.ended:
            self._pruned += 1
            self._engine.prune(branch.sequence)

    def _step(self) -> bool:
        """One step of the engine; false when nothing is left to do. Whose step of thought has
        ended rests from then on."""
        more = self._engine.step()
        for branch in self._growing:
            if branch.scanner is not None:
                fresh = branch.sequence.tokens[branch.scanner.scanned_tokens :]
                if steps := branch.scanner.feed(fresh):
                    branch.steps += len(steps)
                    self._engine.pause(branch.sequence)
        self._growing = [b for b in self._growing if not (b.ended or b.rests)]
        return more

    # ------------------------------------------------------------------- judging

    def score(self, branch: Branch, verifier: Verifier) -> float | None:
        """Have a branch scored as it is now; None if that failed."""

        def said() -> float:
            score = float(verifier(self.question.prompt, tuple(branch.sequence.generated)))
            if not isfinite(score):
                raise ValueError(f"the verifier gave {score}, which is no score")
            return score

        branch.score = self.ask(branch, said)
        return branch.score

    def ask(self, branch: Branch, said: Callable[[], Said]) -> Said | None:
        """What is said about a branch; None, and the failure noted, if that raises."""
        if branch.sequence.failure is not None:
            self._note_failure(branch, branch.sequence.failure)
            return None
        self._calls += 1
        try:
            return said()
        except Exception as error:  # anybody's code: the search goes on with the other branches
            self._failures += 1
            self._note_failure(branch, error)
            return None

    def _note_failure(self, branch: Branch, failure: Exception) -> None:
        branch.failure = f"{type(failure).__name__}: {failure}"
        self._first_failure = self._first_failure or failure

    def outcome(self) -> Outcome:
        """End what has not ended; the best of what has is the winner. Errors: SearchFailed."""
        for branch in self._branches:
            self.prune(branch)
        reports = tuple(branch.report() for branch in self._branches)
        scored = [r for r in reports if r.fate is Fate.FINISHED and r.score is not None]
        if not scored:
            why = self._first_failure
            raise SearchFailed(
                f"none of {len(reports)} branches came to an end that could be scored"
                + (f"; the first to fail: {type(why).__name__}: {why}" if why else ""),
                self._figures(),
            ) from why
        return Outcome(
            winner=max(scored, key=lambda report: report.score or 0.0),
            branches=reports,
            figures=self._figures(),
        )

    def _figures(self) -> SearchFigures:
        return SearchFigures(
            branches=len(self._branches),
            pruned=self._pruned,
            parked=self._parked,
            woken=self._woken,
            generated_tokens=sum(
                len(branch.sequence.generated) - branch.forked_at for branch in self._branches
            ),
            shared_tokens=self._shared_tokens,
            verifier_calls=self._calls,
            verifier_failures=self._failures,
        )
