"""What the tests of the engines' adapters share."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The tiny models' GEMMs are too small to share."""
    torch.set_num_threads(1)
