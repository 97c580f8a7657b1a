"""The spill files on disk as one row of slabs and slots, from their opening to their closing.

    open_spill   (spill_open.py) lock, look, refuse or accept; makes headers of new directories
    scan         what a restart finds, and which of it has lost its payload or its key
    begin        the start has succeeded: payloads get their size, data keys and generation are
                 stamped, headers of a new size replace the former ones
    abandon      the start has failed elsewhere: what open_spill made is removed

Each directory holds `headers.kv` and `blocks.kv`. Slots and slabs are numbered through all files;
all files have one geometry, so a number's file and place are plain divisions. It changes with
`capacity_bytes`, from one start to the next, and no number with it.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from kvtierd.tiers.blockio import I64, Kernel
from kvtierd.tiers.bodies import W_VALID_LENGTH
from kvtierd.tiers.cipher import FileCipher
from kvtierd.tiers.direct_io import DirectIO
from kvtierd.tiers.errors import StartError
from kvtierd.tiers.headers import SlotArray, SpillHeaders, Words
from kvtierd.tiers.locks import LockedDirectory
from kvtierd.tiers.records import SlabEntry
from kvtierd.tiers.scan import Scan, scan_parts
from kvtierd.tiers.superblock import KEYS_MAX, Geometry

log = logging.getLogger(__name__)

HEADERS_NAME: Final = "headers.kv"
NEW_HEADERS_NAME: Final = "headers.kv.new"
"""Until it is whole, and for a directory that has headers, until the start has succeeded."""
PAYLOAD_NAME: Final = "blocks.kv"


class SpillSettings(msgspec.Struct, frozen=True):
    """What the configuration says of the NVMe tier.

    Units: `capacity_bytes` is of each directory; what is left over of a slab is not used.
    """

    paths: tuple[str, ...]
    capacity_bytes: int
    slab_bytes: int
    min_block_bytes: int
    direct_io: DirectIO = "try"
    durability: Literal["process", "power"] = "process"
    preallocate: bool = False
    missing: Literal["refuse", "accept"] = "refuse"
    """What a start does without the files that a directory has had."""
    io_threads: int = 16
    queue_bytes: int = 256 << 20
    encrypt: bool = False
    key: str = ""
    """Where the master key is (master_key.py)."""
    old_key: str = ""

    def geometry(self) -> Geometry:
        """How each file is cut. Errors: `ValueError` when the sizes do not fit together."""
        return Geometry(
            self.capacity_bytes // self.slab_bytes,
            self.slab_bytes,
            self.slab_bytes // self.min_block_bytes,
        )


FILE_SHIFT: Final = 48
OFFSET_MASK: Final = (1 << FILE_SHIFT) - 1


class SpillScan(msgspec.Struct, frozen=True):
    """A part of what a restart finds. Slots are global; bodies say their place in their file."""

    found: Scan
    lost: npt.NDArray[np.bool_]
    """Which of `found.slots` have lost their payload (file missing or cut, data key damaged).
    Shapes: [n]."""


class SpillFile:
    """One directory's pair of files."""

    def __init__(
        self,
        index: int,
        directory: LockedDirectory,
        headers: SpillHeaders,
        cipher: FileCipher,
        former: Geometry | None,
        direct: bool,
    ) -> None:
        self.index = index
        self.directory = directory
        self.headers = headers
        self.cipher = cipher
        self.former = former
        """How the files were cut before this start; None where there were none."""
        self.direct = direct
        self.payload_fd = -1
        self.payload_bytes = 0
        """Size as found; less than the geometry's when the payload is missing or was cut."""

    def open_payload(self) -> None:
        """Open the payload if it is there; it may lack bytes, which `begin` gives back."""
        with contextlib.suppress(FileNotFoundError):
            self.payload_fd = self.directory.open_file(PAYLOAD_NAME, os.O_RDWR | self._direct_flag)
            self.payload_bytes = os.fstat(self.payload_fd).st_size

    def make_whole(self, preallocate: bool, undo: list[Callable[[], None]]) -> None:
        """Give the payload its size; `undo` collects how to take that back.

        Errors: `OSError` (ENOSPC) when it cannot be preallocated.
        """
        size = self.headers.geometry.payload_bytes
        resize = self.payload_bytes < size or self.resized
        if self.payload_fd < 0:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | self._direct_flag
            self.payload_fd = self.directory.open_file(PAYLOAD_NAME, flags)
            undo.append(lambda: self.directory.remove(PAYLOAD_NAME))
        elif resize:
            undo.append(lambda: os.ftruncate(self.payload_fd, self.payload_bytes))
        if resize:
            os.ftruncate(self.payload_fd, size)
        if preallocate:
            os.posix_fallocate(self.payload_fd, 0, size)

    @property
    def resized(self) -> bool:
        """Whether this start changes the number of slabs."""
        return self.former not in (None, self.headers.geometry)

    def adopt_headers(self) -> None:
        """Put the headers of a resized file in the place of its former ones; they are synced."""
        at = self.directory.fd
        if self.resized:
            os.rename(NEW_HEADERS_NAME, HEADERS_NAME, src_dir_fd=at, dst_dir_fd=at)
        else:
            self.directory.remove(NEW_HEADERS_NAME)  # of a start that was killed at it

    @property
    def _direct_flag(self) -> int:
        return os.O_DIRECT if self.direct else 0

    def close(self) -> None:
        """Close both files and let go of the lock."""
        self._close_files()
        self.directory.close()

    def abandon(self) -> None:
        """Close both files, and remove what this start has made."""
        self._close_files()
        if self.former is None:
            self.directory.remove(HEADERS_NAME)
        if self.resized:
            self.directory.remove(NEW_HEADERS_NAME)
        self.directory.discard()

    def _close_files(self) -> None:
        self.headers.close()
        if self.payload_fd >= 0:
            os.close(self.payload_fd)
            self.payload_fd = -1


class SpillFiles:
    """All spill files of the daemon, as one row of slabs and slots."""

    def __init__(
        self, settings: SpillSettings, files: list[SpillFile], words: Words, kernel: Kernel
    ) -> None:
        self.settings = settings
        self.files = files
        self.kernel = kernel
        self.words = words
        """Mirror of all words as found at the start; from then on the core's. [slots]"""
        self.geometry = settings.geometry()
        self.warnings: list[str] = []
        """What an operator should know about this start; also logged."""
        self.damaged_slabs: list[int] = []
        """Slabs whose directory entry is unreadable: their blocks are lost, unnamed."""
        self._slot_bytes = np.zeros(len(files) * self.geometry.slabs, np.int64)
        file, slab = np.divmod(np.arange(len(self._slot_bytes)), self.geometry.slabs)
        self._slab_places = (file << FILE_SHIFT) + slab * self.geometry.slab_bytes
        self._entries: list[SlabEntry] = []
        self._pending: dict[int, SlabEntry | None] = {}  # slabs whose entry is due
        self._pending_lock = threading.Lock()
        self._settle_locks = [threading.Lock() for _ in files]
        self._load_directory()

    # ------------------------------------------------------------ where things are

    def locate(self, slots: SlotArray) -> tuple[I64, I64]:
        """The place of each slot (file << FILE_SHIFT | byte offset), and its size in bytes.

        The size is 0 where no slab is assigned.
        """
        slabs, inside = np.divmod(slots, self.geometry.max_slots)
        slot_bytes = self._slot_bytes[slabs]
        return self._slab_places[slabs] + inside * slot_bytes, slot_bytes

    def local(self, slots: SlotArray) -> SlotArray:
        """Slot numbers within their file."""
        return slots % self.geometry.total_slots

    # ------------------------------------------------------------ slab directory

    def slabs(self) -> list[SlabEntry]:
        """The slabs in use as found at the start; numbers are global."""
        return self._entries

    def assign_slab(self, entry: SlabEntry) -> None:
        """Give a slab (global number) to a layout; written by the next `settle` of its file."""
        self._slot_bytes[entry.slab] = entry.slot_bytes
        with self._pending_lock:
            self._pending[entry.slab] = entry

    def free_slab(self, slab: int) -> None:
        """Take a slab (global number) back; written by the next `settle` of its file."""
        self._slot_bytes[slab] = 0
        with self._pending_lock:
            self._pending[slab] = None

    def settle(self, index: int) -> dict[int, OSError]:
        """Write what is due in a file's slab directory; returns the slabs where that failed.

        Those stay due. It takes turns: when it returns, no entry is half written by another.
        """
        failed: dict[int, OSError] = {}
        with self._settle_locks[index]:
            with self._pending_lock:
                first = index * self.geometry.slabs
                mine = [slab for slab in self._pending if 0 <= slab - first < self.geometry.slabs]
                due = {slab: self._pending.pop(slab) for slab in mine}
            for slab, entry in due.items():
                try:
                    self._write_entry(self.files[index].headers, slab - first, entry)
                except OSError as error:
                    failed[slab] = error
                    with self._pending_lock:
                        self._pending.setdefault(slab, entry)
        return failed

    @staticmethod
    def _write_entry(headers: SpillHeaders, slab: int, entry: SlabEntry | None) -> None:
        if entry is None:
            headers.free_slab(slab)
            return
        # Words left over from a damaged entry or a lost write must not come alive again.
        first = slab * headers.geometry.max_slots
        slots = np.arange(first, first + entry.slots, dtype=np.int64)
        headers.write_words(slots, np.zeros(entry.slots, np.uint64))
        headers.assign_slab(msgspec.structs.replace(entry, slab=slab))

    def _load_directory(self) -> None:
        for index, file in enumerate(self.files):
            table = file.headers.slab_table()
            base = index * self.geometry.slabs
            for entry in table.entries():
                self._entries.append(msgspec.structs.replace(entry, slab=base + entry.slab))
                self._slot_bytes[base + entry.slab] = entry.slot_bytes
            self.damaged_slabs += (base + np.flatnonzero(table.damaged)).tolist()

    # ------------------------------------------------------------ restart

    def scan(self) -> Iterator[SpillScan]:
        """What lies in the slots, file by file and part by part; nothing is changed.

        Errors: `StartError` for encrypted blocks without the right master key.
        """
        for index, file in enumerate(self.files):
            for part in scan_parts(file.headers):
                no_key = file.cipher.reveal(part.bodies)
                if file.cipher.used & file.cipher.locked:
                    raise self._locked(file)
                slots = part.slots + index * self.geometry.total_slots
                offsets = self.locate(slots)[0] & OFFSET_MASK
                lengths = (part.bodies[:, W_VALID_LENGTH] >> np.uint64(32)).astype(np.int64)
                found = msgspec.structs.replace(
                    part,
                    slots=slots,
                    busy_slots=part.busy_slots + index * self.geometry.total_slots,
                    damaged=part.damaged + index * self.geometry.total_slots,
                )
                yield SpillScan(found, (offsets + lengths > file.payload_bytes) | no_key)
            file.cipher.seen_all = True

    def _locked(self, file: SpillFile) -> StartError:
        asked = f"cannot read spill.paths[{file.index}] ({file.directory.path})"
        if not self.settings.key:
            return StartError(
                asked,
                "it has encrypted blocks, and no key is configured",
                "give their key as spill.encryption.key, with enabled = false to encrypt no more",
            )
        return StartError(
            asked,
            "it has blocks that were encrypted under another master key",
            "give that key as spill.encryption.key, or as old_key beside a new one",
        )

    def begin(self, generation: int) -> None:
        """Take the files into use under this start's number; call once, when nothing else can fail.

        Errors: `StartError`; what this call changed is taken back.
        """
        undo: list[Callable[[], None]] = []
        try:
            for file in self.files:
                file.make_whole(self.settings.preallocate, undo)
            for file in self.files:
                self._begin_cipher(file, generation)
                file.headers.set_generation(generation)
                file.headers.sync()
            for file in self.files:
                file.adopt_headers()
                os.fsync(file.directory.fd)
        except (OSError, StartError) as error:
            for step in reversed(undo):
                step()
            if isinstance(error, StartError):
                raise
            raise StartError(
                f"cannot prepare the spill files ({self.geometry.payload_bytes} bytes each)",
                error.strerror or str(error),
                "make room, lower spill.capacity_bytes or set spill.preallocate = false",
            ) from error
        for file in self.files:
            file.former = self.geometry

    def _begin_cipher(self, file: SpillFile, generation: int) -> None:
        where = f"spill.paths[{file.index}] ({file.directory.path})"
        damaged = file.cipher.used - file.cipher.keys.keys()
        if damaged:
            self.warn(f"{where}: {len(damaged)} data keys are damaged; their blocks are lost")
        if not file.cipher.begin(generation, encrypt=self.settings.encrypt):
            self.warn(
                f"{where}: blocks of {KEYS_MAX} starts have data keys of their own, and there is "
                "no room for another: it is only read until blocks of the oldest are gone"
            )

    def warn(self, message: str) -> None:
        """Note what an operator should know."""
        log.warning("%s", message)
        self.warnings.append(message)

    def abandon(self) -> None:
        """The start has failed: close, and remove what it has made."""
        for file in self.files:
            file.abandon()

    def close(self) -> None:
        """Write what is due, close all files and let go of the locks."""
        for index, file in enumerate(self.files):
            for slab, error in self.settle(index).items():
                log.error("spill: slab %d: its directory entry was not written: %s", slab, error)
            file.close()
