"""How an actor reads blocks, and how the answers are held to the truth."""

from typing import Any

import numpy as np

from kvtier_client import errors
from tests.sim.clock import Failure
from tests.sim.hand import GONE, Hand
from tests.sim.truth import Node, View

Window = tuple[Node, int, list[int]]


class Reading(Hand):
    """The verbs that read blocks."""

    def _window(self) -> Window | None:
        """Node, part and neighbouring pages that may be stored."""
        node, part = self.node(), self.part()
        known = node.known(part)
        if not known:
            return None
        first = self.random.randrange(len(known))
        if node.start in known and self.sim.chance(0.3):
            first = known.index(node.start)  # where a fork may divide a block
        last = first + 1
        longest = self.random.choice((1, 2, 5, 12))
        while last < len(known) and last - first < longest and known[last] == known[last - 1] + 1:
            last += 1
        return node, part, known[first:last]

    async def swap_in(self) -> None:
        window = self._window()
        if window is not None:
            await self.read(*window)

    async def read(self, node: Node, part: int, pages: list[int]) -> None:
        """Read pages back, and hold the answer to the truth."""
        which = self.layout(part)
        records = np.zeros((len(pages), which.block_bytes // 8), np.uint64)
        span = (pages[0], pages[-1] + 1)
        try:
            valid = await self.handle.swap_in(records, span, node.id, which, wait_s=self.wait_s)
        except (*GONE, errors.InvalidArgument) as error:
            self._missing(node, part, pages, error)
            return
        for i, page in enumerate(pages):
            self._look(node.view(part, page), records[i], int(valid[i]), f"{node.id}/{page}")

    def _look(self, view: View, record: Any, valid: int, name: str) -> None:
        value = int(record[0])
        if not (record == value).all() or not view.right(value, valid):
            cells = [(cell.possible, cell.older, cell.must, cap) for cell, cap in view.cells]
            raise Failure(
                f"{name} reads {sorted(set(record.tolist()))} of {valid} tokens; it may be "
                f"(possible, older, HELD, shared) {cells}"
            )

    def _missing(self, node: Node, part: int, pages: list[int], why: errors.KvtierError) -> None:
        """Blocks are said to be gone: none of them may be one that the media still have."""
        named = [page for page in why.pages if page in pages]
        views = [node.view(part, page) for page in named or pages]
        excused = [not view.must or view.lost(self.medium.hurt) for view in views]
        if not (all(excused) if named else any(excused)):
            raise Failure(f"HELD pages {named or pages} of node {node.id} are lost: {why!r}")

    async def lease_in(self) -> None:
        """What is leased for reading stays as it is until it is released, however late."""
        window = self._window()
        if window is None:
            return
        node, part, pages = window
        span = (pages[0], pages[-1] + 1)
        try:
            async with self.handle.acquire(span, node.id, self.layout(part), wait_s=2.0) as lease:
                seen = None
                for _ in range(3):
                    blocks = [block.view(np.uint64) for block in lease.blocks]
                    for page, block, valid in zip(pages, blocks, lease.valid, strict=False):
                        if seen is None:
                            self._look(node.view(part, page), block, int(valid), "a lease")
                    now = [block.tolist() for block in blocks]
                    if seen is not None and now != seen:
                        raise Failure(f"bytes changed under a reader: {seen} became {now}")
                    seen = now
                    await self.pause()
        except (*GONE, errors.InvalidArgument) as error:
            self._missing(node, part, pages, error)

    async def prefetch(self) -> None:
        window = self._window()
        if window is None:
            return
        node, part, pages = window
        try:
            ticket = await self.handle.prefetch(
                (pages[0], pages[-1] + 1), node.id, self.layout(part)
            )
            if self.sim.chance(0.5):
                await ticket.wait(10.0)
            elif self.sim.chance(0.5):
                await ticket.cancel()
        except (*GONE, errors.InvalidArgument):
            return
