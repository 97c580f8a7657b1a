"""The catalog: layouts, sessions, nodes, folds, blobs and holds, in one SQLite file (WAL).

What changes rarely and must outlive the daemon is here; blocks describe themselves in their
headers. Every change is a struct (`Op`); `Catalog.apply` makes a list of them one transaction,
and `CatalogWriter` (writer.py) does so from a thread of its own.

Tombstones: a pruned node's id stays while its session lives, and a closed session stays as
`closed` until `ForgetSession` says that its headers are cleared, so that blocks of either, found
in headers after a crash, are known to be garbage. Tokens are never stored, only their hashes.
"""

import contextlib
import gc
import math
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import msgspec
import xxhash

from kvtier_client.wire import CACHED, HELD, Layout
from kvtierd.catalog.changes import APPLY
from kvtierd.catalog.errors import CatalogDamaged, CatalogError, CatalogFormatError, CatalogFull
from kvtierd.catalog.rows import (
    BlobRecord,
    CatalogSnapshot,
    FoldRecord,
    LayoutRecord,
    NodeRecord,
    Op,
    SessionRecord,
)
from kvtierd.tiers.locks import LockedDirectory

FILE_NAME: Final = "catalog.db"
_SIDE_FILES: Final = (f"{FILE_NAME}-wal", f"{FILE_NAME}-shm")
_JOURNAL: Final = f"{FILE_NAME}-journal"
APPLICATION_ID: Final = 0x4B565443
FORMAT: Final = 1

_RETENTIONS: Final = (HELD, CACHED)

Durability = Literal["process", "power"]

_FOLDS: Final = """
CREATE TABLE IF NOT EXISTS folds (
    id INTEGER, node INTEGER, first INTEGER NOT NULL, "end" INTEGER NOT NULL, seq INTEGER NOT NULL,
    state INTEGER NOT NULL, grace_s REAL NOT NULL, until_s REAL NOT NULL, kept INTEGER NOT NULL,
    PRIMARY KEY (id, node, first)) STRICT, WITHOUT ROWID
"""
"""Not in every catalog: the first daemons made none, and none of theirs has folds."""

_SCHEMA: Final = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID;
CREATE TABLE layouts (
    tenant TEXT, fingerprint BLOB CHECK (length(fingerprint) = 16), layout BLOB NOT NULL,
    PRIMARY KEY (tenant, fingerprint)) STRICT, WITHOUT ROWID;
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY, tenant TEXT NOT NULL,
    session BLOB NOT NULL CHECK (length(session) = 16),
    name TEXT NOT NULL, priority INTEGER NOT NULL CHECK (priority BETWEEN 0 AND 255),
    layouts BLOB NOT NULL CHECK (length(layouts) % 16 = 0), since_seq INTEGER NOT NULL,
    created_s REAL NOT NULL, idle_s REAL NOT NULL, closed INTEGER NOT NULL CHECK (closed IN (0, 1)),
    UNIQUE (tenant, session)) STRICT;
CREATE TABLE nodes (
    id INTEGER, node INTEGER CHECK (node BETWEEN 0 AND 4294967294),
    parent INTEGER NOT NULL CHECK (parent BETWEEN 0 AND 4294967295),
    fork_tokens INTEGER NOT NULL CHECK (fork_tokens BETWEEN 0 AND 2147483647),
    retention INTEGER NOT NULL CHECK (retention BETWEEN 0 AND 255),
    ended INTEGER NOT NULL CHECK (ended IN (0, 1)),
    pruned INTEGER NOT NULL CHECK (pruned IN (0, 1)),
    retention_seq INTEGER NOT NULL,
    PRIMARY KEY (id, node)) STRICT, WITHOUT ROWID;
{_FOLDS};
CREATE TABLE blobs (
    id INTEGER, node INTEGER, version INTEGER NOT NULL, checksum BLOB NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (id, node)) STRICT;
CREATE TABLE holds (
    id INTEGER, fingerprint BLOB CHECK (length(fingerprint) = 16),
    key BLOB CHECK (length(key) = 16),
    PRIMARY KEY (id, fingerprint, key)) STRICT, WITHOUT ROWID;
"""


_BLOBS: Final = "SELECT tenant, session, node FROM blobs JOIN sessions USING (id)"
_STRAYS: Final = """
SELECT count(*) FROM (
    SELECT id FROM nodes UNION ALL SELECT id FROM blobs UNION ALL SELECT id FROM holds
    UNION ALL SELECT id FROM folds)
WHERE id NOT IN (SELECT id FROM sessions WHERE NOT closed)
"""


class Catalog:
    """The open catalog of one daemon. One thread at a time may use it."""

    def __init__(self, db: sqlite3.Connection, path: str) -> None:
        self._db = db
        self.path = path
        self.created = False
        """This start has made the file, so a start that fails should remove it again."""
        self._leftovers: tuple[LockedDirectory, list[str]] | None = None

    # ---------------------------------------------------------------- open

    @classmethod
    def open(cls, directory: LockedDirectory, durability: Durability = "process") -> "Catalog":
        """Open the catalog of a state directory; an empty one is made when there is none.

        Durability: a transaction survives the daemon's death; under "power" also the host's.
        Errors: `CatalogDamaged`, `CatalogFormatError`, `CatalogFull`; `StartError` when it is a
        link or somebody else's. An existing file is never replaced.
        """
        created = not directory.exists(FILE_NAME)
        # SQLite opens by name; this makes sure that the name is a private file of ours.
        _check_side_files(directory)
        os.close(directory.open_file(FILE_NAME, os.O_RDWR | os.O_CREAT))
        try:
            catalog = cls._connect(directory, "rw", durability)
        except BaseException:
            if created:
                _remove(directory, (FILE_NAME, *_SIDE_FILES))
            raise
        catalog.created = created
        return catalog

    @classmethod
    def open_readonly(cls, directory: LockedDirectory) -> "Catalog":
        """Open the catalog of a stopped daemon to look at it; its contents are not changed.

        Errors: `FileNotFoundError` when there is none; else as `open`.
        """
        os.close(directory.open_file(FILE_NAME, os.O_RDONLY))
        _check_side_files(directory)
        leftovers = [name for name in _SIDE_FILES if not directory.exists(name)]
        try:
            catalog = cls._connect(directory, "ro", "process")
        except CatalogError:
            _remove(directory, leftovers)
            raise
        catalog._leftovers = (directory, leftovers)
        return catalog

    @classmethod
    def _connect(
        cls, directory: LockedDirectory, mode: Literal["rw", "ro"], durability: Durability
    ) -> "Catalog":
        path = f"{directory.path}/{FILE_NAME}"
        name = f"file:/proc/self/fd/{directory.fd}/{FILE_NAME}?mode={mode}"
        db = sqlite3.connect(name, uri=True, isolation_level=None, check_same_thread=False)
        catalog = cls(db, path)
        try:
            catalog._prepare(mode, durability)
        except BaseException as error:
            db.close()
            if isinstance(error, sqlite3.Error):
                raise catalog._typed("open", error) from error
            raise
        return catalog

    def _prepare(self, mode: str, durability: Durability) -> None:
        db = self._db
        db.execute("PRAGMA busy_timeout = 1000")
        empty = not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        found_id = db.execute("PRAGMA application_id").fetchone()[0]
        found = db.execute("PRAGMA user_version").fetchone()[0]
        if not (empty and mode == "rw"):
            self._check_format(found_id, found)
        if mode == "ro":
            return
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA synchronous = {'FULL' if durability == 'power' else 'NORMAL'}")
        if empty:
            self._create()

    def _check_format(self, found_id: int, found: int) -> None:
        asked = f"cannot open {self.path}"
        if found_id != APPLICATION_ID:
            raise CatalogDamaged(
                asked,
                "it is not a catalog of kvtierd",
                "move it away, or restore the catalog from a backup",
            )
        if found != FORMAT:
            raise CatalogFormatError(
                asked,
                f"it has format {found}, this version reads format {FORMAT}",
                "install the version of kvtierd that wrote it",
            )

    def _create(self) -> None:
        with self._transaction():
            for statement in _SCHEMA.split(";"):
                self._db.execute(statement)
            self._db.executemany(
                "INSERT INTO meta VALUES (?, ?)",
                [("instance", os.urandom(16)), ("generation", 0), ("created_s", time.time())],
            )
            self._db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            self._db.execute(f"PRAGMA user_version = {FORMAT}")

    def close(self) -> None:
        """Fold the write-ahead log into the file and close it."""
        self._db.close()
        if self._leftovers is not None:
            _remove(*self._leftovers)

    def abandon(self, directory: LockedDirectory) -> None:
        """Close, and remove the file if this start has made it."""
        self.close()
        if self.created:
            _remove(directory, (FILE_NAME, *_SIDE_FILES))

    # ---------------------------------------------------------------- meta

    @property
    def instance(self) -> bytes:
        """16 bytes that name this daemon's data, in all its lives."""
        return bytes(self._meta("instance"))

    @property
    def generation(self) -> int:
        """How many starts have succeeded on this data."""
        return int(self._meta("generation"))

    @property
    def scrubbed_s(self) -> float:
        """When a scrub of all blocks last ended; 0 for never. Units: Unix seconds."""
        return self._number("scrubbed_s")

    @property
    def spill_files(self) -> int:
        """How many spill directories the last start had; 0 when an older daemon did not say."""
        return int(self._number("spill_files"))

    def _number(self, key: str) -> float:
        try:
            row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            raise self._typed("read", error) from error
        good = row and isinstance(row[0], float | int) and 0.0 <= row[0] < math.inf
        return float(row[0]) if good else 0.0

    def stamp(self, generation: int, spill_files: int) -> None:
        """Record that a start has succeeded, and with how many spill directories."""
        values = [("generation", generation), ("spill_files", spill_files)]
        with self._transaction("stamp"):
            self._db.execute(_FOLDS)
            self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values)

    def _meta(self, key: str) -> Any:
        try:
            row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            raise self._typed("read", error) from error
        if row is None:
            raise self._damaged("read", f"it has no {key}")
        return row[0]

    # ------------------------------------------------------------- changes

    def apply(self, ops: Sequence[Op]) -> None:
        """Carry out all of `ops` in their order, or none of them.

        Durability: when it returns, the changes survive the daemon's death.
        Errors: `CatalogFull`, `CatalogDamaged`, `CatalogError`.
        """
        with self._transaction():
            for op in ops:
                APPLY[type(op)](self._db, op)

    def _transaction(self, verb: str = "change") -> "_Transaction":
        return _Transaction(self._db, lambda error: self._typed(verb, error))

    # ------------------------------------------------------------- reading

    def load(self) -> CatalogSnapshot:
        """Everything but the blobs' data. Errors: `CatalogDamaged`."""
        collecting = gc.isenabled()
        gc.disable()  # a million new structs and no garbage: collections would double the time
        try:
            [problem] = self._db.execute("PRAGMA quick_check(1)").fetchone()
            if problem != "ok":
                raise self._damaged("read", f"it is damaged ({' '.join(problem.split())})")
            return CatalogSnapshot(
                self.instance, self.generation, self._load_layouts(), self._load_sessions(),
                self._number("ran_s"), self.spill_files,
            )  # fmt: skip
        except sqlite3.Error as error:
            raise self._typed("read", error) from error
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            raise self._damaged(
                "read", f"a value in it is not what was written ({error})"
            ) from error
        finally:
            if collecting:
                gc.enable()

    def _load_layouts(self) -> list[LayoutRecord]:
        decoder = msgspec.msgpack.Decoder(Layout)
        records = []
        for tenant, fingerprint, data in self._db.execute("SELECT * FROM layouts"):
            layout = decoder.decode(data)
            if layout.fingerprint() != fingerprint:
                raise ValueError(f"layout {fingerprint.hex()} has another fingerprint")
            records.append(LayoutRecord(tenant, fingerprint, layout))
        return records

    def _load_sessions(self) -> list[SessionRecord]:
        sessions: dict[int, SessionRecord] = {}
        for row in self._db.execute("SELECT * FROM sessions"):
            number, tenant, session, name, priority, layouts, since_seq, *times_s, closed = row
            created_s, idle_s = times_s
            if since_seq < 0 or not (0 <= idle_s < math.inf):
                raise ValueError(f"session {session.hex()} is of no time")
            sessions[number] = SessionRecord(
                tenant, session, name, priority, _split16(layouts), since_seq, created_s, idle_s,
                bool(closed), [], [], {}, [], [],
            )  # fmt: skip
        # Rows of no session are harmless here; `check` speaks of them.
        for row in self._db.execute("SELECT * FROM nodes WHERE id IN (SELECT id FROM sessions)"):
            number, node, parent, fork_tokens, retention, ended, pruned, seq = row
            if pruned:
                sessions[number].pruned.append(node)
            else:
                if seq < 0 or retention not in _RETENTIONS:
                    raise ValueError(f"node {node} has retention {retention} since {seq}")
                record = NodeRecord(node, parent, fork_tokens, retention, bool(ended), seq)
                sessions[number].nodes.append(record)
        for number, node, version in self._db.execute("SELECT id, node, version FROM blobs"):
            if number in sessions:
                sessions[number].blob_versions[node] = version
        for number, fingerprint, key in self._db.execute("SELECT * FROM holds"):
            if number in sessions:
                sessions[number].holds.append((fingerprint, key))
        self._load_folds(sessions)
        return list(sessions.values())

    def _load_folds(self, sessions: dict[int, SessionRecord]) -> None:
        for number, *values in self._db.execute("SELECT * FROM folds") if self._has_folds() else ():
            fold = FoldRecord(*values)
            if not 0 <= fold.first < fold.end or fold.seq < 0 or not fold.until_s >= 0.0:
                raise ValueError(f"a fold of node {fold.node} is of no pages or of no time")
            if not 0 <= fold.state <= 2:
                raise ValueError(f"a fold of node {fold.node} has state {fold.state}")
            if number in sessions:
                sessions[number].folds.append(fold)

    def _has_folds(self) -> bool:
        found = self._db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'folds'")
        return bool(found.fetchone()[0])

    def get_blob(self, tenant: str, session: bytes, node: int) -> BlobRecord | None:
        """A blob, or None when none is stored. Errors: `CatalogDamaged`."""
        try:
            row = self._db.execute(
                "SELECT version, checksum, data FROM blobs JOIN sessions USING (id) "
                "WHERE tenant = ? AND session = ? AND node = ?",
                (tenant, session, node),
            ).fetchone()
        except sqlite3.Error as error:
            raise self._typed("read a blob of", error) from error
        if row is None:
            return None
        version, checksum, data = row
        if xxhash.xxh3_64_digest(data) != checksum:
            raise self._damaged(
                "read a blob of", f"blob of session {session.hex()} node {node} has changed"
            )
        return BlobRecord(version, data)

    def check(self) -> list[str]:
        """What is wrong with the file and its contents; empty when all is well."""
        try:
            found = [row[0] for row in self._db.execute("PRAGMA integrity_check")]
            problems = (
                []
                if found == ["ok"]
                else [f"{self.path}: {' '.join(text.split())}" for text in found]
            )
            blobs = self._db.execute(_BLOBS).fetchall()
            strays = self._db.execute(_STRAYS).fetchone()[0] if self._has_folds() else 0
        except sqlite3.Error as error:
            return [str(self._typed("check", error))]
        if strays:
            problems.append(f"{self.path}: {strays} nodes, blobs, holds or folds are of no session")
        for tenant, session, node in blobs:
            try:
                self.get_blob(tenant, session, node)
            except CatalogError as error:
                problems.append(str(error))
        return problems

    # -------------------------------------------------------------- errors

    def _damaged(self, verb: str, obstacle: str) -> CatalogDamaged:
        return CatalogDamaged(
            f"cannot {verb} {self.path}",
            obstacle,
            f"restore it (and {FILE_NAME}-wal) from a backup, or move both away, which loses the "
            "sessions",
        )

    def _typed(self, verb: str, error: sqlite3.Error) -> CatalogError:
        code = getattr(error, "sqlite_errorcode", None)
        primary = None if code is None else code & 0xFF
        if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT):
            return self._damaged(verb, f"it is damaged ({error})")
        asked = f"cannot {verb} {self.path}"
        if primary == sqlite3.SQLITE_FULL:
            return CatalogFull(asked, f"no room ({error})", "make room on its file system")
        name = getattr(error, "sqlite_errorname", type(error).__name__)
        return CatalogError(asked, f"{error} ({name})", "see the log of the kernel and the disk")


class _Transaction:
    """`with`: one SQLite transaction; an sqlite3 error leaves as what `typed` makes of it."""

    def __init__(
        self, db: sqlite3.Connection, typed: Callable[[sqlite3.Error], CatalogError]
    ) -> None:
        self._db = db
        self._typed = typed

    def __enter__(self) -> None:
        try:
            self._db.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            raise self._typed(error) from error

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            try:
                self._db.execute("COMMIT")
                return
            except sqlite3.Error as failed:
                error = failed
        # A full disk may have rolled back already.
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")
        if isinstance(error, sqlite3.Error):
            raise self._typed(error) from error


def _check_side_files(directory: LockedDirectory) -> None:
    """SQLite opens these by name as well: they must be private files of ours. Errors: StartError"""
    for name in (*_SIDE_FILES, _JOURNAL):
        with contextlib.suppress(FileNotFoundError):
            os.close(directory.open_file(name, os.O_RDONLY))


def _remove(directory: LockedDirectory, names: Sequence[str]) -> None:
    for name in names:
        directory.remove(name)


def _split16(packed: bytes) -> tuple[bytes, ...]:
    if len(packed) == 16:
        return (packed,)
    return tuple(packed[i : i + 16] for i in range(0, len(packed), 16))
