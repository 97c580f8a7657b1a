"""Moves KV blocks between an engine's paged pools and contiguous block records, by device."""

from torch import Tensor

from kvtier_kernels import launch, reference

__all__ = ["gather_blocks", "scatter_blocks"]


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
    device = launch if pages.is_cuda else reference
    device.gather_blocks(layers_k, layers_v, pages, out)


def scatter_blocks(
    layers_k: list[Tensor], layers_v: list[Tensor], pages: Tensor, records: Tensor
) -> None:
    """Copies contiguous block records back into pages of every layer's pools.

    Shapes and errors: as for `gather_blocks`, with `records` read instead of written; no page may
    occur twice in `pages`.
    """
    device = launch if pages.is_cuda else reference
    device.scatter_blocks(layers_k, layers_v, pages, records)
