"""Launches the kernels through CuPy, on torch's memory and torch's current stream.

CuPy is imported at the first launch and compiles the source for the GPU at hand; it caches the
result on disk. Signatures and errors are those of `kvtier_kernels`.
"""

from functools import cache
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from kvtier_kernels.attended import Attention
from kvtier_kernels.geometry import describe
from kvtier_kernels.plans import Launch, Plan, plan_attention, plan_moves, plan_scoring, table
from kvtier_kernels.scores import KeyScores

# Few thread blocks: a swap must leave the multiprocessors to decoding, and a handful of them
# already fills the link to the host.
GRID_BLOCKS_MAX = 16
THREADS_PER_BLOCK = 256


def scatter_blocks(
    layers_k: list[Tensor], layers_v: list[Tensor], pages: Tensor, records: Tensor
) -> None:
    """Queues the copy of contiguous block records into pages of every layer's pools."""
    geometry = describe(layers_k, layers_v, pages, records)
    if not records.is_cuda and not records.is_pinned():
        raise ValueError("records are in host memory that CUDA does not know: register it first")
    if geometry.segments == 0:
        return
    description = table(geometry.words(), pages.device)
    grid = (min(geometry.segments, GRID_BLOCKS_MAX), 1, 1)
    launch = Launch("scatter_blocks", grid, THREADS_PER_BLOCK, (description.data_ptr(),))
    _run(Plan("scatter.cu", pages.device, (launch,), description))


def move_entries(pools: list[Tensor], sources: Tensor, targets: Tensor) -> None:
    """Queues the move of rows of every pool to other slots."""
    _run(plan_moves(pools, sources, targets))


def paged_attention(attention: Attention) -> Tensor:
    """Queues the attention of each row of queries to its own entries."""
    result = attention.queries.new_empty(attention.queries.shape)
    _run(plan_attention(attention, result))
    return result


def score_keys(
    keys: list[Tensor],
    slots: Tensor,
    queries: Tensor,
    squared: bool = False,
    values: list[Tensor] | None = None,
) -> KeyScores:
    """Queues the score pass of a step, and for the outputs the attention of each layer."""
    plans, scores = plan_scoring(keys, slots, queries, squared, values)
    for plan in plans:
        _run(plan)
    return scores


def _run(plan: Plan) -> None:
    if not plan.launches:
        return
    import cupy

    module = _module(plan.source)
    stream = torch.cuda.current_stream(plan.device)
    with cupy.cuda.Device(plan.device.index), cupy.cuda.ExternalStream(stream.cuda_stream):
        for launch in plan.launches:
            arguments = tuple(map(cupy.uint64, launch.arguments))
            module.get_function(launch.kernel)(launch.grid, (launch.threads,), arguments)


@cache
def _module(source: str) -> Any:
    import cupy

    code = resources.files("kvtier_kernels").joinpath(source).read_text("utf-8")
    return cupy.RawModule(code=code, options=("--std=c++17",))
