"""One tile: a number of rows on which every kernel of the model runs.

A floating-point kernel may add in another order when its shape changes, and then the same token
gets other bits in another batch. Here every GEMM sees one of the few numbers of rows that were
found to give the same bits when the model was loaded, and attention goes through a row's own
entries one by one, so a row's bits depend on the row alone: not on its neighbours, not on its place
in the tile, not on whether it is a decode step or part of a prefill chunk. Rows that are missing
are padding; their K and V go to the pool's scratch page.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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

    Shapes: `tokens`, `positions`, `slots` [one of a model's `tile_sizes`], of which the first
    `rows` are not padding; `entries` [all rows' entries], one row's behind the other's; `starts`
    [rows + 1], where each row's begin and the last one's end; `groups` as `entries`, or None when
    no mass is measured, with numbers below `group_count`. The longest row has `longest` entries.
    """

    rows: int
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    entries: Tensor
    starts: Tensor
    longest: int
    biased: bool
    groups: Tensor | None
    group_count: int


def build_tile(rows: Seq[Row], sizes: Seq[int], scratch_slot: int, device: torch.device) -> Tile:
    """Lay rows out as a tile of the least of the rising `sizes` that holds them."""
    assert 0 < len(rows) <= sizes[-1]
    size = next(size for size in sizes if size >= len(rows))
    positions = np.zeros(size, np.int64)
    tokens = np.zeros(size, np.int64)
    written = np.full(size, scratch_slot, np.int64)
    positions[: len(rows)] = [row.position for row in rows]
    tokens[: len(rows)] = [row.token for row in rows]
    written[: len(rows)] = [row.slots[-1] if row.write else scratch_slot for row in rows]
    lengths = [len(row.slots) for row in rows]
    starts = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    groups, group_count = _groups(rows)
    return Tile(
        rows=len(rows),
        tokens=torch.from_numpy(tokens).to(device),
        positions=torch.from_numpy(positions).to(device),
        slots=torch.from_numpy(written).to(device),
        entries=torch.from_numpy(np.concatenate([row.slots for row in rows])).to(device),
        starts=torch.from_numpy(starts).to(device),
        longest=max(lengths),
        biased=any(row.biased for row in rows),
        groups=None if groups is None else torch.from_numpy(groups).to(device),
        group_count=group_count,
    )


def _groups(rows: Seq[Row]) -> tuple[NDArray[np.int64] | None, int]:
    if all(row.groups is None for row in rows):
        return None, 0
    parts = [np.zeros(len(r.slots), np.int64) if r.groups is None else r.groups for r in rows]
    groups = np.concatenate(parts)
    return groups, int(groups.max()) + 1
