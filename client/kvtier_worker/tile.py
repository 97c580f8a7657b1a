"""One tile: a fixed number of rows on which every kernel of the model runs.

A floating-point kernel may add in another order when its shape changes, and then the same token
gets other bits in another batch. Here every GEMM sees exactly `TILE_ROWS` rows and every
attention product one row and `CHUNK_TOKENS` keys, so a row's bits depend on the row alone: not on
its neighbours, not on its place in the tile, not on whether it is a decode step or part of a
prefill chunk. Rows that are missing are padding; their K and V go to the pool's scratch page.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TILE_ROWS: Final = 16
"""Rows of one tile: 16 rows take a quarter more time than 8 (the weights are read once)."""

CHUNK_TOKENS: Final = 64
"""Keys of one attention product; a multiple of every allowed block size."""


@dataclass(frozen=True, slots=True)
class Row:
    """One token to compute: where it stands in its sequence, and that sequence's pages."""

    token: int
    position: int
    pages: Seq[int]


@dataclass(frozen=True, slots=True)
class Tile:
    """The tensors that one pass over the layers reads.

    Shapes: `tokens`, `positions`, `slots` [TILE_ROWS], of which the first `rows` are not padding;
    `keys` [chunks, rows * kv_heads * CHUNK_TOKENS], indices into a layer's pages seen as [pages *
    block_tokens * kv_heads, head_dim]; `hidden` [chunks, rows, 1, 1, CHUNK_TOKENS], true where a
    key must not be seen.
    """

    rows: int

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    keys: Tensor
    hidden: Tensor


def build_tile(
    rows: Seq[Row], block_tokens: int, kv_heads: int, scratch_page: int, device: torch.device
) -> Tile:
    """Lay up to `TILE_ROWS` rows out as a tile; the pages of every row must cover its position."""
    assert 0 < len(rows) <= TILE_ROWS and CHUNK_TOKENS % block_tokens == 0
    positions = np.zeros(TILE_ROWS, np.int64)
    tokens = np.zeros(TILE_ROWS, np.int64)
    positions[: len(rows)] = [row.position for row in rows]
    tokens[: len(rows)] = [row.token for row in rows]
    chunks = int(positions.max()) // CHUNK_TOKENS + 1
    pages = np.full((len(rows), chunks * CHUNK_TOKENS // block_tokens), scratch_page, np.int64)
    slots = np.full(TILE_ROWS, scratch_page * block_tokens, np.int64)
    for i, row in enumerate(rows):
        block, offset = divmod(row.position, block_tokens)
        pages[i, : block + 1] = row.pages[: block + 1]
        slots[i] = row.pages[block] * block_tokens + offset
    return Tile(
        rows=len(rows),
        tokens=torch.from_numpy(tokens).to(device),
        positions=torch.from_numpy(positions).to(device),
        slots=torch.from_numpy(slots).to(device),
        keys=torch.from_numpy(_key_indices(pages, block_tokens, kv_heads)).to(device),
        hidden=torch.from_numpy(_hidden(positions[: len(rows)], chunks)).to(device),
    )


def _key_indices(pages: NDArray[np.int64], block_tokens: int, kv_heads: int) -> NDArray[np.int64]:
    tokens = pages[:, :, None] * block_tokens + np.arange(block_tokens)
    tokens = tokens.reshape(len(pages), -1, CHUNK_TOKENS).swapaxes(0, 1)
    heads = tokens[:, :, None, :] * kv_heads + np.arange(kv_heads)[:, None]
    return np.ascontiguousarray(heads).reshape(heads.shape[0], -1)


def _hidden(positions: NDArray[np.int64], chunks: int) -> NDArray[np.bool_]:
    keys = np.arange(chunks * CHUNK_TOKENS).reshape(chunks, 1, CHUNK_TOKENS)
    hidden: NDArray[np.bool_] = keys > positions[:, None]
    return hidden[:, :, None, None, :]
