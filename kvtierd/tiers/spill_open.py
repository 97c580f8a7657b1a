"""Opens the spill directories: lock, look, then refuse or accept; a refusal changes nothing.

Only a directory with neither file is new, and gets its header file here. Where the configuration
asks for more or fewer slabs than the files have, a header file of that size is made beside the old
one. `SpillFiles.begin` puts it in its place and makes the payloads, so that a payload that is
missing beside its headers is seen as what it is.
"""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator

import numpy as np

from kvtierd.sparse import sparse_zeros
from kvtierd.tiers.blockio import Kernel, LinuxKernel
from kvtierd.tiers.cipher import FileCipher
from kvtierd.tiers.direct_io import choose
from kvtierd.tiers.errors import FormatError, StartError
from kvtierd.tiers.headers import SpillHeaders, Words, create, new_superblock, open_headers
from kvtierd.tiers.locks import LockedDirectory, lock_directory
from kvtierd.tiers.master_key import load_master_keys
from kvtierd.tiers.spill_files import (
    HEADERS_NAME,
    NEW_HEADERS_NAME,
    PAYLOAD_NAME,
    SpillFile,
    SpillFiles,
    SpillSettings,
)
from kvtierd.tiers.superblock import Expected, Geometry, Kind

log = logging.getLogger(__name__)


def open_spill(
    settings: SpillSettings,
    instance: bytes,
    generation: int,
    kernel: Kernel | None = None,
    *,
    known_files: int = 0,
) -> SpillFiles:
    """Lock and open all spill directories; new ones get their header file.

    `instance`, `generation` and `known_files` (so many directories have had files) are the
    catalog's. A directory whose files are gone is refused, unless `settings.missing` accepts
    that. A file of another instance or other slabs is refused, and so is one of fewer slabs than
    are in use; one of an unexpected generation, and lost payload, is a warning. A master key that
    cannot be used is refused here, a wrong one by `SpillFiles.scan`.

    Errors: `StartError` (also its child `FormatError`); nothing is changed then.
    """
    kernel = LinuxKernel() if kernel is None else kernel
    masters = load_master_keys(settings.key, settings.old_key)
    geometry = settings.geometry()
    words = sparse_zeros(len(settings.paths) * geometry.total_slots, np.uint64)
    directories: list[LockedDirectory] = []
    files: list[SpillFile] = []
    try:
        directories += map(lock_directory, settings.paths)
        if settings.missing == "refuse":
            _refuse_missing(directories, known_files)
        for index, directory in enumerate(directories):
            mirror = words[index * geometry.total_slots : (index + 1) * geometry.total_slots]
            expected = Expected(Kind.SPILL, instance, geometry, 0, index)
            direct = choose(settings.direct_io, index, directory, kernel)
            headers, former = _headers(directory, expected, generation, mirror)
            cipher = FileCipher(headers, masters)
            files.append(SpillFile(index, directory, headers, cipher, former, direct))
            files[-1].open_payload()
        spill = SpillFiles(settings, files, words, kernel)
    except BaseException:
        for file in files:
            file.abandon()
        for directory in directories[len(files) :]:
            directory.discard()
        raise
    for index in range(len(files)):
        _judge(spill, index, generation)
    return spill


def _refuse_missing(directories: list[LockedDirectory], known_files: int) -> None:
    """Every directory that has had files must be named and have them. Errors: `StartError`."""
    way_out = 'or accept that its blocks are lost (spill.missing = "accept")'
    for directory in directories[:known_files]:
        if not directory.exists(HEADERS_NAME):
            raise StartError(
                f"cannot use directory {directory.path}",
                f"the files of this daemon are gone from it: it has no {HEADERS_NAME}",
                f"mount its disk or restore it, {way_out}",
            )
    if known_files > len(directories):
        raise StartError(
            f"cannot start with {len(directories)} spill directories",
            f"{known_files} have files of this daemon",
            f"name all of them in spill.paths, {way_out}",
        )


def _headers(
    directory: LockedDirectory, expected: Expected, generation: int, mirror: Words
) -> tuple[SpillHeaders, Geometry | None]:
    """The directory's header file, and how it was cut before; None when it was made now."""
    name = f"{directory.path}/{HEADERS_NAME}"
    try:
        fd = directory.open_file(HEADERS_NAME, os.O_RDWR)
    except FileNotFoundError:
        return _new_headers(directory, name, expected, generation, mirror), None
    kept = False
    try:
        headers = open_headers(fd, expected, name, mirror)
        kept = True
    except FormatError as error:
        if error.reason != "geometry":
            raise
        return _resized(directory, name, fd, expected, mirror, error)
    finally:
        if not kept:
            os.close(fd)
    assert isinstance(headers, SpillHeaders)
    return headers, headers.geometry


def _resized(
    directory: LockedDirectory,
    name: str,
    fd: int,
    expected: Expected,
    mirror: Words,
    refusal: FormatError,
) -> tuple[SpillHeaders, Geometry]:
    """A copy of a header file, under its new name, with as many slabs as are expected; and how the
    file itself is cut. Errors: `refusal` when more than their number differs; `StartError`."""
    old = open_headers(fd, dataclasses.replace(expected, geometry=None), name)
    wanted = expected.geometry
    assert isinstance(old, SpillHeaders) and wanted is not None
    if dataclasses.replace(old.geometry, slabs=wanted.slabs) != wanted:
        raise refusal
    asked = f"cannot give {name} {wanted.slabs} slabs in place of {old.geometry.slabs}"
    table = old.slab_table()
    needed = int(np.flatnonzero(table.in_use | table.damaged).max(initial=-1)) + 1
    if needed > wanted.slabs:
        raise StartError(
            asked,
            f"slab {needed - 1} is in use",
            f"set spill.capacity_bytes to {needed * wanted.slab_bytes} or more",
        )
    with _new_file(directory, asked, "go back to the old spill.capacity_bytes") as new_fd:
        superblock = dataclasses.replace(old.superblock, geometry=wanted)
        headers = create(new_fd, superblock, name, mirror)
        assert isinstance(headers, SpillHeaders)
        old.copy_into(headers)
        headers.load_words()
    return headers, old.geometry


def _new_headers(
    directory: LockedDirectory, name: str, expected: Expected, generation: int, mirror: Words
) -> SpillHeaders:
    assert expected.geometry is not None and expected.instance is not None
    if directory.exists(PAYLOAD_NAME):
        raise StartError(
            f"cannot use directory {directory.path}",
            f"it has {PAYLOAD_NAME} without the {HEADERS_NAME} that says what is in it",
            f"restore {HEADERS_NAME}, or move {PAYLOAD_NAME} away; its blocks are lost",
        )
    superblock = new_superblock(
        Kind.SPILL,
        expected.geometry,
        instance=expected.instance,
        generation=generation,
        file_index=expected.file_index or 0,
    )
    with _new_file(directory, f"cannot create {name}", "choose another directory") as fd:
        headers = create(fd, superblock, name, mirror)
        os.rename(NEW_HEADERS_NAME, HEADERS_NAME, src_dir_fd=directory.fd, dst_dir_fd=directory.fd)
    assert isinstance(headers, SpillHeaders)
    return headers


@contextlib.contextmanager
def _new_file(directory: LockedDirectory, asked: str, way_out: str) -> Iterator[int]:
    """An empty file under the headers' new name; it is gone again when what is done fails."""
    directory.remove(NEW_HEADERS_NAME)
    fd = directory.open_file(NEW_HEADERS_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        yield fd
    except BaseException as error:
        os.close(fd)
        directory.remove(NEW_HEADERS_NAME)
        if isinstance(error, OSError):
            obstacle = error.strerror or str(error)
            raise StartError(asked, obstacle, f"make room there, or {way_out}") from error
        raise


def _judge(spill: SpillFiles, index: int, generation: int) -> None:
    """Say what is unusual about a file that is accepted."""
    file, geometry = spill.files[index], spill.geometry
    where = f"spill.paths[{index}] ({file.directory.path})"
    stamped = file.headers.superblock.generation
    if file.former is None:
        if generation > 0:
            spill.warn(
                f"{where}: no spill files, though this daemon has run before; unless the directory "
                "is a new one, the blocks that were in it are lost"
            )
        return
    if stamped not in (generation, generation + 1):
        spill.warn(
            f"{where}: written by start {stamped}, the catalog knows {generation}; one of them was "
            "restored from an older copy, and blocks may be missing"
        )
    if file.resized:
        log.info("%s: %d slabs, there were %d", where, geometry.slabs, file.former.slabs)
    in_use = [slab for slab in spill.slabs() if slab.slab // geometry.slabs == index]
    size_bytes = file.former.payload_bytes
    if file.payload_bytes != size_bytes and (in_use or file.payload_fd >= 0):
        found = f"has {file.payload_bytes} bytes" if file.payload_fd >= 0 else "is missing"
        spill.warn(
            f"{where}: {PAYLOAD_NAME} {found} instead of {size_bytes}; "
            "blocks beyond its end are lost"
        )
    damaged = [slab for slab in spill.damaged_slabs if slab // geometry.slabs == index]
    if damaged:
        spill.warn(f"{where}: {len(damaged)} slabs have damaged directory entries; blocks lost")
