"""Client groups and their processes: who comes, who goes, and what is forgotten with them.

A group lives as long as one of its processes does; silence never ends it while it holds anything.
"""

import hashlib
import hmac
from typing import Final

from kvtier_client import wire
from kvtier_client.errors import ConnectionLost, InvalidArgument, NotOwner, QuotaExceeded
from kvtierd.core.actions import HangUp, RecordMember, Send
from kvtierd.core.leases import MEMBERS_MAX, Group, Member, Peer, Ticket, owner_of, unpack_u64
from kvtierd.core.reads import Reads
from kvtierd.core.reclaim import Reclaim
from kvtierd.core.tenant import Tenant
from kvtierd.core.world import World

GROUP_LINGER_S: Final = 30.0
"""How long a group without connections or leases is remembered for repeats."""


class Groups:
    """The groups of all tenants."""

    def __init__(self, world: World, reads: Reads, reclaim: Reclaim) -> None:
        self.world, self.reads, self.reclaim = world, reads, reclaim

    def hello(
        self, conn: object, tenant: Tenant, uid: int, pid: int, start_time: int,
        req: wire.Hello,
    ) -> tuple[Peer, list[int]]:  # fmt: skip
        """Let a connection in; returns its peer and which of its leases have ended."""
        if len(req.group) != 16 or not 16 <= len(req.secret) <= 64:
            raise InvalidArgument("a group id has 16 bytes and its secret 16..64")
        secret_hash = hashlib.sha256(b"kvtierd-group" + req.secret).digest()[:16]
        group = tenant.groups.get(req.group)
        if group is None:
            if len(tenant.groups) >= self.world.limits.groups:
                self._forget_idlest(tenant)
            if len(tenant.groups) >= self.world.limits.groups:
                raise QuotaExceeded(f"{len(tenant.groups)} client groups (limits.groups)")
            group = Group(req.group, secret_hash, tenant)
            tenant.groups[req.group] = group
        elif not hmac.compare_digest(group.secret_hash, secret_hash):
            raise NotOwner("the group exists and has another secret")
        member = self._member(group, req.member, uid, pid, start_time)
        self._hang_up(member)  # what comes late on its older connections was sent before this
        peer = Peer(conn, group, member, self.world.boot)
        group.peers.add(peer)
        return peer, self.reclaim.returned(group, member, req.leases)

    def _member(self, group: Group, claimed: int, uid: int, pid: int, start_time: int) -> Member:
        """The member that a process was, or a new one; nobody becomes another process's member."""
        tenant = group.tenant
        for member in group.members:
            same = (member.pid, member.start_time) == (pid, start_time)
            if member.index == claimed and same:
                if not member.listed:
                    member.listed = True
                    self.world.actions.append(RecordMember(tenant, member))
                return member
        if len(tenant.members) >= MEMBERS_MAX:
            self._forget_member(tenant)
        numbers = (claimed, *range(MEMBERS_MAX))
        free = next((i for i in numbers if 0 <= i < MEMBERS_MAX and i not in tenant.members), None)
        if free is None:
            raise QuotaExceeded(f"tenant {tenant.name} has {MEMBERS_MAX} clients")
        member = Member(free, group, pid, start_time, uid)
        tenant.members[free] = member
        group.members.append(member)
        self.world.actions.append(RecordMember(tenant, member))
        return member

    def close(self, peer: Peer) -> None:
        """Nothing is answered or granted any more on a connection."""
        peer.open = False
        group = peer.group
        group.peers.discard(peer)
        group.idle_since_s = self.world.now_s
        self._drop_waiting(peer)

    def goodbye(self, peer: Peer, req: wire.Goodbye) -> wire.Done:
        """A client closes: it is granted nothing more, and its leases end but those it names."""
        kept = set(unpack_u64(req.keep).tolist())
        world = self.world
        for ticket in self._drop_waiting(peer):
            if not ticket.prefetch:
                text = "nothing is granted after a goodbye"
                world.actions.append(Send(peer, wire.Error(
                    ticket.request.id, world.boot, peer.acked, ConnectionLost.code, text
                )))  # fmt: skip
        member = peer.member.index
        leases = [x for x in peer.group.leases.values() if owner_of(x.id) == member]
        ended = [lease for lease in leases if lease.id not in kept]
        for lease in ended:
            self.reclaim.end(lease)
        return wire.Done(req.id, world.boot, peer.acked, len(ended))

    def _drop_waiting(self, peer: Peer) -> list[Ticket]:
        """What a connection has asked for and waits for is not granted any more; returns it."""
        tenant = peer.group.tenant
        dropped: list[Ticket] = []
        for queue in (tenant.waiting, tenant.loading):
            mine = [t for t in queue if t.peer is peer]
            for ticket in mine:
                queue.remove(ticket)
                self.reads.cancel_ticket(ticket)
            dropped += mine
        peer.tickets.clear()
        return dropped

    def _hang_up(self, member: Member) -> None:
        """Whatever a process's connections still bring is not carried out."""
        for peer in [p for p in member.group.peers if p.member is member]:
            self.close(peer)
            self.world.actions.append(HangUp(peer))

    def process_died(self, member: Member) -> None:
        """A client process is dead; with the last of a group, its leases end."""
        member.alive = False
        group = member.group
        self._hang_up(member)  # its last requests may come after the news of its death
        if group.alive:
            # Its leases are the group's, which may use them; so its record stays for a restart.
            self.reclaim.end_unclaimed(group, member, set())
        else:
            self._forget_group(group)

    def tidy(self, tenant: Tenant) -> None:
        """Let groups go that hold nothing: nobody comes back for that after a restart, and after
        a while not to this daemon either."""
        for group in list(tenant.groups.values()):
            if group.peers or group.leases or not group.returned:
                continue
            for member in group.members:
                if member.listed:
                    member.listed = False
                    self.world.actions.append(RecordMember(tenant, member))
            if self.world.now_s - group.idle_since_s > GROUP_LINGER_S:
                self._forget_group(group)

    def _forget_idlest(self, tenant: Tenant) -> None:
        """Make room for a group: the one that has been without connection and lease longest."""
        idle = [g for g in tenant.groups.values() if not g.peers and not g.leases and g.returned]
        if idle:
            self._forget_group(min(idle, key=lambda group: group.idle_since_s))

    def _forget_member(self, tenant: Tenant) -> None:
        """Make room for a member: one without a connection and without a lease."""
        busy = {peer.member for group in tenant.groups.values() for peer in group.peers}
        owners = {owner_of(lease) for lease in tenant.leases}
        for member in tenant.members.values():
            if member not in busy and member.index not in owners and member.returned:
                self._drop_member(member)
                member.group.members.remove(member)
                return

    def _drop_member(self, member: Member) -> None:
        """Nothing can be of this member any more; its place is free."""
        tenant = member.group.tenant
        member.alive = False
        if tenant.members.get(member.index) is member:
            del tenant.members[member.index]
            self.world.actions.append(RecordMember(tenant, member))

    def _forget_group(self, group: Group) -> None:
        tenant = group.tenant
        for lease in list(group.leases.values()):
            self.reclaim.end(lease)
        for sid in group.sessions:
            session = tenant.sessions[sid]
            session.groups.discard(group)
            session.idle_since_s = self.world.now_s
        group.sessions.clear()
        for member in group.members:
            self._drop_member(member)
        if tenant.groups.get(group.id) is group:
            del tenant.groups[group.id]
