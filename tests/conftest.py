"""What holds for all tests: where those marked gpu run, and where Hypothesis keeps its examples."""

from pathlib import Path

import pytest
from hypothesis.configuration import set_hypothesis_home_dir

set_hypothesis_home_dir(Path(__file__).parents[1] / "build" / "hypothesis")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked gpu where CUDA is not available."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
