"""A random Llama of transformers that decodes in milliseconds, and what tests ask of it."""

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
PAGE_TOKENS = 16
PAGE_BYTES = 3 * 2 * 2 * 8 * PAGE_TOKENS * 4
"""Of a page of this model in float32, for a batch of one."""


def tiny_llama(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """The same weights for the same seed."""
    torch.manual_seed(seed)
    model: Any = LlamaForCausalLM(LlamaConfig(**(SIZES | changes)))
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(4)  # so that greedy output depends on all that came before
    return model.to(dtype).eval()


def prompt(tokens: int, seed: int = 0, batch: int = 1) -> Tensor:
    """Random ids, none of them special. Shapes: [batch, tokens]."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(3, SIZES["vocab_size"], (batch, tokens), generator=random)


def extend(model: Any, ids: Tensor, cache: Any, tokens: int, mask: Tensor | None = None) -> Tensor:
    """The ids with so many greedy ones more. Shapes: [batch, tokens]."""
    out: Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids) if mask is None else mask, cache=cache,
        max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return out


def kv_of(cache: Any) -> list[Tensor]:
    """Keys and values of every layer, as they are now."""
    return [tensor.clone() for layer in cache.layers for tensor in (layer.keys, layer.values)]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Whether all bits are the same."""
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
