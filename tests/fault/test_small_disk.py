"""A small ext4 that really fills up, also by somebody else, under spill files and catalog."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.checker import KNOWN, Promises
from tests.fault.test_capacity import can_mount, fill_until_refused
from tests.fault.test_kill_daemon import assert_books_balance, assert_files_are_sound
from tests.support.daemon import DaemonProcess
from tests.support.fixtures import MakeDaemon
from tests.support.raw import NO_NODE, RawClient, from_u32, from_u64, pattern, u32
from tests.support.wait import until

MIB = 1 << 20
NO_ROOM = (301, 302)


class SmallFileSystem:
    """An ext4 on a loop device, and somebody else who fills it."""

    def __init__(self, directory: Path, size_bytes: int) -> None:
        self.path = directory / "small"
        self.path.mkdir()
        self.size_bytes = size_bytes
        image = directory / "small.img"
        with image.open("wb") as file:
            file.truncate(size_bytes)
        for command in (
            ["mkfs.ext4", "-q", "-m", "0", "-b", "4096", "-O", "^has_journal", str(image)],
            ["mount", "-o", "loop", str(image), str(self.path)],
        ):
            subprocess.run(command, check=True, timeout=60)
        self.path.chmod(0o700)
        self._others = self.path / "of_somebody_else"

    def fill(self, but_bytes: int = 0) -> None:
        """Somebody else takes what is free."""
        free = os.statvfs(self.path)
        left_bytes = free.f_bavail * free.f_frsize - but_bytes
        with self._others.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            for size in (MIB, 4096):
                while left_bytes >= size:
                    left_bytes -= file.write(bytes(size))
            os.fsync(file.fileno())

    def free(self) -> None:
        """Somebody else deletes it again."""
        self._others.unlink()

    def close(self) -> None:
        subprocess.run(["umount", str(self.path)], check=True, timeout=60)


if can_mount():

    @pytest.fixture(params=[12, 40], ids=lambda size: f"{size}MiB")
    def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallFileSystem]:
        system = SmallFileSystem(tmp_path, request.param * MIB)
        yield system
        system.close()

    def store_keys(client: RawClient, keys: list[bytes]) -> int:
        """Store keyed blocks; returns how many, which is all or none."""
        granted = client.call("reserve_keys", client.lease(), KNOWN, b"".join(keys), 0.2)
        if granted[0] == "error":
            assert granted[4] in NO_ROOM, granted
            return 0
        index = from_u32(granted[7])
        for place, offset in zip(index, from_u64(granted[6]), strict=True):
            client.write(offset, pattern(int.from_bytes(keys[place], "big")))
        n = len(index)
        named = b"".join(keys[place] for place in index)
        client.ask("commit_keys", granted[4], u32(*range(n)), named, u32(*index), u32(*[16] * n))
        return n

    def test_spill_files_on_a_disk_that_somebody_fills_and_frees(
        small: SmallFileSystem, make_daemon: MakeDaemon
    ) -> None:
        spill = {"paths": [str(small.path / "spill")], "capacity_bytes": small.size_bytes * 2 // 3}
        daemon = make_daemon(spill=spill).start()
        promises = Promises()
        keys = [number.to_bytes(16, "big") for number in range(1, 9)]
        with daemon.client() as client:
            session = promises.open(client)
            for _ in range(2):
                small.fill(but_bytes=2 * MIB)
                assert fill_until_refused(client, promises, session) in NO_ROOM
                until(daemon.ails, "it is unwell")
                promises.check(client)
                stored = store_keys(client, keys)
                hits = client.ask("lookup", [KNOWN], b"".join(keys))[4]
                assert hits in ([stored], [0])  # evicted at once, or all of them
                small.free()
                promises.swap_out(client, session, 8)  # the retry
                until(lambda: not daemon.ails(), "it is well again")
                promises.check(client)
                client.ask("remove", KNOWN, b"".join(keys))
                assert_books_balance(daemon, promises.total())
                client.ask("close_session", session)
                del promises.pages[session], promises.tokens[session]
                assert_books_balance(daemon, 0)
                session = promises.open(client)
                promises.swap_out(client, session, 16)
            daemon.kill()
            assert_files_are_sound(daemon, [str(small.path / "spill")])
            daemon.start()
            client.come_back()
            promises.check(client)
            assert_books_balance(daemon, promises.total())
        daemon.end()

    def test_a_catalog_on_a_full_disk_refuses_and_takes_it_up_again(
        make_daemon: MakeDaemon, tmp_path: Path
    ) -> None:
        system = SmallFileSystem(tmp_path, 16 * MIB)
        try:
            daemon = make_daemon(spill={"paths": [str(tmp_path / "spill")]})
            daemon.state_path = system.path / "state"
            keep_catalog_promises(daemon.start(), system)
        finally:
            daemon.end()
            system.close()

    def keep_catalog_promises(daemon: DaemonProcess, system: SmallFileSystem) -> None:
        promises = Promises()
        with daemon.client() as client:
            session = promises.open(client)
            promises.swap_out(client, session, 8)
            system.fill()
            version, code = 0, 0
            while not code:
                version += 1
                reply = client.call(
                    "put_blob", session, NO_NODE, version, bytes([version % 256]) * (64 << 10)
                )
                code = reply[4] if reply[0] == "error" else 0
                assert version < 1000, "the disk does not fill up"
            assert code == 302
            promises.swap_out(client, session, 8)  # blocks need no catalog
            assert len(client.swap_in(KNOWN, session, 0, 0, 16)) == 16
            assert any(each.startswith("catalog") for each in daemon.ails())
            system.free()
            until(lambda: not daemon.ails(), "what waited is stored")
            data = bytes([version % 256]) * (64 << 10)
            client.ask("put_blob", session, NO_NODE, version, data)
            daemon.restart()
            client.come_back()
            promises.check(client)
            assert client.ask("get_blob", session, NO_NODE)[4:] == [version, data]
            assert_books_balance(daemon, promises.total())
