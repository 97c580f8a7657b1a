"""Loads a model and its tokenizer from a Hugging Face directory, or from a GGUF file.

Reading a GGUF takes many seconds, so the first load writes it as a Hugging Face directory beside
the file, and later loads take that.
"""

import glob
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from xxhash import xxh3_128

from kvtier_worker.errors import UnsupportedModel
from kvtier_worker.gguf_file import read_gguf
from kvtier_worker.model import Llama, ModelConfig
from kvtier_worker.tokenizer import Tokenizer, convert_gguf_tokenizer

READ_BYTES: Final = 1 << 24
CONVERTED_SUFFIX: Final = ".hf-2"
"""Of the directory that a GGUF file becomes; another one whenever the conversion changes."""

_UNREADABLE: Final = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    SafetensorError,
    TypeError,
    ValueError,
)
"""What may befall who reads anybody's files as a model."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and the tokenizer that goes with it."""

    model: Llama
    tokenizer: Tokenizer


def load_model(path: str, device: torch.device) -> LoadedModel:
    """Load a Hugging Face directory, a .gguf file, or a directory with one .gguf file in it.

    Errors: UnsupportedModel when there is no model, a damaged one, or one that is no plain Llama.
    """
    try:
        directory = hugging_face_directory(path)
        config = read_config(directory)
        weights: dict[str, torch.Tensor] = {}
        for file in _weight_files(directory):
            weights.update(load_file(file))
        return LoadedModel(Llama(config, weights, device), Tokenizer(directory))
    except _UNREADABLE as error:
        raise UnsupportedModel(
            f"the model at {path} cannot be loaded: {error!r}; if it is damaged or incomplete,"
            " get its files again"
        ) from error


def read_config(directory: str) -> ModelConfig:
    """The shape of the model in a Hugging Face directory.

    Its name is the directory's with a hash of config and weights: KV of other weights never
    passes for this model's. Errors: UnsupportedModel.
    """
    path = os.path.join(directory, "config.json")
    with open(path, encoding="utf-8") as file:
        raw = json.load(file)
    rope = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", scaling.get("rope_type", scaling.get("type", "default")))
    wanted = {
        "model_type": (raw.get("model_type"), "llama"),
        "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
        "rope_type": (rope_type, "default"),
        "attention_bias": (raw.get("attention_bias", False), False),
        "mlp_bias": (raw.get("mlp_bias", False), False),
    }
    for key, (is_, may_be) in wanted.items():
        if is_ != may_be:
            raise UnsupportedModel(
                f"{path} has {key} = {is_!r}; this worker runs {may_be!r} only; take another model"
            )
    heads = raw["num_attention_heads"]
    return ModelConfig(
        name=f"{os.path.basename(os.path.abspath(directory))}@{_identity(directory)}",
        vocab=raw["vocab_size"],
        hidden=raw["hidden_size"],
        intermediate=raw["intermediate_size"],
        layers=raw["num_hidden_layers"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads", heads),
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        rms_eps=raw["rms_norm_eps"],
        rope_theta=rope.get("rope_theta", raw.get("rope_theta", 10000.0)),
        max_positions=raw["max_position_embeddings"],
        fold_trained_keep=raw.get("fold_trained_keep"),
    )


def hugging_face_directory(path: str) -> str:
    """The Hugging Face directory at `path`, or the one that its GGUF file is converted to.

    Errors: UnsupportedModel.
    """
    if os.path.isfile(os.path.join(path, "config.json")):
        return path
    files = [path] if os.path.isfile(path) else sorted(glob.glob(os.path.join(path, "*.gguf")))
    if len(files) != 1 or not files[0].endswith(".gguf"):
        raise UnsupportedModel(
            f"no model at {path}: it has neither a config.json nor exactly one .gguf file;"
            " give a Hugging Face directory or a GGUF file"
        )
    directory = files[0].removesuffix(".gguf") + CONVERTED_SUFFIX
    if not os.path.isdir(directory):
        _convert(files[0], directory)
    return directory


def _convert(gguf: str, directory: str) -> None:
    """Write a GGUF file as a Hugging Face directory, which appears complete or not at all."""
    draft = tempfile.mkdtemp(prefix=".converting-", dir=os.path.dirname(directory) or ".")
    try:
        config, weights = read_gguf(gguf)
        save_file(weights, os.path.join(draft, "model.safetensors"))
        with open(os.path.join(draft, "config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file, indent=2)
        convert_gguf_tokenizer(gguf, draft)
        take_name(draft, directory)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def take_name(draft: str, directory: str) -> None:
    """Give a finished directory its name, unless another process was faster. Errors: OSError."""
    try:
        os.rename(draft, directory)
    except OSError:
        if not os.path.isdir(directory):
            raise


def _weight_files(directory: str) -> list[str]:
    files = sorted(glob.glob(os.path.join(directory, "*.safetensors")))
    if not files:
        raise UnsupportedModel(
            f"{directory} has no .safetensors file; save the model's weights in that form"
        )
    return files


def _identity(directory: str) -> str:
    digest = xxh3_128()
    for path in [os.path.join(directory, "config.json"), *_weight_files(directory)]:
        with open(path, "rb") as file:
            while part := file.read(READ_BYTES):
                digest.update(part)
    return digest.hexdigest()[:16]
