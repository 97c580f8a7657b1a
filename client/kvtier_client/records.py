"""What callers hand over as records, turned into copies from and to arena slots.

A record is the content of one block. Records may be one array or tensor whose first axis counts
blocks, a sequence of buffers, or a callable that fills or drains the arena's views itself. CPU
tensors are known by their methods, so torch is never imported for them; CUDA tensors go to
`cuda.py`.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np

from kvtier_client.arena import Arena, Bytes, Offsets, cut_runs, runs
from kvtier_client.crew import PIECE_BYTES, Crew
from kvtier_client.errors import InvalidArgument

Records = Any
"""An array or tensor [n, ...], a sequence of n buffers, or `callable(views, i, j)`."""
Handler = Callable[[list[Bytes], int, int], None]
ALONE_BYTES: Final = 64 << 10
"""Scattered records smaller than this are copied by one thread: they would wait for each other."""


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

    def prepare(self) -> None:
        """Look at every record, while its slots are being asked for. Errors: InvalidArgument."""

    def store(self, slots: Slots, i: int, crew: Crew) -> None:
        """Records to slots."""

    def load(self, slots: Slots, i: int, crew: Crew) -> None:
        """Slots to records."""


class MatrixCopier:
    """Small records that lie at one distance from each other, copied by runs of slots.

    Shapes: matrix [n, block_bytes].
    """

    __slots__ = ("matrix", "owner")

    def __init__(self, matrix: Bytes, owner: object = None) -> None:
        self.matrix = matrix
        self.owner = owner

    def prepare(self) -> None:
        """As `Copier.prepare`: there is nothing left to look at."""

    def store(self, slots: Slots, i: int, crew: Crew) -> None:
        """As `Copier.store`."""
        self._copy(slots, i, crew, to_slots=True)

    def load(self, slots: Slots, i: int, crew: Crew) -> None:
        """As `Copier.load`."""
        self._copy(slots, i, crew, to_slots=False)

    def _copy(self, slots: Slots, i: int, crew: Crew, to_slots: bool) -> None:
        arena, block_bytes, slot_bytes = slots.arena, slots.block_bytes, slots.slot_bytes
        pieces = cut_runs(runs(slots.offsets, slot_bytes), PIECE_BYTES // block_bytes, slot_bytes)

        def one(piece: int) -> None:
            first, count, offset = pieces[piece]
            view = arena.matrix(offset, count, block_bytes, slot_bytes)
            rows = self.matrix[i + first : i + first + count]
            if to_slots:
                np.copyto(view, rows)
            else:
                np.copyto(rows, view)

        crew.run(len(pieces), len(slots.offsets) * block_bytes, one)


class RowsCopier:
    """Records copied one by one; large ones are cut. Shapes: each row [block_bytes]."""

    __slots__ = ("block_bytes", "owner", "rows", "writable")

    def __init__(
        self, rows: Sequence[Any] | Bytes, block_bytes: int, writable: bool, owner: object = None
    ) -> None:
        self.rows = rows
        self.block_bytes = block_bytes
        self.writable = writable
        self.owner = owner

    def prepare(self) -> None:
        """As `Copier.prepare`."""
        if not isinstance(self.rows, np.ndarray):
            size, writable = self.block_bytes, self.writable
            self.rows = [_row(record, size, writable) for record in self.rows]

    def store(self, slots: Slots, i: int, crew: Crew) -> None:
        """As `Copier.store`."""
        starts, memory, rows = slots.offsets.tolist(), slots.arena.bytes, self.rows

        def one(k: int, lo: int, hi: int) -> None:
            start = starts[k]
            np.copyto(memory[start + lo : start + hi], rows[i + k][lo:hi])

        _by_block(slots, crew, one)

    def load(self, slots: Slots, i: int, crew: Crew) -> None:
        """As `Copier.load`."""
        starts, memory, rows = slots.offsets.tolist(), slots.arena.bytes, self.rows

        def one(k: int, lo: int, hi: int) -> None:
            start = starts[k]
            np.copyto(rows[i + k][lo:hi], memory[start + lo : start + hi])

        _by_block(slots, crew, one)


def _by_block(slots: Slots, crew: Crew, one: Callable[[int, int, int], None]) -> None:
    """Call `one(k, lo, hi)` for all bytes of all slots, each time for a part of slot `k`."""
    count, size = len(slots.offsets), slots.block_bytes
    if size < ALONE_BYTES:
        for k in range(count):
            one(k, 0, size)
        return
    cuts = max(1, size // PIECE_BYTES)
    step = -(-size // cuts)

    def piece(m: int) -> None:
        k, cut = divmod(m, cuts)
        one(k, cut * step, min(size, (cut + 1) * step))

    crew.run(count * cuts, count * size, piece)


class CallableCopier:
    """The caller's own code fills or drains the views; it must have finished when it returns."""

    __slots__ = ("handler",)

    def __init__(self, handler: Handler) -> None:
        self.handler = handler

    def prepare(self) -> None:
        """As `Copier.prepare`: its records are its own."""

    def store(self, slots: Slots, i: int, crew: Crew) -> None:
        """As `Copier.store`."""
        views = slots.arena.blocks(slots.offsets, slots.block_bytes)
        self.handler(views, i, i + len(views))

    def load(self, slots: Slots, i: int, crew: Crew) -> None:
        """As `Copier.load`."""
        views = slots.arena.blocks(slots.offsets, slots.block_bytes)
        for view in views:
            view.flags.writeable = False
        self.handler(views, i, i + len(views))


def copier(records: Records, n: int, block_bytes: int, writable: bool) -> Copier:
    """The way to copy `n` records of `block_bytes` each.

    What costs time for each record is left to `Copier.prepare`.
    Errors: InvalidArgument when number, size, contiguity or writability do not fit.
    """
    if isinstance(records, np.ndarray):
        return _from_array(records, n, block_bytes, writable)
    if hasattr(records, "data_ptr"):
        if _is_cuda(records):
            return _cuda([records] if n == 1 else list(records), n, block_bytes)
        if not records.is_contiguous():
            return _from_sequence(list(records), n, block_bytes, writable)
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
        matrix = array.reshape(-1).view(np.uint8).reshape(n, block_bytes)
        if block_bytes < PIECE_BYTES:
            return MatrixCopier(matrix, owner)
        return RowsCopier(matrix, block_bytes, writable, owner)
    if array.shape[0] != n:
        raise InvalidArgument("records must be contiguous, or have one first-axis entry per block")
    return RowsCopier(list(array), block_bytes, writable, owner)


def _from_sequence(records: Sequence[Any], n: int, block_bytes: int, writable: bool) -> Copier:
    if len(records) != n:
        raise InvalidArgument(f"{len(records)} records for {n} pages: give one for each page")
    if n and _is_cuda(records[0]):
        return _cuda(records, n, block_bytes)
    return RowsCopier(records, block_bytes, writable)


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
