"""How the reasoning task's solutions are brought to land: their own question is asked early.

A solution then ends as every solution does: the value that the next step would begin with, "there
is no such step", the question. The model answers from what it has got so far. To a question about
a step's note that is the answer as soon as the step is done; the last conclusion so far answers a
shorter problem.
"""

from typing import Final

from kvtier_worker.cot.vocabulary import ASKED_STEP, DELIMITER, IDS, INPUTS, NAMES, Kind
from kvtier_worker.governor import GovernPolicy, Landing, Probe
from kvtier_worker.loops import LoopRules
from kvtier_worker.sequence import Sequence

ANSWER_TOKENS: Final = 2
"""A digit, and the end."""


class AskNow:
    """The control sequence: ends the solution behind the newest step that is done."""

    longest_tokens = 3

    def __call__(self, sequence: Sequence) -> list[int]:
        """The opening of the answer, the stop and the question; KeyError before the first step."""
        names = (NAMES[token] for token in reversed(sequence.tokens))
        done, digit = next(name[1:] for name in names if name[0] is Kind.CONCLUSION)
        opening, stop = (Kind.VALUE, done + 1, digit), (Kind.STOP, done + 1)
        return [IDS[opening], IDS[stop], question_of(sequence)]


def question_of(sequence: Sequence) -> int:
    """The token by which the statement of a sequence's problem says what is asked."""
    return sequence.tokens[sequence.prompt_tokens - INPUTS - 2]


def has_asked_step(sequence: Sequence) -> float:
    """The value probe: 1 where a step has just ended and the one that is asked about is done."""
    asked = ASKED_STEP.get(question_of(sequence))
    if asked is None or sequence.tokens[-1] != DELIMITER:
        return 0.0
    kind, *numbers = NAMES[sequence.tokens[-2]]
    return float(kind is Kind.CONCLUSION and numbers[0] >= asked)


def by_question(step_tokens: int, *, early: bool = True) -> GovernPolicy:
    """Govern solutions whose steps have so many tokens.

    With `early` a question about a note is asked as soon as the model can know the answer.
    """
    return GovernPolicy(
        landing=Landing(AskNow(), ANSWER_TOKENS, boundary_tokens=step_tokens),
        loops=LoopRules(),
        probe=Probe(has_asked_step, sure=1.0, every_tokens=1) if early else None,
    )
