"""The core's changes as rows of the catalog."""

import time
from collections.abc import Callable
from typing import Any, Final

from kvtier_client.wire import NO_NODE
from kvtierd.catalog import rows
from kvtierd.core import actions as act
from kvtierd.core.tree import Node


def _node(node: Node) -> rows.NodeRecord:
    parent = NO_NODE if node.parent is None else node.parent.id
    return rows.NodeRecord(
        node.id, parent, node.fork_tokens, node.retention, node.ended, node.retention_seq
    )


def _save_session(action: act.SaveSession) -> rows.Op:
    session = action.session
    layouts = tuple(pool.fingerprint for pool in session.pools)
    return rows.SaveSession(
        session.tenant.name, session.token_hash, session.name, session.priority, layouts,
        time.time(), session.since_seq,
    )  # fmt: skip


def _save_nodes(action: act.SaveNodes) -> rows.Op:
    session = action.nodes[0].session
    return rows.SaveNodes(
        session.tenant.name, session.token_hash, tuple(_node(node) for node in action.nodes)
    )


def _save_fold(action: act.SaveFold) -> rows.Op:
    session, fold = action.node.session, action.fold
    record = rows.FoldRecord(
        action.node.id, fold.first, fold.end, fold.seq, int(fold.state), fold.grace_s,
        action.until_ran_s, fold.kept,
    )  # fmt: skip
    return rows.SaveFold(session.tenant.name, session.token_hash, record)


def _drop_folds(action: act.DropFolds) -> rows.Op:
    session = action.nodes[0].session
    ids = tuple(node.id for node in action.nodes)
    return rows.DropFolds(session.tenant.name, session.token_hash, ids)


def _drop_nodes(action: act.DropNodes) -> rows.Op:
    session = action.session
    return rows.DropNodes(session.tenant.name, session.token_hash, tuple(action.nodes))


def _drop_session(action: act.DropSession) -> rows.Op:
    return rows.DropSession(action.session.tenant.name, action.session.token_hash)


def _forget_session(action: act.ForgetSession) -> rows.Op:
    return rows.ForgetSession(action.tenant.name, action.token_hash)


def _save_layout(action: act.SaveLayout) -> rows.Op:
    return rows.SaveLayout(action.pool.tenant.name, action.pool.layout)


def _save_blob(action: act.SaveBlob) -> rows.Op:
    session = action.session
    return rows.SaveBlob(
        session.tenant.name, session.token_hash, action.node, action.version, action.data
    )


def _save_holds(action: act.SaveHolds) -> rows.Op:
    session = action.session
    kind = rows.Hold if action.held else rows.Unhold
    return kind(
        session.tenant.name, session.token_hash, action.pool.fingerprint, tuple(action.keys)
    )


def _save_scrub(action: act.SaveScrub) -> rows.Op:
    return rows.SaveScrub(time.time())


_OPS: Final[dict[type, Callable[[Any], rows.Op]]] = {
    act.SaveSession: _save_session,
    act.SaveNodes: _save_nodes,
    act.SaveFold: _save_fold,
    act.DropFolds: _drop_folds,
    act.DropNodes: _drop_nodes,
    act.DropSession: _drop_session,
    act.ForgetSession: _forget_session,
    act.SaveLayout: _save_layout,
    act.SaveBlob: _save_blob,
    act.SaveHolds: _save_holds,
    act.SaveScrub: _save_scrub,
}


def op_of(action: act.Action) -> rows.Op:
    """The catalog's row for an action of the core."""
    return _OPS[type(action)](action)
