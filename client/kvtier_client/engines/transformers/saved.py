"""What a save point leaves in its node's blob besides KV, and the token that names it."""

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from kvtier_client.engines.transformers.identity import Identity
from kvtier_client.engines.transformers.pages import Shape
from kvtier_client.errors import InvalidArgument

FORMAT: Final = 1
ENGINE: Final = "transformers"
_DTYPES: Final[dict[str, torch.dtype]] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
    )
}  # fmt: skip
_SHRUNK: Final = ("int8", "int16", "int32")
"""Integers are stored in the first of these that holds them all: ids of a long conversation are
to fit a blob."""


class SavedTensor(msgspec.Struct, frozen=True):
    """A tensor of the caller's; `data` is of dtype `stored`."""

    dtype: str
    stored: str
    shape: list[int]
    data: bytes


class SavedBranch(msgspec.Struct, frozen=True):
    """A save point: the first `tokens` tokens of its node's branch are the cache."""

    identity: Identity
    shape: Shape
    tokens: int
    state: dict[str, SavedTensor]
    engine: str = ENGINE
    format: int = FORMAT


def encode_saved(saved: SavedBranch) -> bytes:
    """The save point as a blob."""
    return msgspec.msgpack.encode(saved)


def decode_saved(blob: bytes) -> SavedBranch:
    """Errors: InvalidArgument when the blob is not one that this engine writes."""
    try:
        saved = msgspec.msgpack.decode(blob, type=SavedBranch)
    except msgspec.MsgspecError as problem:
        raise InvalidArgument(
            f"the token names no suspended cache of transformers ({problem}); it is another "
            "program's, or nothing was suspended under it"
        ) from problem
    if saved.engine != ENGINE or saved.format != FORMAT:
        raise InvalidArgument(
            f"the token names something of {saved.engine!r}, format {saved.format}; this library "
            f"reads {ENGINE!r}, format {FORMAT}: resume it with what suspended it"
        )
    return saved


def pack_state(state: Mapping[str, Any]) -> dict[str, SavedTensor]:
    """The caller's tensors as they are stored. Errors: InvalidArgument."""
    packed = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise InvalidArgument(
                f"{name} is a {type(tensor).__name__}: beside KV, tensors are kept; make it one"
            )
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise InvalidArgument(f"{name} is of {dtype}: give one of {', '.join(_DTYPES)}")
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        stored = next(
            (small for small in _shrunk(flat) if bool((flat.to(small) == flat).all())), None
        )
        flat = flat if stored is None else flat.to(stored)
        packed[name] = SavedTensor(
            dtype=dtype,
            stored=str(flat.dtype).removeprefix("torch."),
            shape=list(tensor.shape),
            data=flat.view(torch.uint8).numpy().tobytes(),
        )
    return packed


def _shrunk(flat: Tensor) -> list[torch.dtype]:
    """The smaller dtypes that might hold the numbers of a tensor."""
    if flat.dtype not in (torch.int32, torch.int64):
        return []
    return [_DTYPES[name] for name in _SHRUNK if _DTYPES[name].itemsize < flat.dtype.itemsize]


def unpack_state(packed: Mapping[str, SavedTensor]) -> dict[str, Tensor]:
    """The caller's tensors, on the CPU. Errors: InvalidArgument."""
    try:
        return {name: _tensor(saved) for name, saved in packed.items()}
    except (KeyError, RuntimeError, ValueError) as problem:
        raise InvalidArgument(f"what was kept beside the KV is damaged: {problem}") from problem


def _tensor(saved: SavedTensor) -> Tensor:
    if not saved.data:
        return torch.empty(saved.shape, dtype=_DTYPES[saved.dtype])
    flat = torch.frombuffer(bytearray(saved.data), dtype=_DTYPES[saved.stored])
    return flat.to(_DTYPES[saved.dtype]).reshape(saved.shape)


def format_token(session: bytes, node: int) -> str:
    """The token of a save point: what names the session, and its node."""
    return f"{session.hex()}-{node:x}"


def parse_token(token: str) -> tuple[bytes, int]:
    """Session token and node. Errors: InvalidArgument, which does not show the token."""
    found = re.fullmatch("([0-9a-f]{32})-([0-9a-f]{1,8})", token)
    if found is None:
        raise InvalidArgument(
            "this is no token of a suspended cache: it has 32 hex digits, a dash and a number; give"
            " what suspend() or save() returned"
        )
    return bytes.fromhex(found[1]), int(found[2], 16)
