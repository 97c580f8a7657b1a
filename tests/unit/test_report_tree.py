"""`kvtierctl tree`: every node with its blocks and folds, and never more than fits an answer."""

import math
from collections.abc import Iterator
from typing import Any

import pytest

from kvtier_client import wire
from kvtier_client.errors import InvalidArgument
from kvtierd.core import report_tree
from tests.model.harness import layout
from tests.unit.core_host import FULL, TOKEN, Fixture, Host


@pytest.fixture
def core() -> Iterator[Fixture]:
    core = Fixture(Host())
    yield core
    core.host.close()


def tree(core: Fixture) -> dict[str, Any]:
    return report_tree.tree(core.host.world, f"{core.session:016x}")


def test_a_nodes_blocks_are_its_own_or_shared_with_its_children(core: Fixture) -> None:
    core.store(list(range(6)))
    core.client.do(wire.Fork, core.session, 1, 0, 2 * FULL + 1)
    core.store([2, 3], node=1)
    core.evict(3)
    root, child = tree(core)["nodes"]
    size = core.layout.block_bytes
    assert (root["shared_bytes"], root["exclusive_bytes"]) == (3 * size, 3 * size)
    assert (child["shared_bytes"], child["exclusive_bytes"]) == (0, 2 * size)
    for node in (root, child):
        stored = node["shared_bytes"] + node["exclusive_bytes"]
        assert node["dram_bytes"] + node["nvme_bytes"] == stored
        assert node["dram_blocks"] + node["nvme_blocks"] == stored // size
    assert root["nvme_blocks"] + child["nvme_blocks"] == 3
    assert (child["parent"], child["pages"], child["tokens"]) == (0, 4, 4 * FULL)


def test_parts_of_a_session_are_added_up(core: Fixture) -> None:
    first, second = core.print, core.register(layout(2, group=1))
    core.session = core.open(b"2" * 16, [first, second])
    core.store([0, 1])
    [root] = tree(core)["nodes"]
    assert (root["dram_blocks"], root["dram_bytes"]) == (2, 2 * core.layout.block_bytes)


def test_folds_are_shown_until_they_are_taken_back(core: Fixture) -> None:
    core.store(list(range(6)))
    for first, grace_s in ((0, 100.0), (2, 0.0), (4, math.inf)):
        core.client.do(wire.Fold, core.session, 0, first, 2, grace_s, first)
    core.host.tick(40.0)
    [root] = tree(core)["nodes"]
    shown = [(x["first"], x["pages"], x["kept_entries"], x["grace_left_s"]) for x in root["folds"]]
    assert shown == [(0, 2, 0, 60.0), (2, 2, 2, 0.0), (4, 2, 4, None)]
    assert root["folds"][0]["dram_blocks"] == 2
    core.client.do(wire.Unfold, core.session, 0, 0, 2)
    [root] = tree(core)["nodes"]
    assert [fold["first"] for fold in root["folds"]] == [2, 4]


def test_a_lost_block_is_in_no_tier(core: Fixture) -> None:
    core.store([0, 1])
    core.evict(2)
    core.host.disk.pages[:] = 0
    core.client.send(wire.Acquire, 50, core.session, 0, core.print, 0, 2, 30.0)
    core.host.settle()
    [root] = tree(core)["nodes"]
    assert (root["dram_blocks"], root["nvme_blocks"], root["lost_blocks"]) == (0, 0, 2)
    assert (root["shared_bytes"], root["exclusive_bytes"]) == (0, 0)


def test_a_report_is_bounded_and_says_what_it_leaves_out(
    core: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    core.store(list(range(4)))
    for node in range(1, 6):
        core.client.do(wire.Fork, core.session, node, 0, 0)
    for page in range(4):
        core.client.do(wire.Fold, core.session, 0, page, 1, 10.0)
    monkeypatch.setattr(report_tree, "NODES_MAX", 2)
    monkeypatch.setattr(report_tree, "FOLDS_MAX", 3)
    found = tree(core)
    assert [node["node"] for node in found["nodes"]] == [0, 1]
    assert [len(node["folds"]) for node in found["nodes"]] == [3, 0]
    assert (found["nodes_left_out"], found["folds_left_out"]) == (4, 1)


def test_a_tree_is_found_by_name_too(core: Fixture) -> None:
    named = core.client.do(wire.OpenSession, TOKEN[::-1], [core.print], name="thought")
    found = report_tree.tree(core.host.world, "thought")
    assert (found["session"], found["name"]) == (f"{named.session:016x}", "thought")


def test_a_name_that_several_sessions_have_is_refused_with_their_ids(core: Fixture) -> None:
    first, second = (
        core.client.do(wire.OpenSession, bytes([i]) * 16, [core.print], name="twin").session
        for i in (1, 2)
    )
    with pytest.raises(InvalidArgument, match=f"{first:016x}, {second:016x}"):
        report_tree.tree(core.host.world, "twin")
    assert report_tree.tree(core.host.world, f"{second:016x}")["name"] == "twin"
