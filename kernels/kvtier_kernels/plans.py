"""Checks what the kernels on single entries are given, and plans what is to be launched for it.

A plan says everything that a launch needs besides a GPU: kernels, grids, arguments and workspace.
The launcher carries it out on a GPU; the tests carry out the same plan on an emulated grid.
"""

from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

import torch
from torch import Tensor, float32, int64

from kvtier_kernels.attended import Attention
from kvtier_kernels.scores import KeyScores

THREADS: Final = 128
CHUNK_KEYS: Final = 64
SCORE_QUERIES: Final = 16
GROUP_MAX: Final = 8
"""Query heads of one kv head; this and those above are constants of attention.cu too."""

HEAD_DIMS: Final = (32, 64, 128)

MOVE_THREADS: Final = 256
MOVE_STAGE_BYTES: Final = 32_768
"""Shared memory of a thread block of move_entries.cu."""

MOVE_ENTRIES_MAX: Final = 1024
"""So that a thread block still moves 32 bytes of each row, which is a sector of memory."""

_WORD_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel's launch; every argument is 8 bytes, an address or a count."""

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    arguments: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Launches of one source's kernels, in order; it keeps what they work on until they are queued.

    Torch gives memory that is freed then to what is queued behind them, on the same stream.
    """

    source: str
    device: torch.device
    launches: tuple[Launch, ...]
    holds: object


def table(words: list[int], device: torch.device) -> Tensor:
    """Words for the kernels to read, on their device; on a GPU they arrive in the stream's turn."""
    on_gpu = device.type == "cuda"
    return torch.tensor(words, dtype=int64, pin_memory=on_gpu).to(device, non_blocking=True)


# ---------------------------------------------------------------------------------------- moves


def check_moves(pools: list[Tensor], sources: Tensor, targets: Tensor) -> None:
    """Raises `ValueError`, saying which tensor and why, when the tensors do not fit together."""
    if not pools:
        raise ValueError("no pools: need one at least")
    first = pools[0]
    for pool in pools:
        if not pool.dim() or not pool.is_contiguous():
            raise ValueError(f"a pool of shape {tuple(pool.shape)} is not contiguous slots")
        if pool.shape[0] != first.shape[0] or pool.device != first.device:
            raise ValueError("pools differ in their number of slots or in device")
    _check_indices(first.device, sources=sources, targets=targets)
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} sources and {len(targets)} targets: need one each")


def plan_moves(pools: list[Tensor], sources: Tensor, targets: Tensor) -> Plan:
    """Plans `kvtier_kernels.move_entries`."""
    check_moves(pools, sources, targets)
    if len(sources) > MOVE_ENTRIES_MAX:
        raise ValueError(f"{len(sources)} sources: at most {MOVE_ENTRIES_MAX} move at once")
    device, entries, slots = sources.device, len(sources), pools[0].shape[0]
    rows_bytes = [pool.nbytes // slots if slots else 0 for pool in pools]
    if not entries or not max(rows_bytes):
        return Plan("move_entries.cu", device, (), None)
    slice_bytes = MOVE_STAGE_BYTES // entries // _WORD_BYTES * _WORD_BYTES
    parts = zip((pool.data_ptr() for pool in pools), rows_bytes, strict=True)
    words = table(list(chain.from_iterable(parts)), device)
    launch = Launch(
        "move_entries",
        (-(-max(rows_bytes) // slice_bytes), len(pools), 1),
        MOVE_THREADS,
        (*_addresses(words, sources, targets), entries, slots, slice_bytes),
    )
    return Plan("move_entries.cu", device, (launch,), words)


# ------------------------------------------------------------------------------------ attention


@dataclass(frozen=True, slots=True)
class _Workspace:
    """What the chunks of each row and head leave for the whole; see `struct Attention`."""

    sums: Tensor
    tops: Tensor
    masses: Tensor
    weights: Tensor | None
    scales: Tensor | None


def check_attention(a: Attention) -> None:
    """Raises `ValueError`, saying which tensor and why, when the tensors do not fit together."""
    keys, groups, masses = a.keys, a.groups, a.masses
    _check_pools([keys, a.values])
    rows = _check_queries(a.queries, keys, dimensions=3)
    if a.biases is not None:
        _check_float(keys.device, keys.shape[:2], biases=a.biases)
    _check_indices(keys.device, entries=a.entries, starts=a.starts)
    if len(a.starts) != rows + 1:
        raise ValueError(
            f"{len(a.starts)} starts for {rows} rows of queries: need one more than rows"
        )
    if (groups is None) != (masses is None):
        raise ValueError("groups and masses come together or not at all")
    if groups is not None and masses is not None:
        _check_indices(keys.device, groups=groups)
        if len(groups) != len(a.entries) or masses.dim() != 2:
            raise ValueError(f"{len(groups)} groups for {len(a.entries)} entries: need one each")
        _check_float(keys.device, (rows, masses.shape[1]), masses=masses)


def plan_attention(a: Attention, result: Tensor) -> Plan:
    """Plans `kvtier_kernels.paged_attention`; `result` is contiguous, of the shape of `queries`."""
    check_attention(a)
    queries, keys, groups, masses = a.queries, a.keys, a.groups, a.masses
    _check_limits([keys, a.values], queries)
    rows, heads, width = queries.shape
    chunks = -(-a.longest // CHUNK_KEYS)
    measured = groups is not None and masses is not None
    work = _Workspace(
        sums=queries.new_empty(rows, heads, chunks, width),
        tops=queries.new_empty(rows, heads, chunks),
        masses=queries.new_empty(rows, heads, chunks),
        weights=queries.new_empty(rows, heads, chunks, CHUNK_KEYS) if measured else None,
        scales=queries.new_empty(rows, heads, chunks) if measured else None,
    )
    attend = Launch(
        f"attend_chunks_{width}",
        (chunks, keys.shape[1], rows),
        THREADS,
        (
            *(queries.data_ptr(), queries.stride(0)),
            *_addresses(keys, a.values, a.biases, a.entries, a.starts),
            *(keys.shape[0], heads // keys.shape[1]),
            *_addresses(work.sums, work.tops, work.masses, work.weights),
        ),
    )
    parts = _addresses(work.sums, work.tops, work.masses, a.starts, result, work.scales)
    merge = Launch("merge_chunks", (heads, rows, 1), width, (*parts, chunks))
    launches = [attend, merge] if chunks else [merge]
    if chunks and groups is not None and masses is not None:
        parts = _addresses(work.weights, work.scales, groups, a.starts, masses)
        arguments = (*parts, masses.shape[1], chunks)
        launches.append(Launch("measure_groups", (heads, rows, 1), THREADS, arguments))
    return Plan("attention.cu", keys.device, tuple(launches) if rows else (), (work, a))


# ----------------------------------------------------------------------------------- score pass


def check_scoring(
    keys: list[Tensor], values: list[Tensor] | None, slots: Tensor, queries: Tensor
) -> None:
    """Raises `ValueError`, saying which tensor and why, when the tensors do not fit together."""
    _check_pools([*keys, *(values or [])])
    if values is not None and len(values) != len(keys):
        raise ValueError(f"{len(keys)} K pools and {len(values)} V pools: need one each")
    _check_indices(keys[0].device, slots=slots)
    _check_queries(queries, keys[0], dimensions=4)
    if queries.shape[0] != len(keys) or not queries.is_contiguous():
        raise ValueError(
            f"queries are {tuple(queries.shape)}: need contiguous ones for {len(keys)} layers"
        )
    if not len(slots) or not queries.shape[1]:
        raise ValueError(f"{len(slots)} slots, {queries.shape[1]} rows of queries: need one each")


def plan_scoring(
    keys: list[Tensor],
    slots: Tensor,
    queries: Tensor,
    squared: bool,
    values: list[Tensor] | None,
) -> tuple[list[Plan], KeyScores]:
    """Plans `kvtier_kernels.score_keys`; besides the plans, the result that they fill."""
    check_scoring(keys, values, slots, queries)
    _check_limits(keys, queries)
    layers, rows, heads, width = queries.shape
    pool_slots, kv_heads, _ = keys[0].shape
    group, entries = heads // kv_heads, len(slots)
    scores = KeyScores(
        importance=queries.new_empty(layers, kv_heads, entries),
        tops=queries.new_empty(layers, kv_heads, rows * group),
        masses=queries.new_empty(layers, kv_heads, rows * group),
    )
    words = table([pool.data_ptr() for pool in keys], slots.device)
    arguments = (
        *_addresses(words, slots, queries, scores.tops, scores.masses, scores.importance),
        *(entries, rows, group, pool_slots, int(squared)),
    )
    tiles, chunks = -(-rows * group // SCORE_QUERIES), -(-entries // CHUNK_KEYS)
    launches = (
        Launch(f"find_masses_{width}", (tiles, kv_heads, layers), THREADS, arguments),
        Launch(f"score_chunks_{width}", (chunks, kv_heads, layers), THREADS, arguments),
    )
    scoring = Plan("attention.cu", slots.device, launches, words)
    if values is None:
        return [scoring], scores
    each = slots.repeat(rows)
    starts = torch.arange(0, len(each) + 1, entries, device=slots.device)
    outputs = torch.empty_like(queries)
    plans = [
        plan_attention(Attention(rows_of, k, v, None, each, starts, entries), out)
        for rows_of, k, v, out in zip(queries, keys, values, outputs, strict=True)
    ]
    grouped = outputs.view(layers, rows, kv_heads, group, width).transpose(1, 2)
    return [scoring, *plans], replace(scores, outputs=grouped)


# ------------------------------------------------------------------------------------ internals


def _addresses(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)


def _check_pools(pools: list[Tensor]) -> None:
    if not pools:
        raise ValueError("no pools: need one at least")
    first = pools[0]
    if first.dim() != 3 or first.dtype != float32:
        raise ValueError(
            f"a pool is {first.dtype} {tuple(first.shape)}: need float32 [slots, kv_heads,"
            " head_dim]"
        )
    for pool in pools:
        if (pool.shape, pool.dtype, pool.device) != (first.shape, first.dtype, first.device):
            raise ValueError("pools differ in shape, dtype or device")
        if not pool.is_contiguous():
            raise ValueError("a pool is not contiguous")


def _check_queries(queries: Tensor, pool: Tensor, dimensions: int) -> int:
    """Returns how many rows there are. Shapes: `queries` [..., rows, heads, head_dim]."""
    kv_heads, width = pool.shape[1:]
    if queries.dtype != float32 or queries.device != pool.device or queries.dim() != dimensions:
        raise ValueError(
            f"queries are {queries.dtype} of {queries.dim()} dimensions on {queries.device}: need"
            f" float32 of {dimensions} on {pool.device}"
        )
    rows, heads, head_dim = queries.shape[-3:]
    if head_dim != width or not kv_heads or not heads or heads % kv_heads:
        raise ValueError(
            f"queries have {heads} heads of {head_dim} for {kv_heads} kv heads of {width}: need a"
            " multiple, and one head_dim"
        )
    if queries.stride()[-2:] != (width, 1):
        raise ValueError("each row of queries must be contiguous")
    return rows


def _check_limits(pools: list[Tensor], queries: Tensor) -> None:
    """What the kernels cannot do, besides what makes no sense."""
    heads, width = queries.shape[-2:]
    if width not in HEAD_DIMS:
        raise ValueError(f"queries and pools have head_dim {width}: the kernels take {HEAD_DIMS}")
    if heads // pools[0].shape[1] > GROUP_MAX:
        raise ValueError(
            f"queries have {heads} heads for {pools[0].shape[1]} kv heads: the kernels take up to"
            f" {GROUP_MAX} times as many"
        )
    if any(tensor.data_ptr() % _WORD_BYTES for tensor in (*pools, queries)):
        raise ValueError("queries and pools must begin at a multiple of 16 bytes")
    if queries.stride(-3) % (_WORD_BYTES // queries.element_size()):
        raise ValueError("rows of queries must lie a multiple of 16 bytes apart")


def _check_float(device: torch.device, shape: tuple[int, ...], **named: Tensor) -> None:
    for name, tensor in named.items():
        if tensor.shape != shape or tensor.dtype != float32 or tensor.device != device:
            raise ValueError(
                f"{name} are {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: need float32"
                f" {tuple(shape)} on {device}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name} are not contiguous")


def _check_indices(device: torch.device, **named: Tensor) -> None:
    for name, tensor in named.items():
        if tensor.dtype != int64 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"{name} must be a contiguous int64 vector")
        if tensor.device != device:
            raise ValueError(f"{name} are on {tensor.device}, pools on {device}")
