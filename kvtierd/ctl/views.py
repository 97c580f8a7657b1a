"""The daemon's reports as tables."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from kvtierd.ctl.output import duration, show_table, show_text_tree, size

Report = Mapping[str, Any]

_NO_NODE = 0xFFFFFFFF
_RETENTIONS = {1: "held", 2: "cached"}


def show_status(stats: Report) -> None:
    """One line about the daemon, its troubles, one line per tenant."""
    daemon, health = stats["daemon"], stats["health"]
    state = "healthy" if health["ok"] else "UNHEALTHY"
    click.echo(
        f"kvtierd {daemon['version']}: {state}, up {duration(daemon['uptime_s'])}, "
        f"pid {daemon['pid']}, start {daemon['generation']}, "
        f"integrity {daemon['integrity']}, durability {daemon['durability']}"
    )
    for reason in health["reasons"]:
        click.echo(f"  ! {reason}")
    show_scrub(stats["scrub"])
    columns = (
        "tenant", "dram used", "dram total", "nvme used", "nvme quota", "sessions", "orphans",
        "blocks held", "clients", "leases", "waiting",
    )  # fmt: skip
    rows = [
        [
            name, size(t["dram"]["used_bytes"]), size(t["dram"]["total_bytes"]),
            size(t["nvme"]["used_bytes"]), size(t["nvme"]["quota_bytes"]),
            *(str(t[key]) for key in
              ("sessions", "orphans", "held_blocks", "clients", "leases", "waiting")),
        ]
        for name, t in sorted(stats["tenants"].items())
    ]  # fmt: skip
    show_table(columns, rows)


def show_scrub(report: Report) -> None:
    """The pass over the spill files that runs, or the last one."""
    where = f"{report['progress']:.0%} done" if report["running"] else "idle"
    since_s = report["since_pass_s"]
    ended = "never ended" if since_s is None else f"last ended {duration(since_s)} ago"
    found = "no pass since the start"
    if report["number"]:
        found = (
            f"pass {report['number']}: {report['checked_blocks']} blocks "
            f"({size(report['checked_bytes'])}) verified, {report['bad_blocks']} bad, "
            f"{report['unreadable_blocks']} unreadable, {report['lost_blocks']} lost"
        )
    click.echo(f"scrub: {where}, {ended}; {found}")


def show_evict(report: Report) -> None:
    """What of a tenant is left in DRAM."""
    dram = report["dram"]
    click.echo(
        f"tenant {report['tenant']}: {size(dram['used_bytes'])} left in DRAM, "
        f"{dram['blocks']} blocks; {size(dram['writing_bytes'])} being written, "
        f"{size(dram['quarantined_bytes'])} quarantined"
    )


def tiers(stats: Report) -> dict[str, Any]:
    """The part of the stats that `tiers` shows."""
    tenants = stats.get("tenants", {})
    return {
        "dram": {name: tenant.get("dram", {}) for name, tenant in tenants.items()},
        "nvme": {name: tenant.get("nvme", {}) for name, tenant in tenants.items()},
        "spill": stats.get("nvme", {}),
    }


def show_tiers(report: Report) -> None:
    """Who uses how much of each tier, and where the spill files are."""
    parts = ("total_bytes", "used_bytes", "free_bytes", "writing_bytes", "quarantined_bytes")
    rows = [
        [
            name, *(size(dram[part]) for part in parts), str(dram["blocks"]),
            f"{dram['low_watermark']:.0%} to {dram['high_watermark']:.0%}",
        ]
        for name, dram in sorted(report["dram"].items())
    ]  # fmt: skip
    columns = (
        "tenant", "total", "used", "free", "writing", "quarantined", "blocks", "watermarks",
    )  # fmt: skip
    show_table(columns, rows, "DRAM")
    click.echo()
    rows = [
        [name, size(nvme["quota_bytes"]), size(nvme["used_bytes"]), str(nvme["blocks"])]
        for name, nvme in sorted(report["nvme"].items())
    ]
    show_table(("tenant", "quota", "used", "blocks"), rows, "NVMe")
    click.echo()
    spill = report["spill"]
    rows = [
        [
            path["path"], size(path["total_bytes"]), size(path["used_bytes"]),
            size(path["total_bytes"] - path["used_bytes"]), "yes" if path["direct_io"] else "no",
        ]
        for path in spill["paths"]
    ]  # fmt: skip
    total = [size(spill[part]) for part in ("total_bytes", "used_bytes", "free_bytes")]
    rows.append(["all", *total, ""])
    show_table(("spill directory", "total", "used", "free", "direct I/O"), rows)


def show_sessions(report: Report) -> None:
    """One line per session, the longest idle last."""
    columns = (
        "session", "name", "tenant", "state", "priority", "nodes", "blocks", "tokens", "dram",
        "nvme", "lost", "idle",
    )  # fmt: skip
    rows = [
        [
            s["session"], s["name"], s["tenant"], s["state"], str(s["priority"]), str(s["nodes"]),
            str(s["blocks"]), str(s["tokens"]), size(s["dram_bytes"]), size(s["nvme_bytes"]),
            str(s["lost_blocks"]), duration(s["idle_s"]),
        ]
        for s in sorted(report["sessions"], key=lambda s: (s["idle_s"], s["session"]))
    ]  # fmt: skip
    show_table(columns, rows)


def show_clients(report: Report) -> None:
    """One line per client process, the one that takes most of the daemon's time first."""
    columns = (
        "pid", "uid", "tenant", "connections", "sessions", "leases", "waiting", "requests", "busy",
        "p50", "p99", "longest",
    )  # fmt: skip
    rows = [
        [
            str(c["pid"]), str(c["uid"]), c["tenant"], str(c["connections"]), str(c["sessions"]),
            str(c["leases"]), str(c["waiting"]), str(c["requests"]), f"{c['busy_s']:.3f} s",
            *(f"{c[key] * 1e6:.0f} us" for key in ("p50_s", "p99_s", "longest_s")),
        ]
        for c in sorted(report["clients"], key=lambda c: -c["busy_s"])
    ]  # fmt: skip
    show_table(columns, rows)


def show_tree(report: Report) -> None:
    """The nodes of a session, each below its parent, and below each what of it is folded."""
    name = f" ({report['name']})" if report["name"] else ""
    lines = []
    for depth, node in _walk(report["nodes"]):
        lines.append((depth, _about_node(node)))
        lines += [(depth + 1, _about_fold(fold)) for fold in node["folds"]]
    for what in ("nodes", "folds"):
        if report[f"{what}_left_out"]:
            lines.append((0, f"and {report[f'{what}_left_out']} {what} more"))
    show_text_tree(f"session {report['session']}{name}", lines)


def _about_node(node: Report) -> str:
    where = "" if node["parent"] == _NO_NODE else f" from token {node['fork_tokens']}"
    state = _RETENTIONS.get(node["retention"], str(node["retention"]))
    parts = (
        f"node {node['node']}{where}: {state}{', ended' if node['ended'] else ''}",
        f"{node['tokens']} tokens in {node['pages']} pages",
        _tiers_of(node),
        f"{size(node['exclusive_bytes'])} own, {size(node['shared_bytes'])} shared",
    )
    return " · ".join(parts)


def _about_fold(fold: Report) -> str:
    last = fold["first"] + fold["pages"] - 1
    parts = (
        f"pages {fold['first']}..{last} folded to {fold['kept_entries']} entries: "
        + _grace(fold["grace_left_s"]),
        _tiers_of(fold),
    )
    return " · ".join(parts)


def _tiers_of(part: Report) -> str:
    """How many blocks are where."""
    lost = f", {part['lost_blocks']} lost" if part["lost_blocks"] else ""
    return f"blocks: {part['dram_blocks']} dram, {part['nvme_blocks']} nvme{lost}"


def _grace(left_s: float | None) -> str:
    """How long folded pages are still kept."""
    if left_s is None:
        return "held"
    return f"held {duration(left_s)} more" if left_s else "cached"


def _walk(nodes: Sequence[Report]) -> list[tuple[int, Report]]:
    """Nodes in the order of the tree, with their depth; what no root leads to comes last."""
    children: dict[int, list[Report]] = {}
    for node in sorted(nodes, key=lambda n: (n["fork_tokens"], n["node"]), reverse=True):
        children.setdefault(node["parent"], []).append(node)
    known = {node["node"] for node in nodes}
    roots = [node for parent in children if parent not in known for node in children[parent]]
    roots.sort(key=lambda n: (n["parent"] == _NO_NODE, -n["node"]))
    order: list[tuple[int, Report]] = []
    stack = [(0, node) for node in roots]
    while stack:
        depth, node = stack.pop()
        order.append((depth, node))
        stack += [(depth + 1, child) for child in children.get(node["node"], [])]
    return order


def show_check(report: Report) -> None:
    """What a check has counted and found."""
    catalog, names = report["catalog"], report["blocks"]
    click.echo(
        f"{report['state_dir']}: instance {report['instance'] or 'unknown'}, "
        f"{report['generation']} starts"
    )
    click.echo(
        f"catalog: {catalog['sessions']} sessions, {catalog['nodes']} nodes, "
        f"{catalog['layouts']} layouts, {catalog['blobs']} blobs, {catalog['holds']} holds"
    )
    parts = ("total_bytes", "used_bytes", "free_bytes")
    rows = [
        [
            s["path"], *(size(s[part]) for part in parts), str(s["slabs_used"]),
            str(s["blocks"]), str(s["free_slots"]), str(s["busy_slots"]), str(s["damaged_slots"]),
            str(s["payloads_verified"]),
        ]
        for s in report["spill"]
    ]  # fmt: skip
    columns = (
        "spill directory", "total", "used", "free", "slabs used", "blocks", "free slots",
        "busy slots", "damaged", "verified",
    )  # fmt: skip
    show_table(columns, rows)
    click.echo(
        f"blocks: {names['session_blocks']} of sessions, {names['keyed_blocks']} keyed, "
        f"{names['orphan_blocks']} unknown to the catalog, {names['stale_blocks']} waiting to be "
        "cleared"
    )
    for note in report["notes"]:
        click.echo(f"note: {note}")
    for problem in report["problems"]:
        click.echo(f"DAMAGE: {problem}")
    click.echo("ok" if report["ok"] else f"{report['damages']} damages")
