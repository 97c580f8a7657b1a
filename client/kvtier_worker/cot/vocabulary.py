"""The tokens of the reasoning task: a kind with up to two numbers each, fused into one token.

A conclusion "x7 is 3" is one token, so finding it is one look-up by its number. Kinds, as text:

  <problem> <end-of-step> <end> =    marks
  rows12                             every step of this problem has 12 rows
  do7<-x4                            step 7 starts from x4 (and from x6, the conclusion before it)
  stop9                              there is no step 9: the answer comes in its place
  last?   note7?                     what is the last conclusion? what was noted inside step 7?
  x7:3                               x7 is 3, a conclusion
  7|3     7!3                        step 7's running value is 3; the same, noted
  use4    12+3   3                   an operand's number; 12 rows are left, add 3; a plain digit
"""

from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import product
from typing import Final

import numpy as np
from numpy.typing import NDArray

MODULUS: Final = 10
INPUTS: Final = 4
STEPS_MAX: Final = 32
ROWS_MAX: Final = 64
NOTE_ROW: Final = 8
"""The row, counted from a step's end, whose value is its note; a step has at least as many."""

FIRST: Final = INPUTS + 1
"""The number of the first step; what the problem gives are x1 .. x4."""
LAST: Final = INPUTS + STEPS_MAX
ROUND_TO: Final = 16


class Kind(Enum):
    """A token's kind: how it is written, and what its numbers mean."""

    PAD = "<pad>", ()
    PROBLEM = "<problem>", ()
    END_OF_STEP = "<end-of-step>", ()
    END = "<end>", ()
    EQUALS = "=", ()
    LAST = "last?", ()
    NOTE_OF = "note{}?", ("index",)
    ROWS = "rows{}", ("rows",)
    DO = "do{}<-x{}", ("index", "operand")
    STOP = "stop{}", ("index",)
    CONCLUSION = "x{}:{}", ("index", "digit")
    VALUE = "{}|{}", ("index", "digit")
    NOTED = "{}!{}", ("index", "digit")
    USE = "use{}", ("operand",)
    ADD = "{}+{}", ("rows", "digit")
    DIGIT = "{}", ("digit",)

    def __init__(self, form: str, numbers: tuple[str, ...]) -> None:
        self.form = form
        self.numbers = numbers


Name = tuple[Kind, *tuple[int, ...]]
"""A token: its kind, and its numbers."""


def _names() -> Iterator[Name]:
    steps, digits = range(FIRST, LAST + 1), range(MODULUS)
    ranges: dict[Kind, Iterable[tuple[int, ...]]] = {
        Kind.NOTE_OF: product(steps),
        Kind.ROWS: product(range(NOTE_ROW, ROWS_MAX + 1)),
        Kind.DO: ((k, j) for k in steps for j in range(1, k - 1)),
        Kind.STOP: product(range(FIRST + 1, LAST + 2)),
        Kind.CONCLUSION: product(range(1, LAST + 1), digits),
        Kind.VALUE: product(range(FIRST, LAST + 2), digits),
        Kind.NOTED: product(steps, digits),
        Kind.USE: product(range(1, LAST - 1)),
        Kind.ADD: product(range(1, ROWS_MAX + 1), digits),
        Kind.DIGIT: product(digits),
    }
    for kind in Kind:
        for numbers in ranges.get(kind, [()]):
            yield (kind, *numbers)


NAMES: Final[tuple[Name, ...]] = tuple(_names())
"""Every token, in the order of its id."""
IDS: Final[dict[Name, int]] = {name: id for id, name in enumerate(NAMES)}
VOCABULARY: Final = -(-len(NAMES) // ROUND_TO) * ROUND_TO
"""Rows of the embedding: all tokens, rounded up."""

PAD: Final = IDS[(Kind.PAD,)]
DELIMITER: Final = IDS[(Kind.END_OF_STEP,)]
"""Ends the problem's statement and every step."""
STOP_TOKEN: Final = IDS[(Kind.END,)]
"""Ends an answer."""
ASKED_STEP: Final[dict[int, int]] = {IDS[(Kind.NOTE_OF, k)]: k for k in range(FIRST, LAST + 1)}
"""The tokens that ask for a step's note, each with the number of the step to unfold."""


def text_of(token: int) -> str:
    """A token as text; tokens are separated by spaces."""
    kind, *numbers = NAMES[token]
    return kind.form.format(*numbers)


def first_embedding(width: int, spread: float, seed: int) -> NDArray[np.float32]:
    """The embedding before training: each token is the sum of codes of its kind and numbers.

    So equal numbers look alike from the start, and a rare token is no stranger. Shapes: the
    result is [VOCABULARY, width].
    """
    random = np.random.default_rng(seed)
    codes: dict[tuple[str, int], NDArray[np.float64]] = {}

    def code(of: str, number: int) -> NDArray[np.float64]:
        if (of, number) not in codes:
            codes[of, number] = random.normal(0, spread, width)
        return codes[of, number]

    table = np.zeros((VOCABULARY, width), np.float32)
    for token, (kind, *numbers) in enumerate(NAMES):
        parts = [code(of, number) for of, number in zip(kind.numbers, numbers, strict=True)]
        table[token] = np.sum([code(kind.name, 0), *parts], axis=0)
    return table
