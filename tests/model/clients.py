"""What the model's clients know: their leases, what they may write, and what they wait for."""

from dataclasses import dataclass, field

from kvtier_client import wire
from tests.model.harness import Host, SimClient, u64
from tests.model.reference import Session


@dataclass(slots=True, eq=False)
class Writing:
    """A write lease: the client may write to `open` slots until it commits or aborts them."""

    id: int
    layout: int
    offsets: list[int]
    promise: int = 0
    open: dict[int, int] = field(default_factory=dict)  # index -> value last written there
    expired: bool = False
    keys: list[bytes] = field(default_factory=list)  # of ReserveKeys, one per slot


@dataclass(slots=True, eq=False)
class Reading:
    """A read lease, and what its blocks must go on to hold until it is released."""

    id: int
    layout: int
    offsets: list[int]
    values: list[int]


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that was not answered at once."""

    request: int
    kind: str
    layout: int
    lease: int
    session: Session | None = None
    node: int = 0
    first: int = 0
    ahead: int = 0
    drawn: "Writing | None" = None
    keys: list[bytes] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Worker:
    """A client process of the model."""

    sim: SimClient
    writes: dict[int, Writing] = field(default_factory=dict)
    reads: dict[int, Reading] = field(default_factory=dict)
    pins: dict[int, list[bytes]] = field(default_factory=dict)
    waits: list[Waiting] = field(default_factory=list)
    sessions: set[tuple[str, bytes]] = field(default_factory=set)

    @property
    def tenant(self) -> str:
        return self.sim.tenant

    @property
    def connected(self) -> bool:
        return self.sim.peer is not None

    def granted(self, reply: wire.Granted, layout: int, ahead: int, value: int) -> Writing:
        """Note a write lease; its slots hold whatever was there."""
        offsets = u64(reply.offsets)
        lease = Writing(reply.lease, layout, offsets, ahead)
        lease.open = dict.fromkeys(range(len(offsets)), value)
        self.writes[reply.lease] = lease
        return lease

    def reconnect(self, host: Host) -> None:
        """Come back, say what is held, and forget what the daemon says is over."""
        held = [
            wire.HeldLease(lease.id, True, _packed(lease.offsets)) for lease in self.writes.values()
        ]
        held += [
            wire.HeldLease(lease.id, False, _packed(lease.offsets)) for lease in self.reads.values()
        ]
        self.waits.clear()
        self.sim.inbox.clear()
        for lease_id in self.sim.hello(held):
            if lease_id in self.writes:
                self.writes[lease_id].expired = True
            self.reads.pop(lease_id, None)
        self.pins.clear()


def _packed(offsets: list[int]) -> bytes:
    return b"".join(offset.to_bytes(8, "little") for offset in offsets)
