"""The paged KV pool: the worker's own memory for KV, of a fixed number of bytes."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtier_kernels import move_entries, scatter_blocks
from kvtier_worker.errors import PoolTooSmall
from kvtier_worker.model import KvPages
from kvtier_worker.tile import Slots

FLOAT_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What one block holds; its record is [layers, 2, block_tokens, kv_heads, head_dim] float32."""

    layers: int
    block_tokens: int
    kv_heads: int
    head_dim: int

    @property
    def record(self) -> tuple[int, int, int, int, int]:
        """The dimensions of a block record."""
        return (self.layers, 2, self.block_tokens, self.kv_heads, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block record."""
        return 2 * self.layers * self.block_tokens * self.kv_heads * self.head_dim * FLOAT_BYTES

    @property
    def bias_bytes(self) -> int:
        """Bytes of the logit biases of a block's entries."""
        return self.layers * self.block_tokens * self.kv_heads * FLOAT_BYTES

    def blocks(self, tokens: int) -> int:
        """Blocks that hold so many tokens, the last one perhaps partly."""
        return -(-tokens // self.block_tokens)


class PagedPool:
    """Pages of KV, how many references each has, and the list of the free ones.

    A page is shared by the branches of a thought that have entries in it; it is free again when the
    last of them has given it back. One page of the budget is the scratch page: padding rows write
    to it, and nobody's entries live there.
    """

    def __init__(
        self, shape: BlockShape, budget_bytes: int, device: torch.device, biased: bool = False
    ) -> None:
        """`biased` pages have a logit bias per entry and kv head, zero unless a fold sets it.

        Errors: PoolTooSmall when the budget holds no page besides the scratch page.
        """
        self.page_bytes = shape.block_bytes + (shape.bias_bytes if biased else 0)
        pages = budget_bytes // self.page_bytes - 1
        if pages < 1:
            raise PoolTooSmall(
                f"a KV pool of {budget_bytes} bytes holds no page: one page and the scratch page"
                f" take {2 * self.page_bytes} bytes; raise the budget"
            )
        self.shape = shape
        self.pages = pages
        self.scratch_page = pages
        size = (pages + 1, shape.block_tokens, shape.kv_heads, shape.head_dim)
        layers = range(shape.layers)
        parts = torch.zeros(shape.layers, 2, *size, device=device)
        self.k_pages = [parts[layer, 0] for layer in layers]
        self.v_pages = [parts[layer, 1] for layer in layers]
        self.bias_pages = [torch.zeros(size[:3], device=device) for _ in layers if biased]
        # All K and V as rows: the part of a block record (a layer's K or V), then the slot.
        self._rows = parts.view(-1, shape.kv_heads * shape.head_dim)
        slots = (pages + 1) * shape.block_tokens
        self._part_rows = np.arange(2 * shape.layers)[:, None] * slots
        self._cpu_rows = None if self._rows.is_cuda else self._rows.numpy()
        self._free = list(range(pages - 1, -1, -1))
        self._references = [0] * pages

    @property
    def kv(self) -> KvPages:
        """The pages as a forward pass takes them."""
        return KvPages(self.k_pages, self.v_pages, self.bias_pages)

    @property
    def scratch_slot(self) -> int:
        """The slot that padding rows write to."""
        return self.scratch_page * self.shape.block_tokens

    @property
    def free_pages(self) -> int:
        """Pages that nobody refers to."""
        return len(self._free)

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages in use; a shared page counts once."""
        return (self.pages - len(self._free)) * self.page_bytes

    def take(self, pages: int) -> list[int]:
        """Take free pages; the caller has looked that there are as many."""
        assert 0 <= pages <= len(self._free)
        taken = [self._free.pop() for _ in range(pages)]
        for page in taken:
            self._references[page] = 1
        return taken

    def share(self, pages: Seq[int]) -> None:
        """Add a reference to each of the pages, which somebody has taken."""
        for page in pages:
            assert self._references[page] > 0
            self._references[page] += 1

    def is_shared(self, page: int) -> bool:
        """Whether somebody else refers to a page as well, so that it must not be written."""
        return self._references[page] > 1

    def give_back(self, pages: Seq[int]) -> None:
        """Give up a reference to each of the pages; those without any are free."""
        for page in reversed(pages):
            assert self._references[page] > 0
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)

    def write_blocks(self, pages: Seq[int], records: Tensor) -> None:
        """Copy block records into pages, without bias. Shapes: `records` [n, *shape.record]."""
        index = self._index(pages)
        scatter_blocks(self.k_pages, self.v_pages, index, records.to(index.device))
        for bias in self.bias_pages:
            bias[index] = 0

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page, biases included."""
        for layer in (*self.k_pages, *self.v_pages, *self.bias_pages):
            layer[target] = layer[source]

    def read_entries(self, slots: Slots) -> Tensor:
        """The K and V of single entries. Shapes: [layers, 2, entries, kv_heads, head_dim]."""
        index = self._index(slots)
        pairs = zip(self.k_pages, self.v_pages, strict=True)
        return torch.stack(
            [torch.stack((k.flatten(0, 1)[index], v.flatten(0, 1)[index])) for k, v in pairs]
        )

    def read_records(self, slots: Slots) -> NDArray[np.float32]:
        """Single entries as block records; what is behind the last entry is a copy of it.

        Shapes: `slots` [entries]; the result is [blocks, *shape.record], in the CPU's memory.
        """
        blocks, tokens = self.shape.blocks(len(slots)), self.shape.block_tokens
        whole = np.full(blocks * tokens, slots[-1])
        whole[: len(slots)] = slots
        index = (whole.reshape(blocks, 1, tokens) + self._part_rows).reshape(-1)
        if self._cpu_rows is None:
            rows = self._rows[self._index(index)].cpu().numpy()
        else:
            rows = self._cpu_rows.take(index, 0)
        return rows.reshape(blocks, *self.shape.record)

    def move_entries(self, sources: Slots, targets: Slots) -> None:
        """Copy single entries, biases included, to other slots; the two may overlap."""
        rows, pools = self._cpu_rows, [layer.flatten(0, 1) for layer in self.bias_pages]
        if rows is None:
            pools += [layer.flatten(0, 1) for layer in (*self.k_pages, *self.v_pages)]
        else:
            rows[self._part_rows + targets] = rows[self._part_rows + sources]
        if pools:
            move_entries(pools, self._index(sources), self._index(targets))

    def write_entries(self, slots: Slots, kv: Tensor, bias: Tensor | None = None) -> None:
        """Set the K, V and bias of single entries.

        Shapes: `kv` [layers, 2, entries, kv_heads, head_dim]; `bias` [layers, entries, kv_heads].
        """
        index = self._index(slots)
        for layer, k, v in zip(kv, self.k_pages, self.v_pages, strict=True):
            k.view(-1, *k.shape[2:])[index] = layer[0]
            v.view(-1, *v.shape[2:])[index] = layer[1]
        self.write_bias(slots, bias)

    def write_bias(self, slots: Slots, bias: Tensor | None) -> None:
        """Set the logit bias of single entries. Shapes: `bias` [layers, entries, kv_heads]."""
        assert self.bias_pages or bias is None, "the pool was made without biases"
        index = self._index(slots)
        for i, layer in enumerate(self.bias_pages):
            layer.view(-1, layer.shape[2])[index] = 0 if bias is None else bias[i].to(layer.device)

    def _index(self, places: Seq[int] | Slots) -> Tensor:
        return torch.as_tensor(places, dtype=torch.int64, device=self.k_pages[0].device)
