"""How an actor writes blocks: whole copies, leases by hand, leases named by another process."""

import asyncio
from typing import Any

import numpy as np

from kvtier_client import ops, wire
from tests.sim.hand import TROUBLE, Hand
from tests.sim.truth import TOKENS, Node

RELAY_S = 30.0
"""How long to wait for what another process was asked to do; it may be dead."""


class Writing(Hand):
    """The verbs that store blocks."""

    def _plan(self) -> tuple[Node, int, list[int], list[int], bool]:
        """Node, part, pages, valid tokens and retention of a write."""
        node, part = self.node(writable=True), self.part()
        first = node.start + self.random.randint(0, 4)
        pages = list(range(first, first + self.random.choice((1, 2, 4, 9))))
        pages = [page for page in pages if node.floor(part, page) < TOKENS and not node.ended]
        floor = max((node.floor(part, page) for page in pages), default=0)
        valid = [min(TOKENS, floor + self.random.randint(1, 5)) for _ in pages]
        return node, part, pages, valid, self.sim.chance(0.75)

    def _begin(self, node: Node, part: int, pages: list[int], valid: list[int]) -> Any:
        """The records of a write that is about to begin."""
        records = np.empty((len(pages), self.layout(part).block_bytes // 8), np.uint64)
        for i, page in enumerate(pages):
            records[i] = self.truth.fresh()
            node.cell(part, page).begin(int(records[i, 0]), valid[i])
        return records

    def _end(
        self, node: Node, part: int, pages: list[int], valid: list[int], records: Any, held: bool
    ) -> None:
        """A write was acknowledged."""
        held, hurt = held and node.held, self.medium.hurt
        for i, page in enumerate(pages):
            node.cell(part, page).wrote(int(records[i, 0]), valid[i], held, hurt)

    async def swap_out(self, ack: bool = True) -> None:
        node, part, pages, valid, held = self._plan()
        if not pages:
            return
        records = self._begin(node, part, pages, valid)
        await self.handle.swap_out(
            records, pages, valid, node.id, self.layout(part),
            wire.HELD if held else wire.CACHED, wait_s=3.0, ack=ack,
        )  # fmt: skip
        if not ack:
            await self.client.flush()
        self._end(node, part, pages, valid, records, held)

    async def lazy_swap_out(self) -> None:
        """Without waiting for each commit; `flush` then says that all is there."""
        if self.alone:
            await self.swap_out(ack=False)

    async def lease_out(self) -> None:
        """Slots that are leased, written and named by hand, or not at all, or too late: a copy
        that has begun goes on when the lease is over, and its slots are nobody else's."""
        node, part, pages, valid, held = self._plan()
        if not pages:
            return
        ahead = self.random.choice((0, 0, 2))
        async with self.client.reserve(
            self.layout(part), len(pages) + 1, wait_s=1.0, ahead=ahead
        ) as lease:
            records = self._begin(node, part, pages, valid)
            hasty = self.sim.chance(0.3)
            for view, record in zip(lease.blocks, records, strict=False):
                if lease.ended and hasty:
                    return
                half = len(record) // 2
                view.view(np.uint64)[:half] = record[:half]
                await self.pause()
                view.view(np.uint64)[half:] = record[half:]
            if self.sim.chance(0.8):
                retention = wire.HELD if held else wire.CACHED
                await lease.commit(self.handle, node.id, pages, valid, retention)
                self._end(node, part, pages, valid, records, held)

    async def relay(self) -> None:
        """One process of a group leases and writes, another one names what was written."""
        others = self.colleagues()
        node, part, pages, valid, held = self._plan()
        if not pages or not others:
            return
        other = self.random.choice(others)
        async with self.client.reserve(self.layout(part), len(pages), wait_s=1.0) as lease:
            records = self._begin(node, part, pages, valid)
            for view, record in zip(lease.blocks, records, strict=True):
                view.view(np.uint64)[:] = record
            places = np.arange(len(pages), dtype="<u4")
            request = (
                lease.id, self.handle.id, node.id, places.tobytes(),
                np.array(pages, "<u4").tobytes(), np.array(valid, "<u4").tobytes(),
                wire.HELD if held else wire.CACHED, 0, ops.checksums(lease._lease, places),
            )  # fmt: skip
            answer = asyncio.get_running_loop().create_future()

            async def commit() -> None:
                problem: BaseException | None = None
                try:
                    call = ops.call(other.client._core, wire.Done, wire.Commit, *request)
                    await other.client._run(call)
                except TROUBLE as error:
                    problem = error
                self.loop.call_soon(lambda: answer.done() or answer.set_result(problem))

            other.loop.call_soon(lambda: other.loop.create_task(commit()))
            try:
                problem = await asyncio.wait_for(answer, RELAY_S)
            except TimeoutError:
                return  # it was killed
            if problem is None:
                self._end(node, part, pages, valid, records, held)
