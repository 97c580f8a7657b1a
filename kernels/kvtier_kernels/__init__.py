"""Kernels on paged KV: block copies, moves of entries, attention and the score pass, by device."""

from torch import Tensor

from kvtier_kernels import launch, reference
from kvtier_kernels.scores import KeyScores

__all__ = [
    "KeyScores",
    "gather_blocks",
    "move_entries",
    "paged_attention",
    "scatter_blocks",
    "score_keys",
]


def gather_blocks(
    layers_k: list[Tensor], layers_v: list[Tensor], pages: Tensor, out: Tensor
) -> None:
    """Copies each page of every layer's pools into one contiguous block record.

    Shapes: `layers_k` and `layers_v` hold a pool [pages, block_tokens, kv_heads, head_dim] per
    layer; `pages` is int64 [n]; `out` is [n, layers, 2, block_tokens, kv_heads, head_dim], records
    contiguous, K before V. With pools on a GPU, `out` is on that GPU or in host memory that is
    registered with CUDA, and the copy is queued on torch's current stream.
    Errors: `ValueError` when shapes, types, strides or devices do not fit together. A page outside
    the pool is a programmer error: `IndexError` on a CPU, a trapped kernel on a GPU.
    """
    gather = launch.gather_blocks if pages.is_cuda else reference.gather_blocks
    gather(layers_k, layers_v, pages, out)


def scatter_blocks(
    layers_k: list[Tensor], layers_v: list[Tensor], pages: Tensor, records: Tensor
) -> None:
    """Copies contiguous block records back into pages of every layer's pools.

    Shapes and errors: as for `gather_blocks`, with `records` read instead of written; no page may
    occur twice in `pages`.
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


def paged_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    biases: Tensor | None,
    entries: Tensor,
    starts: Tensor,
    longest: int,
    groups: Tensor | None = None,
    masses: Tensor | None = None,
) -> Tensor:
    """Lets each row of queries attend to its own entries; a row without any gets zeros.

    An entry's bias is added to its logits. A row's bits depend on its own queries and entries
    alone. With `masses` the share of attention that each group of a row's entries gets is raised
    there to what the head gives that gives most, if that is more.

    Shapes: `queries` float32 [rows, heads, head_dim], with any stride between rows; `keys`,
    `values` float32 [slots, kv_heads, head_dim]; `biases` [slots, kv_heads]; `entries` int64, the
    rows' slots one row after the other, of which row i has those from `starts[i]` to `starts[i +
    1]`, at most `longest`; `groups` int64, one number per entry; `masses` [rows, groups]; the
    result is [rows, heads, head_dim]. Head h reads kv head h // (heads / kv_heads).
    Errors: `ValueError` when the tensors do not fit together, and on a GPU for a head_dim not in
    `plans.HEAD_DIMS` or more heads per kv head than `plans.GROUP_MAX`. A slot outside the pools or
    a row longer than `longest` is a programmer error: `IndexError` on a CPU, a trapped kernel on a
    GPU.
    """
    attend = launch.paged_attention if queries.is_cuda else reference.paged_attention
    return attend(queries, keys, values, biases, entries, starts, longest, groups, masses)


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
