"""The kernels in plain torch: what runs on a CPU, and the oracle of the CUDA kernels.

Signatures and errors are those of `kvtier_kernels`.
"""

import torch
from torch import Tensor

from kvtier_kernels.attended import Attention
from kvtier_kernels.geometry import check
from kvtier_kernels.plans import check_attention, check_moves, check_scoring
from kvtier_kernels.scores import KeyScores


def scatter_blocks(
    layers_k: list[Tensor], layers_v: list[Tensor], pages: Tensor, records: Tensor
) -> None:
    """Copies contiguous block records back into pages of every layer's pools."""
    check(layers_k, layers_v, pages, records)
    for layer, (keys, values) in enumerate(zip(layers_k, layers_v, strict=True)):
        keys[pages] = records[:, layer, 0]
        values[pages] = records[:, layer, 1]


def move_entries(pools: list[Tensor], sources: Tensor, targets: Tensor) -> None:
    """Moves rows of every pool to other slots, as if all were read before one is written."""
    check_moves(pools, sources, targets)
    for pool in pools:
        pool[targets] = pool[sources]


def paged_attention(a: Attention) -> Tensor:
    """Lets each row of queries attend to its own entries, one row after another."""
    check_attention(a)
    queries, keys, groups, masses = a.queries, a.keys, a.groups, a.masses
    rows, heads, width = queries.shape
    lanes = (keys.shape[1], heads // keys.shape[1], width)
    result = torch.zeros(rows, heads, width, device=queries.device)
    bounds = a.starts.tolist()
    for row in range(rows):
        seen = slice(bounds[row], bounds[row + 1])
        slots = a.entries[seen]
        if not len(slots):
            continue
        if len(slots) > a.longest:
            raise IndexError(f"row {row} has {len(slots)} entries, the longest {a.longest}")
        scaled = (queries[row] * width**-0.5).view(lanes)
        logits = scaled @ keys[slots].permute(1, 2, 0)
        if a.biases is not None:
            logits += a.biases[slots].T[:, None]
        shares = torch.softmax(logits, -1)
        result[row] = (shares @ a.values[slots].transpose(0, 1)).view(heads, width)
        if groups is not None and masses is not None:
            of_heads = masses.new_zeros(heads, masses.shape[1])
            of_heads.index_add_(1, groups[seen], shares.view(heads, -1))
            torch.maximum(masses[row], of_heads.amax(0), out=masses[row])
    return result


def score_keys(
    keys: list[Tensor],
    slots: Tensor,
    queries: Tensor,
    squared: bool = False,
    values: list[Tensor] | None = None,
) -> KeyScores:
    """Says how much attention each entry gets, from all logits at once."""
    check_scoring(keys, values, slots, queries)
    layers, _, heads, width = queries.shape
    kv_heads = keys[0].shape[1]
    group = heads // kv_heads
    grouped = queries.view(layers, -1, kv_heads, group, width).transpose(1, 2)
    grouped = grouped.reshape(layers * kv_heads, -1, width)
    logits = torch.bmm(grouped * width**-0.5, _lanes(keys, slots).transpose(1, 2))
    tops = logits.amax(-1, keepdim=True)
    shares = logits.sub_(tops).exp_()
    masses = shares.sum(-1, keepdim=True)
    shares /= masses
    importance = shares.square().mean(1).sqrt() if squared else shares.mean(1)
    shape = (layers, kv_heads, -1)
    return KeyScores(
        importance=importance.view(shape),
        tops=tops.view(shape),
        masses=masses.view(shape),
        outputs=None
        if values is None
        else torch.bmm(shares, _lanes(values, slots)).view(*shape, group, width),
    )


def _lanes(pools: list[Tensor], slots: Tensor) -> Tensor:
    """Entries of each (layer, kv head). Shapes: the result is [lanes, entries, head_dim]."""
    return torch.stack([pool[slots] for pool in pools]).transpose(1, 2).flatten(0, 1)
