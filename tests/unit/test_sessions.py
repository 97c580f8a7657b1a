"""Sessions: opened, resumed and closed by their token, once, by who knows it."""

import pytest

from kvtier_client import errors, wire
from kvtier_client.wire import CACHED, HELD
from kvtierd.catalog import rows
from kvtierd.core.actions import ForgetSession
from tests.model.harness import LIMITS, layout, refused
from tests.model.limits import with_limits
from tests.unit.core_host import TOKEN, Fixture, Host


def test_opening_a_known_token_returns_its_session(core: Fixture) -> None:
    core.store([0])
    reply = core.client.do(wire.OpenSession, TOKEN, [core.print])
    assert (reply.session, reply.created) == (core.session, False)
    assert core.read(0, 1) == [100]


def test_a_session_is_open_to_groups_that_know_its_token(core: Fixture) -> None:
    core.store([0])
    other = core.host.spawn()
    with refused(errors.UnknownSession):
        other.do(wire.Acquire, 5, core.session, 0, core.print, 0, 1)
    other.do(wire.ResumeSession, TOKEN)
    assert other.do(wire.Acquire, 5, core.session, 0, core.print, 0, 1).lease


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"token": b"short"}, errors.InvalidArgument),
        ({"layouts": []}, errors.InvalidArgument),
        ({"layouts": [bytes(16)]}, errors.LayoutMismatch),
        ({"priority": 256}, errors.InvalidArgument),
        ({"name": "x" * 201}, errors.InvalidArgument),
    ],
)
def test_an_opening_that_makes_no_sense_changes_nothing(
    core: Fixture, fields: dict[str, object], error: type[errors.KvtierError]
) -> None:
    before = core.counts()
    with refused(error):
        core.client.do(wire.OpenSession, **({"token": b"n" * 16, "layouts": [core.print]} | fields))
    assert core.counts() == before


def test_layouts_of_one_session_agree(core: Fixture) -> None:
    coarse = core.register(layout(1, group=1, tokens=8))
    with refused(errors.LayoutMismatch):
        core.client.do(wire.OpenSession, b"n" * 16, [core.print, coarse])
    with refused(errors.InvalidArgument):
        core.client.do(wire.OpenSession, b"n" * 16, [core.print, core.print])
    other = core.register(layout(2, group=1))
    with refused(errors.LayoutMismatch):
        core.client.do(wire.OpenSession, TOKEN, [core.print, other])


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": "int3"}, {"layers": 0}, {"block_tokens": 0}, {"block_bytes": 0},
        {"block_bytes": 1 << 20}, {"tp_rank": 1}, {"tp_rank": 1, "tp_size": 2, "replicated": True},
        {"codec": "raw"}, {"latent": -1}, {"extra": "x" * 5000},
    ],
)  # fmt: skip
def test_a_layout_that_contradicts_itself_is_refused(
    core: Fixture, changed: dict[str, object]
) -> None:
    import msgspec

    described = msgspec.structs.replace(core.layout, **changed)
    with refused(errors.LayoutMismatch):
        core.register(described)
    assert len(core.host.tenant().pools) == 1


def test_limits_of_sessions_layouts_and_groups() -> None:
    limits = with_limits(LIMITS, sessions_per_tenant=2, layouts_per_tenant=2, groups=2)
    core = Fixture(Host(limits=limits))
    core.open(b"2" * 16)
    with refused(errors.QuotaExceeded):
        core.open(b"3" * 16)
    core.register(layout(2))
    with refused(errors.QuotaExceeded):
        core.register(layout(3))
    core.host.spawn()
    with pytest.raises(errors.QuotaExceeded):
        core.host.spawn()
    core.host.close()


def test_close_frees_everything_and_may_be_repeated(core: Fixture) -> None:
    core.store(list(range(5)))
    core.evict(3)
    core.client.do(wire.Fork, core.session, 1, 0, 8)
    assert [core.client.do(wire.CloseSession, core.session).count for _ in range(2)] == [5, 0]
    core.host.settle()
    pool = core.host.tenant().pools[core.print]
    assert (core.host.world.table.used, pool.dram.used, pool.nvme.used) == (0, 0, 0)
    with refused(errors.UnknownSession):
        core.client.do(wire.ResumeSession, TOKEN)


def test_a_token_can_be_used_again_after_its_session_was_closed(core: Fixture) -> None:
    core.store([0, 1])
    core.client.do(wire.CloseSession, core.session)
    assert core.open() == core.session
    assert core.tiers() == {}


def test_a_tombstone_goes_when_nothing_is_left_on_any_medium(core: Fixture) -> None:
    core.store([0, 1])
    core.evict(1)
    core.read(0, 2)
    lease = core.acquire(0, 2)
    core.client.do(wire.CloseSession, core.session)

    def forgotten() -> bool:
        return any(isinstance(op, rows.ForgetSession) for op in core.host.ops)

    core.host.settle()
    assert not forgotten(), "a reader still keeps a block that has an NVMe header"
    core.client.do(wire.Release, lease.lease)
    core.host.tick(1.1)
    core.host.tick(1.1)
    assert not forgotten(), "the header is not cleared yet"
    core.host.settle()
    assert forgotten()
    assert not core.host.world.tombstones


def test_a_tombstone_of_a_token_that_is_used_again_is_not_forgotten(core: Fixture) -> None:
    core.store([0])
    core.evict()
    core.client.do(wire.CloseSession, core.session)
    core.open()
    core.host.settle()
    assert not any(isinstance(op, ForgetSession | rows.ForgetSession) for op in core.host.ops)


def test_orphans_are_reaped_after_their_time() -> None:
    core = Fixture(Host(limits=with_limits(LIMITS, orphan_ttl_s=100.0)))
    core.store([0, 1])
    core.host.kill(core.client)
    core.host.tick(99.0)
    assert core.session in core.host.tenant().sessions
    core.host.tick(2.0)
    assert core.session not in core.host.tenant().sessions
    assert core.host.world.table.used == 0
    assert any(note.kind == "orphan_reaped" for note in core.host.notes)
    core.host.close()


def test_a_session_that_somebody_has_open_is_never_reaped() -> None:
    core = Fixture(Host(limits=with_limits(LIMITS, orphan_ttl_s=100.0)))
    values = core.store([0, 1])
    second = core.host.spawn()
    second.do(wire.ResumeSession, TOKEN)
    core.host.kill(core.client)
    core.host.tick(500.0)
    assert second.do(wire.Describe, core.session).session == core.session
    core.client = second
    assert core.read(0, 2) == values
    core.host.close()


def test_retention_of_stored_blocks_changes_in_both_directions(core: Fixture) -> None:
    core.store([0, 1], retention=CACHED)
    pool = core.host.tenant().pools[core.print]
    assert core.client.do(wire.SetRetention, core.session, 0, HELD).count == 2
    assert pool.held == 2
    core.client.do(wire.SetRetention, core.session, wire.NO_NODE, HELD)
    assert pool.held == 2
    core.client.do(wire.SetRetention, core.session, wire.NO_NODE, CACHED)
    assert pool.held == 0
    with refused(errors.UnknownBranch):
        core.client.do(wire.SetRetention, core.session, 5, HELD)
    with refused(errors.InvalidArgument):
        core.client.do(wire.SetRetention, core.session, 0, 3)


def test_more_held_blocks_than_fit_are_refused_and_nothing_changes() -> None:
    core = Fixture(Host({"a": (1, 1)}, spill_slabs=1))
    core.store(list(range(6)), retention=CACHED)
    core.client.do(wire.Reserve, core.client.counter(), core.print, 0, 12)
    before = core.counts()
    with refused(errors.SpillFull):
        core.client.do(wire.SetRetention, core.session, 0, HELD)
    assert core.counts() == before
    core.host.close()


def test_both_parts_of_a_session_are_admitted_together() -> None:
    core = Fixture(Host({"a": (2, 1)}, spill_slabs=1))
    second = core.register(layout(1, group=1))
    session = core.open(b"2" * 16, [core.print, second])
    first_print = core.print
    core.store(list(range(6)), session=session, retention=CACHED)
    core.print = second
    core.store(list(range(6)), session=session, retention=CACHED)
    core.print = first_print
    for each in (first_print, second):  # each part alone could take the one slab that is left
        core.client.do(wire.Reserve, core.client.counter(), each, 0, 5)
    before = core.counts()
    with refused(errors.SpillFull):
        core.client.do(wire.SetRetention, session, wire.NO_NODE, HELD)
    assert core.counts() == before
    core.host.check()
    core.host.close()


def test_blobs_grow_in_version(core: Fixture) -> None:
    for version, data in ((1, b"one"), (3, b"three"), (2, b"two"), (3, b"other")):
        core.client.do(wire.PutBlob, core.session, wire.NO_NODE, version, data)
    reply = core.client.do(wire.GetBlob, core.session, wire.NO_NODE)
    assert (reply.version, reply.data) == (3, b"three")
    reply = core.client.do(wire.GetBlob, core.session, 0)
    assert (reply.version, reply.data) == (0, b"")


@pytest.mark.parametrize(
    ("node", "version", "data", "error"),
    [
        (9, 1, b"", errors.UnknownBranch),
        (0, 0, b"", errors.InvalidArgument),
        (0, 2**63, b"", errors.InvalidArgument),
        (0, 1, bytes(65), errors.QuotaExceeded),
    ],
)
def test_a_blob_that_cannot_be_is_refused(
    core: Fixture, node: int, version: int, data: bytes, error: type[errors.KvtierError]
) -> None:
    with refused(error):
        core.client.do(wire.PutBlob, core.session, node, version, data)


def test_a_closed_group_does_not_reach_its_sessions(core: Fixture) -> None:
    second = core.host.spawn()
    second.do(wire.ResumeSession, TOKEN)
    core.host.kill(core.client)
    second.do(wire.CloseSession, core.session)
    assert core.session not in core.host.tenant().sessions
