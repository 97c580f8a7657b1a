"""Limits of the core with some of them changed."""

from typing import Any

from kvtierd.core.world import CoreLimits


def with_limits(limits: CoreLimits, **changed: Any) -> CoreLimits:
    """The same limits, but for those named."""
    return CoreLimits(**{name: getattr(limits, name) for name in limits.__slots__} | changed)
