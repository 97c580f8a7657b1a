"""What the client library and the real daemon promise together, also across kill -9."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvtier_client import wire
from kvtier_client.admin import AdminClient
from kvtier_client.errors import (
    ArenaFull,
    InvalidArgument,
    LeaseExpired,
    SpillFull,
    UnknownBranch,
)
from tests.client.shells import SHELLS, Shells
from tests.support.daemon import ARENA_BYTES, DaemonProcess
from tests.support.wait import until

BLOCK = 64 << 10
ARENA_BLOCKS = ARENA_BYTES // BLOCK


@pytest.fixture
def layout() -> wire.Layout:
    return wire.Layout("tiny", "uint8", 1, 8, 256, 16, BLOCK)


@pytest.fixture(params=SHELLS)
def client(request: pytest.FixtureRequest, daemon: DaemonProcess) -> Iterator[Any]:
    shells = Shells(request.param)
    yield shells.open(daemon.client_path)
    shells.close()


def records(n: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (n, BLOCK), dtype=np.uint8)


def dram(daemon: DaemonProcess) -> dict[str, int]:
    tier: dict[str, int] = daemon.tenant()["dram"]
    return tier


def is_free(client: Any, daemon: DaemonProcess) -> bool:
    """Whether all is given back; what was asked for ahead may still come, and goes back then."""
    client.flush()
    return daemon.tenant()["leases"] == dram(daemon)["blocks"] == 0


def test_arrays_come_back_as_they_were(client: Any, layout: wire.Layout) -> None:
    session = client.open_session([layout])
    out = records(24)
    session.swap_out(out, range(24), valid=[16] * 23 + [5])
    back = np.zeros_like(out)
    assert session.swap_in(back, range(24)).tolist() == [16] * 23 + [5]
    assert (back == out).all()


def test_tensors_come_back_as_they_were(client: Any, layout: wire.Layout) -> None:
    session = client.open_session([layout])
    out = [torch.randn(BLOCK // 4) for _ in range(5)]
    session.swap_out(out, [4, 0, 1, 2, 9], 16)
    back = [torch.zeros(BLOCK // 4) for _ in range(5)]
    session.swap_in(back, [4, 0, 1, 2, 9])
    assert all(torch.equal(a, b) for a, b in zip(out, back, strict=True))


def test_one_way_swap_outs_are_there_after_a_flush(client: Any, layout: wire.Layout) -> None:
    session = client.open_session([layout])
    out = records(20)
    for page in range(20):
        session.swap_out(out[page], page, 16, ack=False)
    client.flush()
    assert session.nodes()[0].pages[0].tolist() == list(range(20))
    back = np.zeros_like(out)
    session.swap_in(back, range(20))
    assert (back == out).all()


def test_a_session_larger_than_the_arena(
    client: Any, daemon: DaemonProcess, layout: wire.Layout
) -> None:
    session = client.open_session([layout])
    out = records(3 * ARENA_BLOCKS)
    session.swap_out(out, range(len(out)), 16)
    back = np.zeros_like(out)
    session.swap_in(back, range(len(out)))
    assert (back == out).all()
    with AdminClient(daemon.admin_path) as admin:
        assert admin.call("stats")["nvme"]["used_bytes"] > 0


def test_pages_read_one_by_one(client: Any, daemon: DaemonProcess, layout: wire.Layout) -> None:
    session = client.open_session([layout])
    out = records(2 * ARENA_BLOCKS)
    session.swap_out(out, range(len(out)), 16)
    back = np.zeros_like(out[0])
    until(lambda: not client.stats.pressure, "there is room again, for what is read ahead too")
    for page, record in enumerate(out):
        assert session.swap_in(back, page).tolist() == [16]
        assert (back == record).all()
    assert client.stats.read_ahead_blocks > 0  # how many depends on who is faster
    with pytest.raises(InvalidArgument, match="not stored"):
        session.swap_in(back, len(out))
    session.close()
    until(lambda: is_free(client, daemon), "nothing is left")


def test_a_pruned_page_is_not_read(client: Any, daemon: DaemonProcess, layout: wire.Layout) -> None:
    session = client.open_session([layout])
    session.fork(1, 0, 0)
    session.swap_out(records(12), range(12), 16, node=1)
    back = np.zeros_like(records(1)[0])
    for page in range(5):
        session.swap_in(back, page, node=1)
    session.prune(1)
    with pytest.raises(UnknownBranch):
        session.swap_in(back, 5, node=1)
    until(lambda: is_free(client, daemon), "nothing is left")


def test_a_fork_reads_its_parent_and_prune_frees(
    client: Any, daemon: DaemonProcess, layout: wire.Layout
) -> None:
    session = client.open_session([layout])
    out = records(6)
    session.swap_out(out[:4], range(4), 16)
    session.fork(1, 0, 2 * 16)
    session.swap_out(out[4:], [2, 3], 16, node=1)
    back = np.zeros_like(out[:4])
    session.swap_in(back, range(4), node=1)
    assert (back == out[[0, 1, 4, 5]]).all()
    assert session.prune(1) == 2
    session.swap_in(back, range(4))
    assert (back == out[:4]).all()


def test_keyed_blocks_and_holds(client: Any, layout: wire.Layout) -> None:
    keys = [bytes([k]) * 16 for k in range(8)]
    out = records(8)
    assert client.put_keys(layout, keys[:5], out[:5]) == 5
    assert client.put_keys(layout, keys, out) == 3
    assert client.lookup([*keys, b"x" * 16], layout) == [8]
    session = client.open_session([layout])
    assert session.hold(layout, keys) == 8
    assert client.remove(layout, keys) == 0
    assert session.unhold(layout, keys) == 8
    back = np.zeros_like(out)
    assert client.get_keys(layout, keys, back) == 8
    assert (back == out).all()
    assert client.remove(layout, keys) == 8
    assert client.lookup(keys, layout) == [0]


def test_repeats_give_the_first_result(
    client: Any, daemon: DaemonProcess, layout: wire.Layout
) -> None:
    session = client.open_session([layout], token=b"r" * 16)
    again = client.open_session([layout], token=b"r" * 16)
    assert (session.id, again.created) == (again.id, False)
    out = records(4)
    with client.reserve(layout, 5) as lease:
        for block, record in zip(lease.blocks, out, strict=False):
            block[:] = record
        lease.commit(session, 0, range(4), 16)
        with pytest.raises(InvalidArgument):
            lease.commit(session, 0, [9], 16, index=[0])
    session.put_blob(b"new", version=2)
    session.put_blob(b"old", version=1)
    assert session.get_blob() == (2, b"new")
    session.close()
    session.close()
    assert dram(daemon)["blocks"] == 0


def test_uncommitted_slots_are_never_seen_and_come_back(
    client: Any, daemon: DaemonProcess, layout: wire.Layout
) -> None:
    session = client.open_session([layout])
    with client.reserve(layout, 8) as lease:
        lease.blocks[3][:] = 1
        lease.commit(session, 0, [0], 16, index=[3])
    assert session.nodes()[0].pages[0].tolist() == [0]
    assert dram(daemon)["writing_bytes"] == 0


def test_more_than_everything_is_a_typed_error(client: Any, layout: wire.Layout) -> None:
    with pytest.raises((ArenaFull, SpillFull)), client.reserve(layout, ARENA_BLOCKS + 1):
        pass


# -------------------------------------------------------------------- kill -9


def test_committed_blocks_and_sessions_survive_kill_9(
    client: Any, daemon: DaemonProcess, layout: wire.Layout
) -> None:
    session = client.open_session([layout])
    out = records(2 * ARENA_BLOCKS)
    session.swap_out(out, range(len(out)), 16)
    session.put_blob(b"sampler", version=1)
    boot = client.boot_id
    daemon.restart()
    back = np.zeros_like(out)
    session.swap_in(back, range(len(out)))
    assert (back == out).all()
    assert session.get_blob() == (1, b"sampler")
    assert client.boot_id != boot


def test_kill_9_with_leases_open(client: Any, daemon: DaemonProcess, layout: wire.Layout) -> None:
    session = client.open_session([layout])
    out = records(6)
    session.swap_out(out[:2], range(2), 16)
    with client.reserve(layout, 4) as write, session.acquire((0, 2)) as read:
        for block, record in zip(write.blocks, out[2:], strict=True):
            block[:] = record
        daemon.restart()
        write.commit(session, 0, range(2, 6), 16)
        assert all((b == r).all() for b, r in zip(read.blocks, out[:2], strict=True))
    back = np.zeros_like(out)
    session.swap_in(back, range(6))
    assert (back == out).all()
    assert dram(daemon)["quarantined_bytes"] == 0


def test_kill_9_in_the_middle_of_a_swap_out(
    client: Any, daemon: DaemonProcess, layout: wire.Layout
) -> None:
    session = client.open_session([layout])
    out, calls = records(ARENA_BLOCKS), itertools.count()

    def fill(views: Any, i: int, j: int) -> None:
        if next(calls) == 1:
            daemon.restart()
        for view, record in zip(views, out[i:j], strict=True):
            view[:] = record

    session.swap_out(fill, range(len(out)), 16)
    back = np.zeros_like(out)
    session.swap_in(back, range(len(out)))
    assert (back == out).all()


def test_kill_9_in_the_middle_of_a_swap_in(
    client: Any, daemon: DaemonProcess, layout: wire.Layout
) -> None:
    session = client.open_session([layout])
    out, calls = records(2 * ARENA_BLOCKS), itertools.count()
    session.swap_out(out, range(len(out)), 16)
    back = np.zeros_like(out)

    def drain(views: Any, i: int, j: int) -> None:
        for record, view in zip(back[i:j], views, strict=True):
            record[:] = view
        if next(calls) == 0:
            daemon.restart()

    session.swap_in(drain, range(len(out)))
    assert (back == out).all()


def test_kill_9_between_pages_read_one_by_one(
    client: Any, daemon: DaemonProcess, layout: wire.Layout
) -> None:
    session = client.open_session([layout])
    out = records(24)
    session.swap_out(out, range(len(out)), 16)
    back = np.zeros_like(out[0])
    for page, record in enumerate(out):
        if page in (2, 3, 9):  # nothing read ahead yet; in a window; at another one's first page
            daemon.restart()
        session.swap_in(back, page)
        assert (back == record).all()


def test_one_way_commits_are_not_lost_by_kill_9(
    client: Any, daemon: DaemonProcess, layout: wire.Layout
) -> None:
    session = client.open_session([layout])
    out = records(12)
    for page in range(12):
        session.swap_out(out[page], page, 16, ack=False)
        if page == 6:
            daemon.restart()
    client.flush()
    back = np.zeros_like(out)
    session.swap_in(back, range(12))
    assert (back == out).all()


def test_a_lease_of_an_ended_client_is_refused(
    client: Any, daemon: DaemonProcess, layout: wire.Layout
) -> None:
    session = client.open_session([layout])
    with client.reserve(layout, 2) as lease:
        pass
    with pytest.raises(LeaseExpired):
        lease.commit(session, 0, [0, 1], 16)
