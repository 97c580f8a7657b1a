"""The copies in plain torch: what runs on a CPU, and the oracle of the CUDA kernels.

Signatures and errors are those of `kvtier_kernels`.
"""

from torch import Tensor

from kvtier_kernels.geometry import check


def gather_blocks(
    layers_k: list[Tensor], layers_v: list[Tensor], pages: Tensor, out: Tensor
) -> None:
    """Copies each page of every layer's pools into one contiguous block record."""
    check(layers_k, layers_v, pages, out)
    for layer, (keys, values) in enumerate(zip(layers_k, layers_v, strict=True)):
        out[:, layer, 0] = keys[pages]
        out[:, layer, 1] = values[pages]


def scatter_blocks(
    layers_k: list[Tensor], layers_v: list[Tensor], pages: Tensor, records: Tensor
) -> None:
    """Copies contiguous block records back into pages of every layer's pools."""
    check(layers_k, layers_v, pages, records)
    for layer, (keys, values) in enumerate(zip(layers_k, layers_v, strict=True)):
        keys[pages] = records[:, layer, 0]
        values[pages] = records[:, layer, 1]
