"""What the tests of searches have in common: a question, judges of random tokens, and the books."""

from collections.abc import Callable, Sequence
from functools import cache

from kvtier_worker.engine import Engine
from kvtier_worker.search import Beam, BestOfN, MajorityVote, Mcts, Outcome, Question, Strategy
from kvtier_worker.search.question import Verifier
from kvtier_worker.steps import StepRules
from tests.worker.naive import DELIMITERS
from tests.worker.tiny import random_prompts, tiny_engine, tiny_model

MODEL = tiny_model()
RULES = StepRules(delimiters=tuple((token,) for token in sorted(DELIMITERS)))
PROMPT = tuple(random_prompts(3)[2])
NEW_TOKENS = 24
QUESTION = Question(PROMPT, NEW_TOKENS, temperature=12.0, seed=5)
LONG = Question(PROMPT, 45, temperature=12.0, seed=5)


def evenness(prompt: Sequence[int], generated: Sequence[int]) -> float:
    """The share of even tokens."""
    assert tuple(prompt) == PROMPT
    return sum(token % 2 == 0 for token in generated) / len(generated)


def remainder(prompt: Sequence[int], generated: Sequence[int]) -> int:
    """An answer of three."""
    return generated[-1] % 3


class Failing:
    """A verifier that raises whenever it should."""

    def __init__(self, fails: Callable[[int], bool], error: BaseException | None = None) -> None:
        self.calls = 0
        self._fails = fails
        self._error = error or RuntimeError("no verdict")

    def __call__(self, prompt: Sequence[int], generated: Sequence[int]) -> float:
        self.calls += 1
        if self._fails(self.calls):
            raise self._error
        return evenness(prompt, generated)


def strategies(verifier: Verifier = evenness) -> dict[str, Strategy]:
    """One of each, small; the vote asks the verifier for its answers."""
    return {
        "best-of-n": BestOfN(verifier, n=4),
        "vote": MajorityVote(verifier, n=4),
        "beam": Beam(verifier, RULES, width=2, expand=2),
        "mcts": Mcts(verifier, RULES, width=2, visits=4, rollouts=2),
    }


NAMES = list(strategies())


@cache
def undisturbed(name: str) -> Outcome:
    """What a strategy finds with all the room that it wants."""
    return strategies()[name].search(tiny_engine(MODEL, 200), QUESTION)


def depth(outcome: Outcome, number: int) -> int:
    """How many forks lie between the first branch and this one."""
    parent = outcome.branches[number].parent
    return 0 if parent is None else 1 + depth(outcome, parent)


def nothing_left(engine: Engine) -> bool:
    """Whether all pages are free and nobody runs or waits."""
    scheduler = engine.scheduler
    return (
        engine.pool.free_pages == engine.pool.pages
        and not scheduler.running
        and not scheduler.waiting
    )
