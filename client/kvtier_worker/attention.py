"""Paged attention whose bits depend on a row's own keys only.

Keys come in chunks of a fixed number of tokens, and each (row, kv head) is a product of its own
at one fixed shape. The maximum of the scores is exact in any order; sums run inside a chunk, and
then chunk by chunk from the front. A chunk beyond a row's length adds exact zeros, so a longer
neighbour changes nothing.
"""

import torch
from torch import Tensor

from kvtier_worker.tile import CHUNK_TOKENS, TILE_ROWS, Tile


def paged_attention(q: Tensor, k_pages: Tensor, v_pages: Tensor, tile: Tile) -> Tensor:
    """Attend each row to the keys of its own pages up to its own position.

    Shapes: `q` [TILE_ROWS, heads, head_dim]; `k_pages`, `v_pages` [pages, block_tokens, kv_heads,
    head_dim]; the result is [TILE_ROWS, heads * head_dim], zero for padding rows. Head h reads kv
    head h // (heads / kv_heads).
    """
    heads, head_dim = q.shape[1], q.shape[2]
    kv_heads = k_pages.shape[2]
    lanes, group = tile.rows * kv_heads, heads // kv_heads
    queries = (q[: tile.rows] * head_dim**-0.5).reshape(lanes, group, head_dim)
    k_rows, v_rows = k_pages.view(-1, head_dim), v_pages.view(-1, head_dim)

    scores = []
    for index, hidden in zip(tile.keys, tile.hidden, strict=True):
        k = k_rows.index_select(0, index).view(lanes, CHUNK_TOKENS, head_dim)
        s = torch.bmm(queries, k.transpose(1, 2)).view(tile.rows, kv_heads, group, CHUNK_TOKENS)
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
    result = q.new_zeros(TILE_ROWS, heads * head_dim)
    result[: tile.rows] = (out / mass).view(tile.rows, heads * head_dim)
    return result
