"""What a caller of either shell is promised, with the daemon broken at every message."""

import contextlib
import os
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier_client import wire
from kvtier_client.client import Client
from kvtier_client.errors import (
    ArenaFull,
    BlockLost,
    ChecksumMismatch,
    ConnectionLost,
    InvalidArgument,
    LayoutMismatch,
    LeaseExpired,
    ProtocolError,
    Timeout,
    UnknownSession,
)
from tests.client.scripted import ScriptedDaemon
from tests.client.shells import Shells


def records(n: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (n, 4096), dtype=np.uint8)


def once(verb: type[wire.Request], what: str) -> Any:
    left = [what]
    return lambda request: left.pop() if left and isinstance(request, verb) else ""


def test_blocks_come_back_as_they_were(client: Any, layout: wire.Layout) -> None:
    session = client.open_session([layout])
    out = records(40)
    session.swap_out(out, (0, 40), valid=np.arange(1, 41) % 4 + 1)
    back = np.zeros_like(out)
    valid = session.swap_in(back, range(40))
    assert (back == out).all()
    assert valid.tolist() == [i % 4 + 1 for i in range(1, 41)]
    assert client.stats.swapped_in_bytes == client.stats.swapped_out_bytes == out.nbytes


def test_scattered_pages_and_lists_of_buffers(client: Any, layout: wire.Layout) -> None:
    session = client.open_session([layout])
    out = list(records(5))
    session.swap_out(out, [9, 3, 4, 30, 0], 4)
    back = [bytearray(4096) for _ in range(3)]
    session.swap_in(back, [3, 4, 0])
    assert [bytes(one) for one in back] == [out[i].tobytes() for i in (1, 2, 4)]


def test_a_callable_fills_and_drains_the_arena_itself(client: Any, layout: wire.Layout) -> None:
    session = client.open_session([layout])

    def fill(views: Any, i: int, j: int) -> None:
        for view, k in zip(views, range(i, j), strict=True):
            view[:] = k

    seen = []
    session.swap_out(fill, range(20), 4)
    session.swap_in(lambda views, i, j: seen.extend(int(v[-1]) for v in views), range(20))
    assert seen == list(range(20))


def test_a_session_larger_than_the_arena_is_read_in_windows(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    session = client.open_session([layout])
    out = records(30)
    session.swap_out(out, range(30), 4)
    daemon.window = 7
    back = np.zeros_like(out)
    session.swap_in(back, range(30))
    assert (back == out).all()
    assert daemon.seen["Acquire"] == 5


def test_small_swap_outs_take_pregranted_slots_and_no_round_trip(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    session = client.open_session([layout])
    out = records(8)
    for page in range(8):
        session.swap_out(out[page], page, 4, ack=False)
    client.flush()
    assert daemon.seen["Commit"] == 8
    assert daemon.seen["Reserve"] <= 5  # two slots a time: 1/32 of this arena
    back = np.zeros_like(out)
    session.swap_in(back, range(8))
    assert (back == out).all()


def test_pregranted_slots_are_given_back_under_pressure(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    session = client.open_session([layout])
    session.swap_out(records(1), 0, 4)
    assert len(daemon.free) < daemon.slots - 1
    daemon.push(wire.Pressure(0, 1, 0, 1, 4096))
    session.nodes()
    session.nodes()
    assert len(daemon.free) == daemon.slots - 1


@pytest.mark.usefixtures("patience")
def test_close_gives_everything_back_and_keeps_the_session(
    shells: Shells, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    client = shells.open(daemon.path)
    session = client.open_session([layout])
    session.swap_out(records(1), 0, 4)
    client.reserve(layout, 3)
    token = session.token
    client.close()
    assert len(daemon.free) == daemon.slots - 1
    again = shells.open(daemon.path)
    again.register_layout(layout)
    back = np.zeros((1, 4096), np.uint8)
    again.resume_session(token).swap_in(back, 0)
    assert (back == records(1)).all()
    with pytest.raises(ConnectionLost, match="closed"):
        client.open_session([layout])


MUTATIONS = [
    *(wire.RegisterLayout, wire.OpenSession, wire.Reserve, wire.Commit, wire.Acquire),
    *(wire.PutBlob, wire.Describe, wire.CloseSession),
]


@pytest.mark.parametrize("what", ["drop", "lose", "kill", "stop"])
@pytest.mark.parametrize("verb", MUTATIONS)
def test_a_call_survives_the_connection_lost_at_any_message(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout, verb: type[wire.Request], what: str
) -> None:
    daemon.fault = once(verb, what)
    session = client.open_session([layout], token=b"t" * 16)
    out = records(24)
    session.swap_out(out, range(24), 4)
    session.put_blob(b"state", version=3)
    back = np.zeros_like(out)
    session.swap_in(back, range(24))
    assert (back == out).all()
    assert session.get_blob() == (3, b"state")
    assert session.nodes()[0].pages[0].tolist() == list(range(24))
    session.close()
    assert client.stats.reconnects == 1
    assert daemon.seen[verb.__name__] >= 2
    assert daemon.blocks == {}
    assert len(daemon.free) == daemon.slots


def test_one_way_commits_are_repeated_after_a_restart(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    session = client.open_session([layout])
    out = records(6)
    daemon.withhold_acks = True
    for page in range(6):
        session.swap_out(out[page], page, 4, ack=False)
    daemon.withhold_acks = False
    daemon.fault = once(wire.Cancel, "kill")
    client.flush()
    back = np.zeros_like(out)
    session.swap_in(back, range(6))
    assert (back == out).all()


def test_a_refused_one_way_commit_is_told_by_flush(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    session = client.open_session([layout])
    other = client.open_session([layout])
    session.swap_out(records(1), 0, 4, ack=False)
    del daemon.sessions[other.token]
    other.swap_out(records(1), 0, 4, ack=False)
    with pytest.raises(UnknownSession):
        client.flush()
    client.flush()


def test_a_swap_out_whose_lease_was_lost_copies_again(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    session = client.open_session([layout])
    daemon.lose_leases = True
    daemon.fault = once(wire.Commit, "drop")
    out = records(24)
    session.swap_out(out, range(24), 4)
    back = np.zeros_like(out)
    session.swap_in(back, range(24))
    assert (back == out).all()
    assert client.stats.repeated_windows >= 1


def test_a_lease_lost_in_a_restart_commits_nothing(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    session = client.open_session([layout])
    daemon.lose_leases = True
    with client.reserve(layout, 2) as lease:
        daemon.fault = once(wire.Describe, "kill")
        session.nodes()
        assert lease.ended
        with pytest.raises(LeaseExpired, match="copy again"):
            lease.commit(session, 0, [0, 1], 4)
    assert daemon.blocks == {}


def test_open_leases_survive_a_restart(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    session = client.open_session([layout])
    with client.reserve(layout, 2) as lease:
        lease.blocks[0][:], lease.blocks[1][:] = 1, 2
        daemon.fault = once(wire.Describe, "kill")
        session.nodes()
        assert [one.lease for one in daemon.hellos[-1].leases] == [lease.id]
        lease.commit(session, 0, [0, 1], 4)
    with session.acquire((0, 2)) as read:
        assert [int(block[0]) for block in read.blocks] == [1, 2]


def test_uncommitted_slots_are_given_back_and_never_published(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    session = client.open_session([layout])
    with contextlib.suppress(ZeroDivisionError), client.reserve(layout, 4) as lease:
        lease.commit(session, 0, [7], 4, index=[2])
        raise ZeroDivisionError
    assert [place[2] for place in daemon.blocks] == [7]
    assert len(daemon.free) == daemon.slots - 1
    with pytest.raises(LeaseExpired):
        lease.commit(session, 0, [8], 4)


def test_a_failing_copy_publishes_nothing(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    session = client.open_session([layout])

    def broken(views: Any, i: int, j: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        session.swap_out(broken, range(20), 4)
    for _ in range(2):  # the window asked for ahead is given back when its grant has come
        session.nodes()
    assert daemon.blocks == {}
    assert len(daemon.free) == daemon.slots


def test_a_full_arena_is_a_typed_error_and_leaves_no_lease(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    with pytest.raises(ArenaFull), client.reserve(layout, 65):
        pass
    session = client.open_session([layout])
    with pytest.raises(ArenaFull):
        session.swap_out(records(100), range(100), 4, wait_s=0)
    session.close()
    assert len(daemon.free) == daemon.slots


def test_a_lost_block_is_named(client: Any, layout: wire.Layout) -> None:
    session = client.open_session([layout])
    session.swap_out(records(4), range(4), 4)
    with pytest.raises(BlockLost) as caught:
        session.swap_in(np.zeros((6, 4096), np.uint8), range(6))
    assert caught.value.pages == (4,)


def test_flipped_bytes_are_never_served_under_end_to_end(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    daemon.integrity = "end_to_end"
    session = client.open_session([layout])
    session.swap_out(records(4), range(4), 4)
    back = np.zeros((4, 4096), np.uint8)
    session.swap_in(back, range(4))
    slot = next(block[0] for place, block in daemon.blocks.items() if place[2] == 2)
    os.pwrite(daemon.fd, b"\x00\xff\x00\xff", slot * 4096 + 100)
    with pytest.raises(ChecksumMismatch) as caught:
        session.swap_in(back, range(4))
    assert caught.value.pages == (2,)


def test_a_daemon_that_never_answers_ends_in_a_timeout(
    shells: Shells, daemon: ScriptedDaemon
) -> None:
    daemon.fault = lambda request: "mute" if isinstance(request, wire.OpenSession) else ""
    client = shells.open(daemon.path)
    client.connect()
    client._core.deadline_s = 0.2
    with pytest.raises(Timeout, match="did not answer"):
        client.open_session([])


def test_no_daemon_ends_in_connection_lost(shells: Shells, tmp_path: Path) -> None:
    client = shells.open(tmp_path / "nobody.sock", deadline_s=0.2)
    with pytest.raises(ConnectionLost, match="no daemon answered"):
        client.connect()


def test_a_call_begun_before_the_daemon_waits_for_it(
    shells: Shells, tmp_path: Path, layout: wire.Layout
) -> None:
    client, fingerprints = shells.open(tmp_path / "kv.sock"), []
    caller = threading.Thread(target=lambda: fingerprints.append(client.register_layout(layout)))
    caller.start()
    with ScriptedDaemon(tmp_path / "kv.sock"):
        caller.join(30)
        assert fingerprints == [layout.fingerprint()]
        client.close()


def test_an_arena_shorter_than_announced_is_not_mapped(
    shells: Shells, daemon: ScriptedDaemon
) -> None:
    os.ftruncate(daemon.fd, 4096)
    client = shells.open(daemon.path)
    with pytest.raises(ProtocolError, match="announced"):
        client.connect()


def test_another_arena_voids_every_lease(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    session = client.open_session([layout])
    with client.reserve(layout, 2) as lease:
        daemon.arena_id = os.urandom(16)
        daemon.fault = once(wire.Describe, "kill")
        session.nodes()
        with pytest.raises(LeaseExpired):
            lease.commit(session, 0, [0, 1], 4)
    assert client.stats.arena_remaps == 1


def test_keyed_blocks(client: Any, daemon: ScriptedDaemon, layout: wire.Layout) -> None:
    keys = [bytes([i]) * 16 for i in range(6)]
    out = records(6)
    assert client.put_keys(layout, keys[:4], out[:4]) == 4
    assert client.put_keys(layout, keys, out) == 2
    assert client.lookup(keys, layout) == [6]
    daemon.window = 4
    back = np.zeros((7, 4096), np.uint8)
    assert client.get_keys(layout, [*keys, b"x" * 16], back) == 6
    assert (back[:6] == out).all()
    assert client.get_keys(layout, [b"x" * 16], back[:1]) == 0


def test_prefetch_tickets_end_with_a_push_or_a_restart(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    session = client.open_session([layout])
    first, second = session.prefetch((0, 4)), session.prefetch((4, 8))
    daemon.push(wire.Ready(0, 1, 0, 1, 4, 0))
    daemon.fault = once(wire.Describe, "kill")
    client.flush()
    session.get_blob()
    assert (first.wait().loaded, first.done) == (4, True)
    session.nodes()
    assert second.wait().loaded == 0


@pytest.mark.parametrize(
    ("pages", "valid", "size", "message"),
    [
        (range(3), 4, 2, "exactly one block_bytes"),
        ([1, 2], [4], 2, "one for each"),
        ([-1], 4, 1, "pages"),
        ([0.5], 4, 1, "integers"),
        (2**32, 4, 1, "pages"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout,
    pages: Any, valid: Any, size: int, message: str,
) -> None:  # fmt: skip
    session = client.open_session([layout])
    with pytest.raises(InvalidArgument, match=message):
        session.swap_out(records(size), pages, valid)
    assert daemon.seen["Reserve"] == 0


def test_what_is_wrong_with_a_record_is_found_while_slots_are_asked_for_and_they_go_back(
    client: Any, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    session = client.open_session([layout])
    out = list(records(8))
    with pytest.raises(InvalidArgument, match="10 bytes"):
        session.swap_out([*out[:7], np.zeros(10, np.uint8)], range(8), 4)
    with pytest.raises(InvalidArgument, match="one for each"):
        session.swap_out(out, range(8), [4] * 7)
    session.swap_out(out, range(8), 4)
    with pytest.raises(InvalidArgument, match="read-only"):
        session.swap_in([*out[:7], bytes(4096)], range(8))
    for _ in range(2):  # a grant that comes late goes back with the next call
        session.nodes()
    client.flush()
    assert daemon.leases == {}
    assert len(daemon.free) == daemon.slots - 8
    assert client._core.protocol.held == {}


def test_a_session_of_unknown_layout_says_what_to_do(
    shells: Shells, daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    token = shells.open(daemon.path).open_session([layout]).token
    session = shells.open(daemon.path).resume_session(token)
    with pytest.raises(LayoutMismatch, match="register_layout"):
        session.swap_in(records(1), 0)


def test_many_threads_share_one_client(daemon: ScriptedDaemon, layout: wire.Layout) -> None:
    with Client(daemon.path) as client:
        session, wrong = client.open_session([layout]), []

        def worker(k: int) -> None:
            out, back = records(1, k), np.zeros((1, 4096), np.uint8)
            for _ in range(20):
                session.swap_out(out, k, 4, ack=bool(k % 2))
                session.swap_in(back, k)
                if not (back == out).all():
                    wrong.append(k)

        threads = [threading.Thread(target=worker, args=(k,)) for k in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert wrong == []


def test_a_forked_child_is_told_to_open_its_own_client(
    daemon: ScriptedDaemon, layout: wire.Layout
) -> None:
    with Client(daemon.path) as client:
        session = client.open_session([layout])
        inherited, told = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads run; the child only asks
            child = os.fork()
        if child == 0:
            try:
                session.nodes()
            except ConnectionLost as problem:
                os.write(told, str(problem).encode())
            client.close()
            os._exit(0)
        os.waitpid(child, 0)
        os.close(told)
        with open(inherited) as pipe:
            assert "after the fork" in pipe.read()
        assert session.nodes()[0].node == 0
