"""The model in training: the worker's Llama again, but differentiable and with a mask.

It has Hugging Face's parameter names, so what is trained is loaded by any Llama as it is.
"""

import math
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvtier_worker.model import ModelConfig

INIT_SPREAD: Final = 0.02


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: any, normalised over the last dimension."""
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(c.hidden, c.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.hidden, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """Shapes: `x` [batch, tokens, hidden]; `mask` [batch, 1, tokens, tokens], added."""
        q, k, v = (self._heads(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
        group = q.shape[1] // k.shape[1]
        k, v = _rotate(k, rotation).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = functional.scaled_dot_product_attention(_rotate(q, rotation), k, v, attn_mask=mask)
        result: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return result

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden, c.intermediate, bias=False)
        self.up_proj = nn.Linear(c.hidden, c.intermediate, bias=False)
        self.down_proj = nn.Linear(c.intermediate, c.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: [..., hidden] to the same."""
        result: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = FeedForward(c)
        self.input_layernorm = Norm(c.hidden, c.rms_eps)
        self.post_attention_layernorm = Norm(c.hidden, c.rms_eps)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """Shapes: as those of `Attention`."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, mask)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Decoder(nn.Module):
    """Embedding, layers and last norm."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab, c.hidden)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.layers))
        self.norm = Norm(c.hidden, c.rms_eps)


class Network(nn.Module):
    """A Llama with tied embeddings."""

    def __init__(self, c: ModelConfig, embedding: Tensor) -> None:
        """Draw the first weights from torch's generator. Shapes: `embedding` [vocab, hidden]."""
        super().__init__()
        self.config = c
        self.model = Decoder(c)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(
                    parameter, std=INIT_SPREAD / (math.sqrt(2 * c.layers) if writes else 1)
                )
        self.model.embed_tokens.weight.data.copy_(embedding)

    def forward(self, tokens: Tensor, positions: Tensor, seen: Tensor, wanted: Tensor) -> Tensor:
        """The logits after the wanted tokens.

        Shapes: `tokens`, `positions`, `wanted` [batch, tokens]; `seen` [batch, tokens, tokens],
        true where a token (row) sees another; the result is [wanted tokens, vocab].
        """
        rotation = rotation_of(positions, self.config)
        mask = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))[:, None]
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, rotation, mask)
        return functional.linear(self.model.norm(x[wanted]), self.model.embed_tokens.weight)


def rotation_of(positions: Tensor, c: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines. Shapes: [batch, tokens] to two of [batch, 1, tokens, head_dim / 2]."""
    exponents = torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim
    angles = positions[:, None, :, None] * c.rope_theta**-exponents
    return angles.cos().float(), angles.sin().float()


def hugging_face_config(c: ModelConfig, end_token: int) -> dict[str, Any]:
    """What config.json says of the model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": c.vocab,
        "hidden_size": c.hidden,
        "intermediate_size": c.intermediate,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_eps,
        "rope_theta": c.rope_theta,
        "max_position_embeddings": c.max_positions,
        "tie_word_embeddings": True,
        "eos_token_id": end_token,
        "fold_trained_keep": c.fold_trained_keep,
        "dtype": "float32",
    }


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = rotation
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
