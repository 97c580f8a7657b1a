"""The model computes what a Llama computes, from either file format."""

import json
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from kvtier_worker.errors import UnsupportedModel
from kvtier_worker.gguf_file import read_gguf
from kvtier_worker.load import load_model, read_config, take_name
from kvtier_worker.model import Llama
from kvtier_worker.tile import Row
from tests.worker.tiny import (
    CPU,
    HF_CONFIG,
    forward,
    random_prompts,
    slots_of,
    tiny_model,
    tiny_pool,
    tiny_weights,
    write_hugging_face,
)

GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def logits_of(model: Llama, tokens: list[int]) -> Tensor:
    pool = tiny_pool(model, 8)
    pages = pool.take(8)
    parts = []
    rows_max = model.tile_sizes[-1]
    for start in range(0, len(tokens), rows_max):
        part = range(start, min(start + rows_max, len(tokens)))
        rows = [Row(tokens[i], i, slots_of(pages, i + 1)) for i in part]
        parts.append(forward(model, pool, rows)[: len(part)])
    return torch.cat(parts)


def write_gguf(path: Path, architecture: str = "llama") -> None:
    """The tiny model as llama.cpp's converter writes it: q and k as interleaved pairs."""
    c = HF_CONFIG
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_vocab_size(c["vocab_size"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_key_length(c["head_dim"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_rope_freq_base(c["rope_theta"])
    heads = {"attn_q": c["num_attention_heads"], "attn_k": c["num_key_value_heads"]}
    for name, tensor in tiny_weights().items():
        array = tensor.numpy()
        parts = name.split(".")
        if parts[1] == "layers":
            short = GGUF_NAMES[".".join(parts[3:-1])]
            if short in heads:
                array = array.reshape(heads[short], 2, -1, array.shape[1]).swapaxes(1, 2)
                array = np.ascontiguousarray(array).reshape(tensor.shape)
            writer.add_tensor(f"blk.{parts[2]}.{short}.weight", array)
        else:
            short = {"embed_tokens": "token_embd", "norm": "output_norm"}[parts[1]]
            writer.add_tensor(f"{short}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_logits_are_those_of_transformers(tiny: Llama) -> None:
    oracle = LlamaForCausalLM(LlamaConfig(**HF_CONFIG, tie_word_embeddings=True))
    oracle.load_state_dict(tiny_weights(), strict=False)
    for prompt in random_prompts(5):
        with torch.no_grad():
            expected = oracle(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(logits_of(tiny, prompt), expected, rtol=1e-4, atol=1e-4)


def test_a_gguf_file_gives_the_same_model(tmp_path: Path, tiny: Llama) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    config, weights = read_gguf(str(tmp_path / "tiny.gguf"))
    told = {key: HF_CONFIG[key] for key in HF_CONFIG if key != "fold_trained_keep"}
    assert {key: config[key] for key in told} == pytest.approx(told)
    prompt = random_prompts(1)[0]
    read = logits_of(Llama(tiny.config, weights, CPU), prompt)
    assert torch.equal(read, logits_of(tiny, prompt))


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "other.gguf", "falcon")
    with pytest.raises(UnsupportedModel, match="'falcon'"):
        read_gguf(str(tmp_path / "other.gguf"))


def test_a_hugging_face_directory_loads_with_its_tokenizer(tmp_path: Path, tiny: Llama) -> None:
    write_hugging_face(str(tmp_path))
    loaded = load_model(str(tmp_path), CPU)
    tokens = loaded.tokenizer.encode_prompt("Why is 7 prime?")
    assert torch.equal(logits_of(loaded.model, tokens), logits_of(tiny, tokens))
    assert len(tokens) == len("Why is 7 prime?")


def test_other_weights_are_another_model_to_the_daemon(tmp_path: Path) -> None:
    write_hugging_face(str(tmp_path))
    before = read_config(str(tmp_path)).name
    path = tmp_path / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    assert read_config(str(tmp_path)).name != before


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="no model at"):
        load_model(os.fspath(tmp_path), CPU)


@pytest.mark.parametrize(
    "config",
    [
        [],
        {},
        HF_CONFIG | {"num_attention_heads": "four"},
        HF_CONFIG | {"num_attention_heads": 0, "head_dim": None},
        HF_CONFIG | {"num_hidden_layers": 0},
        HF_CONFIG | {"num_hidden_layers": 4},
        HF_CONFIG | {"num_key_value_heads": 3},
        HF_CONFIG | {"num_key_value_heads": 4},
        HF_CONFIG | {"vocab_size": 255},
        HF_CONFIG | {"intermediate_size": 127},
        HF_CONFIG | {"hidden_size": 63},
        HF_CONFIG | {"head_dim": 15},
        HF_CONFIG | {"max_position_embeddings": "many"},
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(tmp_path: Path, config: object) -> None:
    write_hugging_face(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"cannot be loaded|has model_type = None"):
        load_model(str(tmp_path), CPU)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no model at all"])
def test_a_gguf_file_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "torn.gguf"
    path.write_bytes(content)
    with pytest.raises(UnsupportedModel, match="cannot be loaded"):
        load_model(str(path), CPU)
    assert os.listdir(tmp_path) == ["torn.gguf"]


def test_two_seeds_are_two_models() -> None:
    prompt = random_prompts(1)[0]
    assert not torch.equal(logits_of(tiny_model(0), prompt), logits_of(tiny_model(1), prompt))


def test_of_two_conversions_at_once_the_first_one_stays(tmp_path: Path) -> None:
    place = tmp_path / "model.hf"
    for name in ("first", "second"):
        draft = tmp_path / name
        draft.mkdir()
        (draft / "config.json").write_text(name)
        take_name(str(draft), str(place))
    assert (place / "config.json").read_text() == "first"
    with pytest.raises(FileNotFoundError):
        take_name(str(tmp_path / "none"), str(tmp_path / "other.hf"))
