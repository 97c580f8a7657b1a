"""What the parts of an actor share: its client, its session, its dice."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvtier_client import errors
from kvtier_client.aio import AsyncClient, AsyncSession
from tests.model.harness import layout
from tests.sim.clock import Sim, SimLoop
from tests.sim.files import Medium
from tests.sim.truth import TOKENS, Node, Session, Truth

if TYPE_CHECKING:
    from tests.sim.run import Worker

LAYOUTS = [
    layout(1, tokens=TOKENS), layout(2, group=1, tokens=TOKENS),
    layout(1, name="keyed", tokens=TOKENS),
]  # fmt: skip
KEYED = LAYOUTS[2]
KEYS = [bytes([97 + i]) * 16 for i in range(8)]
GONE = (errors.BlockLost, errors.ChecksumMismatch)
TROUBLE = (
    errors.TransportError, errors.CapacityError, errors.LeaseExpired, errors.QuotaExceeded,
    errors.ShuttingDown,
)  # fmt: skip
"""What may always happen here: the daemon is away, there is no room, it took too long."""


class Hand:
    """One task of a client, with a session of its own at a time."""

    def __init__(
        self, sim: Sim, truth: Truth, medium: Medium, client: AsyncClient, tenant: str, alone: bool
    ) -> None:
        self.sim, self.truth, self.medium = sim, truth, medium
        self.client, self.tenant, self.alone = client, tenant, alone
        """`alone`: no other task uses the client."""
        self.random = sim.random
        self.wait_s = 3.0
        """How long it waits for what it reads; a call of the disk takes up to 0.6 s."""
        self.session: Session | None = None
        self.handle: AsyncSession
        self.colleagues: Callable[[], list[Worker]] = list
        """Other processes of the client's group."""
        self.loop: SimLoop
        self.done = 0
        """Operations that have ended, whichever way."""

    def mine(self) -> Session:
        """The session that it works on."""
        assert self.session is not None
        return self.session

    def node(self, *, writable: bool = False) -> Node:
        """Some node of the session that is surely there."""
        nodes = [x for x in self.mine().nodes.values() if x.sure]
        going = [x for x in nodes if not x.ended]
        return self.random.choice(going if writable and going else nodes)

    async def pause(self) -> None:
        """Between two parts of a copy: for long, or in a SIGSTOP that outlasts a lease."""
        if self.sim.chance(0.1):
            self.loop.stopped_until_s = self.sim.now_s + self.random.choice((3.0, 8.0))
        await asyncio.sleep(self.random.choice((0, 0.01, 0.3, 2.0)))

    def part(self) -> int:
        """Some part of the session."""
        return self.random.randrange(len(self.mine().parts))

    def layout(self, part: int) -> Any:
        """The layout of a part."""
        return LAYOUTS[self.mine().parts[part]]
