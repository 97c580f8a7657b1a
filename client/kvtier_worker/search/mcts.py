"""Monte Carlo tree search over steps: UCT says where to go on, rollouts what that is worth.

Nodes are ends of steps. Their branches are parked, so that what is not visited moves down the
daemon's tiers; a visit forks the parked branch, and the fork's KV comes back from there.
"""

from dataclasses import dataclass, field
from math import isfinite, log, sqrt

from kvtier_worker.engine import Engine
from kvtier_worker.errors import BadSearch
from kvtier_worker.search.outcome import Outcome
from kvtier_worker.search.question import Question, Verifier, check_count
from kvtier_worker.search.tree import Branch, SearchTree
from kvtier_worker.steps import StepRules


@dataclass(slots=True, eq=False)
class _Node:
    branch: Branch
    children: list["_Node"] = field(default_factory=list)
    visits: int = 0
    value: float = 0.0

    def best_child(self, exploration: float) -> "_Node":
        """UCT: the child of the highest mean value, and more the less it was visited."""

        def promise(child: _Node) -> float:
            unknown = sqrt(log(self.visits) / child.visits)
            return child.value / child.visits + exploration * unknown

        return max(self.children, key=promise)


@dataclass(frozen=True, slots=True)
class Mcts:
    """Satisfies `Strategy`. Each of `visits` adds one step, of which a node has `width` at most.

    The mean score of `rollouts`, which run together, is a step's value. `exploration` weighs what
    is little known against what is good; scores are taken to be 0 to 1. Errors: BadSearch.
    """

    verifier: Verifier
    rules: StepRules
    width: int = 4
    visits: int = 16
    rollouts: int = 4
    exploration: float = sqrt(2)

    def __post_init__(self) -> None:
        check_count("width", self.width)
        check_count("visits", self.visits)
        check_count("rollouts", self.rollouts)
        check_count("visits × (1 + rollouts)", self.visits * (1 + self.rollouts))
        if not 0 <= self.exploration or not isfinite(self.exploration):
            raise BadSearch(f"exploration is {self.exploration}; give a finite number, not below 0")

    def search(self, engine: Engine, question: Question) -> Outcome:
        """See `Strategy`. A rollout without a score is worth 0."""
        with SearchTree(engine, question, self.rules) as tree:
            root = _Node(tree.plant())
            tree.park(root.branch)
            for _ in range(self.visits):
                path = self._select(root)
                self._expand(tree, path)
                value = self._roll_out(tree, path[-1])
                for node in path:
                    node.visits += 1
                    node.value += value
            return tree.outcome()

    def _select(self, root: _Node) -> list[_Node]:
        """The way to the most promising node with room for another step, or at an end."""
        path = [root]
        while not path[-1].branch.ended and len(path[-1].children) == self.width:
            path.append(path[-1].best_child(self.exploration))
        return path

    def _expand(self, tree: SearchTree, path: list[_Node]) -> None:
        """Another step from the path's end, and the path on to it; none if its branch has ended."""
        node = path[-1]
        if not node.branch.ended:
            child = _Node(tree.fork(node.branch))
            tree.grow([child.branch])
            node.children.append(child)
            path.append(child)

    def _roll_out(self, tree: SearchTree, node: _Node) -> float:
        """The value of a node: the mean score of a few ways on to the end."""
        ends = [node.branch]
        if not node.branch.ended:
            ends = [tree.fork(node.branch, to_end=True) for _ in range(self.rollouts)]
            tree.park(node.branch)
            tree.grow(ends)
        for end in ends:
            if end.score is None and end.failure is None:
                tree.score(end, self.verifier)
        return sum(end.score or 0.0 for end in ends) / len(ends)
