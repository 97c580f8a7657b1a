"""Blocks of the engine on a GPU: in one piece each, or gathered and scattered around the copies.

With the layout that the connector asks for, a block of all layers is one piece of memory, and its
copy is one DMA between the GPU and the arena. Other layouts go through a buffer on the GPU.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from kvtier_client import cuda
from kvtier_client.arena import Arena
from kvtier_client.engines.vllm.paged import Stack, record_bytes
from kvtier_client.errors import InvalidArgument

WINDOW_BYTES: Final = 128 << 20
"""Blocks that are copied between two looks at the deadline, and the largest buffer for them."""


def stack_view(stack: Stack, blocks: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A stack's memory as bytes. Shapes: [blocks, layers, page_bytes].

    Errors: InvalidArgument when none of the tensors has its memory.
    """
    for tensor in tensors:
        storage = tensor.untyped_storage()
        offset = stack.address - storage.data_ptr()
        if 0 <= offset < storage.nbytes():
            empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            shape = (blocks, stack.layers, stack.page_bytes)
            stride = (stack.block_stride, stack.layer_stride, 1)
            return empty.set_(storage, offset, shape, stride)
    raise InvalidArgument("a layer's pages lie outside of the tensors that were registered")


def _piece(stack: Stack, buffer: torch.Tensor) -> torch.Tensor:
    """A stack's part of records. Shapes: [n, layers, page_bytes]."""
    shape = (len(buffer), stack.layers, stack.page_bytes)
    return buffer.as_strided(
        shape, (buffer.stride(0), stack.page_bytes, 1), buffer.storage_offset() + stack.offset
    )


def gather(
    stacks: Sequence[tuple[Stack, torch.Tensor]], index: torch.Tensor, buffer: torch.Tensor
) -> None:
    """Blocks to records. Shapes: index [n], buffer [n, record_bytes]."""
    for stack, view in stacks:
        _piece(stack, buffer).copy_(view[index])


def scatter(
    stacks: Sequence[tuple[Stack, torch.Tensor]], index: torch.Tensor, buffer: torch.Tensor
) -> None:
    """Records to blocks. Shapes: as for `gather`."""
    for stack, view in stacks:
        view[index] = _piece(stack, buffer)


class CudaMemory:
    """A group's blocks in the memory of a GPU."""

    def __init__(self, stacks: Sequence[Stack], blocks: int, tensors: list[torch.Tensor]) -> None:
        self._device = tensors[0].device
        self._record_bytes = record_bytes(stacks)
        self._stacks = [(stack, stack_view(stack, blocks, tensors)) for stack in stacks]
        self._whole = len(stacks) == 1 and stacks[0].layers == 1

    def prepare(self, arena: Arena) -> None:
        """As `Memory.prepare`: registers the arena with CUDA, which may take seconds."""
        with torch.cuda.device(self._device):
            cuda.registration(arena)

    def windows(self, ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """As `Memory.windows`."""
        step = max(1, WINDOW_BYTES // self._record_bytes)
        return ((i, min(i + step, len(ids))) for i in range(0, len(ids), step))

    def source(self, ids: Sequence[int]) -> list[torch.Tensor]:
        """As `Memory.source`; ordered after what is under way on the calling thread's stream."""
        if self._whole:
            return self._rows(ids)
        buffer = self._buffer(len(ids))
        gather(self._stacks, self._index(ids), buffer)
        return list(buffer)

    def target(self, ids: Sequence[int], after: Any) -> tuple[Any, Callable[[int], None]]:
        """As `Memory.target`; waits on the calling thread for what was under way."""
        after.synchronize()
        if self._whole:
            return self._rows(ids), lambda got: None
        buffer = self._buffer(len(ids))

        def finish(got: int) -> None:
            with torch.cuda.device(self._device):
                scatter(self._stacks, self._index(ids[:got]), buffer[:got])
                torch.cuda.current_stream().synchronize()

        return list(buffer), finish

    def moment(self) -> Any:
        """As `Memory.moment`: an event on the engine's stream."""
        with torch.cuda.device(self._device):
            return torch.cuda.current_stream().record_event()

    def _rows(self, ids: Sequence[int]) -> list[torch.Tensor]:
        view = self._stacks[0][1]
        return [view[id, 0] for id in ids]

    def _buffer(self, records: int) -> torch.Tensor:
        return torch.empty((records, self._record_bytes), dtype=torch.uint8, device=self._device)

    def _index(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self._device)
