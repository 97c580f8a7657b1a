"""Adds what `kvtier-worker eval` found to the figures of the benchmarks.

python -m tests.bench.accuracy [FILE]
"""

import sys

from kvtier_worker.cot.evaluate import HALF_WIDTH_POINTS, LEAST_PAIRS, read_results
from kvtier_worker.cot.verdict import Comparison, Verdict
from kvtierd.bench.figures import Figure, merge, table
from tests.bench.__main__ import BUILD, RESULTS


def figures(verdict: Verdict) -> list[Figure]:
    """The figures of one evaluation. Units: points of a hundred."""
    answers = verdict.answers
    half = (answers.high_points - answers.low_points) / 2
    found = [
        Figure("cot.pairs", answers.pairs, LEAST_PAIRS),
        Figure("cot.accuracy_interval_points", half, HALF_WIDTH_POINTS, "lower"),
        *_compared("cot.accuracy", answers, -0.2),
        *_compared("cot.conclusions", verdict.conclusions),
        *_compared("cot.internals_unfold", verdict.internals_unfold, -1.0),
        *_compared("cot.internals_fold_only", verdict.internals_fold_only),
        Figure("cot.accuracy_full_percent", answers.first),
        Figure("cot.accuracy_folded_percent", answers.second),
        Figure("cot.traces_full_percent", verdict.full_traces),
        Figure("cot.traces_folded_percent", verdict.folded_traces),
    ]
    if verdict.attention is not None:
        found += [
            Figure("cot.attention_precision_percent", verdict.attention.precision),
            Figure("cot.attention_recall_percent", verdict.attention.recall),
            Figure("cot.attention_internals_percent", verdict.attention.internals),
        ]
    return found


def _compared(name: str, one: Comparison, least_points: float | None = None) -> list[Figure]:
    note = f"{one.pairs} pairs, right only with full KV {one.only_first}, folded {one.only_second}"
    return [
        Figure(f"{name}_delta_points", one.delta_points, least_points, note=note),
        Figure(f"{name}_low_points", one.low_points),
        Figure(f"{name}_high_points", one.high_points),
    ]


def main(path: str = str(BUILD / "eval.json")) -> None:
    """Print the figures and keep them."""
    results = read_results(path)
    if results is None or results.verdict is None:
        raise SystemExit(f"tests.bench.accuracy: {path} has no verdict; run kvtier-worker eval")
    found = figures(results.verdict)
    merge(RESULTS, found)
    print(table(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
