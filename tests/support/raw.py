"""A client of the protocol made of a socket and `msgpack` alone, as a third party would write it.

Messages are plain lists: `[tag, id, field, ...]` out, `[tag, id, boot, acked, field, ...]` in.
"""

import array
import hashlib
import mmap
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import msgpack

HELD, CACHED = 1, 2
NO_NODE = 0xFFFFFFFF
PUSHES = {"ready", "failed", "pressure", "revoke"}
BLOCK_BYTES = 65536
BLOCK_TOKENS = 16
TIMEOUT_S = 30.0


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def from_u32(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 4}I", packed))


def from_u64(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 8}Q", packed))


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def layout(model: str = "tiny", block_bytes: int = BLOCK_BYTES, **changes: Any) -> list[Any]:
    """A layout whose raw block has `block_bytes`: 1 layer, 2 heads, bytes of one token enough."""
    fields = {
        "model": model, "dtype": "uint8", "layers": 1, "kv_heads": 2,
        "head_dim": block_bytes // BLOCK_TOKENS // 4, "block_tokens": BLOCK_TOKENS,
        "block_bytes": block_bytes, "latent": 0, "group": 0, "tp_rank": 0, "tp_size": 1,
        "replicated": False, "codec": "raw", "extra": "",
    }  # fmt: skip
    return list((fields | changes).values())


def fingerprint(fields: list[Any]) -> bytes:
    """What the daemon computes of a layout."""
    return hashlib.sha256(b"kvtierd-layout-1" + msgpack.packb(fields)).digest()[:16]


def session_id(token: bytes) -> int:
    return int.from_bytes(hashlib.sha256(b"kvtierd-session" + token).digest()[:8], "little")


def pattern(seed: int, length: int = BLOCK_BYTES) -> bytes:
    """Bytes that tell a block from every other, and a torn one from a whole one."""
    return struct.pack("<Q", seed + 1) * (length // 8)


class Closed(Exception):
    """The daemon has closed the connection."""


class RawClient:
    """One connection; after `hello` it has the arena mapped."""

    def __init__(self, path: str, group: bytes | None = None, secret: bytes | None = None) -> None:
        self.path = path
        self.group = group or os.urandom(16)
        self.secret = secret or os.urandom(32)
        self.member = -1
        self.arena: mmap.mmap | None = None
        self.arena_fd = -1
        self.pushes: list[list[Any]] = []
        self.welcome: list[Any] = []
        self.granted: set[int] = set()
        self.sessions: set[int] = set()
        self._replies: dict[int, list[Any]] = {}
        self._next_id = 0
        self._leases = 0
        self.connect()

    def connect(self) -> None:
        """Connect, or connect again."""
        if hasattr(self, "socket"):
            self.socket.close()
        self._replies.clear()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(TIMEOUT_S)
        self.socket.connect(self.path)
        self._buffer = b""

    def close(self) -> None:
        self.socket.close()
        if self.arena is not None:
            self.arena.close()
            os.close(self.arena_fd)
            self.arena = None

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ messages

    def send(self, verb: str, *fields: Any) -> int:
        self._next_id += 1
        self.send_frame(msgpack.packb([verb, self._next_id, *fields]))
        return self._next_id

    def send_frame(self, body: bytes) -> None:
        try:
            self.socket.sendall(struct.pack("<I", len(body)) + body)
        except ConnectionError:
            raise Closed from None

    def receive(self) -> list[Any]:
        """The next message. Errors: Closed."""
        while True:
            if len(self._buffer) >= 4:
                end = 4 + struct.unpack_from("<I", self._buffer)[0]
                if len(self._buffer) >= end:
                    body, self._buffer = self._buffer[4:end], self._buffer[end:]
                    return msgpack.unpackb(body)  # type: ignore[no-any-return]
            self._fill()

    def _fill(self) -> None:
        try:
            data, ancillary, _, _ = self.socket.recvmsg(1 << 20, socket.CMSG_LEN(4))
        except ConnectionError:
            raise Closed from None
        for _, kind, payload in ancillary:
            if kind == socket.SCM_RIGHTS:
                self._passed = array.array("i", payload)[0]
        if not data:
            raise Closed
        self._buffer += data

    def reply(self, request_id: int) -> list[Any]:
        """The reply to a request; pushes and other replies that come before it are kept."""
        while request_id not in self._replies:
            self._sort(self.receive())
        return self._replies.pop(request_id)

    def _sort(self, message: list[Any]) -> None:
        if message[0] in PUSHES:
            self.pushes.append(message)
            return
        self._replies[message[1]] = message
        if message[0] == "granted":
            self.granted.add(message[4])
        elif message[0] == "hits" and message[5]:
            self.granted.add(message[5])
        elif message[0] == "session":
            self.sessions.add(message[4])

    def clean(self) -> None:
        """Give back every lease and close every session that this client has ever had."""
        for lease in self.granted - {0}:
            self.call("abort", lease)
            self.call("release", lease)
        while self.sessions:
            self.call("close_session", self.sessions.pop())

    def call(self, verb: str, *fields: Any) -> list[Any]:
        return self.reply(self.send(verb, *fields))

    def ask(self, verb: str, *fields: Any) -> list[Any]:
        """A call that must succeed."""
        reply = self.call(verb, *fields)
        assert reply[0] != "error", reply
        return reply

    def code(self, verb: str, *fields: Any) -> int:
        """The error code of a call that must fail."""
        reply = self.call(verb, *fields)
        assert reply[0] == "error", reply
        return int(reply[4])

    def push(self, kind: str) -> list[Any]:
        """The next push of a kind."""
        while True:
            for message in self.pushes:
                if message[0] == kind:
                    self.pushes.remove(message)
                    return message
            self._sort(self.receive())

    # --------------------------------------------------------------- verbs

    def hello(self, leases: Iterable[Sequence[Any]] = ()) -> list[Any]:
        """Say who we are; maps the arena the first time."""
        claims = [list(lease) for lease in leases]
        self.welcome = self.ask("hello", 1, "raw", self.group, self.secret, self.member, claims)
        self.member = self.welcome[8]
        if self.arena is None:
            self.arena_fd = self._passed
            self.arena = mmap.mmap(self.arena_fd, self.welcome[10])
        else:
            os.close(self._passed)
        return self.welcome

    def come_back(self) -> None:
        """Connect again and say who we are, as a client does after a restart."""
        self.connect()
        self.hello()

    def join(self, group: bytes, secret: bytes, hello: bool = True) -> None:
        """Be of another client's group."""
        self.group, self.secret = group, secret
        if hello:
            self.hello()

    def lease(self) -> int:
        """A counter that no lease of this client has had."""
        self._leases += 1
        return self._leases

    def open(self, fields: list[Any], token: bytes | None = None, name: str = "") -> int:
        """Register a layout and open a session of it; returns the session's id."""
        known = self.ask("register_layout", fields)[4]
        return int(self.ask("open_session", token or os.urandom(16), [known], 0, name)[4])

    def reserve(self, known: bytes, blocks: int, wait_s: float = 30.0) -> tuple[int, list[int]]:
        """A write lease and the arena offsets of its slots."""
        granted = self.ask("reserve", self.lease(), known, blocks, 0, 0, wait_s)
        return granted[4], from_u64(granted[6])

    def write(self, offset: int, data: bytes) -> None:
        assert self.arena is not None
        self.arena[offset : offset + len(data)] = data

    def read(self, offset: int, length: int = BLOCK_BYTES) -> bytes:
        assert self.arena is not None
        return self.arena[offset : offset + length]

    def swap_out(
        self, known: bytes, session: int, node: int, seeds: dict[int, int],
        retention: int = HELD, wait_s: float = 30.0,
    ) -> None:  # fmt: skip
        """Store pages {page: seed of its bytes}; when this returns they are acknowledged."""
        lease, offsets = self.reserve(known, len(seeds), wait_s)
        for offset, seed in zip(offsets, seeds.values(), strict=True):
            self.write(offset, pattern(seed))
        n = len(seeds)
        done = self.ask(
            "commit", lease, session, node, u32(*range(n)), u32(*seeds),
            u32(*[BLOCK_TOKENS] * n), retention,
        )  # fmt: skip
        assert done[4] == n

    def swap_in(
        self, known: bytes, session: int, node: int, first: int, pages: int, wait_s: float = 30.0
    ) -> list[bytes]:
        """The bytes of pages, window by window."""
        found: list[bytes] = []
        while len(found) < pages:
            at = first + len(found)
            granted = self.ask(
                "acquire", self.lease(), session, node, known, at, pages - len(found), wait_s
            )
            found += [self.read(offset) for offset in from_u64(granted[6])]
            self.ask("release", granted[4])
        return found
