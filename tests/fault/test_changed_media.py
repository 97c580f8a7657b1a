"""Media that change from one start to the next: nothing is lost, or the start is refused."""

from click.testing import CliRunner

from kvtier_client.errors import CapacityError, InvalidArgument, SpillFull
from kvtierd.ctl.main import main
from tests.fault.checker import KNOWN, Promises
from tests.support.daemon import ARENA_BYTES, DaemonProcess
from tests.support.fixtures import MakeDaemon
from tests.support.raw import BLOCK_BYTES, RawClient
from tests.support.wait import until

MIB = 1 << 20
STEP = 8
"""Blocks of 64 KiB that are stored at once."""


def kvtierctl(daemon: DaemonProcess, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["--socket", daemon.admin_path, *words])
    return result.exit_code, result.output


def fill(client: RawClient, promises: Promises) -> int:
    """Store HELD blocks until the daemon has room for no more; returns how many are promised."""
    session = promises.open(client)
    while True:
        probe = client.call("reserve", client.lease(), KNOWN, STEP, 0, 0, 5.0)
        if probe[0] == "error":
            assert probe[4] == SpillFull.code, probe
            return promises.total()
        client.ask("abort", probe[4])
        promises.swap_out(client, session, STEP)


def test_a_full_daemon_has_room_after_a_start_with_more_capacity(make_daemon: MakeDaemon) -> None:
    daemon, promises = make_daemon(spill={"capacity_bytes": 8 * MIB}).start(), Promises()
    with daemon.client() as client:
        fill(client, promises)
    daemon.stop()
    daemon.sections["spill"]["capacity_bytes"] = 16 * MIB
    daemon.start()
    with daemon.client() as client:
        promises.check(client)
        session = promises.open(client)
        for _ in range(8 * MIB // BLOCK_BYTES // STEP):
            promises.swap_out(client, session, STEP)
    daemon.kill()
    daemon.start()
    with daemon.client() as client:
        promises.check(client)


def test_less_capacity_than_the_blocks_need_is_refused_and_they_stay(
    make_daemon: MakeDaemon,
) -> None:
    daemon, promises = make_daemon(spill={"capacity_bytes": 16 * MIB}).start(), Promises()
    with daemon.client() as client:
        promises.swap_out(client, promises.open(client), 6 * MIB // BLOCK_BYTES)
        assert kvtierctl(daemon, "evict", "t", "--wait")[0] == 0
    daemon.stop()
    daemon.sections["spill"]["capacity_bytes"] = 4 * MIB
    assert "is in use; set spill.capacity_bytes to" in daemon.refuse()
    daemon.sections["spill"]["capacity_bytes"] = 16 * MIB
    daemon.start()
    with daemon.client() as client:
        promises.check(client)


def test_a_disk_that_is_not_mounted_refuses_the_start_and_loses_nothing(
    daemon: DaemonProcess,
) -> None:
    promises, spill = Promises(), daemon.state_path / "spill"
    with daemon.client() as client:
        promises.swap_out(client, promises.open(client), 40)
        assert kvtierctl(daemon, "evict", "t", "--wait")[0] == 0
    daemon.stop()
    spill.rename(daemon.state_path / "aside")
    assert "mount its disk" in daemon.refuse()
    assert not spill.exists()
    (daemon.state_path / "aside").rename(spill)
    daemon.start()
    with daemon.client() as client:
        promises.check(client)
    daemon.stop()
    spill.rename(daemon.state_path / "aside")
    daemon.sections["spill"]["missing"] = "accept"
    daemon.start()
    assert "no spill files, though this daemon has run before" in daemon.log()


def test_an_arena_changes_its_size_when_it_is_empty_and_not_before(daemon: DaemonProcess) -> None:
    promises = Promises()
    with daemon.client() as client:
        session = promises.open(client)
        promises.swap_out(client, session, 40)
        daemon.stop()
        for size_bytes in (2 * ARENA_BYTES, ARENA_BYTES // 2):
            daemon.tenants[0]["arena_bytes"] = size_bytes
            assert "kvtierctl evict" in daemon.refuse()
            daemon.tenants[0]["arena_bytes"] = ARENA_BYTES
    daemon.start()
    with daemon.client() as client:
        promises.check(client)
        code, said = kvtierctl(daemon, "evict", "t", "--wait")
        assert (code, "0 blocks" in said) == (0, True)
    for size_bytes in (2 * ARENA_BYTES, ARENA_BYTES // 2):
        daemon.stop()
        daemon.tenants[0]["arena_bytes"] = size_bytes
        daemon.start()
        assert daemon.tenant()["dram"]["total_bytes"] == size_bytes
        with daemon.client() as client:
            promises.check(client)
        assert kvtierctl(daemon, "evict", "t", "--wait")[0] == 0


def test_an_operator_is_told_what_cannot_leave_dram(make_daemon: MakeDaemon) -> None:
    daemon, promises = make_daemon(spill={"capacity_bytes": 8 * MIB}).start(), Promises()
    with daemon.client() as client:
        full = fill(client, promises)
        code, said = kvtierctl(daemon, "evict", "t", "--wait")
        assert code == CapacityError.exit_code
        dram = daemon.tenant()["dram"]
        assert f"{dram['blocks']} blocks" in said
        assert dram["blocks"] == full - daemon.tenant()["nvme"]["blocks"] > 0
        promises.check(client)


def test_evict_without_wait_returns_at_once_and_an_unknown_tenant_is_told(
    daemon: DaemonProcess,
) -> None:
    with daemon.client() as client:
        promises = Promises()
        promises.swap_out(client, promises.open(client), 8)
        assert kvtierctl(daemon, "evict", "t")[0] == 0
        until(lambda: daemon.tenant()["dram"]["blocks"] == 0, "all blocks have left DRAM")
        code, said = kvtierctl(daemon, "evict", "nobody", "--wait")
        assert (code, "no tenant 'nobody'" in said) == (InvalidArgument.exit_code, True)
