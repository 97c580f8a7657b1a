"""kill -9 of the daemon at chosen moments: what was acknowledged is there after the restart."""

import pytest

from kvtierd.ctl.check import check_files
from tests.fault.checker import KNOWN, Promises
from tests.support.daemon import DaemonProcess
from tests.support.descriptors import memfds
from tests.support.fixtures import MakeDaemon
from tests.support.raw import BLOCK_BYTES, RawClient, from_u64, pattern, u32, u64
from tests.support.wait import until


def assert_books_balance(daemon: DaemonProcess, blocks: int) -> None:
    """Without leases, what is used is what is stored, once the clearing of headers has ended."""

    def balanced() -> bool:
        tenant = daemon.tenant()
        return (
            tenant["leases"] == tenant["promised_blocks"] == tenant["waiting"] == 0
            and tenant["held_blocks"] == blocks
            and all(
                tenant[tier]["used_bytes"] == tenant[tier]["blocks"] * BLOCK_BYTES
                for tier in ("dram", "nvme")
            )
        )

    until(balanced, lambda: f"the books balance with {blocks} blocks: {daemon.tenant()}", 30.0)


def assert_files_are_sound(daemon: DaemonProcess, spill: list[str] | None = None) -> None:
    state = daemon.state_path
    report = check_files(str(state), spill or [str(state / "spill")], True)
    assert report.ok, report.problems


def fill(client: RawClient, promises: Promises, session: int, blocks: int) -> None:
    while len(promises.pages[session]) < blocks:
        promises.swap_out(client, session, 8)


def test_a_kill_with_leases_open_keeps_them(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    promises = Promises()
    with daemon.client() as client:
        session = promises.open(client)
        fill(client, promises, session, 16)
        seeds = promises.seeds(session, 4)
        writing, slots = client.reserve(KNOWN, 4)
        reading = client.ask("acquire", client.lease(), session, 0, KNOWN, 0, 8)
        for slot, seed in zip(slots[:2], list(seeds.values())[:2], strict=True):
            client.write(slot, pattern(seed))
        daemon.restart()
        for slot, seed in zip(slots[2:], list(seeds.values())[2:], strict=True):
            client.write(slot, pattern(seed))  # the mapping is the same memory
        read = [client.read(offset) for offset in from_u64(reading[6])]
        assert read == [pattern(promises.pages[session][page]) for page in range(8)]
        client.connect()
        client.hello([[writing, True, u64(*slots)], [reading[4], False, reading[6]]])
        assert client.welcome[13] == []
        promises.resume(client)
        client.ask(
            "commit", writing, session, 0, u32(*range(4)), u32(*seeds), u32(*[16] * 4)
        )  # fmt: skip
        promises.pages[session] |= seeds
        client.ask("release", reading[4])
        promises.check(client)
        assert_books_balance(daemon, promises.total())


def test_slots_of_a_client_that_has_not_come_back_are_nobodys(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    promises = Promises()
    with daemon.client() as client:
        session = promises.open(client)
        fill(client, promises, session, 8)
        _, slots = client.reserve(KNOWN, 8)
        reading = client.ask("acquire", client.lease(), session, 0, KNOWN, 0, 8)
        client.socket.close()
        daemon.restart()
        with daemon.client() as other:
            promises.resume(other)
            granted, got = other.reserve(KNOWN, 80)
            assert not set(got) & {*slots, *from_u64(reading[6])}
            other.ask("abort", granted)
            other.ask("close_session", session)
            granted, got = other.reserve(KNOWN, 80)
            assert not set(got) & {*slots, *from_u64(reading[6])}
            other.ask("abort", granted)
        client.connect()
        client.hello()  # claims nothing: its leases have ended
        assert_books_balance(daemon, 0)


def test_a_reserve_is_repeated_with_its_result_after_a_restart(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    with daemon.client() as client:
        promises = Promises()
        promises.open(client)
        counter = client.lease()
        lost = client.ask("reserve", counter, KNOWN, 4)  # as if this reply had been lost
        daemon.restart()
        client.come_back()
        promises.resume(client)
        again = client.ask("reserve", counter, KNOWN, 4)
        assert again[4] == lost[4]
        assert len(from_u64(again[6])) == 4
        client.ask("abort", again[4])
        assert_books_balance(daemon, 0)


def test_a_kill_during_demotion_and_during_promotion(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(spill={"io_threads": 1}).start()
    promises = Promises()
    with daemon.client() as client:
        session = promises.open(client)
        fill(client, promises, session, 96)
        client.send("reserve", client.lease(), KNOWN, 100, 0, 0, 60.0)  # demotes nearly all
        with RawClient(daemon.admin_path) as operator:
            operator.ask("stats")
        daemon.kill()
        assert_files_are_sound(daemon)
        daemon.start()
        client.come_back()
        promises.check(client)
        daemon.admin("evict", "t")
        until(lambda: daemon.tenant()["dram"]["blocks"] == 0, "all is on NVMe")
        client.send("acquire", client.lease(), session, 0, KNOWN, 0, 96, 60.0)  # promotes
        with RawClient(daemon.admin_path) as operator:
            operator.ask("stats")
        daemon.kill()
        assert_files_are_sound(daemon)
        daemon.start()
        client.come_back()
        promises.check(client)
        assert_books_balance(daemon, 96)


def test_pruned_and_closed_blocks_do_not_come_back(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    promises = Promises()
    with daemon.client() as client:
        session = promises.open(client)
        closed = promises.open(client)
        fill(client, promises, session, 64)
        fill(client, promises, closed, 64)
        client.ask("fork", session, 1, 0, 64 * 16)
        client.swap_out(KNOWN, session, 1, {64: 1, 65: 2})
        client.ask("prune", session, 1)
        client.ask("close_session", closed)
        daemon.restart()
        client.come_back()
        assert client.code("resume_session", promises.tokens.pop(closed)) == 201
        del promises.pages[closed]
        promises.check(client)
        assert client.code("fork", session, 1, 0, 0) == 204
        assert_books_balance(daemon, 64)


def test_blobs_holds_and_keyed_blocks_survive(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    promises = Promises()
    key = bytes(range(16))
    with daemon.client() as client:
        session = promises.open(client)
        client.ask("put_blob", session, 0xFFFFFFFF, 3, b"state")
        granted = client.ask("reserve_keys", client.lease(), KNOWN, key)
        client.write(from_u64(granted[6])[0], pattern(7))
        client.ask("commit_keys", granted[4], u32(0), key, u32(0), u32(16))
        client.ask("hold", session, KNOWN, key)
        daemon.restart()
        client.come_back()
        promises.resume(client)
        assert client.ask("get_blob", session, 0xFFFFFFFF)[4:] == [3, b"state"]
        assert client.ask("remove", KNOWN, key)[4] == 0  # held
        granted = client.ask("acquire_keys", client.lease(), KNOWN, key)
        assert client.read(from_u64(granted[6])[0]) == pattern(7)


@pytest.mark.timeout(180)
def test_many_restarts_leave_one_holder_and_the_same_memory(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()
    promises = Promises()
    with daemon.client() as client:
        session = promises.open(client)
        fill(client, promises, session, 8)
        (holder,) = daemon.holders()
        before = sorted(memfds(holder).values())
        assert len(before) == 2
        for life in range(20):
            if life % 2:
                daemon.stop()
            else:
                daemon.kill()
            daemon.start()
        assert daemon.holders() == [holder]
        until(lambda: sorted(memfds(holder).values()) == before, "the holder has what it had")
        client.come_back()
        promises.check(client)
