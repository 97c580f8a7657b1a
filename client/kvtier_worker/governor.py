"""The governor: says when a thought has had enough, and brings it to its end.

It looks at a sequence whenever a token was accepted, and at nothing but the sequence's tokens,
steps and number of entries, which preemption does not change. So a sequence lands at the same
token under pressure as alone, unless the pressure rule is on, whose purpose is that it does not.

     submit           cause               end of step, or enough waited       answer, or hard stop
  ──────────▶ thinks ───────▶ looks for a step's end ───────────────▶ control ─────────────────▶ end

The hard stop is the sequence's `end_tokens`: a landing lowers it, and nothing raises it again.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from kvtier_worker.budget import Budget, Cause, Course
from kvtier_worker.errors import BadBudget, BadControl
from kvtier_worker.folding import Folder
from kvtier_worker.loops import LoopRules, LoopWindow
from kvtier_worker.metrics import BudgetFigures, plus
from kvtier_worker.pool import PagedPool
from kvtier_worker.sequence import Sequence


class Control(Protocol):
    """Gives the tokens that bring a sequence to its end, where they depend on the sequence."""

    @property
    def longest_tokens(self) -> int:
        """The most tokens that it gives."""

    def __call__(self, sequence: Sequence) -> Seq[int]:
        """The tokens to go on with. If it raises, the sequence lands without them."""


@dataclass(frozen=True, slots=True)
class Landing:
    """How a thought is brought to its end.

    `control` are tokens, or gives them. They come behind the next step that ends within
    `boundary_tokens` tokens, or else at once then; without step rules (`FoldPolicy.rules`) no step
    ends. After `answer_tokens` more the sequence is stopped if it has not ended by itself.
    """

    control: tuple[int, ...] | Control
    answer_tokens: int
    boundary_tokens: int = 0

    def __post_init__(self) -> None:
        if self.answer_tokens < 1 or self.boundary_tokens < 0:
            raise ValueError(
                f"{self.answer_tokens} tokens for the answer, {self.boundary_tokens} to look for a"
                " step's end: an answer has a token at least, and there is no looking back"
            )

    @property
    def control_tokens(self) -> int:
        """The most tokens that `control` gives."""
        control = self.control
        return len(control) if isinstance(control, tuple) else control.longest_tokens

    @property
    def least_tokens(self) -> int:
        """The tokens that it takes when it does not look for a step's end."""
        return self.control_tokens + self.answer_tokens

    @property
    def most_tokens(self) -> int:
        """The tokens that it takes when it does not find a step's end."""
        return self.boundary_tokens + self.least_tokens


@dataclass(frozen=True, slots=True)
class Probe:
    """Asks, every so many tokens, how sure the answer already is, from 0 to 1; `sure` is enough.

    `ask` is called between two tokens, changes nothing and is quick. If it raises, or says what is
    no share, it is not asked again for that sequence.
    """

    ask: Callable[[Sequence], float]
    sure: float = 0.95
    every_tokens: int = 32

    def __post_init__(self) -> None:
        if not 0 < self.sure <= 1 or self.every_tokens < 1:
            raise ValueError(
                f"a probe that is sure from {self.sure} on and asked every {self.every_tokens}"
                " tokens: the first must be above 0 and not above 1, the second 1 at least"
            )


@dataclass(frozen=True, slots=True)
class Pressure:
    """When the pool is full, thoughts have to be shorter.

    Once more than `high` of its pages are in use, what budgets leave beyond the prompt is
    multiplied by `tight`, until no more than `low` are in use. What has begun to land does land.
    """

    high: float = 0.95
    low: float = 0.85
    tight: float = 0.5

    def __post_init__(self) -> None:
        if not (0 <= self.low <= self.high <= 1 and 0 < self.tight < 1):
            raise ValueError(
                f"pressure from {self.high} down to {self.low} of the pool, budgets times"
                f" {self.tight}: low may not exceed high, and tight lies between 0 and 1"
            )


@dataclass(frozen=True, slots=True)
class GovernPolicy:
    """How thoughts that have a budget are governed; what is None is not looked at."""

    landing: Landing
    loops: LoopRules | None = None
    probe: Probe | None = None
    pressure: Pressure | None = None


class Governor:
    """Carries out a policy on one engine's sequences; those without a budget it leaves alone."""

    def __init__(self, policy: GovernPolicy, vocab: int, pool: PagedPool, folder: Folder) -> None:
        """Errors: BadControl."""
        self.policy = policy
        self.figures = BudgetFigures()
        self.tight = False
        self._vocab = vocab
        self._pool = pool
        self._folder = folder
        control = policy.landing.control
        if isinstance(control, tuple):
            self._check(control, stop_token=None)

    def govern(self, sequence: Sequence, budget: Budget) -> None:
        """Give a sequence that is not queued yet its budget. Errors: BadBudget; BadControl."""
        landing = self.policy.landing
        if isinstance(landing.control, tuple):
            self._check(landing.control, sequence.stop_token)
        prompt_tokens = sequence.prompt_tokens
        new_tokens = sequence.end_tokens - prompt_tokens
        longest_thought = new_tokens - landing.least_tokens
        if longest_thought < 1:
            raise BadBudget(
                f"{new_tokens} new tokens were asked for; the landing alone takes"
                f" {landing.least_tokens}, and a token of thought comes before it; ask for more, or"
                " shorten the control sequence or the answer"
            )
        tokens = budget.tokens or max(1, new_tokens - landing.most_tokens)
        tokens = min(max(1, int(tokens * budget.share)), longest_thought)
        kv_entries = None
        if budget.kv_bytes is not None:
            kv_bytes = int(budget.kv_bytes * budget.share)
            entry_bytes = self._pool.page_bytes // self._pool.shape.block_tokens
            kv_entries = kv_bytes // entry_bytes
            if kv_entries <= prompt_tokens:
                raise BadBudget(
                    f"a budget of {kv_bytes} bytes of KV; the prompt takes"
                    f" {prompt_tokens * entry_bytes} and each token {entry_bytes} more; raise it"
                )
        sequence.course = Course(tokens, kv_entries)
        sequence.end_tokens = prompt_tokens + min(new_tokens, tokens + landing.most_tokens)

    def feel(self) -> None:
        """Look how full the pool is: budgets are tightened from now on, or relaxed."""
        rule = self.policy.pressure
        if rule is None:
            return
        used = (self._pool.pages - self._pool.free_pages) / self._pool.pages
        if self.tight:
            self.tight = used > rule.low
        elif used > rule.high:
            self.tight = True
            self._count(tightened=1)

    def accepted(self, sequence: Sequence) -> None:
        """The sequence has one more token, or has ended with it; it may land now."""
        course = sequence.course
        if course is None:
            return
        if sequence.ended:
            if course.cause is not None and sequence.tokens[-1] != sequence.stop_token:
                course.stopped = True
                self._count(hard_stops=1)
            return
        if course.cause is None:
            course.cause = self._find_cause(sequence, course)
            if course.cause is None:
                return
            course.begun_at = len(sequence.tokens)
            self._count(**{course.cause.value: 1})
        if course.landed_at is None and self._may_land(sequence, course):
            self._land(sequence, course)

    # ------------------------------------------------------------------- causes

    def _find_cause(self, sequence: Sequence, course: Course) -> Cause | None:
        generated = len(sequence.tokens) - sequence.prompt_tokens
        loop = self._find_loop(sequence, course)
        if generated >= course.tokens:
            return Cause.TOKENS
        grown = len(sequence.kv) + 1 - sequence.prompt_tokens
        limit = None if course.kv_entries is None else course.kv_entries - sequence.prompt_tokens
        if limit is not None and grown >= limit:
            return Cause.KV
        if loop is not None:
            return loop
        if self._is_sure(sequence, course, generated):
            return Cause.SURE
        if self.tight:
            assert self.policy.pressure is not None
            tight = self.policy.pressure.tight
            if generated >= course.tokens * tight or (limit is not None and grown >= limit * tight):
                return Cause.PRESSURE
        return None

    def _find_loop(self, sequence: Sequence, course: Course) -> Cause | None:
        rules = self.policy.loops
        if rules is None:
            return None
        window = course.window
        if window is None:
            window = course.window = LoopWindow(rules)
            for token in sequence.generated[-rules.window_tokens :]:
                window.feed(token)
        else:
            window.feed(sequence.tokens[-1])
        if window.repeats:
            return Cause.REPEATS
        return Cause.MONOTONY if window.is_monotonous else None

    def _is_sure(self, sequence: Sequence, course: Course, generated: int) -> bool:
        probe = self.policy.probe
        if probe is None or course.probe_failed or generated % probe.every_tokens:
            return False
        try:
            share = probe.ask(sequence)
            if not 0 <= share <= 1:
                raise ValueError(f"{share} is no share of 1")
        except Exception as error:  # anybody's code: the sequence goes on without it
            course.probe_failed = True
            course.problem = f"probe: {error!r}"
            self._count(probe_failures=1)
            return False
        return share >= probe.sure

    # ------------------------------------------------------------------ landing

    def _may_land(self, sequence: Sequence, course: Course) -> bool:
        """Whether a step has just ended, or there is no more looking for one."""
        landing, tokens, steps = self.policy.landing, len(sequence.tokens), sequence.thoughts.steps
        return (
            (bool(steps) and steps[-1].end == tokens)
            or tokens - course.begun_at >= landing.boundary_tokens
            or sequence.end_tokens - tokens <= landing.least_tokens
        )

    def _land(self, sequence: Sequence, course: Course) -> None:
        control = self._control(sequence, course)
        course.landed_at = len(sequence.tokens)
        end = course.landed_at + len(control) + self.policy.landing.answer_tokens
        sequence.end_tokens = min(sequence.end_tokens, end)
        course.forced = control
        if control:
            self._count(landings=1, forced_tokens=len(control))
        policy = self._folder.policy
        if policy is None or policy.trigger is None:
            # Computed at once, like a prompt. One by one, where a token may ask for a step: what
            # comes before it must be computed before the step is there.
            sequence.tokens += control
            course.forced = []
            self._folder.accept(sequence)

    def _control(self, sequence: Sequence, course: Course) -> list[int]:
        """The control tokens; none if there are none to be had, and then that is counted."""
        control = self.policy.landing.control
        try:
            tokens = control if isinstance(control, tuple) else tuple(map(int, control(sequence)))
            self._check(tokens, sequence.stop_token)
            room = sequence.end_tokens - len(sequence.tokens) - 1
            if len(tokens) > min(room, self.policy.landing.control_tokens):
                raise BadControl(
                    f"{len(tokens)} tokens; {self.policy.landing.control_tokens} were announced,"
                    f" and the request has room for {room}"
                )
        except Exception as error:  # anybody's code: the sequence ends without it
            course.problem = f"control: {error!r}"
            self._count(control_failures=1)
            return []
        return list(tokens)

    def _check(self, control: tuple[int, ...], stop_token: int | None) -> None:
        """Errors: BadControl for what no sequence can go on with."""
        if not control:
            raise BadControl("the control sequence is empty: nothing would end the thought")
        if not all(0 <= token < self._vocab for token in control):
            raise BadControl(
                f"control sequence {list(control)} has tokens that the model has not (0 to"
                f" {self._vocab - 1}); take the ids from the model's own tokenizer"
            )
        if stop_token in control:
            raise BadControl(
                f"control sequence {list(control)} has the stop token {stop_token}: the sequence"
                " would end without an answer; leave it out"
            )

    def _count(self, **more: int) -> None:
        self.figures = plus(self.figures, more)
