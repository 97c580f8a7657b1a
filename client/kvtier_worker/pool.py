"""The paged KV pool: the worker's own memory for KV, of a fixed number of bytes."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvtier_kernels import gather_blocks, scatter_blocks
from kvtier_worker.errors import PoolTooSmall
from kvtier_worker.tile import CHUNK_TOKENS

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

    def blocks(self, tokens: int) -> int:
        """Blocks that hold so many tokens, the last one perhaps partly."""
        return -(-tokens // self.block_tokens)


class PagedPool:
    """Pages of KV and the list of the free ones.

    One page of the budget is the scratch page: padding rows write to it, and nobody's tokens live
    there.
    """

    def __init__(self, shape: BlockShape, budget_bytes: int, device: torch.device) -> None:
        """Errors: PoolTooSmall when the budget holds no page besides the scratch page."""
        if CHUNK_TOKENS % shape.block_tokens:
            raise PoolTooSmall(
                f"block_tokens is {shape.block_tokens}; it must divide {CHUNK_TOKENS}"
            )
        pages = budget_bytes // shape.block_bytes - 1
        if pages < 1:
            raise PoolTooSmall(
                f"a KV pool of {budget_bytes} bytes holds no page: one page and the scratch page"
                f" take {2 * shape.block_bytes} bytes; raise the budget"
            )
        self.shape = shape
        self.pages = pages
        self.scratch_page = pages
        size = (pages + 1, shape.block_tokens, shape.kv_heads, shape.head_dim)
        self.k_pages = [torch.zeros(size, device=device) for _ in range(shape.layers)]
        self.v_pages = [torch.zeros(size, device=device) for _ in range(shape.layers)]
        self._free = list(range(pages - 1, -1, -1))
        self._is_free = [True] * pages

    @property
    def free_pages(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages in use."""
        return (self.pages - len(self._free)) * self.shape.block_bytes

    def take(self, pages: int) -> list[int]:
        """Take free pages; the caller has looked that there are as many."""
        assert 0 <= pages <= len(self._free)
        taken = [self._free.pop() for _ in range(pages)]
        for page in taken:
            self._is_free[page] = False
        return taken

    def give_back(self, pages: Seq[int]) -> None:
        """Free pages, each of which somebody has taken."""
        for page in pages:
            assert not self._is_free[page]
            self._is_free[page] = True
        self._free.extend(reversed(pages))

    def read_blocks(self, pages: Seq[int], out: Tensor) -> None:
        """Copy pages into block records. Shapes: `out` [n, *shape.record]."""
        gather_blocks(self.k_pages, self.v_pages, self._index(pages), out)

    def write_blocks(self, pages: Seq[int], records: Tensor) -> None:
        """Copy block records into pages. Shapes: `records` [n, *shape.record]."""
        scatter_blocks(self.k_pages, self.v_pages, self._index(pages), records)

    def _index(self, pages: Seq[int]) -> Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self.k_pages[0].device)
