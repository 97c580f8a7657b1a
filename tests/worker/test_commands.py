"""The commands as they are typed: the demo shows what it promises, sessions resume by token."""

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from kvtier_worker.__main__ import main
from kvtier_worker.daemon import OwnDaemon
from kvtier_worker.demo import DemoReport, find_failures
from tests.worker.tiny import write_hugging_face

SESSIONS = 12
TOKENS = 128


def worker(*arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments, "--threads", "1"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tiny")
    write_hugging_face(str(directory))
    return str(directory)


@pytest.fixture(scope="module")
def report(model: str, tmp_path_factory: pytest.TempPathFactory) -> DemoReport:
    out = tmp_path_factory.mktemp("out") / "run.json"
    size = ["--sessions", str(SESSIONS), "--tokens", str(TOKENS), "--pressure", "4"]
    done = worker("demo", "--model", model, *size, "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "outputs equal to unpressured" in done.output
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(out.read_text())["failures"] == []
    return msgspec.json.decode(out.read_bytes(), type=DemoReport)


def test_the_demo_compares_three_policies(report: DemoReport) -> None:
    assert list(report.policies) == ["none", "recompute", "swap"]
    assert report.outputs_equal == {"none": True, "recompute": True, "swap": True}
    for figures in report.policies.values():
        assert figures.sessions == SESSIONS
        assert figures.generated_tokens == SESSIONS * TOKENS


def test_the_demo_pressures_the_pool(report: DemoReport) -> None:
    none, recompute, swap = report.policies.values()
    assert none.preemptions == none.recomputed_tokens == 0
    assert swap.pool_bytes <= none.peak_pool_bytes / 4
    assert swap.preemptions >= 5
    assert recompute.recomputed_tokens > swap.recomputed_tokens == 0


def test_the_demo_uses_both_tiers(report: DemoReport) -> None:
    assert report.spilled_share >= 0.5
    assert report.tiers.dram_peak_bytes > 0
    assert report.tiers.nvme_peak_bytes > 0
    assert report.tiers.restored_bytes > 0
    swap = report.policies["swap"].swap
    assert swap.hashes_checked == swap.in_blocks > 0
    assert swap.hashes_wrong == 0


def test_the_demo_fails_on_what_it_must_not_show(report: DemoReport) -> None:
    swap = report.policies["swap"]
    changed = msgspec.structs.replace
    assert find_failures(swap, report.tiers, outputs_equal=True) == []
    wrong_hash = changed(swap, swap=changed(swap.swap, hashes_wrong=1))
    for bad, tiers, equal in (
        (swap, report.tiers, False),
        (changed(swap, recomputed_tokens=1), report.tiers, True),
        (wrong_hash, report.tiers, True),
        (swap, changed(report.tiers, nvme_peak_bytes=0), True),
        (swap, changed(report.tiers, spilled_bytes=1), True),
        (swap, changed(report.tiers, dram_peak_bytes=0), True),
    ):
        assert len(find_failures(bad, tiers, equal)) == 1


@pytest.mark.parametrize("temperature", ["0", "0.9"])
def test_a_session_suspended_by_one_command_is_finished_by_the_next(
    model: str, daemon: OwnDaemon, temperature: str
) -> None:
    asked = ["--model", model, "--prompt", "Why?", "--tokens", "40", "--temperature", temperature]
    whole = worker("generate", *asked).stdout.rstrip("\n")
    first = worker("generate", *asked, "--daemon", daemon.socket_path, "--suspend-after", "23")
    begun, token = first.stdout.rstrip("\n").rsplit("\ntoken: ", 1)
    rest = worker("resume", "--model", model, "--token", token, "--daemon", daemon.socket_path)
    assert rest.exit_code == 0, rest.output
    assert begun + rest.stdout.rstrip("\n") == whole
    assert len(rest.stdout) > 1


def test_a_budget_brings_an_answer_to_its_end(model: str) -> None:
    asked = ["--model", model, "--prompt", "Why?", "--tokens", "80"]
    free = worker("generate", *asked)
    done = worker("generate", *asked, "--budget-tokens", "20", "--effort", "medium")
    assert done.exit_code == 0, done.output
    assert free.stderr == "" and done.stderr.startswith("landed after 10 tokens: token_budget")
    thought, answer = done.stdout.split("\u010a\u010aThe\u0120answer\u0120is:", 1)
    assert free.stdout.startswith(thought) and len(answer) > 1
    short = worker("generate", *asked, "--effort", "low", "--landing", "So:")
    assert short.exit_code == 0 and "So:" in short.stdout


def test_a_budget_goes_with_the_session(model: str, daemon: OwnDaemon) -> None:
    asked = ["--model", model, "--prompt", "Why?", "--tokens", "80", "--budget-tokens", "30"]
    whole = worker("generate", *asked).stdout.rstrip("\n")
    first = worker("generate", *asked, "--daemon", daemon.socket_path, "--suspend-after", "23")
    begun, token = first.stdout.rstrip("\n").rsplit("\ntoken: ", 1)
    rest = worker("resume", "--model", model, "--token", token, "--daemon", daemon.socket_path)
    assert rest.exit_code == 0, rest.output
    assert begun + rest.stdout.rstrip("\n") == whole
    assert rest.stderr.startswith("landed after 30 tokens: token_budget")


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (["--effort", "extreme"], 2, "'extreme' is not one of"),
        (["--budget-tokens", "0"], 2, "x>=1"),
        (["--budget-tokens", "9", "--tokens", "9"], 1, "the landing alone takes"),
        (["--effort", "low", "--landing", ""], 1, "the control sequence is empty"),
    ],
)
def test_budgets_under_which_nothing_can_be_said_are_refused(
    model: str, options: list[str], code: int, told: str
) -> None:
    done = worker("generate", "--model", model, "--prompt", "Why?", *options)
    assert done.exit_code == code and told in done.stderr


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["generate", "--prompt", "Why?", "--temperature", "-1"], "temperature -1.0"),
        (["generate", "--prompt", "Why?", "--temperature", "nan"], "temperature nan"),
        (["generate", "--prompt", "Why?", "--suspend-after", "3"], "needs --daemon"),
        (["demo", "--out", "/nowhere/run.json"], "'/nowhere/run.json' cannot be written"),
        (["demo", "--out", "/"], "'/' cannot be written"),
    ],
)
def test_what_cannot_be_is_told_before_any_work(command: list[str], told: str) -> None:
    done = worker(*command, "--model", "/nowhere")
    assert done.exit_code == 2 and told in done.stderr and "Usage: " in done.stderr


def test_errors_are_told_in_one_line(model: str, daemon: OwnDaemon, tmp_path: Path) -> None:
    missing = worker("generate", "--model", str(tmp_path), "--prompt", "Why?")
    assert missing.exit_code == 1
    assert missing.stderr.startswith("error: no model at")
    nothing = worker("generate", "--model", model, "--prompt", "")
    assert nothing.exit_code == 1 and nothing.stderr.startswith("error: the prompt is empty")
    other = CliRunner().invoke(main, ["eval", "--model", model, "--out", str(tmp_path / "e.json")])
    assert other.exit_code == 1 and "does not know the reasoning task" in other.stderr
    unknown = worker(
        "resume", "--model", model, "--token", "00" * 16, "--daemon", daemon.socket_path
    )
    assert unknown.exit_code == 21
    assert unknown.stderr.startswith("error: ")
    assert missing.stderr.count("\n") == unknown.stderr.count("\n") == 1
