"""The short way to read one block that is in DRAM: the same as `reads.py`, without arrays.

It uses memoryviews and one packed row, which cost a fraction of numpy's scalar access. Whatever
is not plain is left to `reads.py`.
"""

import numpy as np

from kvtier_client.wire import Acquire, Granted
from kvtierd.core.blocks import F_DOOMED, F_FILLING, F_LOST, NONE, READERS_END
from kvtierd.core.leases import Kind, Lease, Peer
from kvtierd.core.slabs import NO_OWNER, READERS_MAX
from kvtierd.core.tenant import Pool
from kvtierd.core.tree import Session, whole_page
from kvtierd.core.world import World
from kvtierd.core.writes import Writes

_NOT_READABLE = F_FILLING | F_LOST | F_DOOMED
_TAG_AND_STATE = 0xFFFFFFFF_000000FF


def acquire_one(
    world: World, writes: Writes, peer: Peer, req: Acquire, session: Session
) -> Granted | None:
    """Lease one page of a branch; None, and nothing done, when the long way must be taken.

    Errors: InvalidArgument, QuotaExceeded, as for the long way.
    """
    node, pool = session.nodes.get(req.node), peer.group.tenant.pools.get(req.layout)
    if node is None or pool is None or pool not in session.pools:
        return None
    run = node.runs[session.part_of(pool)]
    place = req.first - run.start
    if not (0 <= place < run.length and whole_page(node, run, req.first)):
        return None
    row = run.view[place]
    if row == NONE:
        return None
    table = world.table
    use = table.use_of(row)
    if use.dram == NONE or use.flags & _NOT_READABLE or use.readers == READERS_END:
        return None
    world.wait_s(req.wait_s)
    ttl_s = world.ttl_s(req.ttl_s)
    lease_id = writes.new_lease_id(peer, req.lease)
    owner, arena = peer.member.index, pool.tenant.arena
    readers = use.readers + 1
    table.set_use(row, int(world.now_s * 4.0), readers)
    old = arena.word_view[use.dram]
    mine = readers == 1 or old >> 16 & 0xFFFF == owner
    arena.word_view[use.dram] = _read_word(old, readers, owner if mine else NO_OWNER)
    offset = arena.offset(pool.dram, use.dram).to_bytes(8, "little")
    sums = use.checksum.to_bytes(8, "little") if world.limits.end_to_end else b""
    lease = Lease(
        lease_id, peer.group, pool, Kind.READ, world.now_s + ttl_s, None,
        np.array((row,), np.int64), offset, use.valid.to_bytes(4, "little"), sums, one=use.dram,
    )  # fmt: skip
    peer.group.leases[lease_id] = peer.group.tenant.leases[lease_id] = lease
    world.counters["acquired_blocks"] += 1
    world.counters["acquired_bytes"] += pool.layout.block_bytes
    return Granted(
        req.id, world.boot, peer.acked, lease_id, ttl_s, offset, lease.valid, lease.checksums
    )


def unread_one(world: World, pool: Pool, row: int) -> bool:
    """Take one reader off a row; whether the row was doomed or lost meanwhile."""
    table, words = world.table, pool.tenant.arena.word_view
    use = table.use_of(row)
    readers = use.readers - 1
    table.set_use(row, use.touch, readers)
    old = words[use.dram]
    words[use.dram] = _read_word(old, readers, old >> 16 & 0xFFFF if readers else NO_OWNER)
    return bool(use.flags & (F_DOOMED | F_LOST))


def _read_word(old: int, readers: int, owner: int) -> int:
    return old & _TAG_AND_STATE | min(readers, READERS_MAX) << 8 | owner << 16
