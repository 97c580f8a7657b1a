"""A Llama-family decoder (RMSNorm, RoPE, grouped-query attention, SwiGLU) on a paged KV cache.

Everything runs in float32 on tiles (see `tile.py`). Outside the GEMMs only exact operations
(+, *, /, sqrt) touch a row, and `exp`, which torch evaluates in the same way in every lane.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kvtier_worker.attention import paged_attention
from kvtier_worker.linear import TileLinear
from kvtier_worker.tile import Tile

TILE_SIZES: Final = (4, 8, 16, 24, 32, 48, 64)
"""Rows of a tile, as far as the machine's GEMMs give the same bits: about where they get faster."""
USUAL_ROWS: Final = 16
"""The size that is there in any case: a batch of decode steps fits, and one row is not slow."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The numbers that fix a model's shape; `name` is what its KV layout is called.

    A model may be trained to go on from the last entries of finished steps: `fold_trained_keep` is
    then the least number of them.
    """

    name: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    max_positions: int
    fold_trained_keep: int | None = None

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ValueError(
                f"{self.heads} heads of {self.head_dim} for {self.kv_heads} kv heads: need a"
                " multiple, and an even head_dim"
            )

    def folds_to(self, keep: int) -> bool:
        """Whether the model was trained to go on from so many entries of a step."""
        return self.fold_trained_keep is not None and keep >= self.fold_trained_keep


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; q, k, v and gate, up are stacked so that each pair of norms feeds one GEMM.

    Shapes: `qkv` [(heads + 2 kv_heads) * head_dim, hidden], `out` [hidden, heads * head_dim],
    `gate_up` [2 intermediate, hidden], `down` [hidden, intermediate].
    """

    input_norm: Tensor
    qkv: TileLinear
    out: TileLinear
    post_norm: Tensor
    gate_up: TileLinear
    down: TileLinear

    def mlp(self, x: Tensor, rms_eps: float) -> Tensor:
        """The residual stream behind the SwiGLU. Shapes: [tile rows, hidden]."""
        gate, up = self.gate_up(_rms_norm(x, self.post_norm, rms_eps)).chunk(2, dim=-1)
        return x + self.down(gate / (1 + torch.exp(-gate)) * up)


@dataclass(frozen=True, slots=True)
class KvPages:
    """The pages of every layer that a forward pass reads and writes.

    Shapes: `k` and `v` hold [pages, block_tokens, kv_heads, head_dim] per layer; `bias` is empty,
    or holds [pages, block_tokens, kv_heads] per layer.
    """

    k: list[Tensor]
    v: list[Tensor]
    bias: list[Tensor]


@dataclass(frozen=True, slots=True)
class Watch:
    """What a forward pass should tell besides its result.

    Shapes: `queries` [layers, rows, heads, head_dim], turned by RoPE; `masses` [rows, groups], the
    largest share of attention that any head of any layer gives to each of the tile's groups.
    """

    queries: Tensor | None = None
    masses: Tensor | None = None


class Llama:
    """The weights of one model and its forward pass."""

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Tensor], device: torch.device
    ) -> None:
        """Take Hugging Face's weight names.

        Errors: KeyError for a missing weight, ValueError for one of another shape.
        """

        def take(name: str, *shape: int) -> Tensor:
            weight = weights[f"{name}.weight"]
            if weight.shape != shape:
                raise ValueError(f"{name} is {tuple(weight.shape)}, and should be {shape}")
            return weight.to(device=device, dtype=torch.float32).contiguous()

        c = self.config = config
        self.device = device
        self.embedding = take("model.embed_tokens", c.vocab, c.hidden)
        tied = "lm_head.weight" not in weights
        head = self.embedding if tied else take("lm_head", c.vocab, c.hidden)
        self.head = TileLinear(head, USUAL_ROWS)
        self.norm = take("model.norm", c.hidden)
        self.layers = [_layer(take, c, f"model.layers.{i}.") for i in range(c.layers)]
        self.cos, self.sin = _rope_table(config, device)
        self.tile_sizes = self._sizes_alike()

    @torch.inference_mode()
    def forward(self, tile: Tile, pages: KvPages, watch: "Watch | None" = None) -> Tensor:
        """Compute one tile and write its rows' K and V into the pages, at `tile.slots`.

        A written entry has no bias; `watch` is filled with what it asks for. Shapes: the result is
        the last hidden state [tile rows, hidden].
        """
        c = self.config
        x = self.embedding[tile.tokens]
        cos, sin = self.cos[tile.positions], self.sin[tile.positions]
        masses = watch.masses if watch is not None else None
        for i, (layer, k_layer, v_layer) in enumerate(
            zip(self.layers, pages.k, pages.v, strict=True)
        ):
            h = layer.qkv(_rms_norm(x, layer.input_norm, c.rms_eps))
            h = h.view(-1, c.heads + 2 * c.kv_heads, c.head_dim)
            qk, v = h.tensor_split((c.heads + c.kv_heads,), dim=1)
            q, k = _rotate(qk, cos, sin).tensor_split((c.heads,), dim=1)
            k_layer.view(-1, c.kv_heads, c.head_dim)[tile.slots] = k
            v_layer.view(-1, c.kv_heads, c.head_dim)[tile.slots] = v
            bias_layer = pages.bias[i] if pages.bias else None
            if bias_layer is not None:
                bias_layer.view(-1, c.kv_heads)[tile.slots] = 0
            if watch is not None and watch.queries is not None:
                watch.queries[i] = q[: tile.rows]
            x = x + layer.out(paged_attention(q, k_layer, v_layer, tile, bias_layer, masses))
            x = layer.mlp(x, c.rms_eps)
        return _rms_norm(x, self.norm, c.rms_eps)

    def rotated(self, queries: Tensor, by: int) -> Tensor:
        """Queries as they would be `by` positions later. Shapes: [..., head_dim]."""
        return _rotate(queries, self.cos[by], self.sin[by])

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Shapes: [tile rows, hidden] to [tile rows, vocab]."""
        return self.head(hidden)

    @torch.inference_mode()
    def _sizes_alike(self) -> tuple[int, ...]:
        """The sizes of tiles in which every row gets the bits that it gets in one of USUAL_ROWS.

        In what order a GEMM adds depends on its shape and on the machine alone, so what one layer
        and the head do with some rows tells.
        """
        rows = self.embedding[torch.arange(TILE_SIZES[-1], device=self.device) % self.config.vocab]
        usual = self._gemms(rows, USUAL_ROWS)
        return tuple(
            size for size in TILE_SIZES if torch.equal(self._gemms(rows[:size], size), usual[:size])
        )

    def _gemms(self, rows: Tensor, size: int) -> Tensor:
        """Every kind of GEMM, on tiles of `size`. Shapes: [rows, hidden] to [rows, vocab]."""
        c, layer, results = self.config, self.layers[0], []
        for start in range(0, len(rows), size):
            x = torch.zeros(size, c.hidden, device=self.device)
            part = rows[start : start + size]
            x[: len(part)] = part
            h = layer.qkv(_rms_norm(x, layer.input_norm, c.rms_eps))
            x = x + layer.out(h[:, : c.heads * c.head_dim].contiguous())
            x = layer.mlp(x, c.rms_eps)
            results.append(self.head(_rms_norm(x, self.norm, c.rms_eps))[: len(part)])
        return torch.cat(results)


def _layer(take: Callable[..., Tensor], c: ModelConfig, prefix: str) -> LayerWeights:
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim

    def stack(part: str, width: int, **rows: int) -> TileLinear:
        whole = [take(f"{prefix}{part}.{name}", count, width) for name, count in rows.items()]
        return TileLinear(torch.cat(whole), USUAL_ROWS)

    return LayerWeights(
        input_norm=take(prefix + "input_layernorm", c.hidden),
        qkv=stack("self_attn", c.hidden, q_proj=q, k_proj=kv, v_proj=kv),
        out=stack("self_attn", q, o_proj=c.hidden),
        post_norm=take(prefix + "post_attention_layernorm", c.hidden),
        gate_up=stack("mlp", c.hidden, gate_proj=c.intermediate, up_proj=c.intermediate),
        down=stack("mlp", c.intermediate, down_proj=c.hidden),
    )


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + head_dim / 2). Shapes: `x` [rows, heads, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _rope_table(config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Shapes: two tables [max_positions, 1, head_dim / 2], computed in float64."""
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    angles = np.arange(config.max_positions)[:, None, None] * config.rope_theta**-exponents
    cos, sin = (torch.from_numpy(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
    return cos.to(device), sin.to(device)
