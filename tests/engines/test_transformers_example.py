"""The chat example on a real model: each turn is a process, and none computes the history again."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvtier_client as kv
from examples.chat_transformers import Chat, Chatbot, one_turn
from kvtier_client.engines.transformers import KvtierCache
from tests.support.fixtures import MakeDaemon, make_daemon  # noqa: F401

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "build" / "model"
EXAMPLE = ROOT / "client" / "examples" / "chat_transformers.py"
QUESTIONS = ["The sky is blue. What colour is the sky?", "And what is not?"]
ANSWER_TOKENS = 6

pytestmark = pytest.mark.timeout(600)


def computed(said: str) -> tuple[int, int]:
    """How many of how many tokens a turn says that it has computed."""
    found = re.search(r"with kvtierd: (\d+) of (\d+) tokens computed", said)
    assert found, said
    return int(found[1]), int(found[2])


def turn_in_a_process(socket_path: str, state: Path, question: str) -> str:
    """What a turn prints that begins with nothing but the state file."""
    return subprocess.run(
        [
            sys.executable, str(EXAMPLE), "--model", str(MODEL), "--socket", socket_path,
            "--state", str(state), "--max-tokens", str(ANSWER_TOKENS), question,
        ],
        check=True, stdout=subprocess.PIPE, text=True, timeout=300, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": "client:kernels:.", "OMP_NUM_THREADS": "1"},
    ).stdout  # fmt: skip


def test_a_chat_of_processes_says_what_one_process_would_have_said(
    make_daemon: MakeDaemon,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert list(MODEL.glob("*.gguf")), "the model is missing: run `make model`"
    daemon = make_daemon(
        arena={"slab_bytes": 4 << 20},
        spill={"slab_bytes": 4 << 20},
        tenants=[{"name": "t", "uids": ["self"], "arena_bytes": 64 << 20}],
    ).start()
    state, bot = tmp_path / "chat.json", Chatbot(str(MODEL), ANSWER_TOKENS)
    one_turn(bot, daemon.client_path, str(state), QUESTIONS[0], compare=True)
    said = capsys.readouterr().out
    assert "the answer is the same" in said
    first_new, first_all = computed(said)
    assert first_new == first_all
    daemon.restart()  # kill -9
    second_new, second_all = computed(turn_in_a_process(daemon.client_path, state, QUESTIONS[1]))
    chat = Chat(**json.loads(state.read_text()))
    assert chat.token is not None
    with kv.Client(daemon.client_path) as client:
        cache = KvtierCache(bot.model, client)
        ids = torch.empty(1, 0, dtype=torch.long)
        for turn, question in enumerate(QUESTIONS):
            asked = bot.question_ids(Chat(messages=chat.messages[: 2 * turn]), question)
            ids, _ = bot.answer(torch.cat([ids, asked], dim=1), cache)
        kept = KvtierCache.resume(chat.token, bot.model, client)
        assert torch.equal(kept.saved["input_ids"], ids)
        assert second_all > first_all and second_new <= asked.shape[1] + 2
        KvtierCache.forget(chat.token, client)
    assert daemon.tenant()["held_blocks"] == 0
