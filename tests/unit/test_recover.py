"""After a crash everything that was committed is there, and nothing else."""

from collections.abc import Iterator

import numpy as np
import pytest

from kvtier_client import errors, wire
from kvtier_client.wire import CACHED, HELD, HeldLease
from kvtierd.catalog import rows
from kvtierd.core import recover
from kvtierd.core.blocks import F_HELD
from kvtierd.core.slabs import QUARANTINED, WRITING
from kvtierd.tiers.spill_io import Status
from tests.model.harness import layout, refused
from tests.unit.core_host import FULL, TOKEN, Fixture, Host, pack, u32, u64


@pytest.fixture
def core() -> Iterator[Fixture]:
    core = Fixture(Host())
    yield core
    core.host.settle()
    core.host.check()
    core.host.close()


def restart(core: Fixture, *held: HeldLease, again: bool = True) -> list[int]:
    """Kill the daemon and start it; the client comes back with what it holds."""
    core.host.crash()
    core.host.recover()
    core.host.check()
    lost = core.client.hello(list(held))
    core.host.check()
    if again:
        core.client.do(wire.ResumeSession, TOKEN)
    return lost


def spill(core: Fixture, pages: list[int]) -> None:
    """Move pages of the root to NVMe."""
    core.evict(len(pages))


def clear_nothing(core: Fixture) -> None:
    """Let no clearing of NVMe headers happen before the crash."""
    core.host.disk.pending.clear()


def test_blocks_are_there_in_both_tiers(core: Fixture) -> None:
    values = core.store(list(range(10)))
    core.evict(6)
    core.read(0, 5)
    restart(core)
    assert core.read(0, 10) == values


def test_a_crash_during_spill_and_restore_loses_nothing(core: Fixture) -> None:
    values = core.store(list(range(12)))
    core.evict(4)
    core.host.state.evictor.evict(core.host.tenant(), 4)
    core.host.perform()
    core.client.send(wire.Acquire, 50, core.session, 0, core.print, 0, 12, 30.0)
    restart(core)
    assert core.read(0, 12) == values


def test_what_was_written_to_nvme_and_not_told_yet_is_one_block(core: Fixture) -> None:
    core.store([0, 1])
    core.host.state.evictor.evict(core.host.tenant(), 2)
    core.host.perform()
    core.host.disk.pending[0].done = lambda result: None
    core.host.finish()
    restart(core)
    assert core.host.world.table.used == 2
    assert core.host.tenant().pools[core.print].clean == 2


def test_one_block_with_two_nvme_copies_keeps_one(core: Fixture) -> None:
    core.store([0])
    core.evict()
    core.read(0, 1)
    pool = core.host.tenant().pools[core.print]
    row = core.host.tenant().sessions[core.session].nodes[0].runs[0].rows[:1].copy()
    core.host.state.copies.leave_nvme(pool, row)
    core.host.perform()
    core.host.disk.finish(0, Status.FAILED)  # its header stays
    core.host.state.evictor.evict(core.host.tenant(), 1)
    core.host.perform()
    core.host.disk.pending[0].done = lambda result: None
    core.host.finish()  # the second copy, of which the core does not hear
    restart(core)
    core.host.settle()
    pool = core.host.tenant().pools[core.print]
    assert (core.host.world.table.used, pool.nvme.used) == (1, 1)
    assert core.read(0, 1) == [100]


def test_the_longer_copy_of_a_page_wins(core: Fixture) -> None:
    core.store([0], 100, last=2)
    core.evict()
    core.store([0], 200, last=3)
    clear_nothing(core)
    restart(core)
    lease = core.acquire(0, 1)
    assert (core.client.read(u64(lease.offsets)[0], 1), u32(lease.valid)) == (200, [3])


def test_blocks_of_an_earlier_session_of_the_token_are_not_the_new_ones(core: Fixture) -> None:
    core.store([0, 1], 100)
    core.evict()
    core.client.do(wire.CloseSession, core.session)
    clear_nothing(core)
    core.open()
    core.store([0], 500, last=1)
    restart(core)
    assert core.tiers().keys() == {0}
    assert core.read(0, 1) == [500]


def test_pruned_nodes_and_trimmed_pages_do_not_come_back(core: Fixture) -> None:
    core.store([0, 1, 2, 3], 100)
    core.client.do(wire.Fork, core.session, 1, 0, 8)
    core.client.do(wire.Fork, core.session, 2, 0, 8)
    core.store([2, 3], 200, node=1)
    core.store([2], 300, node=2)
    core.evict()
    core.client.do(wire.Prune, core.session, 1)
    core.client.do(wire.Prune, core.session, 0, False)
    clear_nothing(core)
    restart(core)
    assert core.tiers().keys() == {0, 1}
    assert core.read(0, 3, node=2) == [100, 101, 302]
    with refused(errors.UnknownBranch):
        core.acquire(0, 1, node=1)
    with refused(errors.InvalidArgument):
        core.client.do(wire.Fork, core.session, 1, 0, 8)


def test_a_closed_session_does_not_come_back_and_is_forgotten(core: Fixture) -> None:
    core.store([0, 1])
    core.evict()
    core.client.do(wire.CloseSession, core.session)
    clear_nothing(core)
    restart(core, again=False)
    with refused(errors.UnknownSession):
        core.client.do(wire.ResumeSession, TOKEN)
    assert (core.host.outcome.blocks, core.host.outcome.discarded) == (0, 2)
    core.host.settle()
    assert any(isinstance(op, rows.ForgetSession) for op in core.host.ops)


def test_retention_is_that_of_the_last_word(core: Fixture) -> None:
    core.store([0, 1])
    core.client.do(wire.SetRetention, core.session, 0, CACHED)
    core.store([2], retention=HELD)
    restart(core)
    run = core.host.tenant().sessions[core.session].nodes[0].runs[0]
    held = (core.host.world.table.flags[run.rows] & F_HELD) != 0
    assert held.tolist() == [False, False, True]


def test_words_of_an_earlier_life_do_not_bind_a_later_one(core: Fixture) -> None:
    core.store([0, 1])
    core.client.do(wire.SetRetention, core.session, 0, CACHED)
    core.evict()
    core.host.disk.pages[:] = 0  # all of it is lost: nothing says any more how far seq had come
    with refused(errors.BlockLost):
        core.acquire(0, 1)
    core.host.settle()
    restart(core)
    core.store([5], 900, retention=HELD)
    restart(core)
    run = core.host.tenant().sessions[core.session].nodes[0].runs[0]
    assert core.host.world.table.flags[run.rows[5]] & F_HELD
    assert core.read(5, 1) == [905]


def test_a_lost_payload_is_lost_blocks_and_never_zeros(core: Fixture) -> None:
    core.store([0, 1, 2])
    core.evict(2)
    core.host.disk.lost_payload = True
    core.host.disk.pages[:] = 0
    restart(core)
    core.host.disk.lost_payload = False
    assert sorted(core.tiers().values()) == [wire.TIER_DRAM, wire.TIER_LOST, wire.TIER_LOST]
    assert core.read(0, 1) == [100]
    with refused(errors.BlockLost):
        core.acquire(1, 1)
    core.store([1], 300)
    assert core.read(0, 2) == [100, 301]


def test_after_a_reboot_what_was_on_nvme_is_there(core: Fixture) -> None:
    core.store(list(range(6)))
    core.evict(4)
    core.host.reboot()
    core.host.recover()
    core.host.check()
    core.client = core.host.spawn()
    core.client.do(wire.ResumeSession, TOKEN)
    assert sorted(core.tiers()) == [2, 3, 4, 5]
    assert core.read(2, 4) == [102, 103, 104, 105]


def test_blocks_written_in_any_order_come_back_to_their_pages(
    core: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes are named a few at a time, their blocks lie in pieces, and some have two copies."""
    monkeypatch.setattr(recover, "BATCH_ROWS", 4)
    other = core.open(b"2" * 16)
    core.client.do(wire.Fork, core.session, 1, 0, 8)
    values: dict[tuple[int, int, int], int] = {}
    for turn, page in enumerate([5, 0, 3, 1, 4, 2, 6]):
        for session, node in ((core.session, 0), (other, 0), (core.session, 1)):
            at = page + 2 if node else page
            [value] = core.store([at], 100 * turn + session % 50, session=session, node=node)
            values[session, node, at] = value
        core.evict(turn)
    core.read(0, 3)
    restart(core)
    core.client.do(wire.ResumeSession, b"2" * 16)
    for (session, node, page), value in values.items():
        assert core.read(page, 1, session=session, node=node) == [value]


def test_a_lost_copy_of_a_block_in_dram_loses_nothing(core: Fixture) -> None:
    values = core.store([0, 1])
    core.evict(2)
    assert core.read(0, 2) == values
    core.host.disk.lost_payload = True
    restart(core)
    core.host.disk.lost_payload = False
    assert core.host.outcome.lost == 0
    assert core.read(0, 2) == values
    core.host.settle()
    assert core.host.tenant().pools[core.print].nvme.used == 0


def test_a_gap_at_the_end_of_a_node_is_not_remembered(core: Fixture) -> None:
    core.store([0, 1, 7], 100, retention=CACHED)
    core.evict(3)
    core.host.disk.pages[:] = 0
    core.host.disk.lost_payload = True
    core.store([2], 300)
    restart(core)
    core.host.disk.lost_payload = False
    run = core.host.tenant().sessions[core.session].nodes[0].runs[0]
    assert run.length == 3
    assert core.read(2, 1) == [302]


# ------------------------------------------------------------ without a catalog


def forget_catalog(core: Fixture) -> None:
    core.host.ops = [op for op in core.host.ops if isinstance(op, rows.SaveLayout)]


def test_sessions_that_only_headers_know_are_kept_whole(core: Fixture) -> None:
    core.store([0, 1, 2, 3], 100)
    # A child with a smaller id than its parent, whose blocks the scan meets first.
    core.client.do(wire.Fork, core.session, 9, 0, 8)
    core.client.do(wire.Fork, core.session, 3, 9, 12)
    core.store([2], 200, node=9)
    core.store([3], 300, node=3)
    forget_catalog(core)
    restart(core)
    assert core.host.outcome.orphans == 1
    assert core.read(0, 4, node=3) == [100, 101, 202, 303]
    core.client.do(wire.Fork, core.session, 10, 3, 16)
    restart(core)
    assert core.host.outcome.orphans == 0, "resumed, so the catalog knows it"
    assert core.read(0, 4, node=10) == [100, 101, 202, 303]


def test_a_parent_that_nothing_is_known_of_lends_no_pages(core: Fixture) -> None:
    core.store([0, 1, 2, 3], 100)
    core.client.do(wire.Fork, core.session, 9, 0, 4)
    core.client.do(wire.Fork, core.session, 3, 9, 12)
    core.store([3], 300, node=3)
    forget_catalog(core)
    restart(core)
    assert core.read(3, 1, node=3) == [303]
    with refused(errors.InvalidArgument):
        core.acquire(1, 1, node=3)  # the root's page 1 is another branch's


def test_an_orphan_is_opened_with_the_layouts_its_client_says() -> None:
    core = Fixture(Host())
    second = core.register(layout(2, group=1))
    session = core.open(b"2" * 16, [core.print, second])
    core.store([0, 1], session=session)
    forget_catalog(core)
    core.host.crash()
    core.host.recover()
    core.client.hello([])
    with refused(errors.LayoutMismatch):
        core.client.do(wire.OpenSession, b"2" * 16, [second])
    reply = core.client.do(wire.OpenSession, b"2" * 16, [core.print, second])
    assert [len(part) // 4 for part in reply.nodes[0].pages] == [2, 0]
    core.host.close()


# ------------------------------------------------------------ leases


def states(core: Fixture) -> tuple[int, int]:
    counts = core.host.tenant().pools[core.print].dram.counts
    return counts[WRITING], counts[QUARANTINED]


def test_a_writer_goes_on_where_it_was(core: Fixture) -> None:
    lease = core.reserve(4)
    offsets = u64(lease.offsets)
    for i, offset in enumerate(offsets):
        core.client.write(offset, 1, 100 + i)
    args = lease.lease, core.session, 0
    core.client.do(wire.Commit, *args, pack(1), pack(1), pack(FULL), HELD)
    assert restart(core, HeldLease(lease.lease, True, lease.offsets)) == []
    core.client.do(wire.Commit, *args, pack(0, 2, 3), pack(0, 2, 3), pack(*[FULL] * 3), HELD)
    assert core.read(0, 4) == [100, 101, 102, 103]


def test_slots_of_a_writer_who_is_away_stay_his(core: Fixture) -> None:
    lease = core.reserve(4)
    core.host.crash()
    core.host.recover()
    assert states(core) == (4, 0)
    other = core.host.spawn()
    core.host.tick(61.0)
    assert states(core) == (0, 4)
    other.do(wire.RegisterLayout, core.layout)
    granted = other.do(wire.Reserve, 1, core.print, 16)
    assert not set(u64(granted.offsets)) & set(u64(lease.offsets))
    core.host.kill(core.client)
    assert states(core) == (16, 0)
    core.client = other


def test_a_lease_that_its_holder_does_not_claim_has_ended(core: Fixture) -> None:
    core.reserve(4)
    assert restart(core) == []
    assert states(core) == (0, 0)


def test_a_claim_that_does_not_fit_is_refused_and_its_slots_wait(core: Fixture) -> None:
    lease = core.reserve(4)
    wrong = HeldLease(lease.lease, True, lease.offsets[8:])
    assert restart(core, wrong) == [lease.lease]
    assert states(core) == (0, 4), "somebody may still be writing there"
    core.client.do(wire.Abort, lease.lease)
    assert states(core) == (0, 0)


def test_an_expired_lease_stays_quarantined_over_a_restart_until_it_is_aborted(
    core: Fixture,
) -> None:
    lease = core.reserve(2)
    core.host.tick(61.0)
    assert restart(core, HeldLease(lease.lease, True, lease.offsets)) == [lease.lease]
    assert states(core) == (0, 2)
    core.client.do(wire.Abort, lease.lease)
    assert states(core) == (0, 0)


def test_a_reader_goes_on_reading(core: Fixture) -> None:
    values = core.store([0, 1, 2])
    lease = core.acquire(0, 3)
    assert restart(core, HeldLease(lease.lease, False, lease.offsets)) == []
    core.store(list(range(3, 22)), 300)
    core.evict()
    assert [core.client.read(offset, 1) for offset in u64(lease.offsets)] == values
    core.client.do(wire.Release, lease.lease)
    assert not core.host.world.table.readers.any()


def test_blocks_shared_with_another_reader_are_claimed_too(core: Fixture) -> None:
    core.store([0, 1, 2])
    other = core.host.spawn()
    other.do(wire.ResumeSession, TOKEN)
    shared = other.do(wire.Acquire, 1, core.session, 0, core.print, 1, 1)
    lease = core.acquire(0, 3)
    assert restart(core, HeldLease(lease.lease, False, lease.offsets)) == []
    assert other.hello([HeldLease(shared.lease, False, shared.offsets)]) == []
    for client, each in ((core.client, lease), (other, shared)):
        client.do(wire.Release, each.lease)
    assert not core.host.world.table.readers.any()


def test_what_is_read_without_a_name_stays_until_its_reader_has_spoken(core: Fixture) -> None:
    core.client.do(wire.Fork, core.session, 1, 0, 0)
    core.store([0, 1], 100, node=1)
    lease = core.acquire(0, 2, node=1)
    core.client.do(wire.Prune, core.session, 1)
    core.host.crash()
    core.host.recover()
    core.host.check()
    other = core.host.spawn()
    other.do(wire.RegisterLayout, core.layout)
    granted = other.do(wire.Reserve, 1, core.print, 18)
    for offset in u64(granted.offsets):
        other.write(offset, 1, 666)
    assert [core.client.read(offset, 1) for offset in u64(lease.offsets)] == [100, 101]
    assert core.client.hello([HeldLease(lease.lease, False, lease.offsets)]) == []
    core.client.do(wire.Release, lease.lease)
    assert core.host.world.doomed == 0


def test_readers_and_writers_who_died_meanwhile_hold_nothing(core: Fixture) -> None:
    core.store([0])
    core.acquire(0, 1)
    core.reserve(3)
    core.host.processes.clear()
    core.host.crash()
    core.host.recover()
    core.host.check()
    assert states(core) == (0, 0)
    assert not core.host.world.table.readers.any()
    assert core.host.tenant().groups == {}
    core.client = core.host.spawn()


def test_a_dead_members_lease_belongs_to_its_living_group(core: Fixture) -> None:
    second = core.host.spawn(group=core.client.group)
    lease = core.reserve(3)
    core.host.kill(core.client)
    assert states(core) == (3, 0)
    core.host.crash()
    core.host.recover()
    assert states(core) == (3, 0), "another process of the group may be writing"
    assert second.hello([HeldLease(lease.lease, True, lease.offsets)]) == []
    second.do(wire.Abort, lease.lease)
    core.client = second


def test_another_groups_reads_cannot_be_claimed(core: Fixture) -> None:
    core.store([0])
    lease = core.acquire(0, 1)
    thief = core.host.spawn()
    core.host.crash()
    core.host.recover()
    its_own = thief.member << 32 | 7
    for claimed in (lease.lease, its_own):
        assert thief.hello([HeldLease(claimed, False, lease.offsets)]) == [claimed]
    assert core.client.hello([HeldLease(lease.lease, False, lease.offsets)]) == []


# ------------------------------------------------------------ keyed


def test_keyed_blocks_and_holds_are_there_again(core: Fixture) -> None:
    keys = b"k" * 16 + b"l" * 16
    lease = core.client.do(wire.ReserveKeys, 50, core.print, keys)
    for i, offset in enumerate(u64(lease.offsets)):
        core.client.write(offset, 1, 700 + i)
    core.client.do(wire.CommitKeys, lease.lease, pack(0, 1), keys, pack(0, 1), pack(FULL, FULL))
    core.client.do(wire.Hold, core.session, core.print, keys[:16])
    core.evict(1)
    restart(core)
    assert core.client.do(wire.Lookup, [core.print], keys).hits == [2]
    assert core.client.do(wire.Remove, core.print, keys).count == 1
    got = core.client.do(wire.AcquireKeys, 60, core.print, keys[:16], 30.0)
    assert core.client.read(u64(got.offsets)[0], 1) == 700


def test_a_header_that_changed_is_no_block(core: Fixture) -> None:
    core.store([0, 1])
    headers = core.host.arenas["a"].headers
    row = core.host.tenant().sessions[core.session].nodes[0].runs[0].rows[0]
    slot = int(core.host.world.table.dram[row])
    bodies = headers.read_bodies(np.array([slot]))
    bodies[0, 3] ^= np.uint64(1)
    headers.write_bodies(np.array([slot]), bodies)
    restart(core)
    assert core.tiers().keys() == {1}
