"""How thoughts about the reasoning task are folded, and which token asks for a step again."""

from collections.abc import Sequence as Seq
from typing import Final

from kvtier_worker.cot.vocabulary import ASKED_STEP, DELIMITER, FIRST
from kvtier_worker.folding import AttentionTrigger, FoldPolicy
from kvtier_worker.steps import StepRules
from kvtier_worker.thoughts import Step

KEEP: Final = 4
"""Entries that stay of a finished step."""
RULES: Final = StepRules(delimiters=((DELIMITER,),))


def asked_step(token: int, steps: Seq[Step]) -> int | None:
    """The number of the step that a token asks about, if it asks and there is such a step."""
    number = ASKED_STEP.get(token, FIRST - 1) - FIRST
    return number if 0 <= number < len(steps) else None


def by_token(step_tokens: int) -> FoldPolicy:
    """Unfold the step that the model asks about; steps have so many tokens."""
    return FoldPolicy(RULES, KEEP, trigger=asked_step, longest_step_tokens=step_tokens)


def by_attention(step_tokens: int) -> FoldPolicy:
    """Unfold the steps that get much of the model's attention."""
    return FoldPolicy(RULES, KEEP, attention=AttentionTrigger(), longest_step_tokens=step_tokens)
