"""Searches over branches of a thought: several tries at one question, of which the best counts.

Every strategy forks branches that share what they have in common, lets them grow, has them scored,
prunes what is not wanted, and ends with an `Outcome`; nothing of it is left in the engine or with
the daemon then. `tree.py` has what all of them do, the other files one strategy each.
"""

from kvtier_worker.search.beam import Beam
from kvtier_worker.search.best_of_n import BestOfN
from kvtier_worker.search.mcts import Mcts
from kvtier_worker.search.outcome import BranchReport, Fate, Outcome, SearchFigures
from kvtier_worker.search.question import AnswerOf, Question, Strategy, Verifier
from kvtier_worker.search.vote import MajorityVote

__all__ = [
    "AnswerOf",
    "Beam",
    "BestOfN",
    "BranchReport",
    "Fate",
    "MajorityVote",
    "Mcts",
    "Outcome",
    "Question",
    "SearchFigures",
    "Strategy",
    "Verifier",
]
