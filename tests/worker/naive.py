"""A thought as plain lists: each entry's KV in a list, decoded one token at a time, alone.

What the engine does with slots, pages and folds has to come out as this does, bit by bit.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvtier_worker.folds import FoldOperator, StepKv
from kvtier_worker.model import Llama
from kvtier_worker.sampler import Sampling, choose
from kvtier_worker.tile import Row
from tests.worker.tiny import BLOCK_TOKENS, forward, slots_of, tiny_pool

DELIMITERS = frozenset(range(0, 256, 12))


@dataclass
class Naive:
    """One sequence. Shapes: each of `entries` is [layers, 2, kv_heads, head_dim]."""

    model: Llama
    entries: list[Tensor] = field(default_factory=list)
    tokens: int = 0

    def feed(self, token: int) -> Tensor:
        """Compute the next token. Shapes: its logits [vocab]."""
        count = len(self.entries) + 1
        blocks = -(-count // BLOCK_TOKENS)
        pool = tiny_pool(self.model, blocks)
        slots = slots_of(pool.take(blocks), count)
        if self.entries:
            pool.write_entries(slots[:-1], torch.stack(self.entries, dim=2))
        logits = forward(self.model, pool, [Row(token, self.tokens, slots)])[0]
        self.entries.append(pool.read_entries(slots[-1:])[:, :, 0])
        self.tokens += 1
        return logits

    def fold(self, first: int, end: int, keep: int, operator: FoldOperator) -> list[Tensor]:
        """Replace entries by what an operator without biases makes of them; what was there."""
        full = self.entries[first:end]
        kept = operator.fold(StepKv(torch.stack(full, dim=2)), keep).kv
        self.entries[first:end] = list(kept.unbind(2))
        return full


@dataclass(frozen=True)
class NaiveRun:
    """What came of a decode; `entries` has those that there were after so many tokens."""

    generated: list[int]
    steps: list[tuple[int, int]]
    entries: dict[int, Tensor]


def decode_folding(
    model: Llama,
    prompt: list[int],
    new_tokens: int,
    sampling: Sampling,
    keep: int,
    operator: FoldOperator,
) -> NaiveRun:
    """Decode, and fold at each delimiter behind the prompt."""
    naive = Naive(model)
    tokens = list(prompt)
    for token in prompt[:-1]:
        naive.feed(token)
    steps, entries = [], {}
    step_first = first_entry = len(prompt)
    while len(tokens) < len(prompt) + new_tokens:
        logits = naive.feed(tokens[-1])
        if tokens[-1] in DELIMITERS and len(tokens) > len(prompt):
            steps.append((step_first, len(tokens)))
            if len(naive.entries) - first_entry > keep:
                naive.fold(first_entry, len(naive.entries), keep, operator)
            step_first, first_entry = len(tokens), len(naive.entries)
        entries[len(tokens)] = torch.stack(naive.entries, dim=2)
        tokens.append(choose(logits.numpy(), sampling, len(tokens)))
    return NaiveRun(tokens[len(prompt) :], steps, entries)
