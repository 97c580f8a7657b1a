"""`check`: the files of a stopped daemon, each by itself and all against each other.

The locks of the directories are taken first, so a running daemon's files are refused. Nothing is
written. The arena lives in memory and is not looked at.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import msgspec

from kvtier_client.errors import InvalidArgument, RequestError
from kvtierd.catalog.errors import CatalogError
from kvtierd.catalog.rows import CatalogSnapshot
from kvtierd.catalog.store import FILE_NAME, Catalog
from kvtierd.ctl.check_names import NamesCheck, NamesReport
from kvtierd.ctl.check_spill import SpillCheck, SpillReport, open_existing
from kvtierd.tiers.locks import LockedDirectory, lock_directory
from kvtierd.tiers.master_key import MasterKey
from kvtierd.tiers.spill_files import HEADERS_NAME

PROBLEMS_MAX: Final = 1000
"""Damages that are told one by one; `damages` counts all."""


class CatalogCounts(msgspec.Struct):
    """What the catalog has."""

    sessions: int = 0
    closed_sessions: int = 0
    nodes: int = 0
    pruned_nodes: int = 0
    layouts: int = 0
    blobs: int = 0
    holds: int = 0


class CheckReport(msgspec.Struct):
    """What was counted and found; `ok` when nothing is damaged.

    `notes` are what a start would accept and log: files of another start, orphans.
    """

    ok: bool
    state_dir: str
    instance: str
    generation: int
    damages: int
    problems: list[str]
    notes: list[str]
    catalog: CatalogCounts
    spill: list[SpillReport]
    blocks: NamesReport


def to_builtins(report: CheckReport) -> dict[str, Any]:
    """The report as plain values."""
    document: dict[str, Any] = msgspec.to_builtins(report)
    return document


class _Check:
    def __init__(self, state_dir: str) -> None:
        self.state_dir = state_dir
        self.damages = 0
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.counts = CatalogCounts()

    def problem(self, text: str) -> None:
        self.damages += 1
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(text)

    def load_catalog(self, directory: LockedDirectory) -> CatalogSnapshot | None:
        try:
            catalog = Catalog.open_readonly(directory)
        except FileNotFoundError:
            self.problem(f"{directory.path}: there is no {FILE_NAME}")
            return None
        except CatalogError as error:
            self.problem(str(error))
            return None
        try:
            for text in catalog.check():
                self.problem(text)
            snapshot = catalog.load()
        except CatalogError as error:
            self.problem(str(error))
            return None
        finally:
            catalog.close()
        self._count(snapshot)
        return snapshot

    def _count(self, snapshot: CatalogSnapshot) -> None:
        counts = self.counts
        counts.layouts = len(snapshot.layouts)
        for session in snapshot.sessions:
            counts.sessions += not session.closed
            counts.closed_sessions += session.closed
            counts.nodes += len(session.nodes)
            counts.pruned_nodes += len(session.pruned)
            counts.blobs += len(session.blob_versions)
            counts.holds += len(session.holds)

    def note_locked(self, spill: SpillReport) -> None:
        """Say what could not be verified."""
        if spill.payloads_locked:
            self.notes.append(
                f"{spill.path}: {spill.payloads_locked} encrypted blocks were not verified: their "
                "key was not given (--config FILE with spill.encryption.key)"
            )

    def judge(self, spill: SpillReport, generation: int) -> None:
        """Say what a start would warn of."""
        if spill.slabs and spill.generation not in (generation, generation + 1):
            self.notes.append(
                f"{spill.path}: written by start {spill.generation}, the catalog knows "
                f"{generation}; one of them was restored from an older copy"
            )


@contextmanager
def as_owner(state_dir: str) -> Iterator[None]:
    """Let root look at a daemon's files as the daemon would; anybody else stays who he is."""
    if os.geteuid() != 0 or not os.path.isdir(state_dir):
        yield
        return
    owner, group = os.stat(state_dir), os.getegid()
    os.setegid(owner.st_gid)
    os.seteuid(owner.st_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)


def _refuse_nothing(state_dir: str, spill_paths: Sequence[str]) -> None:
    """Refuse what is no daemon's before its directories are asked for."""
    asked = f"check of {state_dir}"
    if not os.path.lexists(state_dir):
        raise InvalidArgument(
            f"{asked}: there is no such directory; name the daemon's state_dir or its configuration"
        )
    if not os.access(state_dir, os.R_OK | os.X_OK, effective_ids=True):
        raise RequestError(f"{asked}: permission denied; be root or the daemon's user")
    names = [os.path.join(path, HEADERS_NAME) for path in spill_paths]
    if not any(map(os.path.lexists, (os.path.join(state_dir, FILE_NAME), *names))):
        raise InvalidArgument(
            f"{asked}: neither a catalog nor spill files are there; "
            "name the daemon's state_dir or its configuration"
        )


def check_files(
    state_dir: str,
    spill_paths: Sequence[str],
    read_payloads: bool,
    masters: Sequence[MasterKey] = (),
) -> CheckReport:
    """Check a stopped daemon's files; damage is in the report.

    `masters` decrypt what is encrypted; without the right ones it is counted as locked.

    Errors: `StartError` when a daemon runs on them or they are not ours; `InvalidArgument` when
    there is nothing to check.
    """
    _refuse_nothing(state_dir, spill_paths)
    check = _Check(state_dir)
    with ExitStack() as stack:
        state = lock_directory(state_dir)
        stack.callback(state.close)
        directories = []
        for path in spill_paths:
            directory = open_existing(path)
            if directory is not None:
                stack.callback(directory.close)
            directories.append(directory)
        snapshot = check.load_catalog(state)
        instance = snapshot.instance if snapshot else None
        generation = snapshot.generation if snapshot else 0
        known = snapshot.spill_files if snapshot else 0
        if known > len(spill_paths):
            check.problem(
                f"{known} spill directories had files, and {len(spill_paths)} are named; name all "
                "of them (--config FILE with spill.paths)"
            )
        names = NamesCheck(snapshot)
        spill: list[SpillReport] = []
        for index, (path, directory) in enumerate(zip(spill_paths, directories, strict=True)):
            one = SpillCheck(path, check.problem, read_payloads, masters)
            spill.append(one.report)
            if directory is not None:
                one.run(directory, instance, index, names.see, had_files=index < known)
            elif generation:
                check.problem(
                    f"{path}: the spill directory is missing, with its blocks; mount it, or name "
                    "the right one (--config FILE with spill.paths)"
                )
            check.note_locked(one.report)
            if snapshot:
                check.judge(one.report, generation)
    if names.report.orphan_blocks:
        check.notes.append(
            f"{names.report.orphan_blocks} blocks are of sessions or nodes that the catalog does "
            "not know; a start keeps the held ones as orphans"
        )
    return CheckReport(
        not check.damages, state_dir, instance.hex() if instance else "", generation, check.damages,
        check.problems, check.notes, check.counts, spill, names.report,
    )  # fmt: skip
