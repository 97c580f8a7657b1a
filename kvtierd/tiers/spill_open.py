"""Opens the spill directories: lock, look, then refuse or accept; a refusal changes nothing.

Only a directory with neither file is new, and gets its header file here. Payloads are made by
`SpillFiles.begin`, so that a payload that is missing beside its headers is seen as what it is.
"""

import os
from typing import Final

import numpy as np

from kvtierd.sparse import sparse_zeros
from kvtierd.tiers.blockio import Kernel, LinuxKernel
from kvtierd.tiers.cipher import FileCipher
from kvtierd.tiers.direct_io import choose
from kvtierd.tiers.errors import StartError
from kvtierd.tiers.headers import SpillHeaders, Words, create, new_superblock, open_headers
from kvtierd.tiers.locks import LockedDirectory, lock_directory
from kvtierd.tiers.master_key import load_master_keys
from kvtierd.tiers.spill_files import (
    HEADERS_NAME,
    PAYLOAD_NAME,
    SpillFile,
    SpillFiles,
    SpillSettings,
)
from kvtierd.tiers.superblock import Expected, Kind

_HALF_MADE_NAME: Final = "headers.kv.new"


def open_spill(
    settings: SpillSettings, instance: bytes, generation: int, kernel: Kernel | None = None
) -> SpillFiles:
    """Lock and open all spill directories; new ones get their header file.

    `instance` and `generation` are the catalog's. A file of another instance or geometry is
    refused; one of an unexpected generation, and lost payload, is a warning. A master key that
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
        for index, directory in enumerate(directories):
            mirror = words[index * geometry.total_slots : (index + 1) * geometry.total_slots]
            expected = Expected(Kind.SPILL, instance, geometry, 0, index)
            direct = choose(settings.direct_io, index, directory, kernel)
            headers, created = _headers(directory, expected, generation, mirror)
            cipher = FileCipher(headers, masters)
            files.append(SpillFile(index, directory, headers, cipher, created, direct))
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


def _headers(
    directory: LockedDirectory, expected: Expected, generation: int, mirror: Words
) -> tuple[SpillHeaders, bool]:
    """The directory's header file, and whether it was made now."""
    name = f"{directory.path}/{HEADERS_NAME}"
    try:
        fd = directory.open_file(HEADERS_NAME, os.O_RDWR)
    except FileNotFoundError:
        return _new_headers(directory, expected, generation, mirror), True
    try:
        headers = open_headers(fd, expected, name, mirror)
    except BaseException:
        os.close(fd)
        raise
    assert isinstance(headers, SpillHeaders)
    return headers, False


def _new_headers(
    directory: LockedDirectory, expected: Expected, generation: int, mirror: Words
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
    directory.remove(_HALF_MADE_NAME)
    fd = directory.open_file(_HALF_MADE_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        headers = create(fd, superblock, f"{directory.path}/{HEADERS_NAME}", mirror)
        os.rename(_HALF_MADE_NAME, HEADERS_NAME, src_dir_fd=directory.fd, dst_dir_fd=directory.fd)
    except BaseException as error:
        os.close(fd)
        directory.remove(_HALF_MADE_NAME)
        if isinstance(error, OSError):
            raise StartError(
                f"cannot create {directory.path}/{HEADERS_NAME}",
                error.strerror or str(error),
                "make room there, or choose another directory",
            ) from error
        raise
    assert isinstance(headers, SpillHeaders)
    return headers


def _judge(spill: SpillFiles, index: int, generation: int) -> None:
    """Say what is unusual about a file that is accepted."""
    file, geometry = spill.files[index], spill.geometry
    where = f"spill.paths[{index}] ({file.directory.path})"
    stamped = file.headers.superblock.generation
    if file.created:
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
    in_use = [slab for slab in spill.slabs() if slab.slab // geometry.slabs == index]
    if file.payload_bytes != geometry.payload_bytes and (in_use or file.payload_fd >= 0):
        found = f"has {file.payload_bytes} bytes" if file.payload_fd >= 0 else "is missing"
        spill.warn(
            f"{where}: {PAYLOAD_NAME} {found} instead of {geometry.payload_bytes}; "
            "blocks beyond its end are lost"
        )
    damaged = [slab for slab in spill.damaged_slabs if slab // geometry.slabs == index]
    if damaged:
        spill.warn(f"{where}: {len(damaged)} slabs have damaged directory entries; blocks lost")
