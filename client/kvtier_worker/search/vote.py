"""Self-consistency: as many branches from one prefill, each to its end; most have the answer."""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

from kvtier_worker.engine import Engine
from kvtier_worker.search.outcome import Outcome
from kvtier_worker.search.question import AnswerOf, Question, check_count
from kvtier_worker.search.tree import Branch, SearchTree


@dataclass(frozen=True, slots=True)
class MajorityVote:
    """Satisfies `Strategy`; a branch's score is the share of the branches that have its answer.

    Errors: BadSearch.
    """

    answer_of: AnswerOf
    n: int = 8

    def __post_init__(self) -> None:
        check_count("n", self.n)

    def search(self, engine: Engine, question: Question) -> Outcome:
        """See `Strategy`; a branch without an answer has no score, the first made wins a tie."""
        with SearchTree(engine, question) as tree:
            branches = tree.spread(self.n)
            answers = [self._answer(tree, branch) for branch in branches]
            votes = Counter(answer for answer in answers if answer is not None)
            for branch, answer in zip(branches, answers, strict=True):
                if answer is not None:
                    branch.score = votes[answer] / self.n
            return tree.outcome()

    def _answer(self, tree: SearchTree, branch: Branch) -> Hashable | None:
        prompt, generated = tree.question.prompt, tuple(branch.sequence.generated)

        def said() -> Hashable | None:
            answer = self.answer_of(prompt, generated)
            hash(answer)  # what cannot be counted fails here, as the branch's own failure
            return answer

        return tree.ask(branch, said)
