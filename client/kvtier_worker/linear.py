"""A weight matrix that multiplies tiles, in the form that is fastest on few rows.

On CPUs oneDNN's packed weights take about half the time of a plain GEMM at this shape.
"""

import torch
from torch import Tensor


class TileLinear:
    """Multiplies one tile by a weight matrix. Shapes: [rows, in] to [rows, out]."""

    def __init__(self, weight: Tensor, rows: int) -> None:
        """Most tiles have about so many rows. Shapes: `weight` [out, in]."""
        self._packed = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight, rows) if self._packed else weight
        )

    def __call__(self, x: Tensor) -> Tensor:
        """One GEMM."""
        if not self._packed:
            return torch.nn.functional.linear(x, self._weight)
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
        return result
