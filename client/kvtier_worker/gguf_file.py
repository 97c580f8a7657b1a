"""Reads a Llama-family GGUF file as Hugging Face's config, weights and tokenizer would be.

Source: the GGUF metadata keys `llama.*` and tensor names of llama.cpp, which stores the rows of
q and k in the order of its own rotary embedding (pairs interleaved).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray
from torch import Tensor

from kvtier_worker.errors import UnsupportedModel

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_gguf(path: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Hugging Face's config and float32 weights of a GGUF file. Errors: UnsupportedModel."""
    reader = GGUFReader(path)
    config = _config(reader, path)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    return config, dict(_weights(reader, heads, path))


def _config(reader: GGUFReader, path: str) -> dict[str, Any]:
    def value(key: str, default: Any = None) -> Any:
        part = reader.get_field(key)
        if part is None and default is None:
            raise UnsupportedModel(f"{path} has no {key}; only Llama-family GGUF files are read")
        return default if part is None else part.contents()

    architecture = value("general.architecture")
    scaling = value("llama.rope.scaling.type", "none")
    if architecture != "llama" or scaling != "none":
        raise UnsupportedModel(
            f"{path} has architecture {architecture!r} and rotary scaling {scaling!r}; this worker"
            " runs 'llama' with 'none'; take another model"
        )
    hidden, heads = value("llama.embedding_length"), value("llama.attention.head_count")
    return {
        "model_type": "llama",
        "vocab_size": value("llama.vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("llama.attention.head_count_kv", heads),
        "head_dim": value("llama.attention.key_length", hidden // heads),
        "rms_norm_eps": value("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": value("llama.rope.freq_base", 10000.0),
        "max_position_embeddings": value("llama.context_length"),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
    }


def _weights(reader: GGUFReader, heads: dict[str, int], path: str) -> Iterator[tuple[str, Tensor]]:
    for tensor in reader.tensors:
        array = np.array(dequantize(tensor.data, tensor.tensor_type), np.float32, order="C")
        if tensor.name in _GLOBAL_NAMES:
            yield _GLOBAL_NAMES[tensor.name], torch.from_numpy(array)
            continue
        parts = tensor.name.split(".")
        if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _LAYER_NAMES:
            raise UnsupportedModel(
                f"{path} has the tensor {tensor.name}, which no plain Llama has; take another model"
            )
        if parts[2] in heads:
            array = _halves(array, heads[parts[2]])
        yield (
            f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}",
            torch.from_numpy(np.array(array, order="C")),
        )


def _halves(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder each head's rows from interleaved pairs to two halves. Shapes: [out, in]."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
