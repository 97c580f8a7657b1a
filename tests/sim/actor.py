"""What a client does: random operations of the real asyncio client, held to the truth."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tests.sim.branches import Branches
from tests.sim.hand import TROUBLE
from tests.sim.keys import Keys
from tests.sim.reading import Reading
from tests.sim.truth import Session

PAUSES_S = (0, 0, 0, 0.005, 0.1)


class Actor(Branches, Reading, Keys):
    """Works until it is told to stop."""

    def __init__(self, *known: Any, **more: Any) -> None:
        super().__init__(*known, **more)
        self.stopping = False
        self._verbs: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (10, self.swap_out), (4, self.lazy_swap_out), (14, self.swap_in), (6, self.lease_out),
            (4, self.relay), (6, self.lease_in), (2, self.prefetch), (7, self.fork),
            (8, self.prune), (2, self.set_retention), (2, self.keep), (4, self.fold),
            (4, self.unfold), (1, self.set_priority),
            (2, self.put_blob), (2, self.get_blob), (3, self.put_keys), (3, self.get_keys),
            (1, self.hold), (1, self.unhold), (1, self.remove), (1, self.close),
            (2, self.cancelled), (1, self.leave),
        ]  # fmt: skip
        self._weights = [weight for weight, _ in self._verbs]

    async def run(self) -> None:
        """One operation after the other."""
        while not self.stopping:
            try:
                if self.session is None:
                    await self.enter()
                elif not self.session.usable:
                    await self.leave()
                else:
                    [(_, verb)] = self.random.choices(self._verbs, self._weights)
                    await verb()
            except TROUBLE:
                pass
            self.done += 1
            await asyncio.sleep(self.random.choice(PAUSES_S))

    async def cancelled(self) -> None:
        """Another operation that its caller gives up."""
        verb = self.random.choice((self.swap_out, self.swap_in, self.lease_out, self.lease_in))
        task = asyncio.get_running_loop().create_task(verb())
        await asyncio.sleep(self.random.choice((0, 0.0005, 0.003, 0.05)))
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is not None:
            raise task.exception()  # type: ignore[misc]

    async def verify(self, session: Session) -> None:
        """Read all of a session that must be there; now there is room to read anything."""
        self.session = session
        await self.open(session)
        for node in [x for x in session.nodes.values() if x.sure]:
            for part in range(len(session.parts)):
                own = {page for p, page in node.cells if p == part} | {node.start}
                own &= {page for page in node.known(part) if node.view(part, page).must}
                for pages in runs(sorted(own)):
                    self.done += len(pages)
                    await self.read(node, part, pages)
        for key in sorted(session.holds):
            self.done += 1
            await self.read_keys([key])
        await self.get_blob()
        self.session = None


def runs(pages: list[int]) -> list[list[int]]:
    """Neighbours together."""
    found: list[list[int]] = []
    for page in pages:
        if found and found[-1][-1] == page - 1:
            found[-1].append(page)
        else:
            found.append([page])
    return found
