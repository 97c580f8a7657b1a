"""`check` of headers against the catalog: does every block have an owner, and is none stale?"""

from typing import Final

import msgspec
import numpy as np
import xxhash

from kvtierd.catalog.rows import CatalogSnapshot, SessionRecord
from kvtierd.tiers import bodies as b

_LOW: Final = np.uint64(0xFFFFFFFF)


class NamesReport(msgspec.Struct):
    """Blocks by whose they are.

    `stale_blocks` belong to a closed session or a pruned node and wait to be cleared;
    `orphan_blocks` to a session or node that the catalog does not know: a restart keeps the HELD
    ones until their client comes back or their time is over.
    """

    session_blocks: int = 0
    keyed_blocks: int = 0
    orphan_blocks: int = 0
    orphan_sessions: int = 0
    stale_blocks: int = 0


class NamesCheck:
    """Sorts blocks by what the catalog knows of their owners."""

    def __init__(self, snapshot: CatalogSnapshot | None) -> None:
        self.report = NamesReport()
        self._orphans: set[tuple[int, bytes]] = set()
        self._sessions: dict[tuple[int, bytes], _Known] = {}
        for session in snapshot.sessions if snapshot else []:
            tenant = xxhash.xxh32_intdigest(session.tenant.encode())
            self._sessions[tenant, session.session] = _Known(session)

    def see(self, bodies: b.Bodies) -> None:
        """Count the blocks of some bodies. Shapes: [n, 16]."""
        flags = bodies[:, b.W_FLAGS]
        keyed = (flags >> np.uint64(32)) & np.uint64(0xFF) == b.BLOCK_KEYED
        self.report.keyed_blocks += int(keyed.sum())
        mine = bodies[~keyed]
        if not len(mine):
            return
        # One question per node, not per block.
        names = np.empty((len(mine), 4), np.uint64)
        names[:, 0] = mine[:, b.W_FLAGS] & _LOW
        names[:, 1:3] = mine[:, b.W_OWNER0 : b.W_OWNER1 + 1]
        names[:, 3] = mine[:, b.W_NODE_PAGE] & _LOW
        nodes, which = np.unique(names, axis=0, return_inverse=True)
        for index, name in enumerate(nodes):
            self._see_node(name, mine[which.reshape(-1) == index, b.W_SEQ])

    def _see_node(self, name: np.typing.NDArray[np.uint64], seqs: b.Bodies) -> None:
        report, owner = self.report, name[1:3].tobytes()
        known = self._sessions.get((int(name[0]), owner))
        if known is None:
            self._orphans.add((int(name[0]), owner))
            report.orphan_sessions = len(self._orphans)
            report.orphan_blocks += len(seqs)
            return
        node = int(name[3])
        stale = seqs < np.uint64(known.record.since_seq)
        if known.record.closed or node in known.pruned:
            stale[:] = True
        report.stale_blocks += int(stale.sum())
        if node in known.nodes:
            report.session_blocks += int((~stale).sum())
        else:
            report.orphan_blocks += int((~stale).sum())


class _Known:
    def __init__(self, record: SessionRecord) -> None:
        self.record = record
        self.nodes = {node.node for node in record.nodes}
        self.pruned = set(record.pruned)
