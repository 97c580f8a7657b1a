"""KV between a cache's tensors and pages of the daemon, many pages at a time.

A page holds `page_tokens` tokens of all layers: for each layer its keys, then its values, each
[batch, kv_heads, page_tokens, head_dim]. Layers need not be alike, nor keys like values.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final

import msgspec
import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from kvtier_client import wire
from kvtier_client.engines.transformers.identity import Identity
from kvtier_client.errors import InvalidArgument
from kvtier_client.layout import DTYPE_BYTES

CODEC: Final = "transformers-1"
"""The order of bytes in a page, as this file's docstring says it."""
WINDOW_BYTES: Final = 64 << 20
"""Most bytes that are on their way between tensors and the daemon at a time; at least one page."""
_DTYPES: Final[dict[str, torch.dtype]] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


_Size = Annotated[int, msgspec.Meta(ge=1)]


class Shape(msgspec.Struct, frozen=True):
    """The sizes of a cache's tensors. Shapes: `layers` has (kv_heads, key_dim, value_dim) each."""

    dtype: str
    batch: _Size
    page_tokens: _Size
    layers: Annotated[list[tuple[_Size, _Size, _Size]], msgspec.Meta(min_length=1)]

    @property
    def torch_dtype(self) -> torch.dtype:
        """Errors: InvalidArgument."""
        dtype = _DTYPES.get(self.dtype)
        if dtype is None:
            raise InvalidArgument(f"KV of {self.dtype}: a cache has one of {', '.join(_DTYPES)}")
        return dtype

    @property
    def page_elements(self) -> int:
        """Numbers in one page."""
        width = sum(heads * (keys + values) for heads, keys, values in self.layers)
        return self.batch * self.page_tokens * width

    def pages(self, tokens: int) -> int:
        """Pages that hold so many tokens, the last one perhaps partly."""
        return -(-tokens // self.page_tokens)

    def window_pages(self) -> int:
        """Pages that are moved at a time."""
        return max(1, WINDOW_BYTES // (self.page_elements * DTYPE_BYTES[self.dtype]))

    def layout(self, identity: Identity) -> wire.Layout:
        """What makes a page readable: the model that computed it, and these sizes."""
        heads, keys, _ = self.layers[0]
        sizes = xxh3_64_hexdigest(msgspec.msgpack.encode(self.layers))
        return wire.Layout(
            model=f"{identity.architecture} {identity.weights}",
            dtype=self.dtype,
            layers=len(self.layers),
            kv_heads=heads,
            head_dim=keys,
            block_tokens=self.page_tokens,
            block_bytes=self.page_elements * DTYPE_BYTES[self.dtype],
            codec=CODEC,
            extra=(
                f"config={identity.config} adapters={identity.adapters} "
                f"batch={self.batch} sizes={sizes}"
            ),
        )


def shape_of(layers: Sequence[Any], page_tokens: int) -> Shape:
    """The sizes of layers that all hold KV. Errors: InvalidArgument."""
    dtypes = {tensor.dtype for layer in layers for tensor in (layer.keys, layer.values)}
    batches = {tensor.shape[0] for layer in layers for tensor in (layer.keys, layer.values)}
    if len(dtypes) != 1 or len(batches) != 1:
        raise InvalidArgument(f"layers of several dtypes or batch sizes: {dtypes}, {batches}")
    shape = Shape(
        dtype=str(dtypes.pop()).removeprefix("torch."),
        batch=batches.pop(),
        page_tokens=page_tokens,
        layers=[
            (layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in layers
        ],
    )
    assert shape.torch_dtype
    return shape


def windows(shape: Shape, first: int, end: int) -> Iterator[tuple[int, int]]:
    """Pages `first..end` in windows of (first, end)."""
    step = shape.window_pages()
    for page in range(first, end, step):
        yield page, min(page + step, end)


def valid_tokens(shape: Shape, first: int, end: int, tokens: int) -> list[int]:
    """How many of its places are filled in each page, of a cache of so many tokens."""
    return [min(shape.page_tokens, tokens - page * shape.page_tokens) for page in range(first, end)]


def new_stage(shape: Shape, pages: int) -> Tensor:
    """Memory for so many pages, without a trace of what it held. Shapes: [pages, elements]."""
    return torch.zeros((pages, shape.page_elements), dtype=shape.torch_dtype)


def new_tensors(
    shape: Shape, tokens: int, devices: Sequence[torch.device]
) -> list[tuple[Tensor, Tensor]]:
    """Keys and values for so many tokens of every layer, yet to be filled."""
    return [
        (
            torch.empty((shape.batch, heads, tokens, keys), dtype=shape.torch_dtype, device=device),
            torch.empty(
                (shape.batch, heads, tokens, values), dtype=shape.torch_dtype, device=device
            ),
        )
        for (heads, keys, values), device in zip(shape.layers, devices, strict=True)
    ]


def gather(shape: Shape, tensors: Sequence[Tensor], first: int, tokens: int, stage: Tensor) -> None:
    """Copy pages `first..` of a cache of so many tokens into a stage, as many as it has."""
    for place, tensor in _places(shape, tensors, first, tokens, stage):
        place.copy_(tensor)


def scatter(
    shape: Shape, tensors: Sequence[Tensor], first: int, tokens: int, stage: Tensor
) -> None:
    """Copy a stage's pages to where they belong in a cache of so many tokens."""
    for place, tensor in _places(shape, tensors, first, tokens, stage):
        tensor.copy_(place)


def _places(
    shape: Shape, tensors: Sequence[Tensor], first: int, tokens: int, stage: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of the stage and of the tensors that hold the same tokens, in the same order.

    Shapes: `tensors` [batch, kv_heads, >= tokens, dim], keys and values of each layer in turn.
    """
    size = shape.page_tokens
    start = first * size
    whole, rest = divmod(min(tokens, start + len(stage) * size) - start, size)
    at = 0
    for tensor in tensors:
        batch, heads, _, dim = tensor.shape
        width = batch * heads * size * dim
        part = _split(stage[:, at : at + width], 1, (batch, heads, size, dim))
        at += width
        if whole:
            held = _split(tensor[:, :, start : start + whole * size], 2, (whole, size))
            yield part[:whole].permute(1, 2, 0, 3, 4), held
        if rest:
            tail = start + whole * size
            yield part[whole, :, :, :rest], tensor[:, :, tail : tail + rest]


def _split(tensor: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """A view with one dimension as several."""
    return tensor.view(*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :])
