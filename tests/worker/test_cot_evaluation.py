"""An evaluation counts what was answered, goes on where it stopped, and says what it found."""

from pathlib import Path

import pytest

from kvtier_worker.cot.answers import Attended, Folded, Full, Outcome, outcome
from kvtier_worker.cot.evaluate import (
    LEAST_PAIRS,
    MOST_PAIRS,
    PILOT_PAIRS,
    About,
    Mode,
    Results,
    evaluate,
    read_results,
)
from kvtier_worker.cot.shipped import shipped_model_path
from kvtier_worker.cot.task import Size
from tests.bench.accuracy import figures
from tests.worker.test_cot_task import drawn

SMALL = Size(6, 12)
ABOUT = About("model", SMALL.steps, SMALL.rows, chunk_problems=512)


def answered(full: str, unfolding: str, without: str, asks: str = "01") -> Results:
    """Results of so many chunks of one pattern, repeated over the chunk."""
    results = Results(ABOUT)
    add(results, 0, full, unfolding, without, asks)
    return results


def add(results: Results, chunk: int, full: str, unfolding: str, without: str, asks: str) -> None:
    asks, full, unfolding, without = (
        pattern * (ABOUT.chunk_problems // len(pattern))
        for pattern in (asks, full, unfolding, without)
    )
    results.take(Mode.FULL, chunk, Full(asks, full))
    results.take(Mode.FOLDED, chunk, Folded(unfolding, without))


def test_outcomes_tell_answers_from_whole_traces() -> None:
    (problem,) = drawn(1, Size(3, 9))
    assert outcome(problem, problem.solution) is Outcome.EVERY_TOKEN
    detour = (problem.solution[1], *problem.solution[1:])
    assert outcome(problem, detour) is Outcome.ANSWER
    assert outcome(problem, problem.solution[:-1]) is Outcome.WRONG


def test_the_verdict_compares_problem_by_problem() -> None:
    verdict = answered("2202", "2112", "2011", asks="0101").verdict
    assert verdict is not None
    n = ABOUT.chunk_problems
    assert (verdict.answers.pairs, verdict.answers.only_first) == (n, 0)
    assert verdict.answers.only_second == n // 4
    assert verdict.answers.delta_points == pytest.approx(25)
    assert verdict.conclusions.pairs == verdict.internals_fold_only.pairs == n // 2
    assert verdict.conclusions.only_second == n // 4
    assert verdict.internals_unfold.delta_points == 0
    assert verdict.internals_fold_only.delta_points == pytest.approx(-50)
    assert (verdict.full_traces, verdict.folded_traces) == (75, 50)
    assert verdict.attention is None


def test_a_chunk_counts_once_it_was_answered_in_both_ways() -> None:
    results = Results(ABOUT)
    results.take(Mode.FULL, 0, Full("0" * 512, "2" * 512))
    assert results.verdict is not None and results.verdict.answers.pairs == 0
    results.take(Mode.FOLDED, 1, Folded("2" * 512, "2" * 512))
    assert results.verdict.answers.pairs == 0


def test_the_attention_trigger_is_judged_by_what_it_brought_back() -> None:
    results = answered("2", "2", "2", asks="1")
    results.take(Mode.ATTENDED, 0, Attended("0011", "2002", unfolds=50, right=2, recalled=1))
    assert results.verdict is not None
    found = results.verdict.attention
    assert found is not None
    assert (found.precision, found.recall, found.internals) == (4, 50, 50)


def test_the_pilot_says_how_many_problems_it_takes() -> None:
    results = answered("2", "2", "2")
    assert results.chunks(None) * 512 == PILOT_PAIRS
    add(results, 1, "2", "2", "2", "0")
    assert results.chunks(None) * 512 == LEAST_PAIRS
    add(results, 1, "22222222", "22222220", "2" * 8, "0")
    assert LEAST_PAIRS < results.chunks(None) * 512 <= MOST_PAIRS
    assert results.chunks(700) == 2


def test_what_is_missing_is_every_chunk_in_every_mode() -> None:
    results = answered("2", "2", "2")
    assert set(results.missing(1024)) == {
        (Mode.FULL, 1),
        (Mode.FOLDED, 1),
        (Mode.ATTENDED, 0),
        (Mode.ATTENDED, 1),
    }


def test_chunks_have_problems_of_their_own_and_always_the_same() -> None:
    about = About("model", 2, 8, chunk_problems=4)
    assert about.problems(3) == about.problems(3) != about.problems(4)


@pytest.mark.timeout(600)
def test_an_interrupted_evaluation_goes_on_where_it_stopped(tmp_path: Path) -> None:
    out = tmp_path / "eval.json"
    lines: list[str] = []

    def run(pairs: int, jobs: int) -> Results:
        lines.clear()
        model = shipped_model_path()
        return evaluate(model, str(out), jobs, lines.append, pairs, SMALL, chunk_problems=4)

    first = run(4, jobs=1)
    assert len(lines) == 3
    second = run(8, jobs=2)
    assert len(lines) == 4  # one about going on, and three chunks
    assert second.full[0] == first.full[0] and second.folded[0] == first.folded[0]
    kept = out.read_bytes()
    assert run(8, jobs=1) == second == read_results(str(out))
    assert len(lines) == 1 and out.read_bytes() == kept
    assert second.verdict is not None
    names = {figure.name: figure.value for figure in figures(second.verdict)}
    assert names["cot.pairs"] == 8
    assert names["cot.internals_fold_only_delta_points"] <= 0


def test_a_file_that_is_no_evaluation_is_begun_anew(tmp_path: Path) -> None:
    torn = tmp_path / "eval.json"
    assert read_results(str(torn)) is None
    for text in ("", "{", "[1]", '{"about": 3}'):
        torn.write_text(text)
        assert read_results(str(torn)) is None
