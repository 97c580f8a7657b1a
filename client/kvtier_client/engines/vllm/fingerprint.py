"""Which blocks may be mixed: a layout's description of everything that changes its bytes.

Two engines share blocks only when all facts below are equal; a difference in any of them makes
another layout, in which nothing is found. What is not known for sure is rather a difference than
not. Configurations are known by their attributes, and a missing one is an error at the start of
the engine: a fact that is silently left out would let foreign blocks in.
"""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from typing import Any, Final

from kvtier_client.engines.vllm.keys import SCHEME
from kvtier_client.layout import DTYPE_BYTES, Layout

WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors")
"""Files of a model's directory that are told apart by name, size and time of change."""
MODEL_CHARS: Final = 400
"""Longest model name in a layout; the facts have all of it."""
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
_PLAIN_ROPE: Final = ("default", "None")


def facts_of(config: Any, version: str) -> dict[str, Any]:
    """Facts of the whole engine, from its `VllmConfig`."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    hf_config = model.hf_config.to_dict()
    speculative = config.speculative_config
    facts = {
        "engine": version,
        "device": config.device_config.device_type,
        "model": model.model,
        "revision": model.revision,
        "code_revision": model.code_revision,
        "commit": getattr(model.hf_config, "_commit_hash", None),
        "config": hf_config,
        "overrides": model.hf_overrides,
        "weights": weights_of(model.model),
        "load": (config.load_config.load_format, model.seed),
        "dtype": str(model.dtype),
        "quantization": (model.quantization, model.quantization_config),
        "kv_dtype": (cache.cache_dtype, cache.kv_cache_dtype_skip_layers),
        "kv_layout": cache.kv_cache_layout,
        "block_size": cache.block_size,
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "lora": config.lora_config,
        "speculative": None
        if speculative is None
        else (speculative.method, speculative.model, speculative.num_speculative_tokens),
        "keys": SCHEME.decode(),
    }
    if rope_types(hf_config) - set(_PLAIN_ROPE):
        facts["max_model_len"] = model.max_model_len  # scaled RoPE may depend on it
    return facts


def rope_types(config: Any) -> set[str]:
    """The kinds of RoPE scaling that a model's configuration names, at any depth."""
    found: set[str] = set()
    if isinstance(config, dict):
        for name, value in config.items():
            if name in ("rope_type", "rope_scaling_type"):
                found.add(str(value))
            elif name == "rope_scaling" and isinstance(value, dict):
                found.add(str(value.get("rope_type", value.get("type"))))
            found |= rope_types(value)
    return found


def weights_of(model: str) -> list[tuple[str, int, int]]:
    """Name, size and time of change of a local model's weights; empty for one from a hub."""
    if os.path.isfile(model):
        paths = [model]
    elif os.path.isdir(model):
        paths = [entry.path for entry in os.scandir(model) if entry.name.endswith(WEIGHTS)]
    else:
        paths = []
    found = []
    for path in sorted(paths):
        state = os.stat(path)
        found.append((os.path.basename(path), state.st_size, state.st_mtime_ns))
    return found


def digest_of(facts: Any) -> str:
    """A digest that is the same in every process for the same facts."""
    text = json.dumps(facts, sort_keys=True, default=_plain, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> str:
    return _ADDRESS.sub("", repr(value))


def dtype_of(dtype: Any) -> str:
    """A torch dtype as layouts name it; quantised formats are bytes."""
    name = str(dtype).removeprefix("torch.").removesuffix("fn")
    return name if name in DTYPE_BYTES else "uint8"


def layout_of(
    facts: dict[str, Any],
    group: int,
    spec: Any,
    layers: Sequence[str],
    kernels: Sequence[str],
    block_bytes: int,
    rank: tuple[int, int],
) -> Layout:
    """The layout of one KV-cache group on one rank.

    `spec` is the engine's description of the group's layers, `kernels` are the names of what reads
    and writes their pages, `rank` is the pipeline and the tensor-parallel rank.
    """
    pipeline_rank, tensor_rank = rank
    first = next(iter(spec.kv_cache_specs.values())) if hasattr(spec, "kv_cache_specs") else spec
    replicated = facts["tp"] > 1 and first.max_tp_shards == 1
    own = facts | {
        "group": group,
        "spec": spec,
        "layers": list(layers),
        "kernels": sorted(kernels),
        "pp_rank": pipeline_rank,
    }
    return Layout(
        model=f"{facts['model']}@{facts['revision']}"[-MODEL_CHARS:],
        dtype=dtype_of(first.dtype),
        layers=len(layers),
        kv_heads=first.num_kv_heads,
        head_dim=first.head_size,
        block_tokens=spec.block_size,
        block_bytes=block_bytes,
        group=group,
        tp_rank=0 if replicated else tensor_rank,
        tp_size=facts["tp"],
        replicated=replicated,
        codec=f"vllm-{facts['kv_layout']}",
        extra=digest_of(own),
    )
