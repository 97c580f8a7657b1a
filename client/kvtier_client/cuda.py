"""Copies between CUDA tensors and the arena, by DMA on streams of their own.

The mapping is registered with CUDA once, in chunks, so that the copy engine reads and writes
leased slots directly. Where registration is refused (memlock, a container without the right) the
copies go through two pinned staging buffers that alternate. A copy counts as done only when its
event has completed: nothing is committed or released before.
"""

import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch

from kvtier_client.arena import Arena, Bytes
from kvtier_client.crew import Crew
from kvtier_client.errors import InvalidArgument
from kvtier_client.records import Slots

REGISTER_CHUNK_BYTES: Final = 1 << 30
STAGING_BYTES: Final = 32 << 20
"""Size of each of the two staging buffers; at least one block."""
READ_WRITE: Final = 0
"""cudaHostRegisterDefault."""
log = logging.getLogger("kvtier_client")


class Registration:
    """An arena's mapping as CUDA knows it, until nobody holds the arena any more.

    Source: cudaHostRegister (CUDA Runtime API, memory management).
    """

    def __init__(self, arena: Arena, runtime: Any) -> None:
        """Register `arena` in chunks; `registered` is False when CUDA refused."""
        self.registered = True
        done: list[int] = []
        for start in range(0, arena.size_bytes, REGISTER_CHUNK_BYTES):
            length = min(REGISTER_CHUNK_BYTES, arena.size_bytes - start)
            code = int(runtime.cudaHostRegister(arena.address + start, length, READ_WRITE))
            if code != 0:
                _unregister(runtime, done)
                self.registered = False
                log.warning(
                    "CUDA refused to register %d bytes of the arena at %d (error %d): copies go "
                    "through pinned staging buffers; raise the memlock limit to avoid that",
                    *(length, start, code),
                )
                return
            done.append(arena.address + start)
        weakref.finalize(arena, _unregister, runtime, done).atexit = False


class Device:
    """One GPU's copy streams and staging buffers."""

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.Lock()
        self.device = device
        with torch.cuda.device(device):
            self.streams = (_stream(), _stream())
        self._staging: list[torch.Tensor] = []

    def staging(self, block_bytes: int) -> list[torch.Tensor]:
        """The two pinned buffers. Shapes: each [at least block_bytes]."""
        size = max(STAGING_BYTES // block_bytes, 1) * block_bytes
        if not self._staging or len(self._staging[0]) < size:
            self._staging = [
                torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in self.streams
            ]
        return self._staging


_registrations: weakref.WeakKeyDictionary[Arena, Registration] = weakref.WeakKeyDictionary()
_devices: dict[int, Device] = {}
_lock = threading.Lock()


def registration(arena: Arena) -> Registration:
    """The registration of an arena, made with the first copy."""
    with _lock:
        known = _registrations.get(arena)
        if known is None:
            known = _registrations[arena] = Registration(arena, _runtime())
        return known


def device_of(device: torch.device) -> Device:
    """Streams and buffers of a GPU."""
    with _lock:
        known = _devices.get(device.index)
        if known is None:
            known = _devices[device.index] = Device(device)
        return known


def _unregister(runtime: Any, addresses: list[int]) -> None:
    for address in addresses:
        runtime.cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _stream() -> Any:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _cut(buffer: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    return (buffer[start : start + size] for start in range(0, len(buffer), size))


class CudaCopier:
    """Records that are CUDA tensors. Shapes: n tensors of block_bytes each, contiguous."""

    def __init__(self, records: Sequence[Any], n: int, block_bytes: int) -> None:
        """Take note of the tensors and of the work on the caller's stream before them.

        Errors: InvalidArgument for a wrong number, size, device or a tensor that is not contiguous.
        """
        if len(records) != n:
            raise InvalidArgument(f"{len(records)} records for {n} pages: give one for each page")
        self.device = records[0].device
        self.rows: list[torch.Tensor] = []
        for tensor in records:
            if tensor.device != self.device or not tensor.is_contiguous():
                raise InvalidArgument("CUDA records must be contiguous and on one device")
            if tensor.nbytes != block_bytes:
                raise InvalidArgument(
                    f"a record of {tensor.nbytes} bytes for a block of {block_bytes}"
                )
            self.rows.append(tensor.detach().reshape(-1).view(torch.uint8))
        with torch.cuda.device(self.device):
            self._ready = torch.cuda.current_stream().record_event()

    def prepare(self) -> None:
        """As `Copier.prepare`: the tensors were looked at before their stream was asked."""

    def store(self, slots: Slots, i: int, crew: Crew) -> None:
        """As `Copier.store`: device to host, complete when it returns."""
        self._copy(slots, i, to_host=True)

    def load(self, slots: Slots, i: int, crew: Crew) -> None:
        """As `Copier.load`: host to device, complete when it returns."""
        self._copy(slots, i, to_host=False)

    def _copy(self, slots: Slots, i: int, to_host: bool) -> None:
        gpu = device_of(self.device)
        views = slots.arena.blocks(slots.offsets, slots.block_bytes)
        rows = self.rows[i : i + len(views)]
        with gpu.lock, torch.cuda.device(self.device):
            for stream in gpu.streams:
                stream.wait_event(self._ready)
            if registration(slots.arena).registered:
                _direct(gpu, rows, views, to_host)
            elif to_host:
                _staged_out(gpu, rows, views)
            else:
                _staged_in(gpu, rows, views)


def _direct(gpu: Device, rows: list[torch.Tensor], views: list[Bytes], to_host: bool) -> None:
    """DMA between device and slots; the two streams take turns so that gaps are filled."""
    events = []
    try:
        for turn, stream in enumerate(gpu.streams):
            with torch.cuda.stream(stream):
                for row, view in zip(rows[turn::2], views[turn::2], strict=True):
                    host = torch.from_numpy(view)
                    if to_host:
                        host.copy_(row, non_blocking=True)
                    else:
                        row.copy_(host, non_blocking=True)
                events.append(stream.record_event())
    finally:
        for stream in gpu.streams:
            stream.synchronize()  # also after an error: nothing may be in flight when we return
    for event in events:
        event.synchronize()


def _staged_out(gpu: Device, rows: list[torch.Tensor], views: list[Bytes]) -> None:
    """Device to slots: while one buffer is emptied by the CPU, the other one is filled by DMA."""
    buffers = gpu.staging(len(views[0]))
    step = len(buffers[0]) // len(views[0])
    flying: list[tuple[int, list[Bytes], Any]] = []
    try:
        for turn, first in enumerate(range(0, len(rows), step)):
            side = turn % 2
            if len(flying) == 2:
                _empty(buffers, *flying.pop(0))
            with torch.cuda.stream(gpu.streams[side]):
                part = rows[first : first + step]
                for row, slot in zip(part, _cut(buffers[side], len(views[0])), strict=False):
                    slot.copy_(row, non_blocking=True)
                event = gpu.streams[side].record_event()
            flying.append((side, views[first : first + step], event))
        while flying:
            _empty(buffers, *flying.pop(0))
    finally:
        for stream in gpu.streams:
            stream.synchronize()


def _empty(buffers: list[torch.Tensor], side: int, views: list[Bytes], event: Any) -> None:
    event.synchronize()
    size = len(views[0])
    memory = buffers[side].numpy()
    for k, view in enumerate(views):
        np.copyto(view, memory[k * size : (k + 1) * size])


def _staged_in(gpu: Device, rows: list[torch.Tensor], views: list[Bytes]) -> None:
    """Slots to device: while one buffer is filled by the CPU, the other one is read by DMA."""
    size = len(views[0])
    buffers = gpu.staging(size)
    step = len(buffers[0]) // size
    events: list[Any] = [None, None]
    try:
        for turn, first in enumerate(range(0, len(rows), step)):
            side = turn % 2
            if events[side] is not None:
                events[side].synchronize()
            memory = buffers[side].numpy()
            part = views[first : first + step]
            for k, view in enumerate(part):
                np.copyto(memory[k * size : (k + 1) * size], view)
            with torch.cuda.stream(gpu.streams[side]):
                for k, row in enumerate(rows[first : first + step]):
                    row.copy_(buffers[side][k * size : (k + 1) * size], non_blocking=True)
                events[side] = gpu.streams[side].record_event()
    finally:
        for stream in gpu.streams:
            stream.synchronize()
