"""The search command: every strategy on the shipped model, beside single samples."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from kvtier_worker.__main__ import STRATEGIES, main
from kvtier_worker.cot.task import Size
from kvtier_worker.errors import BadSearch
from kvtier_worker.search.outcome import BranchReport, Fate, Outcome, SearchFigures
from kvtier_worker.search.show import SHOWN_BRANCHES_MAX, outcome_tree
from kvtier_worker.search.trial import SINGLE, TrialPlan
from tests.worker.tiny import write_hugging_face

SMALL = ["--problems", "2", "--steps", "2", "--rows", "8", "--n", "3", "--width", "2"]
SMALL += ["--expand", "2", "--visits", "3", "--rollouts", "2", "--kv-mib", "4"]


def worker(*arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments, "--threads", "1"])


def cells(done: Result, label: str) -> list[str]:
    """What stands in a row of the table."""
    line = next(line for line in done.stdout.splitlines() if label in line)
    return [cell.strip() for cell in line.strip("│").split("│")][1:]


def test_every_strategy_stands_beside_single_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    done = worker("search", *SMALL)
    assert done.exit_code == 0, done.output
    assert len(cells(done, "right")) == 1 + len(STRATEGIES)
    assert all(cell.split()[1:3] == ["of", "2"] for cell in cells(done, "right"))
    assert cells(done, "tokens recomputed") == ["0"] * (1 + len(STRATEGIES))
    single, *_, mcts = cells(done, "parked / woken")
    assert single == "0 / 0"
    assert all(int(count) > 0 for count in mcts.split(" / "))
    assert all(int(saved) > 0 for saved in cells(done, "sharing saved"))
    assert "mcts: the last problem that was answered" in done.stdout
    assert done.stdout.count("the winner") == 1


def test_one_strategy_may_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    done = worker("search", *SMALL, "--strategy", "beam")
    assert done.exit_code == 0, done.output
    assert len(cells(done, "right")) == 2


def test_what_cannot_be_searched_is_told_in_one_line(tmp_path: Path) -> None:
    write_hugging_face(str(tmp_path))
    other = worker("search", *SMALL, "--model", str(tmp_path))
    assert other.exit_code == 1
    assert other.stderr.startswith("error: ") and "does not know the reasoning task" in other.stderr
    none = worker("search", *SMALL, "--n", "0")
    assert none.exit_code == 1 and none.stderr == "error: n is 0; give one from 1 to 4095\n"
    cold = worker("search", *SMALL, "--temperature", "0")
    assert cold.exit_code == 1 and "temperature is 0.0" in cold.stderr
    assert worker("search", *SMALL, "--rows", "1").exit_code == 2
    assert worker("search", *SMALL, "--strategy", "guess").exit_code == 2


def test_a_plan_refuses_what_its_strategies_refuse() -> None:
    plan = TrialPlan(
        names=STRATEGIES, problems=1, size=Size(1, 8), n=3, width=0, expand=1, visits=1,
        rollouts=1, temperature=1.0, seed=0, pool_bytes=1 << 20,
    )  # fmt: skip
    with pytest.raises(BadSearch, match="width is 0"):
        plan.strategies()


def test_a_tree_of_many_branches_says_how_many_are_not_shown() -> None:
    def branch(number: int, fate: Fate = Fate.PRUNED, failure: str | None = None) -> BranchReport:
        parent = None if number == 0 else number // 2
        return BranchReport(number, parent, 1, (1, 2, 3), 1, fate, 0.5, failure)

    winner = branch(2, Fate.FINISHED)
    many = [branch(0), branch(1), winner, branch(3, Fate.FAILED, "ValueError: [odd]")]
    many += [branch(number) for number in range(4, SHOWN_BRANCHES_MAX + 7)]
    outcome = Outcome(winner, tuple(many), SearchFigures(len(many), 0, 0, 0, 0, 0, 0, 0))
    console = Console(width=120)
    with console.capture() as captured:
        console.print(outcome_tree(SINGLE, outcome))
    lines = captured.get().splitlines()
    assert lines[0] == SINGLE
    assert lines[1] == "├── branch 0: the prompt, score 0.50, pruned"
    assert sum("the winner" in line for line in lines) == 1
    assert any("failed, ValueError: [odd]" in line for line in lines)
    assert lines[-1] == "└── and 7 branches more"
    assert len(lines) == SHOWN_BRANCHES_MAX + 2
