"""What a sequence's thought is cut into: its finished steps, which of them are folded, and when.

Tokens are counted from the prompt's first on and never change; entries are what of their KV is in
the pool. A folded step has `kept` entries in place of its tokens'. Every change of a step's form
is noted with the token before which it happened: KV that is lost can be computed again only if the
changes happen again at the same tokens.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from torch import Tensor


class Form(Enum):
    """What of a step is in the pool: all of it as computed, its summary, or all of it again."""

    WHOLE = "whole"
    FOLDED = "folded"
    UNFOLDED = "unfolded"


REPEATED: Final = "repeated"
"""The cause of an unfold that nobody asks for anew: it has been before."""

_WHOLE: Final = Form.WHOLE
_FOLDED: Final = Form.FOLDED


@dataclass(frozen=True, slots=True)
class Archived:
    """Where the daemon has a step's full KV: pages of the branch's archive, and their hashes."""

    first_page: int
    hashes: tuple[int, ...]

    @property
    def pages(self) -> tuple[int, int]:
        """The range of pages, end excluded."""
        return (self.first_page, self.first_page + len(self.hashes))


@dataclass(slots=True)
class Step:
    """One finished span of thought: the tokens `first..end`.

    `kept` entries are its summary once it was folded, with `bias` [layers, kept, kv_heads] if the
    operator gives one. `wanted` asks for an unfold before the next token, and `cause` says why;
    `away` says that it was unfolded when its sequence had to leave the pool, so that the unfold is
    no change. What is `pinned` stays unfolded at boundaries. Attention unfolds it only when
    `rests_until` tokens are computed, and has not been on it for `idle_tokens` tokens.
    """

    number: int
    first: int
    end: int
    form: Form = Form.WHOLE
    kept: int = 0
    bias: Tensor | None = None
    archived: Archived | None = None
    wanted: bool = False
    cause: str = REPEATED
    away: bool = False
    pinned: bool = False
    rests_until: int = 0
    idle_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Its length."""
        return self.end - self.first

    @property
    def unfolded(self) -> bool:
        """Whether all of it is there again, or will be when its sequence is back in the pool."""
        return self.form is Form.UNFOLDED or self.away

    @property
    def saved_entries(self) -> int:
        """How many entries fewer than tokens it has now."""
        return self.tokens - self.kept if self.form is Form.FOLDED else 0


@dataclass(frozen=True, slots=True)
class Event:
    """A step took another form when `at` tokens were computed."""

    at: int
    step: int
    form: Form


@dataclass(slots=True)
class Thoughts:
    """The steps of one sequence, and the history of their forms.

    The first `decided` steps have been folded or been left whole on purpose; `replay` are events
    of the past that are still to happen again.
    """

    steps: list[Step] = field(default_factory=list)
    decided: int = 0
    events: list[Event] = field(default_factory=list)
    replay: deque[Event] = field(default_factory=deque)

    def folded_away(self) -> int:
        """How many entries fewer than tokens there are."""
        return sum(step.saved_entries for step in self.steps)

    @property
    def biased(self) -> bool:
        """Whether a summary in the pool has logit biases."""
        return any(step.bias is not None and step.form is Form.FOLDED for step in self.steps)

    def unfolded_entries(self) -> int:
        """How many entries more there are than if all that is unfolded were folded again."""
        steps = [step for step in self.steps if step.form is Form.UNFOLDED]
        return sum(step.tokens - step.kept for step in steps)

    def first_entry(self, step: Step) -> int:
        """The index of the step's first entry."""
        earlier = self.steps[: step.number]
        return step.first - sum([e.end - e.first - e.kept for e in earlier if e.form is _FOLDED])

    def first_packed_entry(self, step: Step) -> int:
        """The same if all that is unfolded were folded again."""
        earlier = self.steps[: step.number]
        return step.first - sum([e.end - e.first - e.kept for e in earlier if e.form is not _WHOLE])

    def coming_form(self, step: Step) -> Form:
        """The form that a step has when all that is to happen again has happened."""
        now = Form.UNFOLDED if step.unfolded else step.form
        return next((e.form for e in reversed(self.replay) if e.step == step.number), now)

    def add(self, first: int, end: int) -> None:
        """A step has ended; whether it is folded is decided when its last token is computed."""
        self.steps.append(Step(len(self.steps), first, end))

    def change(self, step: Step, form: Form, computed_tokens: int) -> None:
        """Note that a step has another form now."""
        step.form = form
        event = Event(computed_tokens, step.number, form)
        if self.replay and self.replay[0] == event:
            self.replay.popleft()
        self.events.append(event)

    def stop(self, computed_tokens: int) -> int | None:
        """Up to which token may be computed before something must happen to a step."""
        stops = [event.at for event in list(self.replay)[:1]]
        stops += [step.end for step in self.steps[self.decided : self.decided + 1]]
        return min((at for at in stops if at > computed_tokens), default=None)

    def peak_entries(self, tokens: int) -> int:
        """The most entries there will be on the way to so many tokens, unfolds included."""
        away = self.folded_away()
        peak = 0
        for event in self.replay:
            step = self.steps[event.step]
            peak = max(peak, event.at - away)
            gain = step.tokens - step.kept
            away += gain if event.form is Form.FOLDED else -gain
        back = sum(step.tokens for step in self.steps if step.wanted)
        return max(peak, tokens - away + back)

    def lose(self, entries: int, computed_tokens: int) -> int:
        """Only the first entries are still there; returns how many leading tokens they stand for.

        From a sequence with folds only what lies before the first one is used: the rest is computed
        again, and folded again on the way. What was wanted when `computed_tokens` were computed,
        and had not been done yet, will happen at that token too.
        """
        folded = [step.first for step in self.steps if step.form is not Form.WHOLE]
        tokens = min([entries, *folded])
        wanted = [
            Event(computed_tokens, step.number, Form.UNFOLDED)
            for step in self.steps
            if step.wanted and not step.away
        ]
        for step in self.steps:
            step.form, step.wanted, step.away = Form.WHOLE, False, False
        self.replay = deque(sorted([*self.events, *self.replay, *wanted], key=lambda e: e.at))
        self.events = []
        return tokens

    def take_back(self, number: int, reached_tokens: int) -> None:
        """A step shall not be unfolded again where no token has been computed since."""
        self.replay = deque(
            event
            for event in self.replay
            if (event.step, event.form) != (number, Form.UNFOLDED) or event.at < reached_tokens
        )

    def fork(self) -> "Thoughts":
        """The same thoughts for another branch, which go their own way from here on."""
        return Thoughts(
            steps=[copy_step(step) for step in self.steps],
            decided=self.decided,
            events=list(self.events),
            replay=deque(self.replay),
        )


def copy_step(step: Step) -> Step:
    """A step of another branch; biases are never changed and shared."""
    return Step(**{name: getattr(step, name) for name in Step.__dataclass_fields__})
