"""Checks a copy's tensors and describes their memory to the kernels as runs of bytes."""

from dataclasses import astuple, dataclass

from torch import Tensor, int64


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where the bytes of pages and records lie; the fields' order is that of the kernels' struct.

    A page's K or V is `outer_runs` × `inner_runs` runs of `run_bytes` each, in the order in which
    a record holds them; strides are the distances between runs in the pool.

    Units: bytes for `*_bytes`, counts for the rest.
    """

    pages_address: int
    records_address: int
    parts: int
    records: int
    record_stride_bytes: int
    pool_pages: int
    page_stride_bytes: int
    outer_runs: int
    outer_stride_bytes: int
    inner_runs: int
    inner_stride_bytes: int
    run_bytes: int
    pool_addresses: tuple[int, ...]

    @property
    def segments(self) -> int:
        """How many (record, layer, K or V) copies there are: the grid's useful size."""
        return self.records * self.parts

    def words(self) -> list[int]:
        """The launch's description as `struct Copy` of scatter.cu, pools' addresses last."""
        *fields, pools = astuple(self)
        return [*fields, *pools]


def describe(
    layers_k: list[Tensor], layers_v: list[Tensor], pages: Tensor, records: Tensor
) -> Geometry:
    """Describes a copy of records to pools.

    Shapes: as for `kvtier_kernels.scatter_blocks`.
    Errors: `ValueError` when the tensors do not fit together.
    """
    check(layers_k, layers_v, pages, records)
    pool = layers_k[0]
    size = pool.element_size()
    tokens, heads, width = pool.shape[1:]
    page_stride, token_stride, head_stride, _ = (step * size for step in pool.stride())
    run_bytes = width * size
    if heads == 1 or head_stride == run_bytes:
        heads, run_bytes = 1, heads * run_bytes
        if tokens == 1 or token_stride == run_bytes:
            tokens, run_bytes = 1, tokens * run_bytes
    pairs = zip(layers_k, layers_v, strict=True)
    return Geometry(
        pages_address=pages.data_ptr(),
        records_address=records.data_ptr(),
        parts=2 * len(layers_k),
        records=records.shape[0],
        record_stride_bytes=records.stride(0) * size,
        pool_pages=pool.shape[0],
        page_stride_bytes=page_stride,
        outer_runs=tokens,
        outer_stride_bytes=token_stride,
        inner_runs=heads,
        inner_stride_bytes=head_stride,
        run_bytes=run_bytes,
        pool_addresses=tuple(layer.data_ptr() for pair in pairs for layer in pair),
    )


def check(layers_k: list[Tensor], layers_v: list[Tensor], pages: Tensor, records: Tensor) -> None:
    """Raises `ValueError`, saying which tensor and why, when the tensors do not fit together."""
    if not layers_k or len(layers_k) != len(layers_v):
        raise ValueError(f"{len(layers_k)} K pools and {len(layers_v)} V pools: need one each")
    first = layers_k[0]
    if first.dim() != 4:
        raise ValueError(f"pool has shape {tuple(first.shape)}: need 4 dimensions")
    if first.stride(3) != 1:
        raise ValueError("pool's head_dim is not contiguous")
    same = (first.shape, first.stride(), first.dtype, first.device)
    for pool in (*layers_k, *layers_v):
        if (pool.shape, pool.stride(), pool.dtype, pool.device) != same:
            raise ValueError("pools differ in shape, strides, dtype or device")
    if pages.dtype != int64 or pages.dim() != 1 or not pages.is_contiguous():
        raise ValueError("pages must be a contiguous int64 vector")
    if pages.device != first.device:
        raise ValueError(f"pages are on {pages.device}, pools on {first.device}")
    shape = (pages.shape[0], len(layers_k), 2, *first.shape[1:])
    if tuple(records.shape) != shape or records.dtype != first.dtype:
        raise ValueError(
            f"records are {records.dtype} {tuple(records.shape)}: need {first.dtype} {shape}"
        )
    if shape[0] and not records[0].is_contiguous():
        raise ValueError("each record must be contiguous")
    if records.device != first.device and records.device.type != "cpu":
        raise ValueError(f"records are on {records.device}, pools on {first.device}")
