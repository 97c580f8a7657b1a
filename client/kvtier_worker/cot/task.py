"""The reasoning task: problems whose long solutions come in steps that can be folded.

A problem gives x1 .. x4 and says for each step k which earlier x_j it starts from. Step k goes on
with the sequence x_j, x_(k-1) as Fibonacci's does, each term the sum of the two before it (mod 10),
for a given number of rows; the last term is its conclusion x_k. So every step needs two earlier
conclusions, its own rows need the step alone, and after its end nothing of it is needed but the
conclusion, with one exception: a question about the step's *note*, the term NOTE_ROW rows from its
end, can be answered only by who sees the step. (Among the sequences with a given conclusion each
digit is equally often the note: the conclusion says nothing about it. Who does not see the step
would have to do all its rows once more.)

  problem  <problem> rows12 do5<-x2 do6<-x5 ... stop7 note6? x1:7 x2:0 x3:9 x4:1 <end-of-step>
  step 5   5|1 use2 12+0 5|1 11+1 5|2 ... 1+4 5|3 = x5:3 <end-of-step>
  answer   7|8 stop7 note6? 3 <end>

A step's last four tokens hold no more than its conclusion: what is kept of it can be four entries.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvtier_worker.cot.vocabulary import (
    DELIMITER,
    FIRST,
    IDS,
    INPUTS,
    LAST,
    MODULUS,
    NOTE_ROW,
    ROWS_MAX,
    STEPS_MAX,
    STOP_TOKEN,
    Kind,
    text_of,
)

NOTE_SHARE: Final = 0.3
"""The share of problems that ask for a note."""
ROW_TOKENS: Final = 2
OPENING_TOKENS: Final = 2
"""A step's first tokens: the value that it starts from, and its operand."""
CLOSING_TOKENS: Final = 3
"""A step's last tokens: equals, conclusion, delimiter."""
ENDING_TOKENS: Final = 5
"""The tokens after the last step."""


@dataclass(frozen=True, slots=True)
class Size:
    """How long a problem is: `steps` steps of `rows` rows."""

    steps: int
    rows: int

    def __post_init__(self) -> None:
        if not (1 <= self.steps <= STEPS_MAX and NOTE_ROW <= self.rows <= ROWS_MAX):
            raise ValueError(
                f"a problem of {self.steps} steps of {self.rows} rows: steps are 1..{STEPS_MAX},"
                f" rows {NOTE_ROW}..{ROWS_MAX}"
            )

    @property
    def step_tokens(self) -> int:
        """Tokens of one step, its delimiter included."""
        return OPENING_TOKENS + ROW_TOKENS * self.rows + CLOSING_TOKENS

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the problem's statement."""
        return self.steps + INPUTS + 5

    @property
    def tokens(self) -> int:
        """Tokens of statement and solution."""
        return self.prompt_tokens + self.steps * self.step_tokens + ENDING_TOKENS


SESSION_1K: Final = Size(steps=16, rows=28)
"""A session of about a thousand tokens."""
SESSION_4K: Final = Size(steps=32, rows=60)
"""A session of about four thousand tokens."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem with its solution. Steps are counted from 0; their numbers from `first`.

    `prompt` and `solution` are tokens; `notes` and `conclusions` have a digit for each step;
    `asked` is the step whose note is asked for, None when it is the last conclusion.
    """

    size: Size
    first: int
    prompt: tuple[int, ...]
    solution: tuple[int, ...]
    notes: tuple[int, ...]
    conclusions: tuple[int, ...]
    asked: int | None

    @property
    def answer(self) -> int:
        """The right answer, a digit."""
        return self.conclusions[-1] if self.asked is None else self.notes[self.asked]

    def is_right(self, generated: Seq[int]) -> bool:
        """Whether generated tokens end with the right answer."""
        return tuple(generated[-2:]) == (_token(Kind.DIGIT, self.answer), STOP_TOKEN)

    def text(self) -> str:
        """Statement and solution as text."""
        return " ".join(map(text_of, self.prompt + self.solution))


def sample_problem(
    random: np.random.Generator, size: Size, note_share: float = NOTE_SHARE, first: int = FIRST
) -> Problem:
    """Draw a problem. With a higher `first` (training) its step numbers are higher."""
    last = first + size.steps - 1
    if not FIRST <= first <= last <= LAST:
        raise ValueError(f"steps {first}..{last} are not within {FIRST}..{LAST}")
    given = [*sorted(random.choice(np.arange(1, first - 1), INPUTS - 1, replace=False)), first - 1]
    known = {int(i): int(random.integers(MODULUS)) for i in given}
    inputs = [_token(Kind.CONCLUSION, i, digit) for i, digit in known.items()]
    plan, solution, notes = [], [], []
    for k in range(first, last + 1):
        operand = list(known)[int(random.integers(len(known) - 1))]
        plan.append(_token(Kind.DO, k, operand))
        tokens, note, known[k] = _step(k, operand, known[operand], known[k - 1], size.rows)
        solution += tokens
        notes.append(note)
    asked = int(random.integers(size.steps)) if random.random() < note_share else None
    question = _token(Kind.LAST) if asked is None else _token(Kind.NOTE_OF, first + asked)
    stop = _token(Kind.STOP, last + 1)
    answer = known[last] if asked is None else notes[asked]
    opening = _token(Kind.VALUE, last + 1, known[last])
    solution += [opening, stop, question, _token(Kind.DIGIT, answer), STOP_TOKEN]
    rows = _token(Kind.ROWS, size.rows)
    prompt = [_token(Kind.PROBLEM), rows, *plan, stop, question, *inputs, DELIMITER]
    conclusions = tuple(known[k] for k in range(first, last + 1))
    return Problem(size, first, tuple(prompt), tuple(solution), tuple(notes), conclusions, asked)


def _step(k: int, operand: int, addend: int, value: int, rows: int) -> tuple[list[int], int, int]:
    """Step `k`: its tokens, its note and its conclusion."""
    tokens = [_token(Kind.VALUE, k, value), _token(Kind.USE, operand)]
    note = value
    for row in range(rows, 0, -1):
        tokens.append(_token(Kind.ADD, row, addend))
        addend, value = value, (value + addend) % MODULUS
        tokens.append(_token(Kind.NOTED if row == NOTE_ROW else Kind.VALUE, k, value))
        if row == NOTE_ROW:
            note = value
    tokens += [_token(Kind.EQUALS), _token(Kind.CONCLUSION, k, value), DELIMITER]
    return tokens, note, value


def _token(kind: Kind, *numbers: int) -> int:
    return IDS[(kind, *numbers)]
