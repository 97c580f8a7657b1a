"""The models that the worker's tests run on."""

import pytest
import torch

from kvtier_worker.model import Llama
from tests.worker.tiny import tiny_model


@pytest.fixture(scope="session", autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def tiny() -> Llama:
    return tiny_model()
