"""Paged attention whose bits depend on a row's own keys only.

Keys come in chunks of a fixed number of entries, and each (row, kv head) is a product of its own
at one fixed shape. The maximum of the scores is exact in any order; sums run inside a chunk, and
then chunk by chunk from the front. A chunk beyond a row's length adds exact zeros, so a longer
neighbour changes nothing; nor does a neighbour's bias, as a bias of zero is added exactly.
"""

import torch
from torch import Tensor

from kvtier_worker.tile import CHUNK_TOKENS, TILE_ROWS, Tile


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    tile: Tile,
    bias_pages: Tensor | None = None,
    masses: Tensor | None = None,
) -> Tensor:
    """Attend each row to its own entries.

    With `bias_pages` each entry's bias is added to its logit where the tile has biased rows. With
    `masses` the share of attention that each group of entries gets is raised there, if it is more
    than what the heads of earlier calls gave it.

    Shapes: `q` [TILE_ROWS, heads, head_dim]; `k_pages`, `v_pages` [pages, block_tokens, kv_heads,
    head_dim]; `bias_pages` [pages, block_tokens, kv_heads]; `masses` [rows, tile.group_count]; the
    result is [TILE_ROWS, heads * head_dim], zero for padding rows. Head h reads kv head
    h // (heads / kv_heads).
    """
    heads, head_dim = q.shape[1], q.shape[2]
    kv_heads = k_pages.shape[2]
    lanes, group = tile.rows * kv_heads, heads // kv_heads
    queries = (q[: tile.rows] * head_dim**-0.5).reshape(lanes, group, head_dim)
    k_rows, v_rows = k_pages.view(-1, head_dim), v_pages.view(-1, head_dim)
    bias_rows = bias_pages.view(-1) if bias_pages is not None and tile.biased else None

    scores = []
    for index, hidden in zip(tile.keys, tile.hidden, strict=True):
        k = k_rows.index_select(0, index).view(lanes, CHUNK_TOKENS, head_dim)
        s = torch.bmm(queries, k.transpose(1, 2)).view(tile.rows, kv_heads, group, CHUNK_TOKENS)
        if bias_rows is not None:
            s += bias_rows.index_select(0, index).view(tile.rows, kv_heads, 1, CHUNK_TOKENS)
        scores.append(s.masked_fill_(hidden, float("-inf")).view(lanes, group, CHUNK_TOKENS))
    top = scores[0].amax(-1, keepdim=True)
    for s in scores[1:]:
        top = torch.maximum(top, s.amax(-1, keepdim=True))

    out = torch.zeros_like(queries)
    mass = torch.zeros_like(top)
    for index, s in zip(tile.keys, scores, strict=True):
        v = v_rows.index_select(0, index).view(lanes, CHUNK_TOKENS, head_dim)
        weights = s.sub_(top).exp_()
        mass += weights.sum(-1, keepdim=True)
        out += torch.bmm(weights, v)
    if masses is not None:
        _measure(scores, mass, tile, masses)
    result = q.new_zeros(TILE_ROWS, heads * head_dim)
    result[: tile.rows] = (out / mass).view(tile.rows, heads * head_dim)
    return result


def _measure(weights: list[Tensor], mass: Tensor, tile: Tile, masses: Tensor) -> None:
    """Raise each row's group masses to those of the head that gives most.

    Shapes: `weights` one [rows * kv_heads, group, CHUNK_TOKENS] per chunk; `mass` the sums of all.
    """
    assert tile.groups is not None
    heads = mass.shape[0] // tile.rows * mass.shape[1]
    sums = mass.new_zeros(tile.rows, heads, tile.group_count)
    for chunk, groups in zip(weights, tile.groups, strict=True):
        index = groups[:, None, :].expand(tile.rows, heads, CHUNK_TOKENS)
        sums.scatter_add_(2, index, chunk.view(tile.rows, heads, CHUNK_TOKENS))
    shares = sums / mass.view(tile.rows, heads, 1)
    torch.maximum(masses, shares.amax(1), out=masses)
