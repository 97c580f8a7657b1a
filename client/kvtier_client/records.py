"""What callers hand over as records, turned into copies from and to arena slots.

A record is the content of one block. Records may be one array or tensor whose first axis counts
blocks, a sequence of buffers, or a callable that fills or drains the arena's views itself. CPU
tensors are known by their methods, so torch is never imported for them; CUDA tensors go to
`cuda.py`.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from kvtier_client.arena import Arena, Bytes, Offsets, runs
from kvtier_client.errors import InvalidArgument

Records = Any
"""An array or tensor [n, ...], a sequence of n buffers, or `callable(views, i, j)`."""
Handler = Callable[[list[Bytes], int, int], None]


class Slots:
    """Leased slots in the arena, one per block of a copy."""

    __slots__ = ("arena", "block_bytes", "offsets", "slot_bytes")

    def __init__(self, arena: Arena, offsets: Offsets, block_bytes: int, slot_bytes: int) -> None:
        self.arena = arena
        self.offsets = offsets
        self.block_bytes = block_bytes
        self.slot_bytes = slot_bytes


class Copier(Protocol):
    """Copies blocks `i .. i+len(slots)` between records and slots; returns when bytes are there."""

    def store(self, slots: Slots, i: int) -> None:
        """Records to slots."""

    def load(self, slots: Slots, i: int) -> None:
        """Slots to records."""


class MatrixCopier:
    """Records that lie at one distance from each other. Shapes: matrix [n, block_bytes]."""

    __slots__ = ("matrix", "owner")

    def __init__(self, matrix: Bytes, owner: object = None) -> None:
        self.matrix = matrix
        self.owner = owner

    def store(self, slots: Slots, i: int) -> None:
        """As `Copier.store`."""
        if len(slots.offsets) == 1:
            np.copyto(slots.arena.block(int(slots.offsets[0]), slots.block_bytes), self.matrix[i])
            return
        for first, count, offset in runs(slots.offsets, slots.slot_bytes):
            view = slots.arena.matrix(offset, count, slots.block_bytes, slots.slot_bytes)
            np.copyto(view, self.matrix[i + first : i + first + count])

    def load(self, slots: Slots, i: int) -> None:
        """As `Copier.load`."""
        if len(slots.offsets) == 1:
            np.copyto(self.matrix[i], slots.arena.block(int(slots.offsets[0]), slots.block_bytes))
            return
        for first, count, offset in runs(slots.offsets, slots.slot_bytes):
            view = slots.arena.matrix(offset, count, slots.block_bytes, slots.slot_bytes)
            np.copyto(self.matrix[i + first : i + first + count], view)


class RowsCopier:
    """Records scattered in memory. Shapes: each row [block_bytes]."""

    __slots__ = ("owner", "rows")

    def __init__(self, rows: list[Bytes], owner: object = None) -> None:
        self.rows = rows
        self.owner = owner

    def store(self, slots: Slots, i: int) -> None:
        """As `Copier.store`."""
        for row, view in enumerate(slots.arena.blocks(slots.offsets, slots.block_bytes), i):
            np.copyto(view, self.rows[row])

    def load(self, slots: Slots, i: int) -> None:
        """As `Copier.load`."""
        for row, view in enumerate(slots.arena.blocks(slots.offsets, slots.block_bytes), i):
            np.copyto(self.rows[row], view)


class CallableCopier:
    """The caller's own code fills or drains the views; it must have finished when it returns."""

    __slots__ = ("handler",)

    def __init__(self, handler: Handler) -> None:
        self.handler = handler

    def store(self, slots: Slots, i: int) -> None:
        """As `Copier.store`."""
        views = slots.arena.blocks(slots.offsets, slots.block_bytes)
        self.handler(views, i, i + len(views))

    def load(self, slots: Slots, i: int) -> None:
        """As `Copier.load`."""
        views = slots.arena.blocks(slots.offsets, slots.block_bytes)
        for view in views:
            view.flags.writeable = False
        self.handler(views, i, i + len(views))


def copier(records: Records, n: int, block_bytes: int, writable: bool) -> Copier:
    """The way to copy `n` records of `block_bytes` each.

    Errors: InvalidArgument when number, size, contiguity or writability do not fit.
    """
    if isinstance(records, np.ndarray):
        return _from_array(records, n, block_bytes, writable)
    if hasattr(records, "data_ptr"):
        if _is_cuda(records):
            return _cuda([records] if n == 1 else list(records), n, block_bytes)
        return _from_array(_tensor_array(records), n, block_bytes, writable, records)
    if isinstance(records, Sequence) and not isinstance(records, bytes | bytearray | memoryview):
        return _from_sequence(records, n, block_bytes, writable)
    if callable(records):
        return CallableCopier(records)
    return _from_array(_buffer_array(records), n, block_bytes, writable, records)


def _from_array(
    array: "np.ndarray[Any, Any]", n: int, block_bytes: int, writable: bool, owner: object = None
) -> Copier:
    if writable and not array.flags.writeable:
        raise InvalidArgument("the records to restore into are read-only")
    if array.nbytes != n * block_bytes:
        raise InvalidArgument(
            f"records of {array.nbytes} bytes for {n} blocks of {block_bytes}: "
            "they must have exactly one block_bytes for every page"
        )
    if array.flags.c_contiguous:
        return MatrixCopier(array.reshape(-1).view(np.uint8).reshape(n, block_bytes), owner)
    if array.shape[0] != n:
        raise InvalidArgument("records must be contiguous, or have one first-axis entry per block")
    return RowsCopier([_row(one, block_bytes, writable) for one in array], owner)


def _from_sequence(records: Sequence[Any], n: int, block_bytes: int, writable: bool) -> Copier:
    if len(records) != n:
        raise InvalidArgument(f"{len(records)} records for {n} pages: give one for each page")
    if n and _is_cuda(records[0]):
        return _cuda(records, n, block_bytes)
    rows = [_row(record, block_bytes, writable) for record in records]
    return RowsCopier(rows, records)


def _row(record: Any, block_bytes: int, writable: bool) -> Bytes:
    if isinstance(record, np.ndarray):
        array = record
    elif hasattr(record, "data_ptr"):
        array = _tensor_array(record)
    else:
        array = _buffer_array(record)
    if array.nbytes != block_bytes:
        raise InvalidArgument(f"a record of {array.nbytes} bytes for a block of {block_bytes}")
    if not array.flags.c_contiguous:
        raise InvalidArgument("a record must be contiguous in memory")
    if writable and not array.flags.writeable:
        raise InvalidArgument("a record to restore into is read-only")
    if array.ndim == 1 and array.dtype == np.uint8:
        return array
    return array.reshape(-1).view(np.uint8)


def _buffer_array(record: Any) -> Bytes:
    try:
        view = memoryview(record)
    except TypeError:
        raise InvalidArgument(
            f"{type(record).__name__} is no record: give a buffer, array, tensor or callable"
        ) from None
    if not view.c_contiguous:
        raise InvalidArgument("a record must be contiguous in memory")
    return np.frombuffer(view.cast("B"), np.uint8)


def _tensor_array(tensor: Any) -> Bytes:
    """The memory of a CPU tensor of any dtype. Shapes: [bytes]."""
    if getattr(tensor, "device", None) is None or tensor.device.type != "cpu":
        raise InvalidArgument(f"records on device {getattr(tensor, 'device', '?')} are unknown")
    if not tensor.is_contiguous():
        raise InvalidArgument("a record must be contiguous in memory")
    memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    memory._owner = tensor  # the array keeps the memory object, that keeps the tensor
    return np.frombuffer(memory, np.uint8)


def _is_cuda(record: Any) -> bool:
    return bool(getattr(record, "is_cuda", False))


def _cuda(records: Sequence[Any], n: int, block_bytes: int) -> Copier:
    from kvtier_client import cuda

    return cuda.CudaCopier(records, n, block_bytes)
