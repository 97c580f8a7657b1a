"""How each change is written: one function per struct of rows.py, inside a transaction."""

import sqlite3
from collections.abc import Callable
from typing import Any, Final

import msgspec
import xxhash

from kvtierd.catalog import rows


def _save_layout(db: sqlite3.Connection, op: rows.SaveLayout) -> None:
    encoded = msgspec.msgpack.encode(op.layout)
    db.execute(
        "INSERT OR REPLACE INTO layouts VALUES (?, ?, ?)",
        (op.tenant, op.layout.fingerprint(), encoded),
    )


def _save_session(db: sqlite3.Connection, op: rows.SaveSession) -> None:
    db.execute(
        "INSERT INTO sessions VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, 0, 0) "
        "ON CONFLICT DO UPDATE SET name = excluded.name, priority = excluded.priority, "
        "layouts = excluded.layouts, since_seq = excluded.since_seq, "
        "created_s = iif(closed, excluded.created_s, created_s), "
        "idle_s = iif(closed, 0, idle_s), closed = 0",
        (op.tenant, op.session, op.name, op.priority, b"".join(op.layouts), op.since_seq,
         op.created_s),
    )  # fmt: skip


def _number(db: sqlite3.Connection, tenant: str, session: bytes) -> int:
    """The number by which other tables name a session; 0 names no session, so a closed one."""
    name = (tenant, session)
    row = db.execute(
        "SELECT iif(closed, 0, id) FROM sessions WHERE tenant = ? AND session = ?", name
    ).fetchone()
    if row is not None:
        return int(row[0])
    # A session that only its headers had remembered.
    added = db.execute("INSERT INTO sessions VALUES (NULL, ?, ?, '', 0, x'', 0, 0, 0, 0)", name)
    assert added.lastrowid
    return added.lastrowid


def _save_nodes(db: sqlite3.Connection, op: rows.SaveNodes) -> None:
    number = _number(db, op.tenant, op.session)
    if not number:
        return
    db.executemany(
        "INSERT OR REPLACE INTO nodes VALUES (?, ?, ?, ?, ?, ?, 0, ?)",
        [
            (number, n.node, n.parent, n.fork_tokens, n.retention, n.ended, n.retention_seq)
            for n in op.nodes
        ],
    )


def _save_fold(db: sqlite3.Connection, op: rows.SaveFold) -> None:
    number, fold = _number(db, op.tenant, op.session), op.fold
    if number:
        db.execute(
            "INSERT OR REPLACE INTO folds VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (number, fold.node, fold.first, fold.end, fold.seq, fold.state, fold.grace_s,
             fold.until_s, fold.kept),
        )  # fmt: skip


def _drop_folds(db: sqlite3.Connection, op: rows.DropFolds) -> None:
    number = _number(db, op.tenant, op.session)
    names = [(number, node) for node in op.nodes]
    db.executemany("DELETE FROM folds WHERE id = ? AND node = ?", names)


def _drop_nodes(db: sqlite3.Connection, op: rows.DropNodes) -> None:
    number = _number(db, op.tenant, op.session)
    if not number:
        return
    names = [(number, node) for node in op.nodes]
    db.executemany("INSERT OR REPLACE INTO nodes VALUES (?, ?, 0, 0, 0, 1, 1, 0)", names)
    db.executemany("DELETE FROM blobs WHERE id = ? AND node = ?", names)
    db.executemany("DELETE FROM folds WHERE id = ? AND node = ?", names)


def _drop_session(db: sqlite3.Connection, op: rows.DropSession) -> None:
    name = (_number(db, op.tenant, op.session),)
    db.execute("UPDATE sessions SET closed = 1 WHERE id = ?", name)
    db.execute("DELETE FROM nodes WHERE id = ?", name)
    db.execute("DELETE FROM folds WHERE id = ?", name)
    db.execute("DELETE FROM blobs WHERE id = ?", name)
    db.execute("DELETE FROM holds WHERE id = ?", name)


def _forget_session(db: sqlite3.Connection, op: rows.ForgetSession) -> None:
    db.execute(
        "DELETE FROM sessions WHERE tenant = ? AND session = ? AND closed", (op.tenant, op.session)
    )


def _save_idle(db: sqlite3.Connection, op: rows.SaveIdle) -> None:
    db.executemany(
        "UPDATE sessions SET idle_s = ? WHERE tenant = ? AND session = ?",
        [(idle_s, tenant, session) for tenant, session, idle_s in op.sessions],
    )


def _save_clock(db: sqlite3.Connection, op: rows.SaveClock) -> None:
    db.execute("INSERT OR REPLACE INTO meta VALUES ('ran_s', ?)", (op.ran_s,))


def _save_blob(db: sqlite3.Connection, op: rows.SaveBlob) -> None:
    number = _number(db, op.tenant, op.session)
    if not number:
        return
    db.execute(
        "INSERT OR REPLACE INTO blobs VALUES (?, ?, ?, ?, ?)",
        (number, op.node, op.version, xxhash.xxh3_64_digest(op.data), op.data),
    )


def _hold(db: sqlite3.Connection, op: rows.Hold) -> None:
    number = _number(db, op.tenant, op.session)
    if not number:
        return
    db.executemany(
        "INSERT OR IGNORE INTO holds VALUES (?, ?, ?)",
        [(number, op.layout, key) for key in op.keys],
    )


def _unhold(db: sqlite3.Connection, op: rows.Unhold) -> None:
    number = _number(db, op.tenant, op.session)
    db.executemany(
        "DELETE FROM holds WHERE id = ? AND fingerprint = ? AND key = ?",
        [(number, op.layout, key) for key in op.keys],
    )


def _save_scrub(db: sqlite3.Connection, op: rows.SaveScrub) -> None:
    db.execute("INSERT OR REPLACE INTO meta VALUES ('scrubbed_s', ?)", (op.ended_s,))


APPLY: Final[dict[type[Any], Callable[[sqlite3.Connection, Any], None]]] = {
    rows.SaveLayout: _save_layout,
    rows.SaveSession: _save_session,
    rows.SaveNodes: _save_nodes,
    rows.SaveFold: _save_fold,
    rows.DropFolds: _drop_folds,
    rows.DropNodes: _drop_nodes,
    rows.DropSession: _drop_session,
    rows.ForgetSession: _forget_session,
    rows.SaveIdle: _save_idle,
    rows.SaveClock: _save_clock,
    rows.SaveBlob: _save_blob,
    rows.Hold: _hold,
    rows.Unhold: _unhold,
    rows.SaveScrub: _save_scrub,
}
