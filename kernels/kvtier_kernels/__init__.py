"""Kernels on paged KV: blocks back to pages, moves of entries, attention, the score pass."""

from torch import Tensor

from kvtier_kernels import launch, reference
from kvtier_kernels.attended import Attention
from kvtier_kernels.scores import KeyScores

__all__ = [
    "Attention",
    "KeyScores",
    "move_entries",
    "paged_attention",
    "scatter_blocks",
    "score_keys",
]


def scatter_blocks(
    layers_k: list[Tensor], layers_v: list[Tensor], pages: Tensor, records: Tensor
) -> None:
    """Copies contiguous block records into pages of every layer's pools.

    With pools on a GPU, `records` are on that GPU or in host memory that is registered with CUDA,
    and the copy is queued on torch's current stream. No page may occur twice in `pages`.

    Shapes: `layers_k` and `layers_v` hold a pool [pages, block_tokens, kv_heads, head_dim] per
    layer; `pages` is int64 [n]; `records` are [n, layers, 2, block_tokens, kv_heads, head_dim],
    each contiguous, K before V.
    Errors: `ValueError` when shapes, types, strides or devices do not fit together. A page outside
    the pool is a programmer error: `IndexError` on a CPU, a trapped kernel on a GPU.
    """
    scatter = launch.scatter_blocks if pages.is_cuda else reference.scatter_blocks
    scatter(layers_k, layers_v, pages, records)


def move_entries(pools: list[Tensor], sources: Tensor, targets: Tensor) -> None:
    """Moves rows of every pool to other slots, as if all were read before one is written.

    Sources and targets may overlap in any way; no slot may occur twice in `targets`. On a GPU it is
    one launch for all pools, queued on torch's current stream.

    Shapes: `pools` hold [slots, ...], contiguous, with rows of any width and type: K, V and biases
    of all layers; `sources`, `targets` int64 [n].
    Errors: `ValueError` when the tensors do not fit together, and on a GPU for more entries than
    `plans.MOVE_ENTRIES_MAX`. A slot outside the pools is a
    programmer error: `IndexError` on a CPU, a trapped kernel on a GPU.
    """
    move = launch.move_entries if sources.is_cuda else reference.move_entries
    move(pools, sources, targets)


def paged_attention(attention: Attention) -> Tensor:
    """Lets each row of queries attend to its own entries; a row without any gets zeros.

    A row's bits depend on its own queries and entries alone.

    Shapes: the result is [rows, heads, head_dim].
    Errors: `ValueError` when the tensors do not fit together, and on a GPU for a head_dim not in
    `plans.HEAD_DIMS` or more heads per kv head than `plans.GROUP_MAX`. A slot outside the pools or
    a row longer than `longest` is a programmer error: `IndexError` on a CPU, a trapped kernel on a
    GPU.
    """
    on_gpu = attention.queries.is_cuda
    attend = launch.paged_attention if on_gpu else reference.paged_attention
    return attend(attention)


def score_keys(
    keys: list[Tensor],
    slots: Tensor,
    queries: Tensor,
    squared: bool = False,
    values: list[Tensor] | None = None,
) -> KeyScores:
    """Says how much attention each entry of a step gets from queries that see all of the step.

    An entry's importance is the mean of its shares over a kv head's queries, or with `squared` the
    root of the mean of their squares. With `values` the attention's outputs are told as well. On a
    GPU the logits of all layers are never kept at once.

    Shapes: `keys`, `values` hold a pool float32 [slots, kv_heads, head_dim] per layer; `slots`
    int64 [entries], one at least; `queries` float32 [layers, rows, heads, head_dim], one row at
    least.
    Errors: as for `paged_attention`.
    """
    score = launch.score_keys if slots.is_cuda else reference.score_keys
    return score(keys, slots, queries, squared, values)
