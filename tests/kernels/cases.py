"""Inputs of the kernels on single entries: what the emulated grid and a GPU are tested with."""

from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

import kvtier_kernels

POOL_SLOTS = 331
LENGTHS = (1, 63, 0, 64, 65, 200)
WIDTHS = (32, 64, 128)
GROUPS = tuple(range(1, 9))


class OnDevice:
    """A dataclass of tensors and lists of tensors."""

    def to(self, device: str) -> Self:
        """Copies of all tensors."""
        moved = {}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                moved[field.name] = value.clone().to(device)
            elif isinstance(value, list):
                moved[field.name] = [tensor.clone().to(device) for tensor in value]
        return replace(self, **moved)  # type: ignore[type-var]


@dataclass(frozen=True)
class Moves(OnDevice):
    """Arguments of `move_entries`."""

    pools: list[Tensor]
    sources: Tensor
    targets: Tensor


class Attention(kvtier_kernels.Attention, OnDevice):
    """What `paged_attention` is given."""


@dataclass(frozen=True)
class Step(OnDevice):
    """Arguments of `score_keys`."""

    keys: list[Tensor]
    values: list[Tensor]
    slots: Tensor
    queries: Tensor


def make_moves(rows: list[tuple[tuple[int, ...], torch.dtype]], entries: int, seed: int) -> Moves:
    """Moves between slots at random, many of them both source and target."""
    random = torch.Generator().manual_seed(seed)
    slots = max(entries + entries // 3, 7)
    pools = []
    for shape, dtype in rows:
        width = torch.Size(shape).numel() * dtype.itemsize
        bytes_ = torch.randint(0, 256, (slots, width), dtype=torch.uint8, generator=random)
        pools.append(bytes_.view(dtype).view(slots, *shape))
    sources = torch.randperm(slots, generator=random)[:entries]
    targets = torch.randperm(slots, generator=random)[:entries]
    return Moves(pools, sources, targets)


def make_attention(
    width: int,
    group: int,
    kv_heads: int = 2,
    lengths: tuple[int, ...] = LENGTHS,
    biased: bool = True,
    group_count: int | None = None,
    seed: int = 0,
) -> Attention:
    """Rows of these lengths whose entries lie anywhere in the pool."""
    random = torch.Generator().manual_seed(seed)
    pools = torch.randn(2, POOL_SLOTS, kv_heads, width, generator=random)
    # Queries come out of one product with the keys: there is more between their rows.
    wide = torch.randn(len(lengths), kv_heads * group + 3, width, generator=random)
    biases = 3 * torch.randn(POOL_SLOTS, kv_heads, generator=random)
    entries = [torch.randperm(POOL_SLOTS, generator=random)[:length] for length in lengths]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return Attention(
        queries=2 * wide[:, : kv_heads * group],
        keys=pools[0],
        values=pools[1],
        biases=biases if biased else None,
        entries=torch.cat([torch.zeros(0, dtype=torch.int64), *entries]),
        starts=starts,
        longest=max(lengths, default=0),
        groups=None
        if group_count is None
        else torch.randint(0, group_count, (int(starts[-1]),), generator=random),
        masses=None
        if group_count is None
        else 0.3 * torch.rand(len(lengths), group_count, generator=random),
    )


def make_step(
    width: int,
    group: int,
    entries: int,
    rows: int,
    kv_heads: int = 2,
    layers: int = 2,
    seed: int = 0,
) -> Step:
    """A step whose entries lie anywhere in the pools, and queries that see some much more."""
    random = torch.Generator().manual_seed(seed)
    pools = torch.randn(2, layers, POOL_SLOTS, kv_heads, width, generator=random)
    return Step(
        keys=list(pools[0]),
        values=list(pools[1]),
        slots=torch.randperm(POOL_SLOTS, generator=random)[:entries],
        queries=2 * torch.randn(layers, rows, kv_heads * group, width, generator=random),
    )
