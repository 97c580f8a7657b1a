"""What a look-up promises is kept, what it does not promise costs nobody anything."""

from kvtier_client import wire
from kvtier_client.wire import CACHED
from tests.unit.core_host import Fixture, pack, u64

KEYS = [bytes([97 + number]) * 16 for number in range(6)]
ALL = b"".join(KEYS)


def put_keys(core: Fixture) -> None:
    lease = core.client.do(wire.ReserveKeys, core.client.counter(), core.print, ALL, 30.0)
    for value, offset in enumerate(u64(lease.offsets), 700):
        core.client.write(offset, 1, value)
    every = pack(*range(len(KEYS)))
    core.client.do(wire.CommitKeys, lease.lease, every, ALL, every, pack(*[4] * len(KEYS)))


def press(core: Fixture, blocks: int = 120) -> None:
    """Far more CACHED blocks than both tiers have room for."""
    for start in range(0, blocks, 12):
        core.store(list(range(start, start + 12)), 100, retention=CACHED)
        core.host.settle(2)


def hits(core: Fixture) -> int:
    return int(core.client.do(wire.Lookup, [core.print], ALL).hits[0])


def test_what_a_lookup_promised_is_there_after_any_pressure(core: Fixture) -> None:
    put_keys(core)
    pin = core.client.do(wire.Lookup, [core.print], ALL, 50, 600.0)
    assert pin.hits == [len(KEYS)]
    press(core)
    core.evict()
    assert core.client.do(wire.Remove, core.print, ALL).count == 0
    lease = core.client.do(wire.AcquireKeys, 51, core.print, ALL, 30.0)
    values = [core.client.read(offset, 1) for offset in u64(lease.offsets)]
    assert values == [700 + number for number in range(len(KEYS))]


def test_probing_takes_no_lease_and_keeps_nothing(core: Fixture) -> None:
    put_keys(core)
    before = core.counts()
    for _ in range(50):
        assert hits(core) == len(KEYS)
    assert core.counts() == before
    assert not core.host.world.table.pins.any()
    press(core)
    assert hits(core) < len(KEYS), "what nobody holds makes room"


def test_no_number_of_lookups_keeps_more_than_what_fits(core: Fixture) -> None:
    """Leases on look-ups are refused, or shortened, before writers find no room any more."""
    put_keys(core)
    for number in range(100, 140):
        core.client.do(wire.Lookup, [core.print], ALL, number, 600.0)
    press(core, 48)
    core.host.tick(601.0)
    press(core, 48)
    assert not core.host.world.table.pins.any()
