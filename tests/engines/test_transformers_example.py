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
from examples.chat_transformers import Chat, Chatbot
from kvtier_client.engines.transformers import KvtierCache
from tests.support.fixtures import MakeDaemon, make_daemon  # noqa: F401

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "build" / "model"
EXAMPLE = ROOT / "client" / "examples" / "chat_transformers.py"
QUESTIONS = ["The sky is blue. What colour is the sky?", "And what is not?"]
ANSWER_TOKENS = 6

pytestmark = pytest.mark.timeout(600)


def take_turn(socket_path: str, state: Path, question: str) -> tuple[int, int]:
    """A turn in a process of its own; returns how many of how many tokens it computed."""
    said = subprocess.run(
        [
            sys.executable, str(EXAMPLE), "--model", str(MODEL), "--socket", socket_path,
            "--state", str(state), "--max-tokens", str(ANSWER_TOKENS), question,
        ],
        check=True, stdout=subprocess.PIPE, text=True, timeout=300, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": "client:kernels:.", "OMP_NUM_THREADS": "1"},
    ).stdout  # fmt: skip
    found = re.search(r"with kvtierd: (\d+) of (\d+) tokens computed", said)
    assert found, said
    return int(found[1]), int(found[2])


def test_a_chat_of_processes_says_what_one_process_would_have_said(
    make_daemon: MakeDaemon,  # noqa: F811
    tmp_path: Path,
) -> None:
    assert list(MODEL.glob("*.gguf")), "the model is missing: run `make model`"
    daemon = make_daemon(
        arena={"slab_bytes": 4 << 20},
        spill={"slab_bytes": 4 << 20},
        tenants=[{"name": "t", "uids": ["self"], "arena_bytes": 64 << 20}],
    ).start()
    state = tmp_path / "chat.json"
    first_new, first_all = take_turn(daemon.client_path, state, QUESTIONS[0])
    daemon.restart()  # kill -9
    second_new, second_all = take_turn(daemon.client_path, state, QUESTIONS[1])
    assert first_new == first_all
    chat = Chat(**json.loads(state.read_text()))

    bot, messages = Chatbot(str(MODEL), ANSWER_TOKENS), chat.messages
    with kv.Client(daemon.client_path) as client:
        cache = KvtierCache(bot.model, client)
        ids = torch.empty(1, 0, dtype=torch.long)
        for turn, question in enumerate(QUESTIONS):
            so_far = Chat(messages=messages[: 2 * turn])
            asked = bot.question_ids(so_far, question)
            ids = torch.cat([ids, asked], dim=1)
            ids, _ = bot.answer(ids, cache)
        assert chat.token is not None
        kept = KvtierCache.resume(chat.token, bot.model, client)
        assert torch.equal(kept.saved["input_ids"], ids)
        new = second_all - first_all
        assert asked.shape[1] <= second_new <= asked.shape[1] + 2 and second_new < new
        KvtierCache.forget(chat.token, client)
    assert daemon.tenant()["held_blocks"] == 0
