"""Muon in float32: momentum whose matrices are made orthogonal before they are applied.

torch's own computes in bfloat16, which on a CPU without bfloat16 instructions takes longer than
the rest of a training step. Source: Jordan et al., "Muon: an optimizer for hidden layers" (2024).
"""

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton-Schulz iteration, tuned for speed at small singular values."""
ITERATIONS: Final = 5
MOMENTUM: Final = 0.95
DECAY: Final = 0.01
TINY: Final = 1e-7


class Muon:
    """Updates matrices in place from their gradients."""

    def __init__(self, matrices: Iterable[Tensor]) -> None:
        self._matrices = list(matrices)
        self._momenta = [torch.zeros_like(matrix) for matrix in self._matrices]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Apply the gradients, and forget them."""
        for matrix, momentum in zip(self._matrices, self._momenta, strict=True):
            assert matrix.grad is not None
            momentum.lerp_(matrix.grad, 1 - MOMENTUM)
            update = orthogonal(matrix.grad.lerp(momentum, MOMENTUM))
            rows, columns = matrix.shape
            matrix.mul_(1 - rate * DECAY)
            matrix.add_(update, alpha=-rate * max(1.0, rows / columns) ** 0.5)
            matrix.grad = None


def orthogonal(matrix: Tensor) -> Tensor:
    """About the nearest matrix with all singular values near 1. Shapes: any [rows, columns]."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + TINY)
    for _ in range(ITERATIONS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    result: Tensor = x.T if tall else x
    return result
