"""Fork and prune touch no block, and a branch reads exactly what belongs to it."""

import pytest

from kvtier_client import errors, wire
from tests.model.harness import refused
from tests.unit.core_host import Fixture, pack, u32


def fork(core: Fixture, node: int, parent: int, tokens: int) -> None:
    core.client.do(wire.Fork, core.session, node, parent, tokens)


def prune(core: Fixture, node: int, subtree: bool = True) -> int:
    return core.client.do(wire.Prune, core.session, node, subtree).count  # type: ignore[no-any-return]


def pages(core: Fixture, node: int) -> list[int]:
    reply = core.client.do(wire.Describe, core.session)
    [info] = [info for info in reply.nodes if info.node == node]
    return u32(info.pages[0])


def test_a_child_reads_its_ancestors_up_to_the_fork(core: Fixture) -> None:
    core.store([0, 1, 2, 3], 100)
    fork(core, 1, 0, 8)
    core.store([2, 3], 200, node=1)
    assert core.read(0, 4, node=1) == [100, 101, 202, 203]
    assert core.read(0, 4) == [100, 101, 102, 103]


def test_a_page_that_the_fork_divides_is_the_parents_until_the_child_has_its_own(
    core: Fixture,
) -> None:
    core.store([0, 1], 100)
    fork(core, 1, 0, 6)
    lease = core.acquire(0, 2, node=1)
    assert u32(lease.valid) == [4, 2]
    core.store([1], 300, node=1)
    assert core.read(0, 2, node=1) == [100, 301]
    assert u32(core.acquire(1, 1, node=1).valid) == [4]
    assert core.read(1, 1) == [101]


def test_a_grandchild_sees_no_more_of_the_root_than_its_parent_does(core: Fixture) -> None:
    core.store([0, 1, 2], 100)
    fork(core, 1, 0, 4)
    fork(core, 2, 1, 12)
    assert core.read(0, 1, node=2) == [100]
    with refused(errors.InvalidArgument):
        core.acquire(1, 1, node=2)


def test_prune_frees_a_subtree_and_nothing_else(core: Fixture) -> None:
    core.store([0, 1], 100)
    fork(core, 1, 0, 8)
    fork(core, 2, 1, 12)
    core.store([2], 200, node=1)
    core.store([3, 4], 300, node=2)
    used = core.host.world.table.used
    assert prune(core, 1) == 3
    assert core.host.world.table.used == used - 3
    assert core.read(0, 2) == [100, 101]
    with refused(errors.UnknownBranch):
        core.acquire(0, 1, node=2)


def test_prune_of_a_continuation_keeps_what_children_share(core: Fixture) -> None:
    core.store([0, 1, 2, 3], 100)
    fork(core, 1, 0, 6)
    fork(core, 2, 0, 4)
    assert prune(core, 0, subtree=False) == 2
    assert pages(core, 0) == [0, 1]
    assert prune(core, 1) == 1
    assert pages(core, 0) == [0]
    with refused(errors.UnknownBranch):
        core.store([1], 500)


def test_an_ended_ancestor_goes_with_its_last_child(core: Fixture) -> None:
    core.store([0], 100)
    fork(core, 1, 0, 4)
    core.store([1], 200, node=1)
    fork(core, 2, 1, 8)
    prune(core, 1, subtree=False)
    assert prune(core, 2) == 1
    with refused(errors.UnknownBranch):
        core.acquire(0, 1, node=1)


def test_node_ids_are_never_used_again(core: Fixture) -> None:
    fork(core, 1, 0, 0)
    prune(core, 1)
    with refused(errors.InvalidArgument):
        fork(core, 1, 0, 0)
    assert prune(core, 1) == 0


@pytest.mark.parametrize(
    ("node", "parent", "tokens", "error"),
    [
        (0, 0, 4, errors.InvalidArgument),
        (wire.NO_NODE, 0, 4, errors.InvalidArgument),
        (2, 9, 4, errors.UnknownBranch),
        (2, 1, 3, errors.InvalidArgument),
        (1, 0, 8, errors.InvalidArgument),
        (2, 0, 2**31, errors.InvalidArgument),
    ],
)
def test_a_fork_that_makes_no_sense_changes_nothing(
    core: Fixture, node: int, parent: int, tokens: int, error: type[errors.KvtierError]
) -> None:
    fork(core, 1, 0, 4)
    before = core.counts()
    with refused(error):
        fork(core, node, parent, tokens)
    assert core.counts() == before


def test_the_root_is_not_pruned(core: Fixture) -> None:
    core.store([0])
    for subtree in (True, False):
        with refused(errors.InvalidArgument):
            prune(core, 0, subtree)
    assert core.read(0, 1) == [100]


def test_a_reader_keeps_what_it_reads_when_its_branch_is_pruned(core: Fixture) -> None:
    fork(core, 1, 0, 0)
    core.store([0, 1], 100, node=1)
    lease = core.acquire(0, 2, node=1)
    prune(core, 1)
    core.store([0, 1, 2, 3, 4, 5], 500)
    offsets = lease.offsets
    assert [core.client.read(int.from_bytes(offsets[i : i + 8], "little"), 1) for i in (0, 8)] == [
        100, 101,
    ]  # fmt: skip
    core.client.do(wire.Release, lease.lease)
    assert core.host.world.doomed == 0


def test_pages_far_beyond_the_last_one_are_refused(core: Fixture) -> None:
    lease = core.reserve(1)
    before = core.counts()
    with refused(errors.InvalidArgument):
        core.client.do(
            wire.Commit, lease.lease, core.session, 0, pack(0), pack(5000), pack(4), wire.HELD
        )
    assert core.counts() == before
