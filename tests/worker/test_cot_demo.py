"""The demo on the reasoning model shows what it promises, and fails when it does not."""

import json
import shutil
from functools import partial
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from kvtier_worker.__main__ import main
from kvtier_worker.cot.contest import Policy, bound
from kvtier_worker.cot.demo import ThoughtPlan, ThoughtReport, ThoughtRun, find_failures
from kvtier_worker.cot.shipped import shipped_model_path
from kvtier_worker.cot.task import SESSION_1K, SESSION_4K, Size
from kvtier_worker.metrics import Clock

SESSIONS = 10
SHORT = Size(steps=4, rows=12)
TIMED = ("folded steps made it slower", "folded steps let only")
"""What is averaged over time; tests/worker/test_admission.py counts who runs, step by step."""

pytestmark = pytest.mark.timeout(600)


def worker(*arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments, "--threads", "1"])


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> ThoughtReport:
    out = tmp_path_factory.mktemp("out") / "run.json"
    done = worker("demo", "--sessions", str(SESSIONS), "--out", str(out))
    assert "about a step's inside" in done.output, done.output
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert done.exit_code == (1 if json.loads(out.read_text())["failures"] else 0), done.output
    return msgspec.json.decode(out.read_bytes(), type=ThoughtReport)


def test_it_shows_what_it_promises(report: ThoughtReport) -> None:
    """How fast it was is the machine's affair; everything else is not."""
    assert [failure for failure in report.failures if not failure.startswith(TIMED)] == []
    assert list(report.runs) == list(Policy)
    assert all(run.figures.sessions == SESSIONS for run in report.runs.values())
    assert len({run.figures.pool_bytes for run in report.runs.values()}) == 1


def test_what_a_daemon_keeps_is_never_recomputed(report: ThoughtReport) -> None:
    recomputed = {policy: run.figures.recomputed_tokens for policy, run in report.runs.items()}
    assert recomputed[Policy.FULL] > 0
    assert recomputed[Policy.SWAP] == recomputed[Policy.UNFOLD] == 0


def test_answers_need_the_steps_that_they_are_about(report: ThoughtReport) -> None:
    fold, unfold = report.runs[Policy.FOLD], report.runs[Policy.UNFOLD]
    assert unfold.figures.folding.unfolds >= unfold.score.internals_right > 0
    assert fold.figures.folding.unfolds == 0
    assert fold.score.internals_right < unfold.score.internals_right


def test_it_fails_on_what_it_must_not_show(report: ThoughtReport) -> None:
    changed = msgspec.structs.replace
    runs = {
        policy: changed(
            run,
            figures=changed(
                run.figures, tokens_per_s=1.0 + policy.folds, mean_running=4.0 + 4 * policy.folds
            ),
        )
        for policy, run in report.runs.items()
    }
    assert find_failures(runs, swap_is_exact=True) == []
    assert len(find_failures(runs, swap_is_exact=False)) == 1

    def broken(policy: Policy, run: ThoughtRun) -> list[str]:
        return find_failures({**runs, policy: run}, swap_is_exact=True)

    full, swap, fold, unfold = (runs[policy] for policy in Policy)
    figures, folding = unfold.figures, unfold.figures.folding
    for policy, run in (
        (Policy.FULL, changed(full, figures=changed(full.figures, preemptions=0))),
        (Policy.SWAP, changed(swap, figures=changed(swap.figures, recomputed_tokens=1))),
        (Policy.SWAP, changed(swap, tiers=changed(swap.tiers, nvme_peak_bytes=0))),
        (Policy.FOLD, changed(fold, score=changed(fold.score, internals_right=SESSIONS))),
        (Policy.UNFOLD, changed(unfold, score=changed(unfold.score, right=0))),
        (Policy.UNFOLD, changed(unfold, figures=changed(figures, mean_running=1.0))),
        (Policy.UNFOLD, changed(unfold, figures=changed(figures, tokens_per_s=0.5))),
        *(
            (Policy.UNFOLD, changed(unfold, figures=changed(figures, folding=other)))
            for other in (changed(folding, unfolds=0), changed(folding, misses=1))
        ),
        *(
            (Policy.UNFOLD, changed(unfold, figures=changed(figures, swap=other)))
            for other in (changed(figures.swap, hashes_wrong=1),)
        ),
    ):
        assert len(broken(policy, run)) == 1


def test_a_model_without_the_training_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier_worker.cot.demo.ThoughtPlan", partial(ThoughtPlan, size=SHORT))
    shutil.copytree(shipped_model_path(), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    del config["fold_trained_keep"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    out = str(tmp_path / "run.json")
    done = worker("demo", "--model", str(tmp_path / "model"), "--sessions", "1", "--out", out)
    assert done.stderr.count("warning: model") == 1
    assert "24 %" in done.stderr
    assert done.exit_code == 1  # one session is no pressure
    assert "failed: full KV was never preempted" in done.stderr


def test_the_bound_is_that_of_open_steps() -> None:
    prompt, steps, step = SESSION_4K.prompt_tokens, SESSION_4K.steps, SESSION_4K.step_tokens
    assert bound(SESSION_4K, 4) == pytest.approx(
        (prompt + steps * step / 2) / (prompt + steps * 4 / 2 + step / 2)
    )
    assert bound(SESSION_4K, 4) > bound(SESSION_1K, 4) > 5


def test_the_mean_counts_the_time_in_which_others_wait() -> None:
    clock = Clock()
    assert clock.mean_running == 0
    clock.step(clock.started_s, running=2, queued=False)
    assert clock.mean_running == pytest.approx(2)
    clock.step(clock.started_s, running=7, queued=True)
    assert clock.mean_running == pytest.approx(7)
