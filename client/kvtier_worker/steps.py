"""Where a thought's steps end: by tokens, by a pattern in the text, and by length.

Only accepted tokens are scanned, one by one, so that a boundary depends on what stands before it
alone. A pattern is searched in a bounded piece of text and for a bounded time: one that backtracks
without end is given up for its sequence, and steps end by the other rules.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

import regex

from kvtier_worker.errors import BadStepRules

WINDOW_TOKENS: Final = 48
"""How many tokens back text is decoded for the pattern and the fence."""

PROBE_TIMEOUT_S: Final = 0.05
PROBE_TIMEOUTS_MAX: Final = 3
"""After so many searches that ran out of time a sequence goes on without the pattern."""

Decode = Callable[[list[int]], str]
TokenRun = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepRules:
    """What ends a step, for one model.

    A step ends with any of `delimiters` (runs of token ids), or where `pattern` (a regular
    expression on the decoded text) matches and the match ends with the newest token. Steps of more
    than `long_tokens` end with the next of `soft_delimiters` too, never in between. A boundary that
    would leave a step of less than `least_tokens` is none. Between two `fence` texts, as around
    code, nothing ends a step. `decode` makes text of tokens; pattern and fence need it.
    """

    delimiters: tuple[TokenRun, ...] = ()
    soft_delimiters: tuple[TokenRun, ...] = ()
    pattern: str | None = None
    fence: str | None = None
    long_tokens: int | None = None
    least_tokens: int = 1
    decode: Decode | None = None

    def check(self, vocab: int) -> None:
        """Errors: BadStepRules for what could never end a step."""
        for run in (*self.delimiters, *self.soft_delimiters):
            if not run or not all(0 <= token < vocab for token in run):
                raise BadStepRules(
                    f"delimiter {list(run)} is not a run of tokens that the model has (0 to"
                    f" {vocab - 1}); take the ids from the model's own tokenizer"
                )
        if (self.pattern or self.fence) and self.decode is None:
            raise BadStepRules(
                "a pattern or fence is given, and no `decode` to make text of tokens"
            )
        if self.pattern is not None:
            _compiled(self.pattern)
        if not self.delimiters and self.pattern is None and not self.soft_delimiters:
            raise BadStepRules("no delimiter and no pattern is given: no step would ever end")
        if self.soft_delimiters and self.long_tokens is None:
            raise BadStepRules("soft delimiters end long steps only: give `long_tokens`, too")


class StepScanner:
    """Reads one sequence's accepted tokens and says where its steps end."""

    def __init__(self, rules: StepRules, first: int) -> None:
        """`first` is the number of the first token that belongs to a step."""
        self._rules = rules
        self._first = first
        self._at = 0
        self._longest = max(map(len, (*rules.delimiters, *rules.soft_delimiters)), default=1)
        self._recent: deque[int] = deque(maxlen=max(self._longest, WINDOW_TOKENS))
        self._run = 0  # tokens since the last boundary that a delimiter may consist of
        self._pattern = None if rules.pattern is None else _compiled(rules.pattern)
        self._fenced = False
        self._read = 0  # characters of the text that older tokens have settled
        self.probe_timeouts = 0

    @property
    def scanned_tokens(self) -> int:
        """How many tokens it has read."""
        return self._at

    def fork(self) -> "StepScanner":
        """A scanner that has read the same, for another branch."""
        other = copy(self)
        other._recent = self._recent.copy()
        return other

    def feed(self, tokens: Seq[int]) -> list[tuple[int, int]]:
        """The steps that end within the next tokens: the first token of each, and its end."""
        steps = []
        for token in tokens:
            self._at += 1
            self._recent.append(token)
            if self._at <= self._first:
                continue
            self._run += 1
            text = self._read_text()
            if self._fenced or not self._ends(text):
                continue
            self._run = 0
            if self._at - self._first >= self._rules.least_tokens:
                steps.append((self._first, self._at))
                self._first = self._at
        return steps

    def _ends(self, text: str) -> bool:
        rules = self._rules
        if self._ends_with(rules.delimiters):
            return True
        too_long = rules.long_tokens is not None and self._at - self._first >= rules.long_tokens
        if too_long and self._ends_with(rules.soft_delimiters):
            return True
        return self._pattern is not None and self._matches(text)

    def _ends_with(self, runs: tuple[TokenRun, ...]) -> bool:
        recent = tuple(self._recent)[-min(self._run, self._longest) :]
        return any(len(run) <= len(recent) and recent[-len(run) :] == run for run in runs)

    def _read_text(self) -> str:
        """What the newest tokens read, as far as they belong to the open step's end."""
        rules = self._rules
        if rules.decode is None or (self._pattern is None and rules.fence is None):
            return ""
        window = list(self._recent)[-min(self._run, WINDOW_TOKENS) :]
        text = rules.decode(window)
        before = rules.decode(window[:-1])
        if rules.fence is not None and text.count(rules.fence) > before.count(rules.fence):
            self._fenced = not self._fenced
        self._read = _common_length(before, text)
        return text

    def _matches(self, text: str) -> bool:
        """Whether a match ends in what the newest token added."""
        assert self._pattern is not None
        try:
            found = self._pattern.finditer(text, timeout=PROBE_TIMEOUT_S)
            return any(match.end() > self._read for match in found)
        except TimeoutError:
            self.probe_timeouts += 1
            if self.probe_timeouts >= PROBE_TIMEOUTS_MAX:
                self._pattern = None
            return False


def _common_length(one: str, other: str) -> int:
    """How many leading characters two texts have in common; a torn character is no character."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _compiled(pattern: str) -> "regex.Pattern[str]":
    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise BadStepRules(f"pattern {pattern!r} is no regular expression: {error}") from error
