"""A random Llama small enough to be decoded thousands of times, and engines around it."""

import json
import os
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from kvtier_worker.daemon import sizes_for
from kvtier_worker.engine import Engine, block_shape
from kvtier_worker.folding import FoldPolicy
from kvtier_worker.governor import GovernPolicy
from kvtier_worker.model import Llama, ModelConfig
from kvtier_worker.pool import BlockShape, PagedPool
from kvtier_worker.sampler import Sampling
from kvtier_worker.scheduler import Limits
from kvtier_worker.store import KvStore, RecomputeStore
from kvtier_worker.tile import Row, Slots, build_tile

CPU = torch.device("cpu")
BLOCK_TOKENS = 16
HF_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "fold_trained_keep": 1,
}
SHAPE: Final = BlockShape(
    HF_CONFIG["num_hidden_layers"],
    BLOCK_TOKENS,
    HF_CONFIG["num_key_value_heads"],
    HF_CONFIG["head_dim"],
)
ROOMY: Final = sizes_for(SHAPE.block_bytes, 4 << 20, 64 << 20)
"""A daemon that holds all that a test stores."""
WAIT_S: Final = 20.0


def tiny_weights(seed: int = 0) -> dict[str, Tensor]:
    """Random weights, large enough that tokens differ and small enough that nothing saturates."""
    c = HF_CONFIG
    random = torch.Generator().manual_seed(seed)
    q, kv = (c[f"num_{name}_heads"] * c["head_dim"] for name in ("attention", "key_value"))
    shapes = {
        "self_attn.q_proj": (q, c["hidden_size"]),
        "self_attn.k_proj": (kv, c["hidden_size"]),
        "self_attn.v_proj": (kv, c["hidden_size"]),
        "self_attn.o_proj": (c["hidden_size"], q),
        "mlp.gate_proj": (c["intermediate_size"], c["hidden_size"]),
        "mlp.up_proj": (c["intermediate_size"], c["hidden_size"]),
        "mlp.down_proj": (c["hidden_size"], c["intermediate_size"]),
    }
    weights = {
        f"model.layers.{layer}.{name}.weight": torch.randn(shape, generator=random) * 0.15
        for layer in range(c["num_hidden_layers"])
        for name, shape in shapes.items()
    }
    for layer in range(c["num_hidden_layers"]):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = 1 + 0.1 * torch.randn(
                c["hidden_size"], generator=random
            )
    weights["model.norm.weight"] = 1 + 0.1 * torch.randn(c["hidden_size"], generator=random)
    weights["model.embed_tokens.weight"] = torch.randn(
        (c["vocab_size"], c["hidden_size"]), generator=random
    )
    return weights


def tiny_model(seed: int = 0) -> Llama:
    """The random model, tied embeddings included."""
    c = HF_CONFIG
    config = ModelConfig(
        name=f"tiny-{seed}",
        vocab=c["vocab_size"],
        hidden=c["hidden_size"],
        intermediate=c["intermediate_size"],
        layers=c["num_hidden_layers"],
        heads=c["num_attention_heads"],
        kv_heads=c["num_key_value_heads"],
        head_dim=c["head_dim"],
        rms_eps=c["rms_norm_eps"],
        rope_theta=c["rope_theta"],
        max_positions=c["max_position_embeddings"],
        fold_trained_keep=c["fold_trained_keep"],
    )
    return Llama(config, tiny_weights(seed), CPU)


def write_hugging_face(directory: str) -> None:
    """Write the random model as a Hugging Face directory, with a tokenizer of single bytes."""
    with open(os.path.join(directory, "config.json"), "w", encoding="utf-8") as file:
        json.dump(HF_CONFIG, file)
    save_file(tiny_weights(), os.path.join(directory, "model.safetensors"))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(os.path.join(directory, "tokenizer.json"))


def tiny_pool(model: Llama, pages: int) -> PagedPool:
    """A pool of so many pages, the scratch page aside."""
    shape = block_shape(model, BLOCK_TOKENS)
    return PagedPool(shape, (pages + 1) * shape.block_bytes, CPU)


def slots_of(pages: list[int], entries: int) -> Slots:
    """The slots of the first entries of pages that are filled one after the other."""
    blocks = [np.arange(page * BLOCK_TOKENS, (page + 1) * BLOCK_TOKENS) for page in pages]
    return np.concatenate(blocks)[:entries]


def forward(model: Llama, pool: PagedPool, rows: list[Row]) -> Tensor:
    """The logits of one tile. Shapes: [tile rows, vocab]."""
    tile = build_tile(rows, model.tile_sizes, pool.scratch_slot, CPU)
    return model.logits(model.forward(tile, pool.kv))


def tiny_engine(
    model: Llama,
    pages: int,
    store: KvStore | None = None,
    limits: Limits | None = None,
    folding: FoldPolicy | None = None,
    governing: GovernPolicy | None = None,
) -> Engine:
    """An engine on a pool of so many pages, which recomputes unless it is given a store."""
    pool = tiny_pool(model, pages)
    return Engine(model, pool, store or RecomputeStore(), limits or Limits(), folding, governing)


def random_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 3 to 60 tokens."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 60, (count,), generator=random).tolist()
    return [torch.randint(0, 256, (n,), generator=random).tolist() for n in lengths]


def sampling_of(i: int) -> Sampling:
    """Greedy for even sessions, seeded for odd ones."""
    return Sampling(temperature=0.8 if i % 2 else 0.0, seed=i)


def lively(i: int) -> Sampling:
    """So hot that the random model does not repeat itself."""
    return Sampling(temperature=12.0, seed=i)
