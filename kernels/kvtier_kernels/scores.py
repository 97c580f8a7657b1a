"""What the score pass of a fold tells."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class KeyScores:
    """How the queries' attention falls on a step's entries.

    A query's weights are exp(logit - top); divided by their sum, its mass, they are its shares.
    Query i of a kv head is head i % group of row i // group. `outputs` are the values, summed up by
    their shares, if they were asked for.

    Shapes: `importance` [layers, kv_heads, entries]; `tops`, `masses` [layers, kv_heads, rows *
    group]; `outputs` [layers, kv_heads, rows, group, head_dim].
    """

    importance: Tensor
    tops: Tensor
    masses: Tensor
    outputs: Tensor | None = None
