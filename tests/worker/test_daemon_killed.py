"""kill -9 of the daemon while blocks are being copied costs no token and no restart of the worker.

The daemon dies with the copy's leases open and starts again before the copy goes on: its arena is
kept by the holder, the client comes back by itself.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

import kvtier_client as kv
from kvtier_worker import swap
from kvtier_worker.daemon import OwnDaemon
from kvtier_worker.engine import Engine
from kvtier_worker.metrics import RunFigures
from kvtier_worker.pool import PagedPool
from kvtier_worker.swap import DaemonStore
from kvtier_worker.tile import Slots
from tests.worker.test_swap import MODEL, PAGES, finish
from tests.worker.tiny import CPU, ROOMY, SHAPE, WAIT_S, tiny_engine


@dataclass(slots=True)
class Strike:
    """Kills the daemon and starts it again when the n-th block is copied."""

    daemon: OwnDaemon
    at_block: int
    blocks: int = 0

    def count(self) -> None:
        self.blocks += 1
        if self.blocks == self.at_block:
            self.daemon.kill()
            self.daemon.start()


class StruckPool(PagedPool):
    """A pool whose blocks are counted on their way out and back in."""

    def __init__(self, out: Strike, back: Strike) -> None:
        super().__init__(SHAPE, (PAGES + 1) * SHAPE.block_bytes, CPU)
        self._out = out
        self._back = back

    def read_records(self, slots: Slots) -> NDArray[np.float32]:
        self._out.count()
        return super().read_records(slots)

    def write_blocks(self, pages: Seq[int], records: Tensor) -> None:
        self._back.count()
        super().write_blocks(pages, records)


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill can fall between any two blocks of a copy."""
    monkeypatch.setattr(swap, "RECORDS_MAX", 1)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return finish(tiny_engine(MODEL, 1000))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[OwnDaemon]:
    with OwnDaemon(str(tmp_path), ROOMY, memory="holder") as daemon:
        yield daemon


def decode(daemon: OwnDaemon, pool: PagedPool) -> tuple[list[list[int]], RunFigures]:
    with kv.Client(daemon.socket_path, name="test", deadline_s=WAIT_S) as client:
        engine = Engine(MODEL, pool, DaemonStore(client, pool, MODEL.config.name, WAIT_S))
        outputs = finish(engine)
        return outputs, engine.figures("swap")


@pytest.mark.parametrize("at_block", [1, 6, 17])
def test_killed_during_swap_out(
    daemon: OwnDaemon, expected: list[list[int]], at_block: int
) -> None:
    strike = Strike(daemon, at_block)
    outputs, figures = decode(daemon, StruckPool(strike, Strike(daemon, -1)))
    assert strike.blocks >= at_block
    assert outputs == expected
    assert figures.recomputed_tokens == 0
    assert figures.swap.hashes_wrong == figures.swap.lost == figures.swap.refused == 0


@pytest.mark.parametrize("at_block", [1, 6, 17])
def test_killed_during_swap_in(daemon: OwnDaemon, expected: list[list[int]], at_block: int) -> None:
    strike = Strike(daemon, at_block)
    outputs, figures = decode(daemon, StruckPool(Strike(daemon, -1), strike))
    assert strike.blocks >= at_block
    assert outputs == expected
    assert figures.recomputed_tokens == 0
    assert figures.swap.hashes_wrong == figures.swap.lost == figures.swap.refused == 0
