"""The models that the worker's tests run on."""

import pytest
import torch

from kvtier_worker.model import Llama
from tests.worker.tiny import tiny_model


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The tiny model's GEMMs are too small to share."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny() -> Llama:
    return tiny_model()
