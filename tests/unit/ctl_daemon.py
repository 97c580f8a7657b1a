"""A daemon that says what a test of kvtierctl wants: the admin socket, and a report per verb."""

import socket
import threading
from pathlib import Path
from typing import Any

import msgspec

from kvtier_client import admin_wire, wire
from kvtier_client.errors import KvtierError

WAIT_S = 20.0

TENANT = {
    "dram": {
        "total_bytes": 4 << 30, "used_bytes": 3 << 29, "free_bytes": 5 << 29, "writing_bytes": 4096,
        "quarantined_bytes": 8192, "blocks": 1536, "high_watermark": 0.9, "low_watermark": 0.8,
    },
    "nvme": {"quota_bytes": 8 << 30, "used_bytes": 1 << 30, "blocks": 1024},
    "sessions": 12, "orphans": 2, "keyed_blocks": 5, "held_blocks": 1500, "clients": 3,
    "leases": 4, "promised_blocks": 6, "waiting": 7,
    "served": {
        "requests": 900, "busy_s": 0.25, "p50_s": 0.00005, "p99_s": 0.0002, "longest_s": 0.003,
    },
}  # fmt: skip
STATS: dict[str, Any] = {
    "daemon": {
        "version": "1.2.3", "boot": 77, "instance": "ab" * 16, "generation": 4, "uptime_s": 11520.5,
        "pid": 4242, "longest_stall_s": 0.125, "integrity": "spill", "durability": "process",
    },
    "health": {"ok": True, "reasons": []},
    "tenants": {"default": TENANT, "research": TENANT},
    "nvme": {
        "total_bytes": 16 << 30, "used_bytes": 2 << 30, "free_bytes": 14 << 30,
        "paths": [
            {"path": "/nvme/a", "direct_io": True, "total_bytes": 8 << 30, "used_bytes": 1 << 30},
            {"path": "/nvme/b", "direct_io": False, "total_bytes": 8 << 30, "used_bytes": 1 << 30},
        ],
    },
    "scrub": {
        "number": 2, "running": True, "progress": 0.25, "since_pass_s": 90000.0,
        "rate_bytes": 32 << 20, "checked_blocks": 5000, "checked_bytes": 5 << 30, "bad_blocks": 3,
        "unreadable_blocks": 1, "lost_blocks": 2,
    },
    "counters": {"spilled_bytes": 1 << 40, "restored_blocks": 9, "mover_queued": 3},
}  # fmt: skip
SESSIONS: dict[str, Any] = {
    "sessions": [
        {
            "session": "00000000000000ff", "name": "proof", "tenant": "default", "priority": 3,
            "nodes": 2, "blocks": 40, "tokens": 640, "dram_bytes": 1 << 20, "nvme_bytes": 3 << 20,
            "lost_blocks": 1, "state": "orphan", "idle_s": 3700.0,
        },
        {
            "session": "00000000000000aa", "name": "", "tenant": "research", "priority": 0,
            "nodes": 1, "blocks": 0, "tokens": 0, "dram_bytes": 0, "nvme_bytes": 0,
            "lost_blocks": 0, "state": "open", "idle_s": 0.0,
        },
    ]
}  # fmt: skip


def node(number: int, parent: int, fork_tokens: int) -> dict[str, Any]:
    return {
        "node": number, "parent": parent, "fork_tokens": fork_tokens, "ended": number == 0,
        "retention": 2 if number == 7 else 1, "pages": 3, "tokens": 44, "dram_blocks": 2,
        "nvme_blocks": 1, "lost_blocks": 0, "shared_bytes": 1 << 20, "exclusive_bytes": 3 << 19,
        "folds": FOLDS if number == 5 else [],
    }  # fmt: skip


FOLDS: list[dict[str, Any]] = [
    {
        "first": 16 * i, "pages": 16, "kept_entries": 4, "grace_left_s": left_s, "dram_blocks": 9,
        "nvme_blocks": 7, "lost_blocks": 0,
    }
    for i, left_s in enumerate([None, 200.0, 0.0])
]  # fmt: skip
TREE: dict[str, Any] = {
    "session": "00000000000000ff",
    "name": "proof",
    "nodes": [node(7, 5, 96), node(0, wire.NO_NODE, 0), node(3, 0, 64), node(5, 0, 32)],
    "nodes_left_out": 0,
    "folds_left_out": 12,
}
CLIENTS: dict[str, Any] = {
    "clients": [
        {
            "tenant": "research", "pid": pid, "uid": 1000, "connections": 2, "leases": 3,
            "sessions": 4, "waiting": 0, "requests": 100 * pid, "busy_s": pid / 1000,
            "p50_s": 0.00005, "p99_s": 0.0002, "longest_s": 0.003,
        }
        for pid in (11, 12)
    ]
}  # fmt: skip
REPORTS: dict[type[wire.Request], dict[str, Any]] = {
    admin_wire.Stats: STATS,
    admin_wire.Sessions: SESSIONS,
    admin_wire.Clients: CLIENTS,
    admin_wire.Tree: TREE,
    admin_wire.Scrub: STATS["scrub"] | {"started": True},
}


class Daemon:
    """The admin socket of a daemon that says what the test wants."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.asked: list[wire.Request] = []
        self.reports = dict(REPORTS)
        self.failure: type[KvtierError] | None = None
        self.silent = False
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._peers: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            peer, _ = self._listener.accept()
            with peer:
                try:
                    self._answer_all(peer)
                except _StopError:
                    return

    def _answer_all(self, peer: socket.socket) -> None:
        stream = peer.makefile("rb")
        decoder = msgspec.msgpack.Decoder(admin_wire.AdminRequest)
        while header := stream.read(4):
            length = int.from_bytes(header, "little")
            if not length:
                raise _StopError
            request = decoder.decode(stream.read(length))
            self.asked.append(request)
            if not self.silent:
                peer.sendall(wire.frame(self._answer(request), msgspec.msgpack.Encoder()))

    def _answer(self, request: wire.Request) -> wire.Reply:
        if self.failure is not None:
            return wire.Error(request.id, 77, 0, self.failure.code, "what stood\nin the way")
        return wire.Report(request.id, 77, 0, self.reports[type(request)])

    def stop(self) -> None:
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(self.path)
            last.sendall(bytes(4))
        self._thread.join(WAIT_S)
        self._listener.close()
        assert not self._thread.is_alive()


class _StopError(Exception):
    pass
