"""`check` of one spill directory: superblock, slab directory, headers, payloads, space."""

import os
import stat
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np
import xxhash

from kvtierd.core.slabs import FREE
from kvtierd.tiers import bodies as b
from kvtierd.tiers.cipher import TAG_BYTES, FileCipher
from kvtierd.tiers.errors import FormatError
from kvtierd.tiers.headers import HeaderFile, SpillHeaders, open_headers
from kvtierd.tiers.locks import LockedDirectory, lock_directory
from kvtierd.tiers.master_key import MasterKey
from kvtierd.tiers.records import SlabTable
from kvtierd.tiers.scan import Scan, scan_parts, word_states
from kvtierd.tiers.spill_files import HEADERS_NAME, PAYLOAD_NAME
from kvtierd.tiers.superblock import Expected, Kind

_32: Final = np.uint64(32)

Visit = Callable[[b.Bodies], None]
"""Is shown the bodies of all valid blocks, part by part."""


class SpillReport(msgspec.Struct):
    """What was counted in one spill directory.

    Units: `total_bytes` = `used_bytes` (slots with a block, or not yet clear) + `free_bytes` (free
    slots and free slabs) + `slack_bytes` (what is left over when slabs are cut into slots).
    `payloads_locked` are encrypted and could not be verified without their master key.
    """

    path: str
    generation: int = 0
    total_bytes: int = 0
    used_bytes: int = 0
    free_bytes: int = 0
    slack_bytes: int = 0
    slabs: int = 0
    slabs_used: int = 0
    slabs_damaged: int = 0
    slots: int = 0
    blocks: int = 0
    free_slots: int = 0
    busy_slots: int = 0
    damaged_slots: int = 0
    encrypted_blocks: int = 0
    payloads_verified: int = 0
    payloads_locked: int = 0
    payloads_lost: int = 0


def open_existing(path: str) -> LockedDirectory | None:
    """Lock a directory as the daemon would, but None when it is missing: `check` makes none.

    Errors: `StartError`, also when a daemon runs on it.
    """
    if not os.path.lexists(path):
        return None
    return lock_directory(path)


class SpillCheck:
    """Checks one directory; `problems` collects what is damaged."""

    def __init__(
        self,
        path: str,
        problem: Callable[[str], None],
        read_payloads: bool,
        masters: Sequence[MasterKey],
    ) -> None:
        self.report = SpillReport(path)
        self._problem = problem
        self._read_payloads = read_payloads
        self._masters = masters

    def run(
        self, directory: LockedDirectory, instance: bytes | None, index: int, see: Visit,
        *, had_files: bool,
    ) -> None:  # fmt: skip
        """Check it all. Errors: `StartError` for files that are not ours to open."""
        try:
            fd = directory.open_file(HEADERS_NAME, os.O_RDONLY)
        except FileNotFoundError:
            if directory.exists(PAYLOAD_NAME):
                self._problem(f"{directory.path}: {PAYLOAD_NAME} without {HEADERS_NAME}")
            elif had_files:
                self._problem(
                    f"{directory.path}: its files are gone, with their blocks; mount or restore it"
                )
            return
        expected = Expected(Kind.SPILL, instance, None, 0, index)
        try:
            headers = open_headers(fd, expected, f"{directory.path}/{HEADERS_NAME}")
        except FormatError as error:
            os.close(fd)
            self._problem(str(error))
            return
        assert isinstance(headers, SpillHeaders)
        try:
            self._check(directory, headers, see)
        finally:
            headers.close()

    def _check(self, directory: LockedDirectory, headers: SpillHeaders, see: Visit) -> None:
        report, geometry = self.report, headers.geometry
        table = headers.slab_table()
        report.generation = headers.superblock.generation
        report.total_bytes, report.slabs = geometry.payload_bytes, geometry.slabs
        report.slabs_used = int(table.in_use.sum())
        report.slabs_damaged = int(table.damaged.sum())
        for slab in np.flatnonzero(table.damaged):
            self._problem(f"{directory.path}: directory entry of slab {slab} is unreadable")
        cipher = FileCipher(headers, self._masters)
        with _Payload(directory, self._read_payloads, cipher) as payload:
            if payload.size_bytes != geometry.payload_bytes and report.slabs_used:
                found = f"has {payload.size_bytes} bytes" if payload.fd >= 0 else "is missing"
                self._problem(
                    f"{directory.path}: {PAYLOAD_NAME} {found} instead of {geometry.payload_bytes}"
                )
            for part in scan_parts(headers, table):
                self._count(directory, table, headers, part)
                cipher.reveal(part.bodies)
                self._verify(directory, payload, table, headers, part)
                see(part.bodies)
        lost_keys = cipher.used - cipher.keys.keys() - cipher.locked
        for number in sorted(lost_keys):
            self._problem(f"{directory.path}: data key {number} is damaged; its blocks are lost")
        self._account(directory, headers, table)

    def _count(
        self, directory: LockedDirectory, table: SlabTable, headers: HeaderFile, part: Scan
    ) -> None:
        report = self.report
        report.blocks += len(part.slots)
        report.busy_slots += len(part.busy_slots)
        report.damaged_slots += len(part.damaged)
        used = np.concatenate((part.slots, part.busy_slots, part.damaged))
        slabs = used // headers.geometry.max_slots
        report.used_bytes += int(table.columns["slot_bytes"][slabs].sum(dtype=np.int64))
        for slot in part.damaged.tolist():
            self._problem(f"{directory.path}: slot {slot}: its header is not a block's")

    def _verify(
        self,
        directory: LockedDirectory,
        payload: "_Payload",
        table: SlabTable,
        headers: HeaderFile,
        part: Scan,
    ) -> None:
        slabs, places = np.divmod(part.slots, headers.geometry.max_slots)
        offsets = slabs * headers.geometry.slab_bytes
        offsets += places * table.columns["slot_bytes"][slabs].astype(np.int64)
        lengths = (part.bodies[:, b.W_VALID_LENGTH] >> _32).astype(np.int64)
        self.report.encrypted_blocks += int(
            (b.checksum_kinds(part.bodies) == b.CHECKSUM_AES_GCM).sum()
        )
        if not self._read_payloads:
            missing = offsets + lengths > payload.size_bytes
            self.report.payloads_lost += int(missing.sum())
            return
        locked = payload.cipher.locked_blocks(part.bodies)
        self.report.payloads_locked += int(locked.sum())
        for index in np.flatnonzero(~locked).tolist():
            slot, offset, length = int(part.slots[index]), int(offsets[index]), int(lengths[index])
            body = part.bodies[index]
            obstacle = payload.obstacle(offset, length, body)
            if obstacle:
                self.report.payloads_lost += 1
                self._problem(f"{directory.path}: slot {slot}: {obstacle}")
            else:
                self.report.payloads_verified += 1

    def _account(self, directory: LockedDirectory, headers: HeaderFile, table: SlabTable) -> None:
        """Count the free slots by themselves; together with the others they must be all."""
        report, geometry = self.report, headers.geometry
        free_bytes = (geometry.slabs - report.slabs_used - report.slabs_damaged) * (
            geometry.slab_bytes
        )
        slack_bytes = report.slabs_damaged * geometry.slab_bytes
        for entry in table.entries():
            first = entry.slab * geometry.max_slots
            free = int((word_states(headers.words[first : first + entry.slots]) == FREE).sum())
            report.slots += entry.slots
            report.free_slots += free
            free_bytes += free * entry.slot_bytes
            slack_bytes += geometry.slab_bytes - entry.slots * entry.slot_bytes
        report.free_bytes, report.slack_bytes = free_bytes, slack_bytes
        counted = report.used_bytes + free_bytes + slack_bytes
        if counted != report.total_bytes:
            self._problem(
                f"{directory.path}: used and free space add up to {counted} bytes instead of "
                f"{report.total_bytes}"
            )


class _Payload:
    """The payload of a directory, read block by block; `with` closes it."""

    def __init__(self, directory: LockedDirectory, sequential: bool, cipher: FileCipher) -> None:
        self.fd = -1
        self.size_bytes = 0
        self.cipher = cipher
        self._buffer = self._plain = bytearray()
        if directory.exists(PAYLOAD_NAME):
            self.fd = directory.open_file(PAYLOAD_NAME, os.O_RDONLY)
            found = os.fstat(self.fd)
            assert stat.S_ISREG(found.st_mode)
            self.size_bytes = found.st_size
            if sequential:
                os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def __enter__(self) -> "_Payload":
        return self

    def __exit__(self, *_: object) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    def obstacle(self, offset: int, length: int, body: b.Bodies) -> str:
        """Why a block cannot be given back; empty when its bytes are those that were stored.

        `body` has the real checksum. Shapes: [16].
        """
        if offset + length > self.size_bytes:
            return "its payload is missing"
        if len(self._buffer) < length + TAG_BYTES:
            self._buffer = bytearray(length + TAG_BYTES)
        with memoryview(self._buffer)[:length] as target:
            done = 0
            while done < length:
                try:
                    count = os.preadv(self.fd, [target[done:]], offset + done)
                except OSError as error:
                    return f"its payload cannot be read ({error.strerror})"
                if not count:
                    return "its payload is missing"
                done += count
            if b.checksum_kinds(body[None])[0] == b.CHECKSUM_AES_GCM:
                right = self._decrypts(length, body)
            else:
                right = xxhash.xxh3_64_intdigest(target) == int(body[b.W_PAYLOAD_SUM])
        return "" if right else "its payload is not what was stored (checksum)"

    def _decrypts(self, length: int, body: b.Bodies) -> bool:
        if len(self._plain) < length:
            self._plain = bytearray(length)
        with memoryview(self._buffer) as data, memoryview(self._plain)[:length] as target:
            place = body[[b.W_PLACE]]
            good = self.cipher.decrypt(body[None], place, body[None], data, length, [target])
            right = xxhash.xxh3_64_intdigest(target) == int(body[b.W_PAYLOAD_SUM])
            return bool(good[0]) and right
