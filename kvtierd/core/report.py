"""What operators may see of the state: plain values, built only when somebody asks."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtierd.core.blocks import F_LOST, NONE, Rows
from kvtierd.core.leases import owner_of
from kvtierd.core.slabs import QUARANTINED, READY, WRITING
from kvtierd.core.tenant import Tenant
from kvtierd.core.tree import Session
from kvtierd.core.world import World
from kvtierd.fair import Flow


def tenants(world: World) -> dict[str, dict[str, object]]:
    """Gauges of every tenant."""
    return {tenant.name: _tenant(world, tenant) for tenant in world.tenants.values()}


def _tenant(world: World, tenant: Tenant) -> dict[str, object]:
    pools = list(tenant.pools.values())
    total = tenant.arena_bytes()
    used = tenant.used_bytes()
    sessions = tenant.sessions.values()
    return {
        "dram": {
            "total_bytes": total,
            "used_bytes": used,
            "free_bytes": total - used,
            "writing_bytes": sum(p.dram.counts[WRITING] * p.slot_bytes for p in pools),
            "quarantined_bytes": sum(p.dram.counts[QUARANTINED] * p.slot_bytes for p in pools),
            "blocks": sum(p.dram.counts[READY] for p in pools),
            "high_watermark": world.limits.high_watermark,
            "low_watermark": world.limits.low_watermark,
        },
        "nvme": {
            "quota_bytes": tenant.nvme_quota_bytes,
            "used_bytes": sum(p.nvme.used * p.slot_bytes for p in pools),
            "blocks": sum(p.nvme.counts[READY] for p in pools),
        },
        "sessions": len(sessions),
        "orphans": sum(1 for session in sessions if not session.groups),
        "keyed_blocks": sum(world.keys.count(pool.number) for pool in pools),
        "held_blocks": sum(pool.held for pool in pools),
        "clients": sum(len(group.peers) for group in tenant.groups.values()),
        "leases": len(tenant.leases),
        "promised_blocks": sum(pool.promised for pool in pools),
        "waiting": len(tenant.waiting) + len(tenant.loading),
    }


def clients(world: World) -> dict[Flow, dict[str, Any]]:
    """One entry per client process that has a connection, by tenant's number and pid."""
    found: dict[Flow, dict[str, Any]] = {}
    for tenant in world.tenants.values():
        waiting = [ticket.peer for ticket in (*tenant.waiting, *tenant.loading)]
        owners = [owner_of(lease) for lease in tenant.leases]
        for member in tenant.members.values():
            peers = [peer for peer in member.group.peers if peer.member is member]
            if not peers:
                continue
            entry = found.setdefault((tenant.number, member.pid), {
                "tenant": tenant.name, "pid": member.pid, "uid": member.uid, "connections": 0,
                "leases": 0, "sessions": 0, "waiting": 0,
            })  # fmt: skip
            entry["connections"] += len(peers)
            entry["leases"] += owners.count(member.index)
            entry["sessions"] = max(entry["sessions"], len(member.group.sessions))
            entry["waiting"] += sum(waiting.count(peer) for peer in peers)
    return found


def nvme_used_bytes(world: World, files: int, slabs_per_file: int) -> list[int]:
    """Bytes of slots in use in each spill file."""
    used = [0] * files
    for pool in world.pools:
        for slab, free in pool.nvme.free.items():
            used[slab // slabs_per_file] += (pool.nvme.slots_per_slab - free) * pool.slot_bytes
    return used


def sessions(world: World, tenant_name: str) -> dict[str, object]:
    """A line per session of one tenant, or of all ('')."""
    return {
        "sessions": [
            _session(world, session)
            for tenant in world.tenants.values()
            if tenant_name in ("", tenant.name)
            for session in tenant.sessions.values()
        ]
    }


def _no_rows() -> Rows:
    return np.empty(0, np.int64)


def _rows(parts: list[Rows]) -> Rows:
    return np.concatenate([_no_rows(), *(part[part != NONE] for part in parts)])


def where(world: World, rows: Rows) -> tuple[NDArray[np.bool_], ...]:
    """Which rows are in DRAM, on NVMe only, and lost."""
    table = world.table
    lost = (table.flags[rows] & F_LOST) != 0
    dram = (table.dram[rows] != NONE) & ~lost
    return dram, (table.nvme[rows] != NONE) & ~dram & ~lost, lost


def _session(world: World, session: Session) -> dict[str, object]:
    rows = _rows([rows for part in session.rows_of(session.nodes.values()) for rows in part])
    dram, nvme, lost = (int(mask.sum()) for mask in where(world, rows))
    slot_bytes = max(pool.slot_bytes for pool in session.pools)
    tokens = world.node_table.tokens
    return {
        "session": f"{session.sid:016x}",
        "name": session.name,
        "tenant": session.tenant.name,
        "priority": session.priority,
        "nodes": len(session.nodes),
        "blocks": len(rows),
        "tokens": max(int(tokens[node.index]) for node in session.nodes.values()),
        "dram_bytes": dram * slot_bytes,
        "nvme_bytes": nvme * slot_bytes,
        "lost_blocks": lost,
        "state": "open" if session.groups else "orphan",
        "idle_s": 0.0 if session.groups else round(world.now_s - session.idle_since_s, 1),
    }
