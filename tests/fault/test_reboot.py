"""After a reboot DRAM is gone: what had reached NVMe is there, and what is lost is told."""

from collections.abc import Callable

import pytest

from tests.fault.checker import KNOWN, LAYOUT, Promises
from tests.fault.test_kill_daemon import assert_books_balance, assert_files_are_sound
from tests.support.daemon import DaemonProcess
from tests.support.fixtures import MakeDaemon
from tests.support.raw import RawClient, from_u32
from tests.support.wait import until

SPILLED = 96
IN_MEMORY = 24
LOST = 255


def reboot(daemon: DaemonProcess) -> None:
    """The daemon and what keeps its memory end at once."""
    daemon.kill()
    daemon.kill_keeper()


def discard(daemon: DaemonProcess) -> None:
    """The memory is still there, and the operator does not want it."""
    daemon.kill()
    daemon.arguments = ["--discard-dram"]


@pytest.mark.parametrize("lose", [reboot, discard])
def test_what_had_reached_nvme_is_there_and_resume_tells_what_is_not(
    make_daemon: MakeDaemon, lose: Callable[[DaemonProcess], None]
) -> None:
    daemon = make_daemon(spill={"durability": "power"}).start()
    promises = Promises()
    with daemon.client() as client:
        session = promises.open(client)
        promises.swap_out(client, session, SPILLED)
        daemon.admin("evict", "t")
        until(lambda: daemon.tenant()["nvme"]["blocks"] == SPILLED, "all is on NVMe")
        until(lambda: daemon.tenant()["dram"]["blocks"] == 0, "and nothing is in DRAM")
        client.swap_in(KNOWN, session, 0, 0, 32)  # promoted, with clean copies left on NVMe
        promises.swap_out(client, session, IN_MEMORY)
        client.ask("fork", session, 1, 0, 16 * 8)
        client.swap_out(KNOWN, session, 1, {page: 7000 + page for page in range(8, 12)})
        client.reserve(KNOWN, 8)
    lose(daemon)
    assert_files_are_sound(daemon)
    daemon.start()
    with daemon.client() as client:
        tell_and_read(client, session, promises)
        assert_books_balance(daemon, len(promises.pages[session]))
        promises.swap_out(client, session, IN_MEMORY)  # its place is as good as new
        promises.check(client)


def tell_and_read(client: RawClient, session: int, promises: Promises) -> None:
    """Which pages are there is told at once; they are right, and the others are errors."""
    client.ask("register_layout", LAYOUT)
    client.ask("resume_session", promises.tokens[session])
    root, branch = client.ask("describe", session)[8]
    pages, tiers = from_u32(root[6][0]), root[8][0]
    there = {page for page, tier in zip(pages, tiers, strict=True) if tier != LOST}
    assert set(range(SPILLED)) <= there <= set(promises.pages[session])
    assert (branch[0], branch[2]) == (1, 16 * 8)
    for page in set(promises.pages[session]) - there:
        assert client.code("acquire", client.lease(), session, 0, KNOWN, page, 1) in (204, 402)
        del promises.pages[session][page]
    client.ask("prune", session, 1)
    promises.check(client)
