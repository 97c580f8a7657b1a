"""Paged attention: each row of a tile over its own entries, wherever they lie in the pool.

On a CUDA device it is a kernel of `kvtier_kernels`, elsewhere the compiled loops below. Either goes
through a row's entries in their order and looks at nothing else, so its bits depend on the row
alone; a neighbour's bias changes nothing, as a bias of zero is added exactly.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numba import njit
from torch import Tensor

from kvtier_kernels import Attention
from kvtier_kernels import paged_attention as attend_on_cuda
from kvtier_worker.tile import Tile

LOG2_E: Final = np.float32(1.4426950408889634)
LOWEST_EXPONENT: Final = np.float32(-126.0)
"""Below it 2^x is no normal number any more: a weight as small as that stays there."""
EXPONENT_BIAS: Final = np.int32(127)
MANTISSA_BITS: Final = np.int32(23)
# 2^x for -0.5 <= x <= 0.5 as a polynomial, from x^6 down; its error is below 2^-22.
C6: Final = np.float32(1.5403530e-4)
C5: Final = np.float32(1.3333558e-3)
C4: Final = np.float32(9.6181291e-3)
C3: Final = np.float32(5.5504109e-2)
C2: Final = np.float32(2.4022651e-1)
C1: Final = np.float32(6.9314718e-1)
ONE: Final = np.float32(1.0)
HALF: Final = np.float32(0.5)
NOTHING: Final = np.float32(0.0)

NO_BIAS: Final = np.zeros((0, 0), np.float32)
NO_GROUPS: Final = np.zeros(0, np.int64)
NO_MASSES: Final = np.zeros((0, 0), np.float32)


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

    Shapes: `q` [tile rows, heads, head_dim]; `k_pages`, `v_pages` [pages, block_tokens, kv_heads,
    head_dim]; `bias_pages` [pages, block_tokens, kv_heads]; `masses` [rows, tile.group_count]; the
    result is [tile rows, heads * head_dim], zero for padding rows. Head h reads kv head
    h // (heads / kv_heads).
    """
    k, v = k_pages.flatten(0, 1), v_pages.flatten(0, 1)
    bias = bias_pages.flatten(0, 1) if bias_pages is not None and tile.biased else None
    groups = None if masses is None else tile.groups
    result = q.new_zeros(q.shape)
    if q.device.type == "cuda":
        rows = slice(tile.rows)
        attention = Attention(
            q[rows], k, v, bias, tile.entries, tile.starts, tile.longest, groups, masses
        )
        result[rows] = attend_on_cuda(attention)
        return result.flatten(1)
    _attend(
        (q * q.shape[2] ** -0.5).numpy(),
        k.numpy(),
        v.numpy(),
        NO_BIAS if bias is None else bias.numpy(),
        tile.entries.numpy(),
        tile.starts.numpy(),
        NO_GROUPS if groups is None else groups.numpy(),
        NO_MASSES if masses is None else masses.numpy(),
        result.numpy(),
    )
    return result.flatten(1)


def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    """The function as machine code, made at its first call, kept on disk if that is possible.

    The order of a sum may be any, but it is fixed when the code is made.
    """
    loose: Any = {"fastmath": {"reassoc", "contract", "nsz", "nnan"}, "nogil": True}
    try:
        return njit(cache=True, **loose)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # no directory to keep it in can be written
        return njit(**loose)(function)  # type: ignore[no-any-return]


@_compiled
def _products(query, k, own, kv_head, products):  # type: ignore[no-untyped-def]
    """The query's products with its entries' keys."""
    for i in range(len(own)):
        key, product = k[np.uint64(own[i]), kv_head], NOTHING
        for d in range(len(query)):
            product += query[d] * key[d]
        products[i] = product


@_compiled
def _softmax(weights, powers):  # type: ignore[no-untyped-def]
    """Turn logits into weights whose sum is 1. Shapes: both [entries]; `powers` is int32."""
    top = weights[0]
    for i in range(len(weights)):
        top = max(top, weights[i])
    for i in range(len(weights)):
        x = max((weights[i] - top) * LOG2_E, LOWEST_EXPONENT)
        whole = np.floor(x + HALF)
        x -= whole
        weights[i] = (((((C6 * x + C5) * x + C4) * x + C3) * x + C2) * x + C1) * x + ONE
        powers[i] = (np.int32(whole) + EXPONENT_BIAS) << MANTISSA_BITS
    scales = powers.view(np.float32)
    mass = NOTHING
    for i in range(len(weights)):
        weights[i] *= scales[i]
        mass += weights[i]
    for i in range(len(weights)):
        weights[i] /= mass


@_compiled
def _mix(weights, v, own, kv_head, out):  # type: ignore[no-untyped-def]
    """Add its entries' values, weighted. Shapes: `out` [head_dim]."""
    for i in range(len(own)):
        value, weight = v[np.uint64(own[i]), kv_head], weights[i]
        for d in range(len(out)):
            out[d] += weight * value[d]


@_compiled
def _attend(q, k, v, bias, entries, starts, groups, masses, out):  # type: ignore[no-untyped-def]
    """Shapes: `q`, `out` [rows, heads, head_dim]; `k`, `v` [slots, kv_heads, head_dim]; `bias`
    [slots, kv_heads] or empty; `groups` [entries] and `masses` [rows, groups] or empty.
    """
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    sums = np.empty(masses.shape[1], np.float32)
    for row in range(len(starts) - 1):
        own = entries[starts[row] : starts[row + 1]]
        weights = np.empty(len(own), np.float32)
        powers = np.empty(len(own), np.int32)
        for head in range(heads):
            kv_head = np.uint64(head // group)
            _products(q[row, head], k, own, kv_head, weights)
            if len(bias):
                for i in range(len(own)):
                    weights[i] += bias[np.uint64(own[i]), kv_head]
            _softmax(weights, powers)
            _mix(weights, v, own, kv_head, out[row, head])
            if len(groups):
                sums[:] = NOTHING
                for i in range(len(own)):
                    sums[groups[starts[row] + i]] += weights[i]
                for i in range(len(sums)):
                    masses[row, i] = max(masses[row, i], sums[i])
