"""The shipped model is there, is small, answers right with folded steps, and honestly needs them.

Problems of a thousand tokens are answered greedily through the engine, with a real daemon.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import kvtier_client as kv
from kvtier_worker.cot.answers import BLOCK_TOKENS, Answerer, Folded, Full, submit
from kvtier_worker.cot.policy import by_token
from kvtier_worker.cot.shipped import shipped_model_path
from kvtier_worker.cot.task import SESSION_1K, Problem
from kvtier_worker.daemon import OwnDaemon, sizes_for
from kvtier_worker.engine import Engine, block_shape
from kvtier_worker.errors import UnsupportedModel, UntrainedFold
from kvtier_worker.load import load_model
from kvtier_worker.model import Llama
from kvtier_worker.pool import PagedPool
from kvtier_worker.store import RecomputeStore
from tests.worker.test_cot_task import drawn
from tests.worker.tiny import CPU, tiny_engine, tiny_model

pytestmark = pytest.mark.timeout(600)

PROBLEMS = drawn(24, SESSION_1K, note_share=0.5, seed=1)
ASKING = [i for i, problem in enumerate(PROBLEMS) if problem.asked is not None]
WEIGHT_BYTES_MAX = 5_000_000


@pytest.fixture(scope="module")
def model() -> Llama:
    return load_model(shipped_model_path(), CPU).model


@pytest.fixture(scope="module")
def answerer(model: Llama, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answerer]:
    sizes = sizes_for(block_shape(model, BLOCK_TOKENS).block_bytes, 96 << 20, 32 << 20)
    with (
        OwnDaemon(str(tmp_path_factory.mktemp("daemon")), sizes) as daemon,
        kv.Client(daemon.socket_path, name="test", deadline_s=60.0) as client,
    ):
        client.connect()
        yield Answerer(model, client)


@pytest.fixture(scope="module")
def full(answerer: Answerer) -> Full:
    return answerer.full(PROBLEMS)


@pytest.fixture(scope="module")
def folded(answerer: Answerer) -> Folded:
    return answerer.folded(PROBLEMS)


def right(outcomes: str, which: list[int] | None = None) -> int:
    chosen = range(len(outcomes)) if which is None else which
    return sum(outcomes[i] != "0" for i in chosen)


def test_it_is_small_and_says_that_it_is_trained_to_fold() -> None:
    directory = shipped_model_path()
    assert os.path.getsize(os.path.join(directory, "model.safetensors")) <= WEIGHT_BYTES_MAX
    config = json.loads(Path(directory, "config.json").read_text())
    assert config["fold_trained_keep"] == 2
    training = json.loads(Path(directory, "training.json").read_text())
    assert training["steps"] == training["recipe"]["steps"]


def test_it_answers_with_full_kv(full: Full) -> None:
    assert right(full.outcomes) >= len(PROBLEMS) - 1


def test_it_answers_with_folded_steps_that_come_back_when_asked_for(folded: Folded) -> None:
    assert right(folded.unfolding) >= len(PROBLEMS) - 1


def test_without_unfolds_only_what_is_inside_steps_is_lost(folded: Folded) -> None:
    """Who cannot see a step guesses one of ten digits; other questions do not suffer."""
    others = [i for i in range(len(PROBLEMS)) if i not in ASKING]
    assert len(ASKING) >= 8 and len(others) >= 8
    assert right(folded.without, ASKING) <= len(ASKING) / 2
    assert right(folded.without, others) >= len(others) - 1


def test_a_fork_without_the_unfold_is_what_a_run_without_a_daemon_writes(
    model: Llama, answerer: Answerer
) -> None:
    some: list[Problem] = [PROBLEMS[i] for i in ASKING[:3]]
    pool = PagedPool(block_shape(model, BLOCK_TOKENS), 32 << 20, CPU)
    folding = by_token(SESSION_1K.step_tokens)
    engine = Engine(model, pool, RecomputeStore(), folding=folding)
    sequences = [submit(engine, problem) for problem in some]
    engine.run()
    assert engine.figures("fold").folding.unfolds == 0
    alone = "".join(
        str(2 * (tuple(s.generated) == p.solution) or int(p.is_right(s.generated)))
        for s, p in zip(sequences, some, strict=True)
    )
    assert answerer.folded(some).without == alone


def test_damaged_or_missing_weights_are_told(tmp_path: Path) -> None:
    shutil.copytree(shipped_model_path(), tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (b"", whole[:8], whole[: len(whole) // 2], b"\xff" * 64):
        weights.write_bytes(damaged)
        with pytest.raises(UnsupportedModel, match="get its files again"):
            load_model(str(tmp_path / "model"), CPU)
    weights.unlink()
    with pytest.raises(UnsupportedModel, match=r"no \.safetensors file"):
        load_model(str(tmp_path / "model"), CPU)
    weights.write_bytes(whole)
    for config in ("", "{}", '{"model_type": "llama"}'):
        (tmp_path / "model" / "config.json").write_text(config)
        with pytest.raises(UnsupportedModel):
            load_model(str(tmp_path / "model"), CPU)


@pytest.mark.parametrize("trained", [None, 8])
def test_folds_beyond_the_training_are_warned_of(trained: int | None) -> None:
    model = tiny_model()
    model.config = replace(model.config, fold_trained_keep=trained)
    with pytest.warns(UntrainedFold, match="24 %"):
        tiny_engine(model, 20, folding=by_token(10))
    model.config = replace(model.config, fold_trained_keep=4)
    tiny_engine(model, 20, folding=by_token(10))
