"""Blocks that are named by content keys: an engine's prefix cache.

Keyed blocks are CACHED unless a session holds them or a lookup's lease pins them. A key belongs to
a tenant and a layout: the same key under another of either is another block.
"""

import numpy as np
from numpy.typing import NDArray

from kvtier_client.errors import InvalidArgument, LeaseExpired, SpillFull
from kvtier_client.wire import (
    CommitKeys,
    Done,
    Granted,
    Hits,
    Hold,
    Lookup,
    Remove,
    ReserveKeys,
    Unhold,
)  # fmt: skip
from kvtierd.core.actions import SaveHolds
from kvtierd.core.blocks import F_LOST, NONE, Rows
from kvtierd.core.commits import Commits
from kvtierd.core.copies import Copies
from kvtierd.core.leases import Kind, Lease, Peer, Ticket, pack_u32, unpack_u32
from kvtierd.core.tenant import Pool
from kvtierd.core.tree import PARTS_MAX, session_of
from kvtierd.core.world import World
from kvtierd.core.writes import Writes


class Keyed:
    """The keyed verbs."""

    def __init__(self, world: World, copies: Copies, writes: Writes, commits: Commits) -> None:
        self.world, self.copies, self.writes, self.commits = world, copies, writes, commits

    def reserve_keys(self, peer: Peer, req: ReserveKeys) -> Granted | Ticket:
        """Grant slots for those keys that are not stored; `index` says which."""
        lease = peer.group.leases.get(peer.member.index << 32 | req.lease)
        if lease is not None and lease.kind is Kind.WRITE:
            return self.writes.granted(peer, req.id, lease)
        pool = self.writes.pool(peer, req.layout)
        rows = self.find(pool, req.keys)
        check_distinct(req.keys)
        missing = np.flatnonzero(rows == NONE)
        self.writes.check_reserve(pool, len(missing), 1)
        self.writes.new_lease_id(peer, req.lease)
        wait_s = self.world.wait_s(req.wait_s)
        self.world.ttl_s(req.ttl_s)
        if not len(missing):
            return Granted(req.id, self.world.boot, peer.acked, 0, 0.0, b"")
        lease = self.writes.try_reserve(peer, pool, req, len(missing), 0, patient=wait_s > 0)
        if lease is not None:
            lease.index = pack_u32(missing)
            return self.writes.granted(peer, req.id, lease)
        if not wait_s:
            raise self.writes.refusal(pool, len(missing))
        return Ticket(peer, req, pool, self.world.now_s + wait_s, missing, asked=len(missing))

    def retry(self, ticket: Ticket) -> Granted | None:
        """Try a reservation that waits once more, for the keys that are still missing."""
        req, pool, peer = ticket.request, ticket.pool, ticket.peer
        assert isinstance(req, ReserveKeys)
        missing = np.flatnonzero(self.find(pool, req.keys) == NONE)
        if not len(missing):
            return Granted(req.id, self.world.boot, peer.acked, 0, 0.0, b"")
        lease = self.writes.try_reserve(peer, pool, req, len(missing), 0, patient=True)
        if lease is None:
            return None
        lease.index = pack_u32(missing)
        return self.writes.granted(peer, req.id, lease)

    def commit_keys(self, peer: Peer, req: CommitKeys) -> Done:
        """Publish slots under content keys; a key that is stored already keeps its first block."""
        pages, valid = unpack_u32(req.pages), unpack_u32(req.valid)
        keys = split_keys(req.keys)
        lease = peer.group.leases.get(req.lease)
        done = Done(req.id, self.world.boot, peer.acked, len(keys))
        if lease is None or lease.kind is not Kind.WRITE or lease.expired:
            if lease is None and req.lease in peer.group.ended:
                return done
            self.writes.lease(peer, req.lease)
            raise LeaseExpired(
                f"lease {req.lease:#x} ran out before its commit; nothing of it was published"
            )
        if not len(req.keys) == 4 * len(req.index) == 4 * len(req.pages) == 4 * len(req.valid) != 0:
            raise InvalidArgument(
                "keys, index, pages and valid must have the same length, at least 1"
            )
        world, pool = self.world, lease.pool
        slots, index = self.commits.take(lease, req.index, valid)
        checksums = self.commits.checksums(req.checksums, len(pages))
        repeated = slots < 0
        if repeated.any():
            new = ~repeated
            index = unpack_u32(req.index)[new]
            slots, pages, valid = slots[new], pages[new], valid[new]
            keys, checksums = keys[new], checksums[new]
            if not len(slots):
                return done
        rows = self.commits.publish(lease, slots, index, pages, valid, checksums, None, False, keys)
        twice = world.keys.insert(rows.astype(np.int32)).astype(np.int64)
        if len(twice):
            twice = self._replace_lost(pool, twice)
            self.copies.drop(twice)
            world.counters["duplicate_blocks"] += len(twice)
        if not lease.left:
            self.writes.end_if_done(lease)
        return done

    def _replace_lost(self, pool: Pool, rows: Rows) -> Rows:
        """Give the blocks of rows whose keys are there, but lost, to the rows that have the keys;
        returns the other rows. Holds and pins go on with what is readable again."""
        table = self.world.table
        old = self.world.keys.find(table.owner0[rows], table.owner1[rows], pool.number)
        old = old.astype(np.int64)
        lost = np.flatnonzero(((table.flags[old] & F_LOST) != 0) & (table.dram[old] == NONE))
        _, first = np.unique(old[lost], return_index=True)
        lost = lost[first]
        into, new = old[lost], rows[lost]
        if len(into):
            self.copies.clear(pool, table.nvme[into])
            table.nvme[into] = NONE
        for column in (table.checksum, table.seq, table.dram, table.page, table.valid, table.touch):
            column[into] = column[new]
        table.flags[into] &= ~np.uint8(F_LOST)
        pool.tenant.arena.row_of[table.dram[into]] = into + 1
        table.remove(new)
        rest: Rows = np.delete(rows, lost)
        return rest

    def index(self, pool: Pool, packed: bytes) -> Rows:
        """Rows of keys, lost ones included; NONE where there is none. Errors: InvalidArgument."""
        keys = split_keys(packed)
        limit = self.world.limits.blocks_per_request
        if not 0 < len(keys) <= limit:
            raise InvalidArgument(f"{len(keys)} keys: allowed are 1..{limit}")
        return self.world.keys.find(keys[:, 0], keys[:, 1], pool.number).astype(np.int64)

    def find(self, pool: Pool, packed: bytes) -> Rows:
        """Rows of keys, NONE where there is no readable block. Errors: InvalidArgument."""
        rows = self.index(pool, packed)
        lost = (rows != NONE) & ((self.world.table.flags[rows] & F_LOST) != 0)
        rows[lost] = NONE
        return rows

    # ------------------------------------------------------------- lookup

    def lookup(self, peer: Peer, req: Lookup) -> Hits:
        """Leading hits per layout; with a lease, of one layout, they stay until its release."""
        world = self.world
        if len(req.layouts) > PARTS_MAX or (req.lease and len(req.layouts) != 1):
            raise InvalidArgument(
                f"a lookup asks for at most {PARTS_MAX} layouts, with a lease for one"
            )
        pools = [self.writes.pool(peer, fingerprint) for fingerprint in req.layouts]
        if req.lease and self._pinned(peer, req.lease) is not None:
            lease = peer.group.leases[peer.member.index << 32 | req.lease]
            return Hits(req.id, world.boot, peer.acked, [len(lease.rows)], lease.id)
        hits, rows = [], np.empty(0, np.int64)
        for pool in pools:
            rows = self.find(pool, req.keys)
            rows = rows[: leading(rows != NONE)]
            world.table.touch[rows] = world.touch
            hits.append(len(rows))
        lease_id = 0
        if req.lease:
            check_distinct(req.keys)
            rows = self._pinnable(pools[0], rows)
            hits = [len(rows)]
        if req.lease and len(rows):
            lease_id = self.writes.new_lease_id(peer, req.lease)
            world.pin(pools[0], rows)
            empty = np.empty(0, np.int64)
            deadline_s = world.now_s + world.ttl_s(req.ttl_s)
            self.writes.add_lease(
                Lease(lease_id, peer.group, pools[0], Kind.PIN, deadline_s, empty, rows, b"")
            )
        return Hits(req.id, world.boot, peer.acked, hits, lease_id)

    def _pinnable(self, pool: Pool, rows: Rows) -> Rows:
        """As many leading rows as may be kept beside what is held and promised already."""

        def fits() -> bool:
            return pool.tenant.keeps({pool.number: len(rows) - self.world.kept(rows)})

        while len(rows) and not fits():
            rows = rows[: len(rows) // 2]
        return rows

    def _pinned(self, peer: Peer, counter: int) -> Lease | None:
        lease = peer.group.leases.get(peer.member.index << 32 | counter)
        if lease is not None and lease.kind is not Kind.PIN:
            raise InvalidArgument(f"lease counter {counter} is in use for something else")
        return lease

    # --------------------------------------------------------------- holds

    def hold(self, peer: Peer, req: Hold) -> Done:
        """Keep the leading stored ones of some keys for a session."""
        session = session_of(peer, req.session)
        pool = self.writes.pool(peer, req.layout)
        rows = self.find(pool, req.keys)
        missing = np.flatnonzero(rows == NONE)
        rows = rows[: missing[0]] if len(missing) else rows
        held = session.holds.setdefault(pool.number, set())
        fresh = np.array([row for row in dict.fromkeys(rows.tolist()) if row not in held], np.int64)
        if len(fresh):
            if not pool.tenant.keeps({pool.number: len(fresh)}):
                raise SpillFull(f"{len(fresh)} more held blocks do not fit beside HELD ones")
            self.world.pin(pool, fresh)
            held.update(fresh.tolist())
            keys = self._keys_of(fresh)
            self.world.actions.append(SaveHolds(session, pool, keys, held=True))
        return Done(req.id, self.world.boot, peer.acked, len(rows))

    def unhold(self, peer: Peer, req: Unhold) -> Done:
        """Let go of keys that a session held."""
        session = session_of(peer, req.session)
        pool = self.writes.pool(peer, req.layout)
        held = session.holds.get(pool.number, set())
        rows = [row for row in self.index(pool, req.keys).tolist() if row in held]
        if rows:
            held.difference_update(rows)
            gone = np.array(sorted(set(rows)), np.int64)
            keys = self._keys_of(gone)
            self.copies.unpin(pool, gone)
            self.world.actions.append(SaveHolds(session, pool, keys, held=False))
        return Done(req.id, self.world.boot, peer.acked, len(rows))

    def _keys_of(self, rows: Rows) -> list[bytes]:
        table = self.world.table
        packed = np.stack([table.owner0[rows], table.owner1[rows]], axis=1).astype("<u8").tobytes()
        return [packed[i : i + 16] for i in range(0, len(packed), 16)]

    def remove(self, peer: Peer, req: Remove) -> Done:
        """Drop keyed blocks that nobody holds; readers keep what they read until they release."""
        pool = self.writes.pool(peer, req.layout)
        rows = np.unique(self.find(pool, req.keys))
        rows = rows[rows != NONE]
        rows = rows[self.world.table.pins[rows] == 0]
        if len(rows):
            self.world.unname(rows)
            self.copies.drop(rows)
        return Done(req.id, self.world.boot, peer.acked, len(rows))


def split_keys(packed: bytes) -> NDArray[np.uint64]:
    """Packed keys as an [n, 2] array. Errors: InvalidArgument when the length does not fit."""
    if len(packed) % 16:
        raise InvalidArgument(f"keys are 16 bytes each; {len(packed)} bytes are no whole number")
    return np.frombuffer(packed, "<u8").reshape(-1, 2)


def leading(mask: NDArray[np.bool_]) -> int:
    """How many of the mask's first elements are true."""
    return len(mask) if np.count_nonzero(mask) == len(mask) else int(mask.argmin())


def check_distinct(packed: bytes) -> None:
    """Refuse a key that comes twice where blocks are leased. Errors: InvalidArgument."""
    keys = split_keys(packed)
    if len(keys) > 1 and len(np.unique(keys, axis=0)) < len(keys):
        raise InvalidArgument("a key comes twice in one request")
