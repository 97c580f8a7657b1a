"""A client that writes where it pleases in its arena: its own tenant alone can suffer, the memory
keeps its size and its seals, and the daemon's books and headers are out of reach.

That a changed block is noticed under `end_to_end`, tests/e2e/test_end_to_end.py says.
"""

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator

import pytest

from tests.fault.checker import KNOWN, LAYOUT
from tests.fault.test_kill_daemon import assert_books_balance
from tests.support.daemon import DaemonProcess
from tests.support.descriptors import descriptors
from tests.support.raw import RawClient, pattern
from tests.support.wait import until

PAGES = 24
FALLOC_PUNCH = 0x03
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE."""
libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def stored(client: RawClient) -> int:
    """A session with blocks in DRAM."""
    session = client.open(LAYOUT)
    client.swap_out(KNOWN, session, 0, {page: page for page in range(PAGES)})
    return session


@pytest.fixture
def vandal(daemon: DaemonProcess) -> Iterator[RawClient]:
    """Another client of the same tenant, with the same arena mapped."""
    with daemon.client() as client:
        client.ask("register_layout", LAYOUT)
        yield client


def test_who_writes_over_everything_harms_bytes_and_no_books(
    daemon: DaemonProcess, client: RawClient, stored: int, vandal: RawClient
) -> None:
    assert vandal.arena is not None
    for byte in (b"\xff", b"\0", b"\xa5"):
        vandal.arena[:] = byte * len(vandal.arena)
    assert client.swap_in(KNOWN, stored, 0, 0, PAGES) == [b"\xa5" * 65536] * PAGES
    assert_books_balance(daemon, PAGES)
    daemon.restart()  # what the daemon knows was never in that memory
    client.come_back()
    client.ask("register_layout", LAYOUT)
    assert_books_balance(daemon, PAGES)
    fresh = client.open(LAYOUT)
    client.swap_out(KNOWN, fresh, 0, {0: 77})
    assert client.swap_in(KNOWN, fresh, 0, 0, 1) == [pattern(77)]
    assert daemon.ails() == []


def test_what_was_on_nvme_is_whatever_it_was_before_the_scribbling(
    daemon: DaemonProcess, client: RawClient, stored: int, vandal: RawClient
) -> None:
    """A demoted block is read back through its checksum, not from what lay in DRAM."""
    assert daemon.admin("evict", "t")["blocks"] == PAGES
    assert_in_nvme_alone(daemon)
    assert vandal.arena is not None
    vandal.arena[:] = b"\xff" * len(vandal.arena)
    assert client.swap_in(KNOWN, stored, 0, 0, PAGES) == [pattern(page) for page in range(PAGES)]


def assert_in_nvme_alone(daemon: DaemonProcess) -> None:
    until(lambda: daemon.tenant()["dram"]["blocks"] == 0, "all blocks have left DRAM")


def refused(call: int) -> int:
    """The error number of a system call that must fail."""
    assert call == -1
    return ctypes.get_errno()


def test_the_arena_cannot_be_resized_resealed_or_executed(
    client: RawClient, vandal: RawClient, stored: int
) -> None:
    """Neither by the descriptor that was passed nor by one that is opened anew from it."""
    size = client.welcome[10]
    again = os.open(f"/proc/self/fd/{vandal.arena_fd}", os.O_RDWR)
    try:
        for fd in (vandal.arena_fd, again):
            for wanted in (0, 4096, size - 1, size + 1, 2 * size):
                with pytest.raises(PermissionError):
                    os.ftruncate(fd, wanted)
            with pytest.raises(PermissionError):
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
            assert refused(libc.fallocate(fd, 0, ctypes.c_long(size), ctypes.c_long(4096))) in (
                errno.EPERM, errno.EINVAL,
            )  # fmt: skip
        with pytest.raises(PermissionError):
            os.open(f"/proc/self/fd/{vandal.arena_fd}", os.O_RDWR | os.O_TRUNC)
        assert os.fstat(client.arena_fd).st_size == size
    finally:
        os.close(again)
    assert client.swap_in(KNOWN, stored, 0, 0, PAGES) == [pattern(page) for page in range(PAGES)]


def test_holes_punched_into_the_arena_are_zeros_and_no_fault(
    daemon: DaemonProcess, client: RawClient, stored: int, vandal: RawClient
) -> None:
    """Pages that a client takes out of the memfd come back as zeros to all, the daemon as well."""
    size = client.welcome[10]
    assert libc.fallocate(
        vandal.arena_fd, FALLOC_PUNCH, ctypes.c_long(0), ctypes.c_long(size)
    ) == 0  # fmt: skip
    assert vandal.arena is not None
    vandal.arena.madvise(9)  # MADV_REMOVE: the same by way of the mapping
    assert client.swap_in(KNOWN, stored, 0, 0, PAGES) == [bytes(65536)] * PAGES
    assert daemon.admin("evict", "t")["blocks"] == PAGES  # the daemon reads those pages now
    assert_in_nvme_alone(daemon)
    assert client.swap_in(KNOWN, stored, 0, 0, PAGES) == [bytes(65536)] * PAGES
    assert_books_balance(daemon, PAGES)


def test_nothing_but_the_payload_is_passed(daemon: DaemonProcess) -> None:
    """A socket and the payload's descriptor; the headers' memfd stays in the daemon."""
    before = descriptors()
    with daemon.client() as client:
        new = [name for fd, name in descriptors().items() if before.get(fd) != name]
        memory = [name for name in new if not name.startswith("socket:")]
        assert set(memory) == {os.readlink(f"/proc/self/fd/{client.arena_fd}")}
        assert "headers" not in memory[0]
        with pytest.raises((ValueError, OSError)):
            mmap.mmap(client.arena_fd, client.welcome[10] + 4096)
