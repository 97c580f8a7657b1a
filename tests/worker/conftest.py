"""The models that the worker's tests run on, and the daemon that keeps their KV."""

from collections.abc import Iterator

import pytest
import torch

import kvtier_client as kv
from kvtier_worker.daemon import OwnDaemon
from kvtier_worker.model import Llama
from tests.worker.tiny import ROOMY, WAIT_S, tiny_model


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """The tiny model's GEMMs are too small to share."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny() -> Llama:
    return tiny_model()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnDaemon]:
    """One for all tests of a file; a file whose tests want it empty has its own."""
    with OwnDaemon(str(tmp_path_factory.mktemp("daemon")), ROOMY, memory="holder") as daemon:
        yield daemon


@pytest.fixture
def client(daemon: OwnDaemon) -> Iterator[kv.Client]:
    with kv.Client(daemon.socket_path, name="test", deadline_s=WAIT_S) as client:
        yield client
