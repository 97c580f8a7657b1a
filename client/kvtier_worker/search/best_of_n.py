"""Best of N: as many branches from one prefill, each to its end; the verifier's favourite wins."""

from dataclasses import dataclass

from kvtier_worker.engine import Engine
from kvtier_worker.search.outcome import Outcome
from kvtier_worker.search.question import Question, Verifier, check_count
from kvtier_worker.search.tree import SearchTree


@dataclass(frozen=True, slots=True)
class BestOfN:
    """Satisfies `Strategy`. Errors: BadSearch."""

    verifier: Verifier
    n: int = 8

    def __post_init__(self) -> None:
        check_count("n", self.n)

    def search(self, engine: Engine, question: Question) -> Outcome:
        """See `Strategy`; the first made wins among equals."""
        with SearchTree(engine, question) as tree:
            branches = tree.spread(self.n)
            for branch in branches:
                tree.score(branch, self.verifier)
            return tree.outcome()
