"""Beam search over steps: after every step the best few branches stay, the others are pruned."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvtier_worker.engine import Engine
from kvtier_worker.search.outcome import Outcome
from kvtier_worker.search.question import Question, Verifier, check_count
from kvtier_worker.search.tree import Branch, SearchTree
from kvtier_worker.steps import StepRules


@dataclass(frozen=True, slots=True)
class Beam:
    """Satisfies `Strategy`. Each of `width` branches goes on in `expand` ways in every round.

    Errors: BadSearch.
    """

    verifier: Verifier
    rules: StepRules
    width: int = 4
    expand: int = 4

    def __post_init__(self) -> None:
        check_count("width", self.width)
        check_count("expand", self.expand)
        check_count("width × expand", self.width * self.expand)

    def search(self, engine: Engine, question: Question) -> Outcome:
        """See `Strategy`. What has ended stays in the beam as long as it is among the best."""
        with SearchTree(engine, question, self.rules) as tree:
            beam = self._round(tree, [tree.plant()], self.width * self.expand)
            while not all(branch.ended for branch in beam):
                beam = self._round(tree, beam, self.expand)
            return tree.outcome()

    def _round(self, tree: SearchTree, beam: Seq[Branch], expand: int) -> list[Branch]:
        """Let each branch go on in so many ways by a step; returns the best of what comes out."""
        found = [branch for branch in beam if branch.ended]
        fresh: list[Branch] = []
        for branch in beam:
            if not branch.ended:
                fresh += [tree.fork(branch) for _ in range(expand)]
                tree.prune(branch)
        tree.grow(fresh)
        for branch in fresh:
            if tree.score(branch, self.verifier) is None:
                tree.prune(branch)
            else:
                found.append(branch)
        found.sort(key=lambda branch: -(branch.score or 0.0))
        for branch in found[self.width :]:
            tree.prune(branch)
        return found[: self.width]
