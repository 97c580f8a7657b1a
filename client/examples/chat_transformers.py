"""A chat of which every turn is a process of its own, and none computes the history again.

    python client/examples/chat_transformers.py                      # two turns, with a daemon
    python client/examples/chat_transformers.py --socket S --state chat.json 'What is a tide?'

The first form starts a small daemon for itself and shows the second turn with and without it. The
second form is one turn: what lies in the state file is a token and the messages so far.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import click
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

import kvtier_client as kv
from kvtier_client.engines.transformers import KvtierCache, model_identity
from kvtier_worker.daemon import OwnDaemon, Sizes
from kvtier_worker.load import hugging_face_directory

SIZES: Final = Sizes(slab_bytes=16 << 20, arena_bytes=256 << 20, spill_bytes=512 << 20)
STORY: Final = (
    "A lighthouse keeper writes a diary. On Monday a storm broke two panes of the lantern room, and"
    " she mended them with oiled cloth. On Tuesday the supply boat came with flour, lamp oil, a"
    " letter from her sister and no glass. On Wednesday the fog was so thick that she rang the bell"
    " every two minutes from noon until midnight. On Thursday a fishing boat found its way by the"
    " bell; the crew left her a cod and a basket of eggs. On Friday she read the letter: her"
    " sister's second child is called Ada. On Saturday the glass came at last, and on Sunday she"
    " slept. In the second week she painted the door green, because green was all the paint she"
    " had. The stove smoked until she found a gull's nest in the pipe; she waited three days, until"
    " the young ones could fly, and ate cold. A painter came from the town with an easel, asked to"
    " stay an hour, stayed until dark, and had to sleep in the boathouse. He left her a picture of"
    " the tower in which the door is red. In the third week the inspector came, counted the wicks,"
    " tasted the water, wrote for a long time in his book and said nothing. The next morning she"
    " found that he had left his umbrella. She hung it beside the picture. Then the nights grew"
    " longer, and she trimmed the wick an hour earlier each week, and wrote less. On the last page"
    " there is a list: rope, needles, two panes of glass to keep, red paint, a present for Ada."
    " What did the supply boat bring? Answer in one sentence."
)
FOLLOW_UP: Final = "And what is the child called?"


@dataclass(slots=True)
class Chat:
    """What is kept of a conversation between two processes."""

    token: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)


class FirstToken(BaseStreamer):
    """Notes when `generate` has its first token; what comes before that is the prompt."""

    def __init__(self) -> None:
        self.came_s: list[float] = []

    def put(self, value: Tensor) -> None:
        """Called with the prompt, then with each token."""
        self.came_s.append(time.perf_counter())

    def end(self) -> None:
        """Called when there are no more."""


class Chatbot:
    """A model that answers."""

    def __init__(self, model_path: str, max_tokens: int) -> None:
        directory = hugging_face_directory(model_path)
        self.tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(directory)
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory)
        self.max_tokens = max_tokens
        model_identity(self.model)  # once for each process that loads a model, not for each cache
        self.model(torch.zeros((1, 1), dtype=torch.long))  # the first forward sets things up

    def question_ids(self, chat: Chat, question: str) -> Tensor:
        """What a question adds to the conversation so far. Shapes: [1, tokens]."""
        asked = [*chat.messages, {"role": "user", "content": question}]
        text = self.tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        if chat.messages:  # the last answer ended with its end token; what follows that is new
            before = self.tokenizer.apply_chat_template(chat.messages, tokenize=False)
            text = "\n" + text[len(before) :]
        ids: Tensor = self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        return ids

    def answer(self, ids: Tensor, cache: KvtierCache | None) -> tuple[Tensor, float]:
        """The conversation with an answer that ends with the end token, and when that began."""
        end, first = self.tokenizer.eos_token_id, FirstToken()
        out: Tensor = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), cache=cache, streamer=first, do_sample=False,
            max_new_tokens=self.max_tokens, eos_token_id=end, pad_token_id=end,
        )  # fmt: skip
        if out[0, -1] != end:
            out = torch.cat([out, torch.full((1, 1), end)], dim=1)
        return out, first.came_s[1]

    def turn(self, chat: Chat, question: str, client: kv.Client, compare: bool) -> Chat:
        """One turn: the cache comes from the daemon, and goes back to it."""
        started_s = time.perf_counter()
        ids = self.question_ids(chat, question)
        if chat.token is None:
            cache = KvtierCache(self.model, client, name="chat")
        else:
            # partial: should the daemon have lost a page, generate computes its tokens again.
            cache = KvtierCache.resume(chat.token, self.model, client, partial=True)
            ids = torch.cat([cache.saved["input_ids"], ids], dim=1)
        new = ids.shape[1] - cache.get_seq_length()
        out, first_s = self.answer(ids, cache)
        token = cache.suspend(input_ids=out)
        text = self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip()
        click.echo(f"> {question[-60:]}\n{text}")
        _tell("with kvtierd", new, ids, first_s - started_s)
        if compare:
            started_s = time.perf_counter()
            again, first_s = self.answer(ids, None)
            _tell("without it", ids.shape[1], ids, first_s - started_s)
            click.echo(f"  the answer is {'the same' if torch.equal(out, again) else 'another'}")
        said = [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
        return Chat(token, [*chat.messages, *said])


def _tell(how: str, new: int, ids: Tensor, wait_s: float) -> None:
    click.echo(
        f"  {how}: {new} of {ids.shape[1]} tokens computed, first token after {wait_s:.2f} s"
    )


def one_turn(bot: Chatbot, socket_path: str, state: str, question: str, compare: bool) -> None:
    """Go on with the chat of a state file, or begin it."""
    chat = Chat()
    if os.path.exists(state):
        with open(state, encoding="utf-8") as file:
            chat = Chat(**json.load(file))
    with kv.Client(socket_path, name="chat") as client:
        later = bot.turn(chat, question, client, compare)
        with open(state + ".new", "w", encoding="utf-8") as file:
            json.dump(asdict(later), file)
        os.replace(state + ".new", state)
        if chat.token is not None:  # only now: until here the state file named it
            KvtierCache.forget(chat.token, client)


def demonstrate(options: list[str]) -> None:
    """A daemon and two turns, each in a process of its own."""
    with tempfile.TemporaryDirectory() as place, OwnDaemon(place, SIZES) as daemon:
        turn = [sys.executable, __file__, "--socket", daemon.socket_path, *options]
        turn += ["--state", os.path.join(place, "chat.json")]
        subprocess.run([*turn, STORY], check=True)
        subprocess.run([*turn, "--compare", FOLLOW_UP], check=True)


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--model", default="build/model", help="A Hugging Face directory or a GGUF file.")
@click.option("--socket", help="The daemon's socket.")
@click.option("--state", help="Where the conversation's token and messages are.")
@click.option("--max-tokens", default=32, help="Longest answer.")
@click.option("--compare", is_flag=True, help="Answer a second time, without the daemon.")
@click.argument("question", required=False)
def main(
    model: str, socket: str | None, state: str | None, max_tokens: int, compare: bool,
    question: str | None,
) -> None:  # fmt: skip
    """Take a turn, or show two of them."""
    if question is None:
        demonstrate(["--model", model, "--max-tokens", str(max_tokens)])
    elif socket is None or state is None:
        raise click.UsageError("a question needs --socket and --state")
    else:
        one_turn(Chatbot(model, max_tokens), socket, state, question, compare)


if __name__ == "__main__":
    main()
