"""Judges solutions of the reasoning task by what is written: the statement, and step by step.

A step is right if each of its rows follows from the one before, and the first from what the
statement gives and earlier steps, right ones, have concluded. Nothing is read but tokens; in this
task that is enough to be sure.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from kvtier_worker.cot.vocabulary import (
    DELIMITER,
    MODULUS,
    NAMES,
    NOTE_ROW,
    PAD,
    STOP_TOKEN,
    Kind,
    Name,
)


@dataclass(slots=True)
class _Statement:
    """What a prompt says; what right steps conclude and note is added to what it gives."""

    rows: int = 0
    plan: list[tuple[int, int]] = field(default_factory=list)
    stop: Name | None = None
    question: Name | None = None
    known: dict[int, int] = field(default_factory=dict)
    notes: dict[int, int] = field(default_factory=dict)


def share_of_right_steps(prompt: Seq[int], generated: Seq[int]) -> float:
    """The share of steps that are right, of those begun; the answer counts as a step.

    Of a solution that has ended it is the share of all steps that there should be; 0 when nothing
    is written. Satisfies `Verifier`. Errors: ValueError when the prompt states no problem.
    """
    statement = _read(prompt)
    written = _cut(generated)
    steps = len(statement.plan)
    right = sum(
        _is_right(statement, k, operand, step)
        for (k, operand), step in zip(statement.plan, written, strict=False)
    )
    if len(written) > steps:
        right += _answers(statement, written[steps])
    due = len(written)
    if generated and generated[-1] == STOP_TOKEN:
        due = max(due, steps + 1)
    return right / due if due else 0.0


def answer_of(prompt: Seq[int], generated: Seq[int]) -> int | None:
    """The digit that a solution ends with; None if it has no end. Satisfies `AnswerOf`."""
    match [_name(token) for token in generated[-2:]]:
        case [(Kind.DIGIT, digit), (Kind.END,)]:
            return digit
        case _:
            return None


def _read(prompt: Seq[int]) -> _Statement:
    statement = _Statement()
    for name in map(_name, prompt):
        match name:
            case (Kind.ROWS, rows):
                statement.rows = rows
            case (Kind.DO, k, operand):
                statement.plan.append((k, operand))
            case (Kind.STOP, _):
                statement.stop = name
            case (Kind.LAST,) | (Kind.NOTE_OF, _):
                statement.question = name
            case (Kind.CONCLUSION, index, digit):
                statement.known[index] = digit
    if not (statement.plan and statement.rows and statement.stop and statement.question):
        raise ValueError("the prompt states no problem of the reasoning task")
    return statement


def _cut(generated: Seq[int]) -> list[list[Name]]:
    """What is written, cut behind each delimiter; the last piece may be unfinished."""
    steps: list[list[Name]] = [[]]
    for token in generated:
        steps[-1].append(_name(token))
        if token == DELIMITER:
            steps.append([])
    return steps if steps[-1] else steps[:-1]


def _is_right(statement: _Statement, k: int, operand: int, step: list[Name]) -> bool:
    """Whether step `k` says what follows; if so, its conclusion and its note are known."""
    known = statement.known
    if operand not in known or k - 1 not in known:
        return False
    addend, value, note = known[operand], known[k - 1], 0
    due: list[Name] = [(Kind.VALUE, k, value), (Kind.USE, operand)]
    for left in range(statement.rows, 0, -1):
        due.append((Kind.ADD, left, addend))
        addend, value = value, (addend + value) % MODULUS
        if left == NOTE_ROW:
            note = value
        due.append((Kind.NOTED if left == NOTE_ROW else Kind.VALUE, k, value))
    due += [(Kind.EQUALS,), (Kind.CONCLUSION, k, value), (Kind.END_OF_STEP,)]
    if step != due:
        return False
    known[k], statement.notes[k] = value, note
    return True


def _answers(statement: _Statement, ending: list[Name]) -> bool:
    """Whether what comes after the last step is right."""
    stop, question = statement.stop, statement.question
    assert stop is not None and question is not None
    last = statement.plan[-1][0]
    asked = statement.notes.get(question[1]) if len(question) > 1 else statement.known.get(last)
    if asked is None or last not in statement.known:
        return False
    opening = (Kind.VALUE, last + 1, statement.known[last])
    return ending == [opening, stop, question, (Kind.DIGIT, asked), (Kind.END,)]


def _name(token: int) -> Name:
    """A token's kind and numbers; ids beyond the vocabulary's words stand for nothing."""
    return NAMES[token if token < len(NAMES) else PAD]
