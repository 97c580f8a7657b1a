"""What the tests of the core share: a host with one client, and short words for what it does."""

from kvtier_client import wire
from kvtier_client.wire import CACHED, HELD, Layout
from tests.model.harness import Host, SimClient, layout, pack, u32, u64

TOKEN = b"a session's token"[:16]
FULL = 4
"""Valid tokens of a full block."""


class Fixture:
    """A host, a client, a layout and a session."""

    def __init__(self, host: Host, **sizes: int) -> None:
        self.host = host
        self.client = host.spawn()
        self.layout = layout(**sizes)
        self.print = self.register(self.layout)
        self.session = self.open()

    def register(self, described: Layout, client: SimClient | None = None) -> bytes:
        """Register a layout; returns its fingerprint."""
        reply = (client or self.client).do(wire.RegisterLayout, described)
        return bytes(reply.fingerprint)

    def open(self, token: bytes = TOKEN, prints: list[bytes] | None = None, **more: int) -> int:
        """Open a session; returns its id."""
        reply = self.client.do(wire.OpenSession, token, prints or [self.print], **more)
        return int(reply.session)

    def reserve(self, blocks: int, **more: object) -> wire.Granted:
        """Reserve slots, letting the disk work while that waits."""
        counter = self.client.counter()
        return self.client.do(wire.Reserve, counter, self.print, blocks, **more)  # type: ignore[no-any-return]

    def store(
        self, pages: list[int], value: int = 100, *, node: int = 0, retention: int = HELD,
        session: int | None = None, last: int = FULL,
    ) -> list[int]:  # fmt: skip
        """Reserve, write and commit pages; page `p` gets the value `value + p`."""
        lease = self.reserve(len(pages), wait_s=30.0)
        size = self.layout.block_bytes // 4096
        values = [value + page for page in pages]
        for offset, each in zip(u64(lease.offsets), values, strict=True):
            self.client.write(offset, size, each)
        valid = [FULL] * (len(pages) - 1) + [last]
        self.client.do(
            wire.Commit, lease.lease, session or self.session, node,
            pack(*range(len(pages))), pack(*pages), pack(*valid), retention,
        )  # fmt: skip
        return values

    def acquire(self, first: int, count: int, node: int = 0, **more: object) -> wire.Granted:
        """Lease pages for reading."""
        session = more.pop("session", self.session)
        return self.client.do(  # type: ignore[no-any-return]
            wire.Acquire, self.client.counter(), session, node, self.print, first, count,
            **({"wait_s": 30.0} | more),
        )  # fmt: skip

    def read(self, first: int, count: int, node: int = 0, **more: object) -> list[int]:
        """What a reader sees of pages, window by window."""
        values: list[int] = []
        while len(values) < count:
            lease = self.acquire(first + len(values), count - len(values), node, **more)
            size = self.layout.block_bytes // 4096
            values += [self.client.read(offset, size) for offset in u64(lease.offsets)]
            self.client.do(wire.Release, lease.lease)
        return values

    def evict(self, blocks: int = 1000, tenant: str = "a") -> None:
        """Move blocks out of DRAM and let that end."""
        self.host.state.evictor.evict(self.host.tenant(tenant), blocks)
        self.host.perform()
        self.host.settle(1)

    def tiers(self, node: int = 0) -> dict[int, int]:
        """Tier of every stored page of a node."""
        reply = self.client.do(wire.Describe, self.session)
        [info] = [info for info in reply.nodes if info.node == node]
        return dict(zip(u32(info.pages[0]), info.tiers[0], strict=True))

    def counts(self) -> tuple[int, ...]:
        """Everything that a refused request must leave as it was."""
        world, tenant = self.host.world, self.host.tenant()
        pools = [
            (*p.dram.counts, *p.nvme.counts, p.held, p.promised) for p in tenant.pools.values()
        ]
        return (
            world.table.used, len(tenant.leases), len(tenant.sessions), len(tenant.waiting),
            sum(len(session.nodes) for session in tenant.sessions.values()), len(world.batches),
            *(number for pool in pools for number in pool),
        )  # fmt: skip


__all__ = ["CACHED", "FULL", "HELD", "TOKEN", "Fixture", "Host", "layout", "pack", "u32", "u64"]
