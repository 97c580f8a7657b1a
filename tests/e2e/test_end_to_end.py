"""`integrity = "end_to_end"` with a real daemon: a client scribbles over blocks, nobody is served.

Every client of a tenant maps its arena, so each could write where it has no lease. The sum that a
block had at its swap-out is what the daemon and every reader hold against that.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvtier_client import wire
from kvtier_client.errors import BlockLost, ChecksumMismatch
from tests.client.shells import Shells
from tests.support.daemon import DaemonProcess
from tests.support.fixtures import MakeDaemon
from tests.support.raw import RawClient
from tests.support.wait import until

BLOCK = 64 << 10
PAGES = 8
LAYOUT = wire.Layout("tiny", "uint8", 1, 8, 256, 16, BLOCK)
HURT = 5


@pytest.fixture
def daemon(make_daemon: MakeDaemon) -> DaemonProcess:
    daemon = make_daemon()
    daemon.top["integrity"] = "end_to_end"
    return daemon.start()


@pytest.fixture
def vandal(daemon: DaemonProcess) -> Iterator[RawClient]:
    """Another client of the tenant."""
    with daemon.client() as client:
        yield client


@pytest.fixture
def client(request: pytest.FixtureRequest, daemon: DaemonProcess) -> Iterator[Any]:
    """A synchronous client, or the one that a test asks for."""
    shells = Shells(getattr(request, "param", "sync"))
    yield shells.open(daemon.client_path)
    shells.close()


def records(n: int = PAGES, seed: int = 1) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (n, BLOCK), dtype=np.uint8)


def scribble(vandal: RawClient, block: np.ndarray[Any, Any]) -> None:
    """Change one byte of a block, wherever in the arena it lies, or has lain."""
    assert vandal.arena is not None
    at = vandal.arena.find(block.tobytes())
    assert at >= 0
    while at >= 0:
        vandal.arena[at + 777] ^= 1
        at = vandal.arena.find(block.tobytes(), at)


def all_on_nvme(daemon: DaemonProcess, blocks: int) -> None:
    def emptied() -> bool:
        daemon.admin("evict", "t")
        return int(daemon.tenant()["dram"]["blocks"]) == 0

    until(emptied, "DRAM is empty")
    until(lambda: daemon.tenant()["nvme"]["blocks"] == blocks, "and all of it is on NVMe")


@pytest.mark.parametrize("client", ["sync", "uvloop"], indirect=True)
def test_every_way_out_and_in_carries_the_sums(client: Any, daemon: DaemonProcess) -> None:
    """One block and many, acknowledged or not, by an explicit lease, in any order, keyed."""
    session, out = client.open_session([LAYOUT]), records(12)
    session.swap_out(out[0], 0, 16)
    session.swap_out(out[1], 1, 16, ack=False)
    session.swap_out(out[2:5], range(2, 5), valid=16, ack=False)
    session.swap_out(out[5:8], [7, 5, 6], valid=[16, 16, 16])
    lease = client.reserve(LAYOUT, 4)
    for view, block in zip(lease.blocks, out[8:12], strict=True):
        view[:] = block
    lease.commit(session, 0, [8, 9, 10, 11], [16, 16, 16, 3])
    lease.close()
    client.flush()
    keys = [bytes([number]) * 16 for number in range(4)]
    assert client.put_keys(LAYOUT, keys, out[:4]) == 4
    order = [0, 1, 2, 3, 4, 7, 5, 6, 8, 9, 10, 11]
    for _ in range(2):  # from DRAM, then from NVMe
        back = np.zeros_like(out)
        session.swap_in(back, order)
        assert np.array_equal(back, out)
        for page in (0, 1, 2):  # page after page, as what is read ahead elsewhere
            session.swap_in(back[page], page)
        assert np.array_equal(back, out)
        got = np.zeros_like(out[:4])
        assert client.get_keys(LAYOUT, keys, got) == 4 and np.array_equal(got, out[:4])
        with_lease = session.acquire((0, 4))
        assert [bytes(view) for view in with_lease.blocks] == [row.tobytes() for row in out[:4]]
        with_lease.close()
        all_on_nvme(daemon, 16)


def test_a_block_changed_in_dram_is_not_read_and_can_be_stored_again(
    client: Any, vandal: RawClient
) -> None:
    session, out = client.open_session([LAYOUT]), records()
    session.swap_out(out, range(PAGES), 16)
    scribble(vandal, out[HURT])
    back = np.zeros_like(out)
    for attempt in (
        lambda: session.swap_in(back, range(PAGES)),
        lambda: session.swap_in(back[HURT], HURT),
        lambda: session.acquire((HURT, HURT + 1)),
    ):
        with pytest.raises(ChecksumMismatch) as caught:
            attempt()
        assert caught.value.pages == (HURT,)
    again = records(1, seed=2)[0]  # computed anew, which need not give the same bits
    session.swap_out(again, HURT, 16)
    session.swap_in(back, range(PAGES))
    out[HURT] = again
    assert np.array_equal(back, out)


def test_a_block_changed_in_dram_is_lost_when_it_leaves(
    client: Any, vandal: RawClient, daemon: DaemonProcess
) -> None:
    session, out = client.open_session([LAYOUT]), records()
    session.swap_out(out, range(PAGES), 16)
    scribble(vandal, out[HURT])
    all_on_nvme(daemon, PAGES)  # the lost one keeps its place, to be told of
    back = np.zeros_like(out)
    with pytest.raises(BlockLost) as caught:
        session.swap_in(back, range(PAGES))
    assert caught.value.pages == (HURT,)
    for page in set(range(PAGES)) - {HURT}:
        session.swap_in(back[page], page)
        assert np.array_equal(back[page], out[page])
    assert daemon.counters()["lost_blocks"] == 1


def test_the_sums_are_known_after_kill_9(
    client: Any, vandal: RawClient, daemon: DaemonProcess
) -> None:
    """Of whole and partly filled blocks, in DRAM and on NVMe."""
    session, out = client.open_session([LAYOUT]), records()
    session.swap_out(out, range(PAGES), valid=[16] * (PAGES - 1) + [3])
    all_on_nvme(daemon, PAGES)
    back = np.zeros_like(out)
    session.swap_in(back[:4], range(4))  # 0 to 3 are in both tiers
    grown = records(1, seed=3)[0]
    session.swap_out(grown, PAGES - 1, 9)  # a longer copy, in DRAM only
    out[PAGES - 1] = grown
    scribble(vandal, grown)
    scribble(vandal, out[1])
    daemon.restart()
    for page in range(PAGES):
        if page in (1, PAGES - 1):
            with pytest.raises(ChecksumMismatch) as caught:
                session.swap_in(back[page], page)
            assert caught.value.pages == (page,)
        else:
            session.swap_in(back[page], page)
            assert np.array_equal(back[page], out[page])


def test_a_changed_keyed_block_is_a_miss_and_can_be_put_again(
    client: Any, vandal: RawClient
) -> None:
    keys, out = [bytes([number]) * 16 for number in range(PAGES)], records()
    assert client.put_keys(LAYOUT, keys, out) == PAGES
    scribble(vandal, out[HURT])
    back = np.zeros_like(out)
    assert client.get_keys(LAYOUT, keys, back) == HURT
    assert np.array_equal(back[:HURT], out[:HURT])
    assert client.stats.changed_blocks == 1
    assert client.put_keys(LAYOUT, keys, out) == 1
    assert client.get_keys(LAYOUT, keys, back) == PAGES and np.array_equal(back, out)


def test_blocks_stored_before_the_level_was_raised_are_read_and_covered_from_then_on(
    make_daemon: MakeDaemon,
) -> None:
    daemon, shells, out = make_daemon().start(), Shells("sync"), records()
    client = shells.open(daemon.client_path)
    try:
        session = client.open_session([LAYOUT])
        session.swap_out(out, range(PAGES), 16)
        daemon.kill()
        daemon.top["integrity"] = "end_to_end"
        daemon.start()
        back = np.zeros_like(out)
        session.swap_in(back, range(PAGES))  # they have no sums yet
        assert np.array_equal(back, out)
        client.flush()
        all_on_nvme(daemon, PAGES)
        session.swap_in(back, range(PAGES))
        with daemon.client() as vandal:
            scribble(vandal, out[HURT])
        with pytest.raises(ChecksumMismatch):
            session.swap_in(back, range(PAGES))
    finally:
        shells.close()
