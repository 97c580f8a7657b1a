"""Answers problems through the worker's engine, greedily, with full KV or with folded steps.

The pool holds all problems that are answered at a time, so nobody waits and nobody is preempted.
"""

from collections.abc import Sequence as Seq
from enum import IntEnum
from typing import Final

import msgspec

import kvtier_client as kv
from kvtier_worker.cot.policy import asked_step, by_attention, by_token
from kvtier_worker.cot.task import Problem
from kvtier_worker.cot.vocabulary import ASKED_STEP, STOP_TOKEN
from kvtier_worker.engine import Engine, block_shape
from kvtier_worker.folding import FoldPolicy, UnfoldNote
from kvtier_worker.model import Llama
from kvtier_worker.pool import PagedPool
from kvtier_worker.sampler import Sampling
from kvtier_worker.scheduler import Limits
from kvtier_worker.sequence import Sequence
from kvtier_worker.store import RecomputeStore
from kvtier_worker.swap import DaemonStore

BLOCK_TOKENS: Final = 16
DAEMON_WAIT_S: Final = 60.0
BRANCHES: Final = 2
"""Of each problem, at most: the thought that unfolds, and the same thought without."""


class Outcome(IntEnum):
    """How far the model got a problem right."""

    WRONG = 0
    ANSWER = 1
    EVERY_TOKEN = 2


class Full(msgspec.Struct, frozen=True):
    """Outcomes with full KV, a digit for each problem; `asks` has a 1 for those that ask about a
    step's inside."""

    asks: str
    outcomes: str


class Folded(msgspec.Struct, frozen=True):
    """Outcomes with folded steps, a digit for each problem: with unfolds, and without any."""

    unfolding: str
    without: str


class Attended(msgspec.Struct, frozen=True):
    """Outcomes with folded steps and the attention's trigger, as those of `Full`, and what it did:
    of its `unfolds` so many were `right`, of a step that the model was asking about; it `recalled`
    so many of such steps."""

    asks: str
    outcomes: str
    unfolds: int
    right: int
    recalled: int


class Answerer:
    """Answers problems with one model; the full KV of folded steps goes to a daemon."""

    def __init__(self, model: Llama, client: kv.Client) -> None:
        self._model = model
        self._client = client
        self._shape = block_shape(model, BLOCK_TOKENS)

    def full(self, problems: Seq[Problem]) -> Full:
        """Answer with full KV."""
        engine, sequences = self._begin(problems, None)
        engine.run()
        return Full(_asks(problems), _outcomes(problems, sequences))

    def folded(self, problems: Seq[Problem]) -> Folded:
        """Answer with folded steps, with and without unfolding the step that is asked about.

        Up to the token that asks, both thoughts are one. There it is forked, and the fork goes on
        without: a sequence's tokens do not depend on what runs beside it.
        """
        engine, sequences = self._begin(problems, by_token(_step_tokens(problems)))
        without = dict(zip((s.id for s in sequences), sequences, strict=True))

        def fork_where_asked(engine: Engine) -> None:
            for sequence in sequences:
                number = asked_step(sequence.tokens[-1], sequence.thoughts.steps)
                if number is None or sequence.ended or without[sequence.id] is not sequence:
                    continue
                without[sequence.id] = fork = engine.fork(sequence)
                engine.refold(fork, number)

        engine.run(fork_where_asked)
        return Folded(
            _outcomes(problems, sequences), _outcomes(problems, [without[s.id] for s in sequences])
        )

    def attended(self, problems: Seq[Problem]) -> Attended:
        """Answer with folded steps, unfolding what gets attention."""
        engine, sequences = self._begin(problems, by_attention(_step_tokens(problems)))
        engine.run()
        notes: dict[int, list[UnfoldNote]] = {sequence.id: [] for sequence in sequences}
        for note in engine.folder.notes:
            notes[note.sequence].append(note)
        right = [
            sum(_is_right(note, problem, sequence) for note in notes[sequence.id])
            for problem, sequence in zip(problems, sequences, strict=True)
        ]
        return Attended(
            asks=_asks(problems),
            outcomes=_outcomes(problems, sequences),
            unfolds=len(engine.folder.notes),
            right=sum(right),
            recalled=sum(count > 0 for count in right),
        )

    def _begin(
        self, problems: Seq[Problem], folding: FoldPolicy | None
    ) -> tuple[Engine, list[Sequence]]:
        """An engine with room for all, and the problems as its sequences."""
        rows = BRANCHES * len(problems)
        pages = 1 + sum(self._shape.blocks(problem.size.tokens) + BRANCHES for problem in problems)
        pool = PagedPool(self._shape, pages * self._shape.block_bytes, self._model.device)
        keeper = None if folding is None else self._client
        engine = open_engine(self._model, pool, keeper, Limits(rows, rows), folding)
        return engine, [submit(engine, problem) for problem in problems]


def open_engine(
    model: Llama,
    pool: PagedPool,
    client: kv.Client | None,
    limits: Limits,
    folding: FoldPolicy | None,
) -> Engine:
    """An engine that swaps to the client's daemon, or computes again without a client."""
    store = (
        RecomputeStore()
        if client is None
        else DaemonStore(client, pool, model.config.name, DAEMON_WAIT_S)
    )
    return Engine(model, pool, store, limits, folding)


def submit(engine: Engine, problem: Problem) -> Sequence:
    """Queue a problem's statement, for as many tokens as its solution has."""
    return engine.submit(problem.prompt, len(problem.solution), Sampling(), stop_token=STOP_TOKEN)


def outcome(problem: Problem, generated: Seq[int]) -> Outcome:
    """How far generated tokens are right."""
    if tuple(generated) == problem.solution:
        return Outcome.EVERY_TOKEN
    return Outcome.ANSWER if problem.is_right(generated) else Outcome.WRONG


def _asks(problems: Seq[Problem]) -> str:
    return "".join(str(int(problem.asked is not None)) for problem in problems)


def _outcomes(problems: Seq[Problem], sequences: Seq[Sequence]) -> str:
    return "".join(
        str(int(outcome(problem, sequence.generated)))
        for problem, sequence in zip(problems, sequences, strict=True)
    )


def _step_tokens(problems: Seq[Problem]) -> int:
    return max(problem.size.step_tokens for problem in problems)


def _is_right(note: UnfoldNote, problem: Problem, sequence: Sequence) -> bool:
    """Whether an unfold brought back the step that is asked about, once the model was asking."""
    asking = [token in ASKED_STEP for token in sequence.generated]
    asked_at = sequence.prompt_tokens + asking.index(True) if any(asking) else len(sequence.tokens)
    return note.step == problem.asked and note.at >= asked_at and note.restored
