"""Where a block of the engine lies in memory, and copies of it on the CPU.

The engine has one tensor per layer whose first axis counts blocks. A block's bytes in one layer are
its page; pages are copied whole, since kernels order tokens inside them as they like. A record in
the arena has the pages of all layers of a group in the order of their addresses.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtier_client.arena import Arena, Bytes
from kvtier_client.crew import Crew
from kvtier_client.errors import InvalidArgument

WINDOW_BYTES: Final = 64 << 20
"""Blocks that are copied between two looks at the deadline."""


class Pages(msgspec.Struct, frozen=True):
    """The pages of one layer. Units: bytes."""

    address: int
    block_stride: int
    page_bytes: int


class Stack(msgspec.Struct, frozen=True):
    """Pages at equal distances, as one strided array. Units: bytes.

    Shapes: [blocks, layers, page_bytes]; in a record they begin at `offset`.
    """

    address: int
    block_stride: int
    layers: int
    layer_stride: int
    page_bytes: int
    offset: int

    @property
    def record_bytes(self) -> int:
        """What it takes of a record."""
        return self.layers * self.page_bytes


def pages_of(tensor: Any, blocks: int) -> Pages:
    """The pages of a layer's tensor. Shapes: [blocks × r, ...], r kernel blocks in each block.

    Errors: InvalidArgument when the pages are not whole pieces of memory.
    """
    shape, strides, width = tuple(tensor.shape), tensor.stride(), tensor.element_size()
    if not shape or shape[0] % blocks:
        raise InvalidArgument(f"a KV cache of shape {shape} for {blocks} blocks")
    pieces, page, expected = shape[0] // blocks, 1, 1
    for stride, size in sorted(zip(strides[1:], shape[1:], strict=True)):
        if size > 1 and stride != expected:
            raise InvalidArgument(
                f"a KV cache of shape {shape} and strides {strides} has pages in several pieces: "
                "set VLLM_KV_CACHE_LAYOUT=LBHNC"
            )
        expected *= size
        page *= size
    if pieces > 1 and strides[0] != page:
        raise InvalidArgument(f"the {pieces} kernel blocks of a block lie apart: {strides}")
    stride = strides[0] * width * pieces
    return Pages(tensor.data_ptr(), stride, page * width * pieces)


def stacks_of(layers: Sequence[Pages]) -> list[Stack]:
    """As few stacks as describe all layers. Layers that share their memory count once."""
    merged: list[Pages] = []
    for pages in sorted(set(layers), key=lambda pages: pages.address):
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.address + last.page_bytes == pages.address
            and (last.block_stride == pages.block_stride != last.page_bytes)
        ):
            merged[-1] = Pages(last.address, last.block_stride, last.page_bytes + pages.page_bytes)
        else:
            merged.append(pages)
    stacks: list[Stack] = []
    offset = 0
    for pages in merged:
        last_stack = stacks[-1] if stacks else None
        joined = None if last_stack is None else _joined(last_stack, pages)
        if joined is None:
            stacks.append(Stack(pages.address, pages.block_stride, 1, 0, pages.page_bytes, offset))
        else:
            stacks[-1] = joined
        offset += pages.page_bytes
    return stacks


def _joined(stack: Stack, pages: Pages) -> Stack | None:
    if (stack.block_stride, stack.page_bytes) != (pages.block_stride, pages.page_bytes):
        return None
    last = stack.address + (stack.layers - 1) * stack.layer_stride
    step = pages.address - last
    if stack.layers > 1 and step != stack.layer_stride:
        return None
    return msgspec.structs.replace(stack, layers=stack.layers + 1, layer_stride=step)


def record_bytes(stacks: Sequence[Stack]) -> int:
    """Size of a record."""
    return sum(stack.record_bytes for stack in stacks)


class HostMemory:
    """A group's blocks in the memory of this process."""

    def __init__(self, stacks: Sequence[Stack], blocks: int, owner: Any, crew: Crew) -> None:
        """`owner` keeps the memory alive."""
        self._owner = owner
        self._crew = crew
        self._record_bytes = record_bytes(stacks)
        self._arrays = [(stack, _array(stack, blocks)) for stack in stacks]

    def prepare(self, arena: Arena) -> None:
        """As `Memory.prepare`: there is nothing to do on a CPU."""

    def windows(self, ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """As `Memory.windows`."""
        step = max(1, WINDOW_BYTES // self._record_bytes)
        return ((i, min(i + step, len(ids))) for i in range(0, len(ids), step))

    def source(self, ids: Sequence[int]) -> Callable[[list[Bytes], int, int], None]:
        """As `Memory.source`: fills slots from blocks."""
        return lambda views, i, j: self._copy(views, ids[i:j], store=True)

    def target(self, ids: Sequence[int], after: Any) -> tuple[Any, Callable[[int], None]]:
        """As `Memory.target`: drains slots into blocks."""
        return lambda views, i, j: self._copy(views, ids[i:j], store=False), lambda got: None

    def moment(self) -> None:
        """As `Memory.moment`: nothing is under way on a CPU."""

    def _copy(self, views: list[Bytes], ids: Sequence[int], store: bool) -> None:
        def one(k: int) -> None:
            view, id = views[k], ids[k]
            for stack, array in self._arrays:
                piece = view[stack.offset : stack.offset + stack.record_bytes]
                piece = piece.reshape(stack.layers, stack.page_bytes)
                if store:
                    np.copyto(piece, array[id])
                else:
                    np.copyto(array[id], piece)

        self._crew.run(len(views), len(views) * self._record_bytes, one)


def _array(stack: Stack, blocks: int) -> NDArray[np.uint8]:
    """A stack's memory. Shapes: [blocks, layers, page_bytes]."""
    span = (blocks - 1) * stack.block_stride + (stack.layers - 1) * stack.layer_stride
    memory: Any = (ctypes.c_uint8 * (span + stack.page_bytes)).from_address(stack.address)
    return np.lib.stride_tricks.as_strided(
        np.frombuffer(memory, np.uint8),
        (blocks, stack.layers, stack.page_bytes),
        (stack.block_stride, stack.layer_stride, 1),
    )
