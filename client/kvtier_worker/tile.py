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

Slots = NDArray[np.int64]
"""Where entries lie in the pool: page * block_tokens + offset, one number per entry."""


@dataclass(frozen=True, slots=True)
class Row:
    """One token to compute: what it attends to, and where it stands.

    `position` is the token's place in its sequence, by which RoPE turns it; `slots` are the entries
    it attends to in attention order, its own last. The two counts differ once a step is folded.
    `biased` says that some of the entries have a logit bias. `groups` has one number per entry
    whose mass is to be measured, 0 for nobody's. A row that does not `write` finds its own K and V
    in its slot already.
    """

    token: int
    position: int
    slots: Slots
    biased: bool = False
    groups: NDArray[np.int64] | None = None
    write: bool = True


@dataclass(frozen=True, slots=True)
class Tile:
    """The tensors that one pass over the layers reads.

    Shapes: `tokens`, `positions`, `slots` [TILE_ROWS], of which the first `rows` are not padding;
    `keys` [chunks, rows * kv_heads * CHUNK_TOKENS], indices into a layer's pages seen as [pages *
    block_tokens * kv_heads, head_dim]; `hidden` [chunks, rows, 1, 1, CHUNK_TOKENS], true where a
    key must not be seen; `groups` [chunks, rows, CHUNK_TOKENS], or None when no mass is measured,
    with numbers below `group_count`.
    """

    rows: int
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    keys: Tensor
    hidden: Tensor
    biased: bool
    groups: Tensor | None
    group_count: int


def build_tile(rows: Seq[Row], kv_heads: int, scratch_slot: int, device: torch.device) -> Tile:
    """Lay up to `TILE_ROWS` rows out as a tile."""
    assert 0 < len(rows) <= TILE_ROWS
    positions = np.zeros(TILE_ROWS, np.int64)
    tokens = np.zeros(TILE_ROWS, np.int64)
    written = np.full(TILE_ROWS, scratch_slot, np.int64)
    positions[: len(rows)] = [row.position for row in rows]
    tokens[: len(rows)] = [row.token for row in rows]
    written[: len(rows)] = [row.slots[-1] if row.write else scratch_slot for row in rows]
    lengths = np.array([len(row.slots) for row in rows])
    chunks = -(-int(lengths.max()) // CHUNK_TOKENS)
    slots = _padded([row.slots for row in rows], chunks, scratch_slot)
    groups, group_count = _groups(rows, chunks)
    return Tile(
        rows=len(rows),
        tokens=torch.from_numpy(tokens).to(device),
        positions=torch.from_numpy(positions).to(device),
        slots=torch.from_numpy(written).to(device),
        keys=torch.from_numpy(_key_indices(slots, kv_heads)).to(device),
        hidden=torch.from_numpy(_hidden(lengths, chunks)).to(device),
        biased=any(row.biased for row in rows),
        groups=None if groups is None else torch.from_numpy(groups).to(device),
        group_count=group_count,
    )


def _padded(rows: Seq[NDArray[np.int64]], chunks: int, filler: int) -> NDArray[np.int64]:
    """Shapes: the result is [len(rows), chunks * CHUNK_TOKENS]."""
    table = np.full((len(rows), chunks * CHUNK_TOKENS), filler, np.int64)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    return table


def _key_indices(slots: NDArray[np.int64], kv_heads: int) -> NDArray[np.int64]:
    chunked = slots.reshape(len(slots), -1, CHUNK_TOKENS).swapaxes(0, 1)
    heads = chunked[:, :, None, :] * kv_heads + np.arange(kv_heads)[:, None]
    return np.ascontiguousarray(heads).reshape(heads.shape[0], -1)


def _hidden(lengths: NDArray[np.int64], chunks: int) -> NDArray[np.bool_]:
    keys = np.arange(chunks * CHUNK_TOKENS).reshape(chunks, 1, CHUNK_TOKENS)
    hidden: NDArray[np.bool_] = keys >= lengths[:, None]
    return hidden[:, :, None, None, :]


def _groups(rows: Seq[Row], chunks: int) -> tuple[NDArray[np.int64] | None, int]:
    if all(row.groups is None for row in rows):
        return None, 0
    nobody = np.zeros(0, np.int64)
    table = _padded([nobody if row.groups is None else row.groups for row in rows], chunks, 0)
    chunked = table.reshape(len(rows), chunks, CHUNK_TOKENS).swapaxes(0, 1)
    return np.ascontiguousarray(chunked), int(table.max()) + 1
