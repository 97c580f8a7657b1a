"""The running daemon: carries out the core's actions, keeps time, serves, reloads and stops."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvtier_client import wire
from kvtier_client.errors import Internal, KvtierError, NotOwner, ShuttingDown, SpillFull
from kvtierd import __version__, systemd
from kvtierd import config as configuration
from kvtierd.catalog.errors import CatalogError, CatalogFull
from kvtierd.catalog.rows import BlobRecord, Op, SaveClock, SaveIdle
from kvtierd.catalog.writer import CatalogWriter
from kvtierd.config import Config, ConfigError
from kvtierd.connection import Connection
from kvtierd.core import actions as act
from kvtierd.core.leases import Member, Peer
from kvtierd.core.slabs import READY
from kvtierd.health import Health
from kvtierd.ledger import Ledger
from kvtierd.mover import Mover
from kvtierd.operator import Operator
from kvtierd.oplog import op_of
from kvtierd.server import Credentials, Listener, ProcessWatch, open_pidfd, process_start_time
from kvtierd.start import Parts, core_limits, kept_fds, tenants_of_uids
from kvtierd.tiers.holder import KeeperError, open_keeper
from kvtierd.tiers.records import ClientRecord, SlabEntry
from kvtierd.turns import Turns

TICK_S: Final = 0.05
SAVE_TIMES_S: Final = 30.0
STORED_VERBS: Final = {
    wire.RegisterLayout, wire.OpenSession, wire.ResumeSession, wire.CloseSession, wire.Fork,
    wire.Prune, wire.SetRetention, wire.Fold, wire.Unfold, wire.SetPriority, wire.PutBlob,
    wire.Hold, wire.Unhold,
}  # fmt: skip
"""What they say is so must be in the catalog, also where it was so before: a repeat, or the same
request of another client, is not answered before the changes of the first one are stored."""
KEEPER_RETRY_S: Final = 1.0

log = logging.getLogger(__name__)


class Daemon:
    """Everything between the sockets and the core; lives on the event loop's thread."""

    def __init__(
        self, config: Config, parts: Parts, path: str | None, *, keep_memory: bool
    ) -> None:
        self.config, self.parts, self.path = config, parts, path
        self.limits = config.limits
        self.turns = Turns()
        self.state = parts.state
        self.boot = parts.state.world.boot
        self._keep_memory = keep_memory
        self.catalog = CatalogWriter(parts.catalog)
        self.faults = 0
        self.keeper_lost = False
        self._stopping = False
        self.began_s = time.time()
        self._stop = asyncio.Event()
        self._watch = ProcessWatch()
        self._listeners: list[Listener] = []
        self._do: dict[type, Callable[[Any], None]] = {
            act.Note: self._note,
            act.Send: self._send,
            act.HangUp: lambda action: action.peer.conn.close(),
            act.AssignSlab: self._assign_slab,
            act.RecordMember: self._record_member,
            act.LoadBlob: self._load_blob,
        }

    # --------------------------------------------------------------- serve

    async def serve(self) -> None:
        """Run until a signal says stop; then stop within `stop.timeout`."""
        loop = self._loop = asyncio.get_running_loop()
        self.mover = Mover(self.state, self.parts.spill, self.parts.arenas, loop, self.perform)
        self._do |= self.mover.handlers
        self.ledger = Ledger(self.catalog, loop)
        self.operator, self.health = Operator(self), Health(self)
        loop.set_exception_handler(self._fault)
        self._watch_keeper()
        self.catalog.start()
        self.state.tick(loop.time())
        for member in self.parts.watched:
            self._watch_recovered(member)
        self.perform()
        for number, handler in (
            (signal.SIGTERM, self._stop.set), (signal.SIGINT, self._stop.set),
            (signal.SIGHUP, self._hangup),
        ):  # fmt: skip
            loop.add_signal_handler(number, handler)
        client, admin = self.config.socket.client_path, self.config.socket.admin_path
        self._listeners = [
            Listener(self, client, 0o666, admin=False),
            Listener(self, admin, 0o600, admin=True),
        ]
        for listener in self._listeners:
            listener.start()
        log.info("serving at %s", client)
        systemd.notify("READY=1\nSTATUS=serving")
        ticking = loop.create_task(self._tick())
        await self._stop.wait()
        ticking.cancel()
        await self._shut_down()

    def _fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Something has escaped a callback of the loop."""
        if not isinstance(context.get("exception"), OSError):  # those are of sockets
            self.faults += 1
        loop.default_exception_handler(context)

    async def _tick(self) -> None:
        next_save_s = self._loop.time() + SAVE_TIMES_S
        while True:
            await asyncio.sleep(TICK_S)
            now_s = self._loop.time()
            for part in (self.state.tick, self._look):
                try:
                    part(now_s)
                except Exception:
                    log.exception("a tick failed")
                    self.faults += 1
                self.perform()
            if now_s >= next_save_s and not self.ledger.refused:
                next_save_s = now_s + SAVE_TIMES_S
                self._save_times(now_s)
            self.ledger.retry()

    def _look(self, now_s: float) -> None:
        self.health.look(TICK_S)
        for listener in self._listeners:
            listener.close_partial(now_s)

    def _save_times(self, now_s: float) -> None:
        idle = tuple(
            (tenant.name, session.token_hash, now_s - session.idle_since_s)
            for tenant in self.state.world.tenants.values()
            for session in tenant.sessions.values()
            if not session.groups
        )
        ran_s = now_s + self.state.world.ran_offset_s
        self.ledger.save([SaveClock(ran_s), *([SaveIdle(idle)] if idle else [])])

    # ---------------------------------------------------------------- stop

    async def _shut_down(self) -> None:
        """Finish what is under way, save what memory would lose, and close."""
        self._stopping = True
        deadline_s = self._loop.time() + self.config.stop.timeout_s
        log.info("stopping")
        systemd.notify("STOPPING=1\nSTATUS=stopping")
        for listener in self._listeners:
            listener.close()
        if self.config.recovery.memory == "off" and self._keep_memory:
            await self._spill_all(deadline_s - 0.3 * self.config.stop.timeout_s)
        left_s = max(deadline_s - self._loop.time(), 1.0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5 * left_s):
                await self.mover.idle.wait()
        self._save_times(self._loop.time())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3 * left_s):
                await self.ledger.idle.wait()
        self._watch.close()
        self.mover.close()
        spill = await asyncio.to_thread(self.parts.spill.close, 0.3 * left_s)
        catalog = await asyncio.to_thread(self.catalog.close, 0.3 * left_s)
        if not (spill and catalog):
            log.error("stopped before all was written: spill %s, catalog %s", spill, catalog)
        self._let_go()
        log.info("stopped")

    async def _spill_all(self, until_s: float) -> None:
        """Copy every block to NVMe, because this daemon's memory ends with it."""
        tenants = self.state.world.tenants.values()
        while (now_s := self._loop.time()) < until_s:
            self.state.world.now_s = now_s
            moved = sum(self.state.evictor.save(tenant) for tenant in tenants)
            self.perform()
            if not moved and self.mover.idle.is_set():
                if all(tenant.spill_retry_s <= now_s for tenant in tenants):
                    break
                await asyncio.sleep(TICK_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(until_s - self._loop.time(), 0.01)):
                    await self.mover.idle.wait()
        for tenant in tenants:
            left = sum(p.dram.counts[READY] - p.clean for p in tenant.pools.values())
            if left:
                log.error("tenant %s: %d blocks are only in memory and end here", tenant.name, left)

    def _watch_keeper(self) -> None:
        """Put the arenas again when their keeper (a process of its own) ends before us."""
        fd = self.parts.keeper.fileno()
        if fd is not None:
            self._loop.add_reader(fd, self._keeper_ended, fd)

    def _keeper_ended(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        self._keep_again()

    def _keep_again(self) -> None:
        if self._stopping:
            return
        parts = self.parts
        try:
            parts.keeper.close()
            parts.keeper = open_keeper(self.config.recovery.memory, self.config.runtime_dir)
            for arena in parts.arenas.values():
                for name, memfd in kept_fds(arena).items():
                    parts.keeper.put(name, memfd)
        except KeeperError as error:
            self.keeper_lost = True
            log.error("the arenas would not outlive this process: %s", error)
            self._loop.call_later(KEEPER_RETRY_S, self._keep_again)
            return
        self.keeper_lost = False
        log.warning("the keeper of the arenas had ended; another one has them now")
        self._watch_keeper()

    def _let_go(self) -> None:
        keeper = self.parts.keeper
        fd = keeper.fileno()
        if fd is not None and not self.keeper_lost:
            self._loop.remove_reader(fd)
        for arena in self.parts.arenas.values():
            if not self._keep_memory:
                for name in kept_fds(arena):
                    with contextlib.suppress(KeeperError):
                        keeper.drop(name)
            arena.close()
        keeper.close()
        self.parts.close_locks()

    # -------------------------------------------------------------- reload

    def _hangup(self) -> None:
        try:
            self.reload()
        except (ConfigError, KvtierError) as error:
            log.error("reload: nothing was changed: %s", error)

    def reload(self) -> dict[str, object]:
        """Read the configuration again; says which changes need a restart. Errors: ConfigError."""
        if self.path is None:
            return {"changed": [], "needs_restart": []}
        systemd.notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            new = configuration.load(self.path)
            config = configuration.with_live_parts(self.config, new)
            self._apply(config)
            changed = configuration.difference(self.config, config)
            restart = configuration.difference(config, new)
            self.config = config
        finally:
            systemd.notify("READY=1\nSTATUS=serving")
        for key in restart:
            log.warning("reload: %s takes effect at the next start", key)
        log.info("reload: %s", ", ".join(changed) or "nothing changed")
        return {"changed": changed, "needs_restart": restart}

    def _apply(self, config: Config) -> None:
        """Bring the live parts of a configuration to where they are used."""
        for part in config.tenants:
            tenant = self.state.world.tenants[part.name]
            tenant.nvme_quota_bytes = int(part.spill_bytes)
            tenant.headroom = config.arena.exchange_headroom
        self.parts.tenant_of_uid = tenants_of_uids(config, self.state.world)
        self.state.world.limits = core_limits(config)
        self.limits = config.limits
        logging.getLogger().setLevel(config.log_level.upper())

    # ------------------------------------------------------------ requests

    def admit(
        self, sock: socket.socket, who: Credentials, hello: wire.Hello, conn: Connection
    ) -> None:
        """Let a client in and send its Welcome with the arena's descriptor."""
        if self._stopping:
            raise ShuttingDown("the daemon is stopping; try again after its restart")
        tenant = self.parts.tenant_of_uid.get(who.uid)
        if tenant is None:
            raise NotOwner(f"uid {who.uid} belongs to no tenant (tenants.uids)")
        arena = self.parts.arenas[tenant.name]
        pidfd = open_pidfd(sock, who.pid)
        try:
            peer, lost = self.state.hello(
                conn, tenant, who.uid, who.pid, who.start_time, hello, self._loop.time()
            )
        except BaseException:
            os.close(pidfd)
            raise
        self._watch_member(peer.member, pidfd)
        self.perform()
        limits = self.limits
        welcome = wire.Welcome(
            hello.id, self.boot, 0, wire.PROTOCOL_VERSION, f"kvtierd {__version__}",
            self.parts.instance, tenant.name, peer.member.index, arena.arena_id,
            arena.headers.geometry.payload_bytes, self.config.integrity,
            wire.Limits(
                int(limits.frame_bytes), limits.requests_in_flight, limits.blocks_per_request,
                limits.leases_per_group, float(limits.lease_ttl_s),
                float(limits.lease_ttl_max_s), float(limits.wait_max_s), int(limits.blob_bytes),
            ),
            lost,
        )  # fmt: skip
        conn.peer = peer
        conn.enter((tenant.number, who.pid))
        try:
            socket.send_fds(
                sock, [wire.frame(welcome, msgspec.msgpack.Encoder())], [arena.payload_fd]
            )
        except OSError:
            self._closed(peer)
            raise

    def request(self, conn: Connection, req: Any) -> wire.Reply | None:
        """Carry out a client's request and the actions it leads to."""
        peer, lasting = conn.peer, type(req) in STORED_VERBS
        try:
            if lasting:
                self.ledger.check_room()
            reply = self.state.handle(peer, req, self._loop.time())
        except SpillFull as error:
            reply = self.state.refuse(peer, req, error)
        except Exception:
            log.exception("request %s failed", type(req).__name__)
            self.faults += 1
            reply = self.state.refuse(
                peer, req, Internal("a fault in the daemon; its log has the trace")
            )
        ops = self._carry_out() if self.state.world.actions else []
        behind = lasting and self.ledger.behind
        oneway: int = getattr(req, "oneway", 0)
        if not (ops or behind) or isinstance(reply, wire.Error):
            self.ledger.save(ops)
            return reply
        if oneway > 0:
            peer.unstored.append(oneway)
        self.ledger.save(ops, lambda error: self._late(conn, req, reply, error))
        return None

    def _late(
        self, conn: Connection, req: Any, reply: wire.Reply | None, error: CatalogError | None
    ) -> None:
        """Send a reply, or acknowledge a one-way request, that had to wait for the catalog."""
        oneway: int = getattr(req, "oneway", 0)
        if oneway > 0:
            conn.peer.unstored.remove(oneway)
        if error is not None and (reply is not None or oneway > 0):
            kind = SpillFull if isinstance(error, CatalogFull) else Internal
            reply = self.state.refuse(conn.peer, req, kind(f"not stored yet: {error}"))
            self.perform()
        if reply is not None:
            conn.send(reply)

    def admin(self, conn: Connection, req: Any) -> wire.Reply | None:
        """Carry out an operator's request."""
        self.state.world.now_s = self._loop.time()
        try:
            data = self.operator.answer(req)
        except KvtierError as error:
            return conn.error(req.id, error)
        except ConfigError as error:
            return wire.Error(req.id, self.boot, 0, 204, str(error))
        except Exception:
            log.exception("admin request %s failed", type(req).__name__)
            return conn.error(req.id, Internal("a fault in the daemon; its log has the trace"))
        self.perform()
        return wire.Report(req.id, self.boot, 0, data)

    def gone(self, conn: Connection) -> None:
        """A connection has closed."""
        for listener in self._listeners:
            listener.forget(conn)
        if conn.peer is not None:
            self._closed(conn.peer)

    def _closed(self, peer: Peer) -> None:
        self.state.closed(peer, self._loop.time())
        self.perform()

    # ------------------------------------------------------------- actions

    def perform(self) -> None:
        """Carry out the core's actions in their order."""
        if self.state.world.actions:
            self.ledger.save(self._carry_out())

    def _carry_out(self) -> list[Op]:
        """The same, but the changes for the catalog are left to the caller."""
        ops: list[Op] = []
        while self.state.world.actions:
            for action in self.state.take_actions():
                try:
                    do = self._do.get(type(action))
                    if do is not None:
                        do(action)
                    else:
                        ops.append(op_of(action))
                except Exception:  # those behind it must not be lost with it
                    log.exception("action %s failed", type(action).__name__)
                    self.faults += 1
        return ops

    @staticmethod
    def _note(action: act.Note) -> None:
        log.warning("%s: %s", action.kind, action.text)

    @staticmethod
    def _send(action: act.Send) -> None:
        conn, message = action.peer.conn, action.message
        assert isinstance(conn, Connection)
        if isinstance(message, wire.Push):
            conn.push(message)
        else:
            conn.send(message)

    def _assign_slab(self, action: act.AssignSlab) -> None:
        pool, slab = action.pool, action.slab
        owner: Any = (
            self.parts.spill
            if action.tenant is None
            else self.parts.arenas[action.tenant.name].headers
        )
        if pool is None:
            owner.free_slab(slab)
            return
        part = pool.nvme if action.tenant is None else pool.dram
        owner.assign_slab(
            SlabEntry(
                slab, pool.fingerprint, pool.tenant.number, pool.slot_bytes, part.slots_per_slab,
                pool.layout.block_bytes,
            )
        )  # fmt: skip

    def _record_member(self, action: act.RecordMember) -> None:
        member, headers = action.member, self.parts.arenas[action.tenant.name].headers
        if not member.alive:
            self._watch.drop(member)
        if not (member.alive and member.listed):
            headers.write_client(member.index, None)
            return
        group = member.group
        record = ClientRecord(
            member.index, member.pid, member.start_time, member.uid, group.id, group.secret_hash
        )
        headers.write_client(member.index, record)

    def _load_blob(self, action: act.LoadBlob) -> None:
        session, peer = action.session, action.peer

        def loaded(result: BlobRecord | CatalogError | None) -> None:
            if isinstance(result, CatalogError):
                reply: wire.Reply = self.state.error(peer, action.id, Internal(str(result)))
            else:
                version, data = (result.version, result.data) if result else (0, b"")
                reply = wire.Blob(action.id, self.boot, peer.acked, version, data)
            self._send(act.Send(peer, reply))

        def from_thread(result: BlobRecord | CatalogError | None) -> None:
            self._loop.call_soon_threadsafe(loaded, result)

        def read(_: CatalogError | None) -> None:
            try:
                self.catalog.read_blob(
                    session.tenant.name, session.token_hash, action.node, from_thread
                )
            except CatalogError as error:
                loaded(error)

        self.ledger.save([], read)  # behind the changes that came before

    # ----------------------------------------------------------- processes

    def _watch_member(self, member: Member, pidfd: int) -> None:
        def ended() -> None:
            self.state.process_died(member, self._loop.time())
            self.perform()

        self._watch.add(member, pidfd, ended)

    def _watch_recovered(self, member: Member) -> None:
        """Watch a client of an earlier life, that may still write to its slots."""
        with contextlib.suppress(ProcessLookupError):
            self._watch_member(member, os.pidfd_open(member.pid))
        if process_start_time(member.pid) != member.start_time:  # ended since the headers were read
            self._watch.drop(member)
            self.state.process_died(member, self._loop.time())
