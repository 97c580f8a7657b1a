"""Looks into the core and the media: where a block is, and whether its bytes are there."""

import numpy as np

from kvtier_client.wire import Layout
from kvtierd.core.blocks import F_DOOMED, F_FILLING, F_HELD, F_LOST, NONE
from kvtierd.core.tree import Session as Real
from tests.model.disk import PAGE, value_of
from tests.model.harness import Host
from tests.model.reference import Block, Session


def real(host: Host, session: Session) -> Real:
    """The core's session."""
    return host.tenant(session.tenant).sessions[session.id]


def stored(host: Host, session: Session) -> set[tuple[int, int, int]]:
    """Names (node, part, page) of the blocks that the core has of a session."""
    return {
        (node.id, part, page + run.start)
        for node in real(host, session).nodes.values()
        for part, run in enumerate(node.runs)
        for page in np.flatnonzero(run.rows != NONE).tolist()
    }


def on_nvme(host: Host, session: Session) -> set[tuple[int, int, int]]:
    """Names of the blocks that have an NVMe copy."""
    nvme = host.world.table.nvme
    return {
        (node.id, part, page + run.start)
        for node in real(host, session).nodes.values()
        for part, run in enumerate(node.runs)
        for page in np.flatnonzero(run.rows != NONE).tolist()
        if nvme[run.rows[page]] != NONE
    }


def value(host: Host, session: Session, node: int, part: int, page: int) -> int | None:
    """What is stored under a name; None when it is lost or was dropped."""
    run = real(host, session).nodes[node].runs[part]
    row = int(run.rows[page - run.start])
    return None if row == NONE else row_value(host, row)


def block(host: Host, session: Session, node: int, part: int, page: int) -> Block:
    """The block that is stored under a name, as the core knows it."""
    run = real(host, session).nodes[node].runs[part]
    row = int(run.rows[page - run.start])
    table = host.world.table
    found = row_value(host, row)
    assert found is not None
    return Block(found, int(table.valid[row]), bool(table.flags[row] & F_HELD))


def row_value(host: Host, row: int) -> int | None:
    """The bytes of a row, wherever they are."""
    table = host.world.table
    pool = host.world.pools[int(table.pool[row])]
    if table.flags[row] & F_LOST:
        return None
    if table.dram[row] != NONE and not table.flags[row] & F_FILLING:
        offset = pool.tenant.arena.offset(pool.dram, int(table.dram[row]))
        payload = host.arenas[pool.tenant.name].payload
        return value_of(payload, offset // PAGE, pool.slot_bytes // PAGE)
    assert table.nvme[row] != NONE, f"row {row} is in no tier and not lost"
    return value_of(host.disk.pages, *host.disk.place(int(table.nvme[row])))


def check_sessions(
    host: Host, sessions: dict[tuple[str, bytes], Session], hurt: set[int], layouts: list[Layout]
) -> None:
    """Every HELD block is there with its bytes; nothing is there that was not committed."""
    for tenant in host.world.tenants.values():
        known = {session.id for (name, _), session in sessions.items() if name == tenant.name}
        assert set(tenant.sessions) == known, "sessions that nobody opened, or lost ones"
    for session in sessions.values():
        core = real(host, session)
        assert set(core.nodes) == set(session.nodes)
        for node in session.nodes.values():
            there = core.nodes[node.id]
            assert (there.fork_tokens, there.ended) == (node.fork, node.ended)
            for part, pages in enumerate(node.pages):
                which = layouts[session.layouts[part]].fingerprint()
                run = there.runs[[pool.fingerprint for pool in core.pools].index(which)]
                rows = {
                    page + run.start: int(run.rows[page])
                    for page in np.flatnonzero(run.rows != NONE).tolist()
                }
                assert set(rows) <= set(pages), f"pages {set(rows) - set(pages)} came from nowhere"
                for page, block in pages.items():
                    row = rows.get(page)
                    assert row is not None or not block.held or block.value in hurt, (
                        f"HELD page {page} of node {node.id} is gone"
                    )
                    if row is not None:
                        check_block(host, row, block.value, block.valid, block.held, hurt)


def check_block(host: Host, row: int, right: int, valid: int, held: bool, hurt: set[int]) -> None:
    """A row has the bytes, length and retention that were committed."""
    table = host.world.table
    assert not table.flags[row] & F_DOOMED
    found = row_value(host, row)
    if right not in hurt:
        assert found == right, f"row {row} has bytes {found}, not {right}"
        assert bool(table.flags[row] & F_HELD) or not held, f"row {row} is not HELD any more"
    assert int(table.valid[row]) == valid


def check_keys(
    host: Host,
    sessions: dict[tuple[str, bytes], Session],
    keys: dict[tuple[str, bytes], set[int]],
    hurt: set[int],
    fingerprint: bytes,
) -> None:
    """Keyed blocks have bytes that were committed under their key; held ones are there."""
    for tenant in host.world.tenants.values():
        pool = tenant.pools.get(fingerprint)
        if pool is None:
            continue
        held = {
            key for session in sessions.values() if session.tenant == tenant.name
            for _, key in session.holds
        }  # fmt: skip
        for (name, key), possible in keys.items():
            if name != tenant.name:
                continue
            packed = np.frombuffer(key, "<u8")
            row = int(host.world.keys.find(packed[:1], packed[1:], pool.number)[0])
            if row != NONE:
                found = row_value(host, row)
                assert found in possible or possible & hurt, (key, found, possible)
            assert row != NONE or key not in held or possible & hurt, f"held key {key!r} is gone"


def check_empty(host: Host) -> None:
    """All that was taken has come back."""
    world = host.world
    assert not world.batches
    assert world.table.used == 0, f"{world.table.used} rows are left"
    for tenant in world.tenants.values():
        assert not tenant.leases
        assert not tenant.waiting
        assert not tenant.loading
        assert not tenant.sessions
    for pool in world.pools:
        assert pool.dram.used == 0, pool.dram.counts
        assert pool.nvme.used == 0, pool.nvme.counts
        assert (pool.held, pool.clean, pool.promised, pool.moving) == (0, 0, 0, 0)
