"""Launches gather_scatter.cu through CuPy, on torch's memory and torch's current stream.

CuPy is imported at the first launch and compiles the source for the GPU at hand; it caches the
result on disk. Signatures and errors are those of `kvtier_kernels`.
"""

from functools import cache
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from kvtier_kernels.geometry import describe

# Few thread blocks: a swap must leave the multiprocessors to decoding, and a handful of them
# already fills the link to the host.
GRID_BLOCKS_MAX = 16
THREADS_PER_BLOCK = 256


def gather_blocks(
    layers_k: list[Tensor], layers_v: list[Tensor], pages: Tensor, out: Tensor
) -> None:
    """Queues the copy of each page of every layer's pools into one contiguous block record."""
    _launch("gather_blocks", layers_k, layers_v, pages, out)


def scatter_blocks(
    layers_k: list[Tensor], layers_v: list[Tensor], pages: Tensor, records: Tensor
) -> None:
    """Queues the copy of contiguous block records back into pages of every layer's pools."""
    _launch("scatter_blocks", layers_k, layers_v, pages, records)


def _launch(
    name: str, layers_k: list[Tensor], layers_v: list[Tensor], pages: Tensor, records: Tensor
) -> None:
    geometry = describe(layers_k, layers_v, pages, records)
    if not records.is_cuda and not records.is_pinned():
        raise ValueError("records are in host memory that CUDA does not know: register it first")
    if geometry.segments == 0:
        return
    import cupy

    words = torch.tensor(geometry.words(), dtype=torch.int64, pin_memory=True)
    description = words.to(pages.device, non_blocking=True)
    stream = torch.cuda.current_stream(pages.device)
    grid = (min(geometry.segments, GRID_BLOCKS_MAX),)
    with cupy.cuda.Device(pages.device.index), cupy.cuda.ExternalStream(stream.cuda_stream):
        argument = cupy.uint64(description.data_ptr())
        _module().get_function(name)(grid, (THREADS_PER_BLOCK,), (argument,))


@cache
def _module() -> Any:
    import cupy

    source = resources.files("kvtier_kernels").joinpath("gather_scatter.cu").read_text("utf-8")
    return cupy.RawModule(code=source, options=("--std=c++17",))
