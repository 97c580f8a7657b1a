"""The daemon's state: a request, completion or tick goes in; replies and actions come out.

`handle` is the entry for client requests: it finds the verb's handler in `_verbs`, turns errors
into replies, and queues requests that must wait. After each event the caller carries out
`take_actions()` in order. To add a verb: a struct in `kvtier_client.wire`, a method in the module
whose subject it is, and a line in `_verbs`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier_client import wire
from kvtier_client.errors import (
    ConnectionLost,
    InvalidArgument,
    KvtierError,
    LeaseExpired,
    QuotaExceeded,
)  # fmt: skip
from kvtierd.core.actions import Action, ForgetSession, Note, Send
from kvtierd.core.commits import Commits
from kvtierd.core.copies import Copies
from kvtierd.core.evict import Evictor
from kvtierd.core.groups import Groups
from kvtierd.core.keyed import Keyed
from kvtierd.core.leases import (
    Kind,
    Lease,
    Member,
    Peer,
    Ticket,
    pack_u32,
)  # fmt: skip
from kvtierd.core.reads import Reads
from kvtierd.core.reclaim import Reclaim
from kvtierd.core.retention import Retention
from kvtierd.core.scrub import Scrub
from kvtierd.core.sessions import Sessions
from kvtierd.core.tenant import Pool, Tenant
from kvtierd.core.tree import session_of
from kvtierd.core.validate import validate
from kvtierd.core.world import World
from kvtierd.core.writes import Writes

ERROR_TEXT_MAX = 1000
"""Characters of an error's message on the wire."""
MAKES_ROOM = frozenset({
    wire.CloseSession, wire.Prune, wire.SetRetention, wire.Fold, wire.Commit, wire.CommitKeys,
    wire.Abort, wire.Release, wire.Cancel, wire.Unhold, wire.Remove, wire.Goodbye,
})  # fmt: skip
"""Requests after which those that wait are tried again; else they are when a move ends, and at
every tick."""


class State:
    """All tables of the daemon and everything that may happen to them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.copies = Copies(world)
        self.evictor = Evictor(world, self.copies)
        self.writes = Writes(world, self.copies, self.evictor)
        self.commits = Commits(world, self.copies, self.writes)
        self.keyed = Keyed(world, self.copies, self.writes, self.commits)
        self.reads = Reads(world, self.copies, self.evictor, self.writes, self.keyed)
        self.reclaim = Reclaim(world, self.writes, self.reads)
        self.groups = Groups(world, self.reads, self.reclaim)
        self.scrub = Scrub(world, self.copies)
        self.retention = Retention(world, self.copies, self.reads.ahead)
        self.sessions = Sessions(world, self.copies, self.writes, self.reads)
        self._next_reap_s = 0.0
        self.unclaimed: dict[tuple[int, bytes], Callable[[Pool], None]] = {}
        """Blocks of layouts that nobody has registered since the catalog was lost."""
        self._verbs: dict[type, Callable[[Peer, Any], Any]] = {
            wire.RegisterLayout: self._register_layout,
            wire.OpenSession: self.sessions.open,
            wire.ResumeSession: self.sessions.resume,
            wire.CloseSession: self.sessions.close,
            wire.Describe: self.sessions.describe,
            wire.Fork: self.sessions.fork,
            wire.Prune: self.sessions.prune,
            wire.SetRetention: self.retention.set_retention,
            wire.Fold: self.retention.fold,
            wire.Unfold: self.retention.unfold,
            wire.SetPriority: self.sessions.set_priority,
            wire.PutBlob: self.sessions.put_blob,
            wire.GetBlob: self.sessions.get_blob,
            wire.Reserve: self.writes.reserve,
            wire.Commit: self._commit,
            wire.Abort: self.writes.abort,
            wire.Acquire: self._acquire,
            wire.Renew: self._renew,
            wire.Release: self.reads.release,
            wire.Prefetch: self._prefetch,
            wire.Cancel: self.reads.cancel,
            wire.Lookup: self.keyed.lookup,
            wire.ReserveKeys: self.keyed.reserve_keys,
            wire.CommitKeys: self.keyed.commit_keys,
            wire.AcquireKeys: self.reads.acquire_keys,
            wire.Hold: self.keyed.hold,
            wire.Unhold: self.keyed.unhold,
            wire.Remove: self.keyed.remove,
            wire.Goodbye: self.groups.goodbye,
        }

    # ------------------------------------------------------------ requests

    def handle(self, peer: Peer, req: wire.Request, now_s: float) -> wire.Reply | None:
        """Carry out a client's request; None when the reply comes later, or none is wanted."""
        world = self.world
        world.now_s = now_s
        oneway: int = getattr(req, "oneway", 0)
        try:
            verb = self._verbs.get(type(req))
            if verb is None:
                raise InvalidArgument("hello was said already on this connection")
            if not peer.open:
                raise ConnectionLost("the process that asked has ended; nothing is given to it")
            result = verb(peer, req)
            if type(result) is Ticket:
                self._queue(result)
                result = None
        except KvtierError as error:
            result = self.refuse(peer, req, error)
        if type(req) in MAKES_ROOM:
            tenant = peer.group.tenant
            if tenant.waiting or tenant.loading:
                self.pump(tenant)
        if oneway > 0:
            peer.handled = max(peer.handled, oneway)
            return None
        return result  # type: ignore[no-any-return]

    def refuse(self, peer: Peer, req: wire.Request, error: KvtierError) -> wire.Error | None:
        """A request has failed: the reply; of a one-way request a push says so, and ends it."""
        oneway: int = getattr(req, "oneway", 0)
        if oneway <= 0:
            return self.error(peer, req.id, error)
        text = str(error)[:ERROR_TEXT_MAX]
        push = wire.Failed(req.id, self.world.boot, peer.acked, error.code, text)
        self.world.actions.append(Send(peer, push))
        peer.handled = max(peer.handled, oneway)
        return None

    def error(self, peer: Peer, request_id: int, error: KvtierError) -> wire.Error:
        """An error as a reply."""
        pages = pack_u32(np.array(error.pages, np.int64)) if error.pages else b""
        text = str(error)[:ERROR_TEXT_MAX]
        return wire.Error(request_id, self.world.boot, peer.acked, error.code, text, pages)

    def take_actions(self) -> list[Action]:
        """What has to be done now, in this order."""
        actions, self.world.actions = self.world.actions, []
        return actions

    def _register_layout(self, peer: Peer, req: wire.RegisterLayout) -> wire.LayoutRegistered:
        reply = self.sessions.register_layout(peer, req)
        tenant = peer.group.tenant
        adopt = self.unclaimed.pop((tenant.number, reply.fingerprint), None)
        if adopt is not None:
            adopt(tenant.pools[reply.fingerprint])
        return reply

    def _commit(self, peer: Peer, req: wire.Commit) -> wire.Done:
        done = self.commits.commit(peer, req, session_of(peer, req.session))
        tenant = peer.group.tenant
        if tenant.calm_bytes < 0 or tenant.calm_epoch != tenant.arena.epoch:
            self.balance(tenant)
        return done

    def _acquire(self, peer: Peer, req: wire.Acquire) -> wire.Granted | Ticket:
        return self.reads.acquire(peer, req, session_of(peer, req.session))

    def _prefetch(self, peer: Peer, req: wire.Prefetch) -> wire.Done:
        return self.reads.prefetch(peer, req, session_of(peer, req.session))

    def _renew(self, peer: Peer, req: wire.Renew) -> wire.Done:
        lease = self.writes.lease(peer, req.lease)
        if lease.expired and lease.kind is Kind.WRITE:
            raise LeaseExpired(f"lease {req.lease:#x} ran out; abort it when its copies have ended")
        lease.deadline_s = self.world.now_s + self.world.ttl_s(req.ttl_s)
        lease.expired = False
        return wire.Done(req.id, self.world.boot, peer.acked, 1)

    # -------------------------------------------------------------- groups

    def hello(
        self, conn: object, tenant: Tenant, uid: int, pid: int, start_time: int,
        req: wire.Hello, now_s: float,
    ) -> tuple[Peer, list[int]]:  # fmt: skip
        """Let a connection in; returns its peer and which of its leases have ended."""
        self.world.now_s = now_s
        return self.groups.hello(conn, tenant, uid, pid, start_time, req)

    def closed(self, peer: Peer, now_s: float) -> None:
        """A connection closed; its process may still live, and its leases with it."""
        self.world.now_s = now_s
        self.groups.close(peer)
        self.pump(peer.group.tenant)

    def process_died(self, member: Member, now_s: float) -> None:
        """A client process is dead; with the last of a group, its leases end."""
        self.world.now_s = now_s
        self.groups.process_died(member)
        self.pump(member.group.tenant)

    # --------------------------------------------------------- completions

    def demoted(
        self, batch: int, status: NDArray[np.uint8], checksums: NDArray[np.uint64], now_s: float
    ) -> None:
        """A `Demote` has ended."""
        self._ended(batch, now_s, lambda: self.copies.demoted(batch, status, checksums))

    def promoted(self, batch: int, status: NDArray[np.uint8], now_s: float) -> None:
        """A `Promote` has ended."""
        self._ended(batch, now_s, lambda: self.copies.promoted(batch, status))

    def cleared(self, batch: int, now_s: float) -> None:
        """A `Clear` has ended."""
        self._ended(batch, now_s, lambda: self.copies.cleared(batch))

    def verified(self, status: NDArray[np.uint8], now_s: float) -> None:
        """A `Verify` has ended."""
        self.world.now_s = now_s
        tenant = self.scrub.verified(status).tenant
        self.pump(tenant)
        self.balance(tenant)

    def _ended(self, batch: int, now_s: float, settle: Callable[[], None]) -> None:
        self.world.now_s = now_s
        tenant = self.world.batches[batch].pool.tenant
        settle()
        self.pump(tenant)
        self.balance(tenant)

    def balance(self, tenant: Tenant) -> None:
        """Evict by watermark; tells the tenant's clients when the pressure changes."""
        if not self.evictor.balance(tenant):
            return
        world = self.world
        free = tenant.arena_bytes() - tenant.used_bytes()
        for group in tenant.groups.values():
            for peer in group.peers:
                push = wire.Pressure(0, world.boot, peer.acked, int(tenant.pressure), free)
                world.actions.append(Send(peer, push))

    # ------------------------------------------------------------- waiting

    def _queue(self, ticket: Ticket) -> None:
        tenant = ticket.pool.tenant
        if ticket.loading:
            tenant.loading.append(ticket)
            return
        own = tenant.waiting.of_group(ticket.peer)
        if own >= self.world.limits.waiting_per_tenant - len(tenant.waiting):
            # Some room always stays for a group that has none.
            raise QuotaExceeded(
                f"{len(tenant.waiting)} requests of the tenant wait already, {own} of this group"
            )
        tenant.waiting.append(ticket)

    def pump(self, tenant: Tenant) -> None:
        """Go on with what waits: demand before prefetch, in each pool the groups in turns."""
        for ticket in list(tenant.loading):
            result = self.reads.finish_loading(ticket)
            if result is not None:
                tenant.loading.remove(ticket)
                self._answer(ticket, result)
            elif ticket.prefetch and ticket.ended:
                tenant.loading.remove(ticket)
        blocked: set[tuple[int, int]] = set()
        for line in tenant.waiting.lines():
            lane, _, pool = line
            while (lane, pool) not in blocked and (head := tenant.waiting.first(line)):
                if not self._go_on(head):
                    blocked.add((lane, pool))

    def _go_on(self, ticket: Ticket) -> bool:
        """Try the first of a line; whether it waits for room no longer."""
        tenant = ticket.pool.tenant
        try:
            result = self._advance(ticket)
        except KvtierError as error:
            result = error
        if result is None and not ticket.loading:
            return False
        tenant.waiting.remove(ticket)
        if result is not None:
            self._answer(ticket, result)
        elif not ticket.ended:
            tenant.loading.append(ticket)
        return True

    def _advance(self, ticket: Ticket) -> wire.Granted | KvtierError | None:
        req = ticket.request
        taken = self.writes.taken(ticket)
        if taken is not None:
            return taken
        if isinstance(req, wire.Reserve | wire.ReserveKeys):
            writer = self.keyed if isinstance(req, wire.ReserveKeys) else self.writes
            return writer.retry(ticket)
        session = ticket.pool.tenant.sessions.get(getattr(req, "session", -1))
        self.reads.refresh(ticket, session)
        if ticket.prefetch and not len(ticket.rows):
            ticket.loading = True
            self.reads.end_prefetch(ticket, ticket.asked, 0)
            return None
        if not len(ticket.rows):  # keyed blocks that were dropped meanwhile
            return wire.Granted(req.id, self.world.boot, ticket.peer.acked, 0, 0.0, b"")
        if self.reads.advance(ticket) and not ticket.prefetch:
            return self.reads.grant(ticket)
        return None

    def _answer(self, ticket: Ticket, result: wire.Granted | KvtierError) -> None:
        req, peer = ticket.request, ticket.peer
        if ticket.prefetch:
            self.reads.end_prefetch(ticket, 0, len(ticket.rows))
            return
        if isinstance(result, KvtierError):
            self.world.actions.append(Send(peer, self.error(peer, req.id, result)))
        else:
            self.world.actions.append(Send(peer, result))

    # ---------------------------------------------------------------- time

    def tick(self, now_s: float) -> None:
        """Let deadlines pass: grace periods, waits, leases, idle groups, orphans."""
        world = self.world
        world.now_s = now_s
        self.retention.tick()
        for tenant in world.tenants.values():
            for queue in (tenant.waiting, tenant.loading):
                for ticket in [t for t in queue if t.deadline_s <= now_s]:
                    queue.remove(ticket)
                    self._overdue(ticket)
            for lease in [x for x in tenant.leases.values() if x.deadline_s <= now_s]:
                self._expire(lease)
            self.groups.tidy(tenant)
            self.evictor.end_stuck_drains(tenant)
            self.pump(tenant)
            self.balance(tenant)
        self.scrub.tick()
        if now_s >= self._next_reap_s:
            self._next_reap_s = now_s + 1.0
            self._reap_orphans()
            self.forget_closed()

    def _overdue(self, ticket: Ticket) -> None:
        if isinstance(ticket.request, wire.Reserve | wire.ReserveKeys):
            self._answer(ticket, self.writes.refusal(ticket.pool, ticket.asked))
        elif ticket.prefetch:
            self.reads.end_prefetch(ticket, 0, len(ticket.rows))
        else:
            self._answer(ticket, self.reads.refusal(ticket))

    def _expire(self, lease: Lease) -> None:
        """A lease ran out: a pin ends, a writer's slots are quarantined, a reader is reminded."""
        world = self.world
        if lease.kind is Kind.PIN:
            self.reads.end_lease(lease)
            return
        lease.deadline_s = float("inf")
        if lease.kind is Kind.WRITE:
            self.writes.quarantine(lease)
        else:
            lease.expired = True
            world.counters["expired_leases"] += 1
        for peer in lease.group.peers:
            world.actions.append(Send(peer, wire.Revoke(0, world.boot, peer.acked, lease.id)))

    def _reap_orphans(self) -> None:
        world = self.world
        for tenant in world.tenants.values():
            for session in list(tenant.sessions.values()):
                idle_s = world.now_s - session.idle_since_s
                if not session.groups and idle_s > world.limits.orphan_ttl_s:
                    blocks = self.sessions.end(session)
                    world.counters["reaped_orphans"] += 1
                    text = (
                        f"session {session.sid:016x} ({session.name or 'unnamed'}) of tenant "
                        f"{tenant.name} had no client for {idle_s:.0f} s (recovery.orphan_ttl): "
                        f"closed, {blocks} blocks freed"
                    )
                    world.actions.append(Note("orphan_reaped", text))

    def forget_closed(self) -> None:
        """Let tombstones of closed sessions go once nothing is left of them on any medium.

        A tombstone's number is 0 while blocks of its session are still read or moved; then the
        batch before which all clearing has begun."""
        world = self.world
        if not world.tombstones:
            return
        doomed = set(world.doomed_owners()) if world.doomed else set()
        oldest = min(world.batches, default=world.next_batch)
        for (tenant, hashed), batch in list(world.tombstones.items()):
            if not batch and hashed not in doomed:
                world.tombstones[tenant, hashed] = world.next_batch
            if 0 < world.tombstones[tenant, hashed] <= oldest:
                del world.tombstones[tenant, hashed]
                world.actions.append(ForgetSession(tenant, hashed))

    def validate(self) -> None:
        """Recount everything; AssertionError when the books do not balance."""
        validate(self.world)
