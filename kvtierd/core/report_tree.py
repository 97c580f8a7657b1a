"""The thought tree of one session as an operator sees it: nodes, their blocks, and folded pages."""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier_client.errors import InvalidArgument, UnknownSession
from kvtier_client.wire import NO_NODE
from kvtierd.core.blocks import NONE
from kvtierd.core.report import where
from kvtierd.core.tree import Fold, Node, Session, rows_in, shared_pages, subtree
from kvtierd.core.world import World

NODES_MAX: Final = 4096
"""Nodes of one report, from the root down; the others are only counted."""
FOLDS_MAX: Final = 1024
"""Folds of one report, of the nodes in it."""
IDS_MAX: Final = 8
"""Sessions of one name that are told."""

_COLUMNS: Final = (
    "dram_blocks", "nvme_blocks", "lost_blocks", "dram_bytes", "nvme_bytes", "shared_bytes",
    "exclusive_bytes",
)  # fmt: skip


def tree(world: World, name: str) -> dict[str, object]:
    """The nodes of the session of this id (hex) or name. Errors: UnknownSession; InvalidArgument
    when several have the name."""
    session = _session(world, name)
    every = subtree(session.nodes[0])
    nodes, left = every[:NODES_MAX], FOLDS_MAX
    counts = _counts(world, session, nodes)
    folds: list[list[dict[str, object]]] = []
    for node in nodes:
        folds.append([_fold(world, node, fold) for fold in node.folded[:left]])
        left -= len(folds[-1])
    folded = sum(len(node.folded) for node in every)
    return {
        "session": f"{session.sid:016x}",
        "name": session.name,
        "nodes": [
            _node(world, node, {key: int(counts[key][i]) for key in _COLUMNS}) | {"folds": folds[i]}
            for i, node in enumerate(nodes)
        ],
        "nodes_left_out": len(every) - len(nodes),
        "folds_left_out": folded - (FOLDS_MAX - left),
    }


def _session(world: World, name: str) -> Session:
    named = []
    for tenant in world.tenants.values():
        for session in tenant.sessions.values():
            if name == f"{session.sid:016x}":
                return session
            if name and name == session.name:
                named.append(session)
    if not named:
        raise UnknownSession(f"no session has the id or name {name!r}; see kvtierctl sessions")
    if len(named) > 1:
        ids = ", ".join(f"{session.sid:016x}" for session in named[:IDS_MAX])
        raise InvalidArgument(
            f"{len(named)} sessions have the name {name!r}; give the id of one: {ids}"
        )
    return named[0]


def _counts(world: World, session: Session, nodes: list[Node]) -> dict[str, NDArray[np.int64]]:
    """Blocks and bytes of each node's own, in one pass over all of them."""
    n = len(nodes)
    found = {key: np.zeros(n, np.int64) for key in _COLUMNS}
    shared_end = np.array([shared_pages(node) for node in nodes])
    for part, pool in enumerate(session.pools):
        runs = [node.runs[part] for node in nodes]
        length = np.array([run.length for run in runs])
        which = np.repeat(np.arange(n), length)
        first = np.array([run.start for run in runs]) - np.cumsum(length) + length
        page = np.arange(len(which)) + first[which]
        rows = np.concatenate([run.rows for run in runs])
        there = rows != NONE
        which, page, rows = which[there], page[there], rows[there]
        dram, nvme, lost = where(world, rows)
        shared = page < shared_end[which]
        size = pool.layout.block_bytes
        for key, mask, weight in (
            ("dram_blocks", dram, 1), ("nvme_blocks", nvme, 1), ("lost_blocks", lost, 1),
            ("dram_bytes", dram, size), ("nvme_bytes", nvme, size),
            ("shared_bytes", shared & ~lost, size), ("exclusive_bytes", ~shared & ~lost, size),
        ):  # fmt: skip
            found[key] += weight * np.bincount(which[mask], minlength=n)
    return found


def _node(world: World, node: Node, counts: dict[str, int]) -> dict[str, object]:
    about: dict[str, object] = {
        "node": node.id,
        "parent": NO_NODE if node.parent is None else node.parent.id,
        "fork_tokens": node.fork_tokens,
        "ended": node.ended,
        "retention": node.retention,
        "pages": max(run.start + run.length for run in node.runs),
        "tokens": int(world.node_table.tokens[node.index]),
    }
    return about | counts


def _fold(world: World, node: Node, fold: Fold) -> dict[str, object]:
    dram, nvme, lost = where(world, rows_in(node, fold.first, fold.end))
    left_s = fold.left_s(world.now_s)
    return {
        "first": fold.first,
        "pages": fold.end - fold.first,
        "kept_entries": fold.kept,
        "grace_left_s": None if left_s == math.inf else left_s,
        "dram_blocks": int(dram.sum()),
        "nvme_blocks": int(nvme.sum()),
        "lost_blocks": int(lost.sum()),
    }
