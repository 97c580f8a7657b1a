"""What decode attention is given."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Attention:
    """Rows of queries, and the entries of the pools that each of them attends to.

    An entry's bias is added to its logits. With `masses` the share of attention that each group of
    a row's entries gets is raised there to what the head gives that gives most, if that is more.

    Shapes: `queries` float32 [rows, heads, head_dim], with any stride between rows; `keys`,
    `values` float32 [slots, kv_heads, head_dim]; `biases` [slots, kv_heads]; `entries` int64, the
    rows' slots one row after the other, of which row i has those from `starts[i]` to `starts[i +
    1]`, at most `longest`; `groups` int64, one number per entry; `masses` [rows, groups]. Head h
    reads kv head h // (heads / kv_heads).
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    biases: Tensor | None
    entries: Tensor
    starts: Tensor
    longest: int
    groups: Tensor | None = None
    masses: Tensor | None = None
