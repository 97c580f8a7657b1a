"""A small daemon in a thread that a test can break at an exact message.

It keeps blocks in a real memfd and speaks real frames over a real socket, so that both shells run
unchanged against it. It is for what a whole daemon cannot be made to do on cue: lose one reply,
die between two messages, answer late, or answer nonsense.
"""

import contextlib
import os
import select
import socket
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvtier_client import errors, wire

SLOT_ALIGN = 4096
LIMITS = wire.Limits(
    frame_bytes=1 << 20,
    requests_in_flight=16,
    blocks_per_request=64,
    leases_per_group=1000,
    lease_ttl_s=60.0,
    lease_ttl_max_s=600.0,
    wait_max_s=5.0,
    blob_bytes=1 << 20,
)
Fault = Callable[[wire.Request], str]
"""Told each request; answers "" to go on, "drop" to hang up before handling it, "lose" to handle
it and hang up instead of replying, "kill" to lose the reply and start another life, "mute" to
never reply, "stop" to answer ShuttingDown and hang up."""


def packed(values: Any, kind: str) -> bytes:
    return np.asarray(values, kind).tobytes()


class ScriptedDaemon:
    """Handles requests one by one; everything in it survives `restart`, as the promises say."""

    def __init__(self, path: Path, slots: int = 64, slot_bytes: int = SLOT_ALIGN) -> None:
        self.path = path
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.limits = LIMITS
        self.integrity = "spill"
        self.boot = 1
        self.arena_id = os.urandom(16)
        self.fd = os.memfd_create("scripted", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, slots * slot_bytes)
        self.free = list(range(slots))
        self.layouts: dict[bytes, wire.Layout] = {}
        self.sessions: dict[bytes, list[bytes]] = {}
        self.blocks: dict[tuple[int, int, int], tuple[int, int, int]] = {}
        self.keys: dict[bytes, tuple[int, int]] = {}
        self.blobs: dict[tuple[int, int], tuple[int, bytes]] = {}
        self.leases: dict[int, list[int]] = {}
        self.commits: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.window = 1 << 30
        self.lose_leases = False
        self.fault: Fault = lambda _: ""
        self.seen: Counter[str] = Counter()
        self.log: list[wire.Request] = []
        self.hellos: list[wire.Hello] = []
        self.pushes: list[wire.Reply] = []
        self.acked = 0
        self.withhold_acks = False
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(wire.ClientRequest)
        self._stop = threading.Event()
        self._wake_r, self._wake_w = os.pipe()
        self._listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    # ------------------------------------------------------------- its life

    def _listen(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(self.path))
        self.listener.listen(8)

    def close(self) -> None:
        self._stop.set()
        os.write(self._wake_w, b"x")
        self._thread.join(60)
        self.listener.close()
        for fd in (self.fd, self._wake_r, self._wake_w):
            os.close(fd)

    def __enter__(self) -> "ScriptedDaemon":
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    @property
    def reading(self) -> list[int]:
        """The read leases that have not ended."""
        leases = list(self.leases.items())  # the other thread may be changing them
        return [lease for lease, slots in leases if slots == [-1]]

    def push(self, *pushes: wire.Reply) -> None:
        """Send pushes before the next reply."""
        self.pushes.extend(pushes)

    def _serve(self) -> None:
        conns: dict[socket.socket, bytearray] = {}
        while not self._stop.is_set():
            ready, _, _ = select.select([self.listener, self._wake_r, *conns], [], [])
            for sock in ready:
                if sock is self.listener:
                    conn, _ = self.listener.accept()
                    conns[conn] = bytearray()
                elif sock is not self._wake_r and not self._read(sock, conns[sock]):
                    sock.close()
                    del conns[sock]
        for conn in conns:
            conn.close()

    def _read(self, sock: socket.socket, inbox: bytearray) -> bool:
        try:
            data = sock.recv(1 << 20)
        except ConnectionError:
            return False
        inbox += data
        while len(inbox) >= 4:
            length = int.from_bytes(inbox[:4], "little")
            if len(inbox) < 4 + length:
                break
            request = self._decoder.decode(bytes(inbox[4 : 4 + length]))
            del inbox[: 4 + length]
            if not self._handle(sock, request):
                return False
        return bool(data)

    # ------------------------------------------------------------- messages

    def _handle(self, sock: socket.socket, request: wire.Request) -> bool:
        name = type(request).__name__
        self.seen[name] += 1
        self.log.append(request)
        if isinstance(request, wire.Hello):
            return self._hello(sock, request)
        fault = self.fault(request)
        if fault == "drop":
            return False
        if fault == "stop":
            self._send(sock, self._error(request, errors.ShuttingDown("stopping")))
            return False
        try:
            reply = getattr(self, f"on_{name}")(request)
        except errors.KvtierError as problem:
            reply = self._error(request, problem)
        number = getattr(request, "oneway", 0)
        if number:
            if not self.withhold_acks:
                self.acked = number
            if isinstance(reply, wire.Error):
                self.pushes.append(
                    wire.Failed(request.id, self.boot, self.acked, reply.code, reply.message)
                )
        if fault == "lose":
            return False
        if fault == "kill":
            self.restart()
            return False
        if not number and fault != "mute":
            for push in self.pushes:
                self._send(sock, msgspec.structs.replace(push, boot=self.boot))
            self.pushes.clear()
            self._send(sock, msgspec.structs.replace(reply, acked=self.acked))
        return True

    def restart(self) -> None:
        """Another life: same blocks, sessions and leases, another boot id."""
        self.boot += 1
        self.layouts.clear()

    def _send(self, sock: socket.socket, reply: wire.Reply) -> None:
        with contextlib.suppress(ConnectionError):
            sock.sendall(wire.frame(reply, self._encoder))

    def _error(self, request: wire.Request, problem: errors.KvtierError) -> wire.Error:
        pages = packed(problem.pages, "<u4")
        return wire.Error(request.id, self.boot, self.acked, problem.code, str(problem), pages)

    def _hello(self, sock: socket.socket, hello: wire.Hello) -> bool:
        self.hellos.append(hello)
        if self.fault(hello) == "drop":
            return False
        self.acked = 0
        said = {lease.lease for lease in hello.leases}
        lost = []
        for lease in list(self.leases):
            if self.lose_leases or lease not in said:
                self._end(lease)
        lost = [lease for lease in said if lease not in self.leases]
        welcome = wire.Welcome(
            hello.id, self.boot, 0, wire.PROTOCOL_VERSION, "scripted", b"i" * 16, "default", 7,
            self.arena_id, self.slots * self.slot_bytes, self.integrity, self.limits, lost,
        )  # fmt: skip
        with contextlib.suppress(ConnectionError):  # the client has given up meanwhile
            socket.send_fds(sock, [wire.frame(welcome, self._encoder)], [self.fd])
        return True

    def _done(self, request: wire.Request, count: int = 0) -> wire.Done:
        return wire.Done(request.id, self.boot, self.acked, count)

    def _end(self, lease: int) -> None:
        slots = enumerate(self.leases.pop(lease))
        self.free += [s for i, s in slots if s >= 0 and (lease, i) not in self.commits]

    def _layout(self, fingerprint: bytes) -> wire.Layout:
        if fingerprint not in self.layouts:
            raise errors.LayoutMismatch("layout is not registered")
        return self.layouts[fingerprint]

    def on_RegisterLayout(self, request: wire.RegisterLayout) -> wire.Reply:  # noqa: N802
        layout = request.layout
        self.layouts[layout.fingerprint()] = layout
        return wire.LayoutRegistered(
            request.id, self.boot, 0, layout.fingerprint(), layout.block_bytes, self.slot_bytes
        )

    def _session_reply(self, request: wire.Request, token: bytes, created: bool) -> wire.Reply:
        number = int.from_bytes(token[:8], "little")
        mine = sorted(place[1:] for place in self.blocks if place[0] == number)
        pages = packed([page for _, page in mine], "<u4")
        valid = packed([self.blocks[(number, *place)][1] for place in mine], "<u4")
        node = wire.NodeInfo(
            0, wire.NO_NODE, 0, wire.HELD, False, 0, [pages], [valid], [bytes([1] * len(mine))]
        )
        return wire.SessionReply(
            request.id, self.boot, 0, number, created, 0, self.sessions[token], [node]
        )

    def on_OpenSession(self, request: wire.OpenSession) -> wire.Reply:  # noqa: N802
        created = request.token not in self.sessions
        self.sessions.setdefault(request.token, request.layouts)
        return self._session_reply(request, request.token, created)

    def on_ResumeSession(self, request: wire.ResumeSession) -> wire.Reply:  # noqa: N802
        if request.token not in self.sessions:
            raise errors.UnknownSession("no session of this token")
        return self._session_reply(request, request.token, False)

    def _token(self, number: int) -> bytes:
        for token in self.sessions:
            if int.from_bytes(token[:8], "little") == number:
                return token
        raise errors.UnknownSession("no such session")

    def on_Describe(self, request: wire.Describe) -> wire.Reply:  # noqa: N802
        return self._session_reply(request, self._token(request.session), False)

    def on_CloseSession(self, request: wire.CloseSession) -> wire.Reply:  # noqa: N802
        del self.sessions[self._token(request.session)]
        gone = [place for place in self.blocks if place[0] == request.session]
        for place in gone:
            self.free.append(self.blocks.pop(place)[0])
        return self._done(request, len(gone))

    def on_Fork(self, request: wire.Fork) -> wire.Reply:  # noqa: N802
        self._token(request.session)
        return self._done(request)

    def on_Prune(self, request: wire.Prune) -> wire.Reply:  # noqa: N802
        gone = [p for p in self.blocks if p[:2] == (request.session, request.node)]
        for place in gone:
            self.free.append(self.blocks.pop(place)[0])
        return self._done(request, len(gone))

    def on_SetRetention(self, request: wire.SetRetention) -> wire.Reply:  # noqa: N802
        self._token(request.session)
        return self._done(request)

    def on_Fold(self, request: wire.Fold) -> wire.Reply:  # noqa: N802
        self._token(request.session)
        return self._done(request, request.pages)

    def on_Unfold(self, request: wire.Unfold) -> wire.Reply:  # noqa: N802
        self._token(request.session)
        pages = range(request.first, request.first + request.pages)
        stored = {page for session, node, page in self.blocks if session == request.session}
        gone = b"".join(page.to_bytes(4, "little") for page in pages if page not in stored)
        return wire.Unfolded(request.id, self.boot, 0, gone, 0)

    def on_PutBlob(self, request: wire.PutBlob) -> wire.Reply:  # noqa: N802
        place = (request.session, request.node)
        if request.version > self.blobs.get(place, (0, b""))[0]:
            self.blobs[place] = (request.version, request.data)
        return self._done(request, 1)

    def on_GetBlob(self, request: wire.GetBlob) -> wire.Reply:  # noqa: N802
        version, data = self.blobs.get((request.session, request.node), (0, b""))
        return wire.Blob(request.id, self.boot, 0, version, data)

    def on_Reserve(self, request: wire.Reserve) -> wire.Reply:  # noqa: N802
        self._layout(request.layout)
        return self._grant(request.id, request.lease, request.blocks)

    def _grant(self, id: int, counter: int, count: int, index: bytes = b"") -> wire.Reply:
        lease = 7 << 32 | counter
        if lease not in self.leases:
            if count > len(self.free):
                raise errors.ArenaFull(f"{count} slots were asked, {len(self.free)} are free")
            self.leases[lease] = [self.free.pop(0) for _ in range(count)]
        offsets = packed([slot * self.slot_bytes for slot in self.leases[lease]], "<u8")
        return wire.Granted(id, self.boot, 0, lease, self.limits.lease_ttl_s, offsets, index=index)

    def on_Commit(self, request: wire.Commit) -> wire.Reply:  # noqa: N802
        self._token(request.session)
        index = np.frombuffer(request.index, "<u4").tolist()
        pages = np.frombuffer(request.pages, "<u4").tolist()
        valid = np.frombuffer(request.valid, "<u4").tolist()
        sums = np.frombuffer(request.checksums, "<u8").tolist() or [0] * len(index)
        for i, page, tokens, checksum in zip(index, pages, valid, sums, strict=True):
            name = (request.session, request.node, page)
            if self.commits.get((request.lease, i)) == name:
                continue
            if request.lease not in self.leases:
                raise errors.LeaseExpired(f"lease {request.lease:#x} has ended")
            if (request.lease, i) in self.commits:
                raise errors.InvalidArgument("the slot has another name")
            self.commits[(request.lease, i)] = name
            if name in self.blocks:
                self.free.append(self.blocks[name][0])
            self.blocks[name] = (self.leases[request.lease][i], tokens, checksum)
        self._finish(request.lease)
        return self._done(request, len(index))

    def _finish(self, lease: int) -> None:
        slots = self.leases.get(lease)
        if slots and all((lease, i) in self.commits for i in range(len(slots))):
            del self.leases[lease]

    def on_Abort(self, request: wire.Abort) -> wire.Reply:  # noqa: N802
        if request.lease not in self.leases:
            raise errors.LeaseExpired("the lease has ended")
        self._end(request.lease)
        return self._done(request)

    def on_Renew(self, request: wire.Renew) -> wire.Reply:  # noqa: N802
        if request.lease not in self.leases:
            raise errors.LeaseExpired("the lease has ended")
        return self._done(request)

    def on_Acquire(self, request: wire.Acquire) -> wire.Reply:  # noqa: N802
        self._token(request.session)
        found = []
        for page in range(request.first, request.first + min(request.pages, self.window)):
            block = self.blocks.get((request.session, request.node, page))
            if block is None:
                break
            found.append(block)
        if not found:
            raise errors.BlockLost(f"page {request.first} is lost", (request.first,))
        return self._read_grant(request.id, request.lease, found)

    def _read_grant(self, id: int, counter: int, found: list[tuple[int, int, int]]) -> wire.Reply:
        lease = 7 << 32 | counter
        self.leases[lease] = [-1]
        return wire.Granted(
            id, self.boot, 0, lease, self.limits.lease_ttl_s,
            packed([slot * self.slot_bytes for slot, _, _ in found], "<u8"),
            packed([tokens for _, tokens, _ in found], "<u4"),
            packed([s for _, _, s in found], "<u8") if self.integrity == "end_to_end" else b"",
        )  # fmt: skip

    def on_Release(self, request: wire.Release) -> wire.Reply:  # noqa: N802
        if self.leases.pop(request.lease, None) is None:
            raise errors.LeaseExpired("the lease has ended")
        return self._done(request)

    def on_Goodbye(self, request: wire.Goodbye) -> wire.Reply:  # noqa: N802
        kept = set(np.frombuffer(request.keep, "<u8").tolist())
        ended = [lease for lease in self.leases if lease not in kept]
        for lease in ended:
            self._end(lease)
        return self._done(request, len(ended))

    def on_Prefetch(self, request: wire.Prefetch) -> wire.Reply:  # noqa: N802
        return self._done(request)

    def on_Cancel(self, request: wire.Cancel) -> wire.Reply:  # noqa: N802
        return self._done(request)

    def _leading(self, keys: bytes) -> list[bytes]:
        split = [keys[i : i + 16] for i in range(0, len(keys), 16)]
        count = next((i for i, key in enumerate(split) if key not in self.keys), len(split))
        return split[:count]

    def on_Lookup(self, request: wire.Lookup) -> wire.Reply:  # noqa: N802
        hits = len(self._leading(request.keys))
        return wire.Hits(request.id, self.boot, 0, [hits] * len(request.layouts))

    def on_ReserveKeys(self, request: wire.ReserveKeys) -> wire.Reply:  # noqa: N802
        split = [request.keys[i : i + 16] for i in range(0, len(request.keys), 16)]
        missing = [i for i, key in enumerate(split) if key not in self.keys]
        return self._grant(request.id, request.lease, len(missing), packed(missing, "<u4"))

    def on_CommitKeys(self, request: wire.CommitKeys) -> wire.Reply:  # noqa: N802
        index = np.frombuffer(request.index, "<u4").tolist()
        for k, i in enumerate(index):
            self.commits[(request.lease, i)] = (0, 0, i)
            key = request.keys[16 * k : 16 * k + 16]
            self.keys[key] = (self.leases[request.lease][i], 0)
        self._finish(request.lease)
        return self._done(request, len(index))

    def on_AcquireKeys(self, request: wire.AcquireKeys) -> wire.Reply:  # noqa: N802
        found = [(self.keys[key][0], 4, 0) for key in self._leading(request.keys)[: self.window]]
        if not found:
            return wire.Granted(request.id, self.boot, 0, 0, 0.0, b"")
        return self._read_grant(request.id, request.lease, found)
