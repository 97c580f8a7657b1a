"""What the answers of an evaluation say: shares, differences with their intervals, the trigger."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import msgspec

from kvtier_worker.cot.answers import Attended, Folded, Full, Outcome
from kvtier_worker.cot.paired import POINTS, Paired


class Comparison(msgspec.Struct, frozen=True):
    """Two ways to answer the same problems. Units: shares and differences in points of 100."""

    pairs: int
    first: float
    second: float
    only_first: int
    only_second: int
    delta_points: float
    low_points: float
    high_points: float


class TriggerFigures(msgspec.Struct, frozen=True):
    """The attention's trigger. `precision`: of its unfolds, the share of the step that was asked
    about; `recall`: of the steps that were asked about, the share that it unfolded; `internals`:
    the share of questions about a step's inside that were answered right. All in points of 100."""

    problems: int
    unfolds: int
    precision: float
    recall: float
    internals: float


class Verdict(msgspec.Struct, frozen=True):
    """All comparisons are of full KV (first) with folded steps (second).

    `answers`: every problem, the asked step unfolded. `conclusions`: those that do not ask about a
    step's inside, nothing unfolded. `internals_*`: those that do. `full_traces` and `folded_traces`
    are the shares of thoughts of which every token was right.
    """

    answers: Comparison
    conclusions: Comparison
    internals_unfold: Comparison
    internals_fold_only: Comparison
    full_traces: float
    folded_traces: float
    attention: TriggerFigures | None


@dataclass(frozen=True, slots=True)
class Answered:
    """One problem's outcomes; `asks` says whether it asks about a step's inside."""

    asks: bool
    full: Outcome
    unfolding: Outcome
    without: Outcome


def paired_answers(full: Mapping[int, Full], folded: Mapping[int, Folded]) -> list[Answered]:
    """The problems of those chunks that were answered in both ways."""
    return [
        Answered(asks == "1", *(Outcome(int(digit)) for digit in digits))
        for one, other in ((full[chunk], folded[chunk]) for chunk in full.keys() & folded.keys())
        for asks, *digits in zip(
            one.asks, one.outcomes, other.unfolding, other.without, strict=True
        )
    ]


def judge(answered: Seq[Answered], attended: Seq[Attended]) -> Verdict:
    """The verdict so far."""
    asks = [one for one in answered if one.asks]
    others = [one for one in answered if not one.asks]
    return Verdict(
        answers=_compare((one.full, one.unfolding) for one in answered),
        conclusions=_compare((one.full, one.without) for one in others),
        internals_unfold=_compare((one.full, one.unfolding) for one in asks),
        internals_fold_only=_compare((one.full, one.without) for one in asks),
        full_traces=_points(one.full is Outcome.EVERY_TOKEN for one in answered),
        folded_traces=_points(one.unfolding is Outcome.EVERY_TOKEN for one in answered),
        attention=_trigger(attended) if attended else None,
    )


def right_pairs(answered: Seq[Answered]) -> Paired:
    """Full KV against folded steps with unfolds, over every problem."""
    return Paired.of((one.full > Outcome.WRONG, one.unfolding > Outcome.WRONG) for one in answered)


def _compare(outcomes: Iterable[tuple[Outcome, Outcome]]) -> Comparison:
    paired = Paired.of((a > Outcome.WRONG, b > Outcome.WRONG) for a, b in outcomes)
    low, high = paired.interval_points
    return Comparison(
        pairs=paired.pairs,
        first=POINTS * paired.first_share,
        second=POINTS * paired.second_share,
        only_first=paired.only_first,
        only_second=paired.only_second,
        delta_points=paired.delta_points,
        low_points=low,
        high_points=high,
    )


def _trigger(attended: Seq[Attended]) -> TriggerFigures:
    unfolds, right, recalled = (
        sum(getattr(one, name) for one in attended) for name in ("unfolds", "right", "recalled")
    )
    pairs = [pair for one in attended for pair in zip(one.asks, one.outcomes, strict=True)]
    asked = [digit for asks, digit in pairs if asks == "1"]
    return TriggerFigures(
        problems=len(pairs),
        unfolds=unfolds,
        precision=POINTS * right / max(1, unfolds),
        recall=POINTS * recalled / max(1, len(asked)),
        internals=_points(digit != "0" for digit in asked),
    )


def _points(happened: Iterable[bool]) -> float:
    each = list(happened)
    return POINTS * sum(each) / max(1, len(each))
