"""Read-ahead: who reads a branch in order finds its next pages on their way from NVMe.

A read that begins where the last one of the same run ended starts a fetch of the pages behind it.
The window doubles with every fetch, and takes only slots that writers could have at once.
"""

from typing import Final

from kvtier_client.wire import Acquire
from kvtierd.core.blocks import F_BUSY, NONE, Rows
from kvtierd.core.copies import Copies
from kvtierd.core.slabs import FILLING, NO_OWNER
from kvtierd.core.tenant import Pool
from kvtierd.core.tree import Node, Session, resolve
from kvtierd.core.world import World
from kvtierd.fair import OWN_WORK

READ_AHEAD_BLOCKS: Final = 64
READ_AHEAD_BYTES: Final = 16 << 20
"""A window has at most so many blocks and bytes."""


class ReadAhead:
    """Fetches what will be read next."""

    def __init__(self, world: World, copies: Copies) -> None:
        self.world, self.copies = world, copies

    def note(self, pool: Pool, session: Session, req: Acquire) -> None:
        """Pages of a branch are being read."""
        node = session.nodes[req.node]
        part = session.part_of(pool)
        run = node.runs[part]
        in_order, run.read_end = run.read_end == req.first, req.first + req.pages
        if not in_order:
            run.ahead, run.ahead_end = 0, 0
        elif run.read_end + run.ahead // 2 >= run.ahead_end:
            self._fetch(pool, node, part, req.pages)

    def _fetch(self, pool: Pool, node: Node, part: int, pages: int) -> None:
        """Start to fetch the next window of a run."""
        run = node.runs[part]
        run.ahead = min(
            2 * max(run.ahead, pages), READ_AHEAD_BLOCKS, READ_AHEAD_BYTES // pool.slot_bytes
        )
        first = max(run.read_end, run.ahead_end)
        run.ahead_end = first + run.ahead
        rows, _ = resolve(node, part, first, run.ahead)
        if not pool.tenant.pressure:
            self.world.counters["read_ahead_blocks"] += self.fetch(pool, rows[rows != NONE])

    def fetch(self, pool: Pool, rows: Rows, client: int = OWN_WORK) -> int:
        """Start to bring those rows of a pool to DRAM that are on NVMe only, as many leading ones
        as writers leave room for; returns how many."""
        table = self.world.table
        rows = rows[(table.dram[rows] == NONE) & ((table.flags[rows] & F_BUSY) == 0)]
        rows = rows[: max(pool.write_room, 0)]
        if len(rows):
            slots = pool.tenant.arena.alloc(pool.dram, len(rows), FILLING, NO_OWNER, 0)
            assert slots is not None, "write_room said that there is room"
            self.copies.promote(pool, rows, slots, urgent=False, client=client)
        return len(rows)
