"""What was admitted has a place and a way back to DRAM, whatever other layouts and tenants do."""

import random
from dataclasses import dataclass, field

import pytest

from kvtier_client import wire
from kvtier_client.wire import CACHED, HELD
from tests.model.harness import SimClient, layout
from tests.unit.core_host import FULL, Fixture, Host, pack, u64


@dataclass
class Store:
    """A session of one layout, with blocks of `units` pages of memory, and what it has stored."""

    client: SimClient
    layout: bytes
    session: int
    units: int
    pages: int = 0
    held: list[int] = field(default_factory=list)


def store(core: Fixture, units: int, tenant: str = "a") -> Store:
    """A client of a tenant with a session of a layout."""
    client = core.host.spawn(tenant)
    known = client.do(wire.RegisterLayout, layout(units, group=units)).fingerprint
    token = tenant.encode() * 15 + bytes([units])
    return Store(client, known, client.do(wire.OpenSession, token, [known]).session, units)


def one_more(core: Fixture, into: Store, retention: int) -> bool:
    """Store one block more; whether there was room for it."""
    asked = into.client.send(wire.Reserve, into.client.counter(), into.layout, 1, 0, 0, 5.0)
    core.host.settle(6)
    reply = into.client.answer(asked)
    if isinstance(reply, wire.Error):
        return False
    into.client.write(u64(reply.offsets)[0], into.units, 100 + into.pages)
    place = pack(0), pack(into.pages), pack(FULL)
    into.client.do(wire.Commit, reply.lease, into.session, 0, *place, retention)
    if retention == HELD:
        into.held.append(into.pages)
    into.pages += 1
    return True


def read_one(of: Store, page: int) -> None:
    """Read one page that may have to be brought to DRAM."""
    counter = of.client.counter()
    granted = of.client.do(wire.Acquire, counter, of.session, 0, of.layout, page, page + 1, 5.0)
    assert of.client.read(u64(granted.offsets)[0], of.units) == 100 + page
    of.client.do(wire.Release, granted.lease)


def store_in_turns(core: Fixture, stores: list[Store], chance: random.Random) -> None:
    """Store into some until each of them was refused, reading and evicting in between."""
    refused = set[int]()
    while len(refused) < len(stores):
        number = chance.randrange(len(stores))
        into = stores[number]
        if into.held and chance.random() < 0.3:
            read_one(into, chance.choice(into.held))
        if not one_more(core, into, chance.choice([HELD, HELD, CACHED])):
            refused.add(number)
        elif chance.random() < 0.5:
            core.evict(chance.randrange(8), into.client.tenant)
    for each in stores:
        for page in each.held:
            read_one(each, page)
    core.host.check()
    core.host.close()


@pytest.mark.parametrize("seed", range(3))
def test_whatever_two_layouts_store_in_turns_all_of_it_can_be_read(seed: int) -> None:
    """What one was promised of the unused slabs, the other's blocks on their way do not take."""
    core = Fixture(Host({"a": (3, 3)}, spill_slabs=3))
    store_in_turns(core, [store(core, 1), store(core, 2)], random.Random(seed))


@pytest.mark.parametrize("seed", range(3))
def test_whatever_two_tenants_store_in_turns_all_of_it_can_be_read(seed: int) -> None:
    """They share the spill files, and what is promised of them to one is not the other's."""
    core = Fixture(Host({"a": (2, 3), "b": (2, 3)}, spill_slabs=4))
    stores = [store(core, 1), store(core, 2), store(core, 1, "b"), store(core, 2, "b")]
    store_in_turns(core, stores, random.Random(seed))


def test_what_is_promised_to_one_tenant_is_not_taken_by_anothers_moves() -> None:
    core = Fixture(Host({"a": (2, 2), "b": (2, 2)}, spill_slabs=2))
    promise = core.client.do(wire.Reserve, core.client.counter(), core.print, 0, 24, ttl_s=600.0)
    other = store(core, 1, "b")
    for _ in range(14):
        assert one_more(core, other, CACHED)
    core.evict(14, "b")
    core.host.settle(2)
    for first in range(0, 24, 4):
        counter = core.client.counter()
        lease = core.client.do(
            wire.Reserve, counter, core.print, 4, draw=promise.lease, wait_s=30.0
        )
        places = pack(*range(4)), pack(*range(first, first + 4)), pack(*[FULL] * 4)
        core.client.do(wire.Commit, lease.lease, core.session, 0, *places, HELD)
    core.host.check()
    core.host.close()


def test_a_promise_keeps_a_way_to_dram_too(core: Fixture) -> None:
    """Before its layout has a slab there, and though all else could go to NVMe."""
    core.store(list(range(4)))
    other = store(core, 2)
    promise = other.client.do(wire.Reserve, other.client.counter(), other.layout, 0, 2, ttl_s=600.0)
    assert one_more(core, store(core, 4), HELD)
    assert not one_more(core, store(core, 1), HELD), "the last slab is promised"
    counter = other.client.counter()
    other.client.do(wire.Reserve, counter, other.layout, 2, draw=promise.lease, wait_s=30.0)


def test_a_slab_is_emptied_for_others_only_if_its_blocks_have_places_without_it(
    core: Fixture,
) -> None:
    small, large = store(core, 1), store(core, 2)
    while one_more(core, small, HELD):
        pass
    large.client.send(wire.Reserve, large.client.counter(), large.layout, 1, 0, 0, 5.0)
    core.host.check()
    core.host.settle(6)
    for page in small.held:
        read_one(small, page)


def test_after_a_reboot_what_is_held_gets_its_slabs_before_anybody_comes() -> None:
    core = Fixture(Host({"a": (2, 3)}, spill_slabs=3))
    for each in (1, 2):
        assert one_more(core, store(core, each), HELD)
    core.evict()
    core.host.reboot()
    core.host.recover()
    third = store(core, 4)
    assert not one_more(core, third, HELD)
    core.host.check()
    core.host.close()


def test_a_new_layout_gets_room_where_all_of_both_tiers_is_cached(core: Fixture) -> None:
    """As after a change of the model: what nobody holds goes, also from slabs cut otherwise."""
    for start in range(0, 96, 12):
        core.store(list(range(start, start + 12)), 100, retention=CACHED)
        core.host.settle(2)
    pool = core.host.tenant().pools[core.print]
    assert pool.dram.total + pool.nvme.total == (3 + 4) * 8
    large = store(core, 2)
    core.client.do(wire.Reserve, core.client.counter(), large.layout, 1)  # and without a wait
    stored = 0
    while one_more(core, large, HELD):
        stored += 1
    assert stored >= (3 + 4) * 4 - 6, "a slab of each tier may stay the other's"
    for page in large.held:
        read_one(large, page)


def test_a_quota_bounds_all_layouts_together() -> None:
    core = Fixture(Host({"a": (4, 2)}, spill_slabs=6))
    core.store(list(range(12)), 100, retention=CACHED)
    core.evict()
    core.client.do(wire.CloseSession, core.session)
    core.host.settle(1)
    large = store(core, 2)
    for _ in range(16):
        assert one_more(core, large, CACHED)
        core.evict(4)
    tenant = core.host.tenant()
    assert sum(len(pool.nvme.free) for pool in tenant.pools.values()) == 2
    core.host.check()
    core.host.close()
