"""The vLLM connector and a daemon that hangs or cannot be greeted: time is lost, nothing else."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier_client.client import Client
from kvtier_client.crew import Crew
from kvtier_client.engines.vllm import link as links
from kvtier_client.engines.vllm.config import Settings
from kvtier_client.engines.vllm.link import Link
from kvtier_client.engines.vllm.messages import Part, Save
from kvtier_client.engines.vllm.paged import HostMemory, Stack
from kvtier_client.engines.vllm.worker_side import Place, WorkerSide
from tests.client.conftest import LAYOUT
from tests.client.scripted import ScriptedDaemon
from tests.support.wait import until

SETTINGS = Settings(deadline_s=0.6)
BLOCKS = 4


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ScriptedDaemon]:
    with ScriptedDaemon(tmp_path / "kv.sock") as scripted:
        yield scripted


def greet(client: Client) -> None:
    client.register_layout(LAYOUT)


def test_a_step_waits_for_a_daemon_that_hangs_no_longer_than_its_deadline_and_once(
    daemon: ScriptedDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    pool = np.zeros((BLOCKS, LAYOUT.block_bytes), np.uint8)
    stack = Stack(pool.ctypes.data, pool.strides[0], 1, 0, LAYOUT.block_bytes, 0)
    place = Place(LAYOUT, HostMemory([stack], BLOCKS, pool, Crew(1)), True, LAYOUT.block_tokens)
    link = Link(Client(daemon.path, deadline_s=SETTINGS.answer_s), greet)
    until(lambda: link.up, "the link is up")
    daemon.fault = lambda request: "mute"
    side = WorkerSide([place], link, SETTINGS.deadline_s)
    saves = [Save(n, [Part(0, bytes([n]) * 64, list(range(4)), 0, 4)]) for n in (1, 2)]
    side.store(saves)
    report = side.report()
    assert report is not None and report.failed == {1, 2}
    assert daemon.seen["ReserveKeys"] == 1
    waited = [float(s) for s in re.findall(r"did not answer within ([\d.]+) s", caplog.text)]
    assert waited and max(waited) <= SETTINGS.deadline_s
    daemon.fault = lambda request: ""
    link.close()


def test_a_greeting_that_fails_is_tried_again(
    daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(links, "PROBE_S", 0.01)
    faults = [RuntimeError("CUDA error: out of memory")]

    def greet_at_last(client: Client) -> None:
        greet(client)
        if faults:
            raise faults.pop()

    link = Link(Client(daemon.path), greet_at_last)
    until(lambda: link.up, "the link is up")
    assert "out of memory" in caplog.text
    assert link.call(lambda client: client.lookup(bytes(16), LAYOUT)) == [0]
    link.close()
