"""What a client does: random operations of the real asyncio client, held to the truth."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from kvtier_client import errors, wire
from kvtier_client.aio import AsyncClient, AsyncSession
from tests.model.harness import layout
from tests.sim.clock import Failure, Sim
from tests.sim.files import Medium
from tests.sim.truth import TOKENS, Cell, Node, Session, Truth

LAYOUTS = [
    layout(1, tokens=TOKENS), layout(2, group=1, tokens=TOKENS),
    layout(1, name="keyed", tokens=TOKENS),
]  # fmt: skip
KEYED = LAYOUTS[2]
PARTS = [[0], [0, 1], [1]]
KEYS = [bytes([97 + i]) * 16 for i in range(8)]
GONE = (errors.BlockLost, errors.ChecksumMismatch)
TROUBLE = (
    errors.TransportError, errors.CapacityError, errors.LeaseExpired, errors.QuotaExceeded,
    errors.ShuttingDown,
)  # fmt: skip
"""What may always happen here: the daemon is away, there is no room, it took too long."""


class Actor:
    """One task of a client, with a session of its own at a time."""

    def __init__(
        self, sim: Sim, truth: Truth, medium: Medium, client: AsyncClient, tenant: str, alone: bool
    ) -> None:
        self.sim, self.truth, self.medium = sim, truth, medium
        self.client, self.tenant, self.alone = client, tenant, alone
        self.random = sim.random
        self.session: Session | None = None
        self.handle: AsyncSession
        self.stopping = False
        self.done = 0
        """Operations that have ended, whichever way."""
        self.crowded_out = 0
        """Blocks that could not be read at the end, as there was no DRAM for their layout."""
        self._verbs: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (10, self.swap_out), (4, self.lazy_swap_out), (10, self.swap_in), (4, self.lease_out),
            (4, self.lease_in), (2, self.prefetch), (3, self.fork), (1, self.prune),
            (2, self.set_retention), (1, self.set_priority), (2, self.put_blob), (2, self.get_blob),
            (3, self.put_keys), (3, self.get_keys), (1, self.hold), (1, self.unhold),
            (1, self.remove), (1, self.close), (2, self.cancelled), (1, self.leave),
        ]  # fmt: skip

    async def run(self) -> None:
        """Work until told to stop."""
        weights = [weight for weight, _ in self._verbs]
        while not self.stopping:
            try:
                if self.session is None:
                    await self.enter()
                else:
                    [(_, verb)] = self.random.choices(self._verbs, weights)
                    await verb()
            except TROUBLE:
                pass
            self.done += 1
            await asyncio.sleep(self.random.choice((0, 0, 0, 0.005, 0.1)))

    # ------------------------------------------------------------- sessions

    async def enter(self) -> None:
        """Take a session that nobody works on, or a new one."""
        free = [x for x in self.truth.sessions if x.tenant == self.tenant and not x.busy]
        free = [x for x in free if not x.ended]
        if len(free) < 2 or self.sim.chance(0.3):
            session = Session(self.tenant, self.random.randbytes(16), self.random.choice(PARTS))
            session.begin()
            self.truth.sessions.append(session)
        else:
            session = self.random.choice(free)
        session.busy = True
        try:
            await self._open(session)
        except BaseException:
            session.busy = False
            raise
        self.session = session

    async def _open(self, session: Session) -> None:
        if session.opened:
            self.handle = await self.client.resume_session(session.token)
        else:
            layouts = [LAYOUTS[part] for part in session.parts]
            priority = self.random.randrange(4)
            self.handle = await self.client.open_session(layouts, session.token, priority)
        session.opened = True

    async def leave(self) -> None:
        """Let somebody else go on with the session."""
        if self.session is not None:
            await self.client.flush()
            self.session.busy = False
            self.session = None

    async def close(self) -> None:
        session, self.session = self._mine(), None
        session.ended = True
        session.busy = False
        await self.handle.close()

    def _mine(self) -> Session:
        assert self.session is not None
        return self.session

    def _node(self) -> Node:
        return self.random.choice([x for x in self._mine().nodes.values() if x.sure])

    async def fork(self) -> None:
        session, parent = self._mine(), self._node()
        if len(session.nodes) > 6:
            return
        start = self.random.randint(parent.start, parent.start + 6)
        node = Node(session.next_node, parent, start, sure=False)
        session.next_node += 1
        session.nodes[node.id] = node
        await self.handle.fork(node.id, parent.id, start * TOKENS)
        node.sure = True

    async def prune(self) -> None:
        session = self._mine()
        parents = {node.parent for node in session.nodes.values()}
        leaves = [x for x in session.nodes.values() if x.id and x.sure and x not in parents]
        if leaves:
            node = self.random.choice(leaves)
            node.sure = False
            await self.handle.prune(node.id)
            del session.nodes[node.id]

    async def set_retention(self) -> None:
        node = self._node()
        for cell in node.cells.values():
            cell.must = False
        held, node.held = node.held, False
        await self.handle.set_retention(node.id, wire.CACHED)
        node.held = held

    async def set_priority(self) -> None:
        await self.handle.set_priority(self.random.randrange(8))

    async def put_blob(self) -> None:
        session = self._mine()
        version = max(session.blobs, default=0) + 1
        session.blobs[version] = self.random.randbytes(20)
        await self.handle.put_blob(session.blobs[version], version=version)
        session.blob_sure = version

    async def get_blob(self) -> None:
        session = self._mine()
        version, data = await self.handle.get_blob()
        if data != session.blobs.get(version, b"") or version < session.blob_sure:
            raise Failure(f"blob {version} {data!r}, not {session.blob_sure} or later")

    # --------------------------------------------------------------- writing

    def _plan(self) -> tuple[Node, int, list[int], list[int], bool]:
        """Node, part, pages, valid tokens and retention of a write."""
        node, part = self._node(), self.random.randrange(len(self._mine().parts))
        first = node.start + self.random.randint(0, 8)
        pages = list(range(first, first + self.random.choice((1, 1, 2, 4, 9))))
        floor = max(node.cell(part, page).longest for page in pages)
        pages = [page for page in pages if node.cell(part, page).longest < TOKENS]
        valid = [min(TOKENS, floor + self.random.randint(1, 5)) for _ in pages]
        return node, part, pages, valid, self.sim.chance(0.75)

    def _begin(self, node: Node, part: int, pages: list[int], valid: list[int]) -> Any:
        """The records of a write that is about to begin."""
        which = LAYOUTS[self._mine().parts[part]]
        records = np.empty((len(pages), which.block_bytes // 8), np.uint64)
        for i, page in enumerate(pages):
            records[i] = self.truth.fresh()
            node.cell(part, page).begin(int(records[i, 0]), valid[i])
        return records

    def _end(
        self, node: Node, part: int, pages: list[int], valid: list[int], records: Any, held: bool
    ) -> None:
        """A write was acknowledged."""
        for i, page in enumerate(pages):
            node.cell(part, page).wrote(int(records[i, 0]), valid[i], held and node.held)

    async def swap_out(self, ack: bool = True) -> None:
        node, part, pages, valid, held = self._plan()
        if not pages:
            return
        records = self._begin(node, part, pages, valid)
        await self.handle.swap_out(
            records, pages, valid, node.id, LAYOUTS[self._mine().parts[part]],
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
        """Slots that are leased, written and named by hand, or not at all, or too late."""
        node, part, pages, valid, held = self._plan()
        if not pages:
            return
        which = LAYOUTS[self._mine().parts[part]]
        async with self.client.reserve(which, len(pages) + 1, wait_s=1.0) as lease:
            records = self._begin(node, part, pages, valid)
            for view, record in zip(lease.blocks, records, strict=False):
                await asyncio.sleep(self.random.choice((0, 0.01, 0.3, 2.0)))
                if lease.ended:
                    return
                view.view(np.uint64)[:] = record
            if self.sim.chance(0.8):
                retention = wire.HELD if held else wire.CACHED
                await lease.commit(self.handle, node.id, pages, valid, retention)
                self._end(node, part, pages, valid, records, held)

    # --------------------------------------------------------------- reading

    def _window(self) -> tuple[Node, int, list[int]] | None:
        node, part = self._node(), self.random.randrange(len(self._mine().parts))
        known = node.known(part)
        if not known:
            return None
        first = self.random.randrange(len(known))
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
        which = LAYOUTS[self._mine().parts[part]]
        records = np.zeros((len(pages), which.block_bytes // 8), np.uint64)
        span = (pages[0], pages[-1] + 1)
        try:
            valid = await self.handle.swap_in(records, span, node.id, which, wait_s=3.0)
        except GONE as error:
            self._missing(node, part, list(error.pages) or pages, error)
            return
        except errors.InvalidArgument as error:
            if all(node.cell(part, page).must for page in pages):
                self._missing(node, part, pages, error)
            return
        for i, page in enumerate(pages):
            self._look(node.cell(part, page), records[i], int(valid[i]), f"{node.id}/{page}")

    def _look(self, cell: Cell, record: Any, valid: int, name: str) -> None:
        value = int(record[0])
        if not (record == value).all() or not cell.right(value, valid):
            raise Failure(
                f"{name} reads {sorted(set(record.tolist()))} of {valid} tokens, not one of "
                f"{cell.possible} (older {cell.older}, HELD {cell.must})"
            )

    def _missing(self, node: Node, part: int, pages: list[int], why: Exception) -> None:
        """Blocks are said to be gone: none of them may be one that the media still have."""
        for page in pages:
            cell = node.cell(part, page)
            if not cell.must or cell.possible.keys() & self.medium.hurt:
                cell.must = False
                return
        raise Failure(f"HELD pages {pages} of node {node.id} are lost: {why!r}")

    async def lease_in(self) -> None:
        """What is leased for reading stays as it is until it is released."""
        window = self._window()
        if window is None:
            return
        node, part, pages = window
        which = LAYOUTS[self._mine().parts[part]]
        span = (pages[0], pages[-1] + 1)
        try:
            async with self.handle.acquire(span, node.id, which, wait_s=2.0) as lease:
                seen = None
                for _ in range(3):
                    if lease.ended:
                        return
                    for i, block in enumerate(lease.blocks):
                        cell = node.cell(part, pages[i])
                        self._look(cell, block.view(np.uint64), int(lease.valid[i]), "a lease")
                    now = [int(block.view(np.uint64)[0]) for block in lease.blocks]
                    if seen is not None and now != seen:
                        raise Failure(f"bytes changed under a reader: {seen} became {now}")
                    seen = now
                    await asyncio.sleep(self.random.choice((0.01, 0.3, 2.0)))
        except GONE as error:
            self._missing(node, part, list(error.pages) or pages, error)
        except errors.InvalidArgument as error:
            if all(node.cell(part, page).must for page in pages):
                self._missing(node, part, pages, error)

    async def prefetch(self) -> None:
        window = self._window()
        if window is None:
            return
        node, part, pages = window
        which = LAYOUTS[self._mine().parts[part]]
        try:
            ticket = await self.handle.prefetch((pages[0], pages[-1] + 1), node.id, which)
            if self.sim.chance(0.5):
                await ticket.wait(10.0)
            elif self.sim.chance(0.5):
                await ticket.cancel()
        except (*GONE, errors.InvalidArgument):
            return

    async def cancelled(self) -> None:
        """Another operation that its caller gives up."""
        verb = self.random.choice((self.swap_out, self.swap_in, self.lease_out, self.lease_in))
        task = asyncio.get_running_loop().create_task(verb())
        await asyncio.sleep(self.random.choice((0, 0.0005, 0.003, 0.05)))
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is not None:
            raise task.exception()  # type: ignore[misc]

    # ------------------------------------------------------------------ keys

    def _keys(self) -> list[bytes]:
        first = self.random.randrange(len(KEYS))
        return KEYS[first : first + self.random.randint(1, 4)]

    async def put_keys(self) -> None:
        keys = self._keys()
        records = np.empty((len(keys), KEYED.block_bytes // 8), np.uint64)
        for i, key in enumerate(keys):
            records[i] = self.truth.fresh()
            self.truth.keys.setdefault((self.tenant, key), set()).add(int(records[i, 0]))
        await self.client.put_keys(KEYED, keys, records, wait_s=1.0)

    async def get_keys(self) -> None:
        keys = self._keys()
        if self._mine().holds and self.sim.chance(0.5):
            keys = sorted(self._mine().holds)
        await self.read_keys(keys)

    async def read_keys(self, keys: list[bytes]) -> None:
        """Read keyed blocks back; those that the session holds must be there."""
        records = np.zeros((len(keys), KEYED.block_bytes // 8), np.uint64)
        held = set(self._mine().holds)
        hits = await self.client.get_keys(KEYED, keys, records, wait_s=3.0)
        for key, record in zip(keys[:hits], records, strict=False):
            possible = self.truth.keys.get((self.tenant, key), set())
            if int(record[0]) not in possible or not (record == record[0]).all():
                raise Failure(f"key {key!r} reads {record[0]}, not one of {possible}")
        if hits < len(keys) and keys[hits] in held & self._mine().holds:
            possible = self.truth.keys.get((self.tenant, keys[hits]), set())
            if not possible & self.medium.hurt:
                raise Failure(f"key {keys[hits]!r} is held and gone")

    async def hold(self) -> None:
        keys = self._keys()
        count = await self.handle.hold(KEYED, keys)
        self._mine().holds |= set(keys[:count])

    async def unhold(self) -> None:
        self._mine().holds.clear()
        await self.handle.unhold(KEYED, KEYS)

    async def remove(self) -> None:
        await self.client.remove(KEYED, self._keys())

    # ------------------------------------------------------------------ ends

    async def verify(self, session: Session) -> None:
        """Read all of a session that must be there."""
        self.session = session
        await self._open(session)
        for node in [x for x in session.nodes.values() if x.sure]:
            for part in range(len(session.parts)):
                for (p, page), cell in list(node.cells.items()):
                    if p == part and cell.must:
                        await self._if_room(self.read(node, part, [page]))
        for key in sorted(session.holds):
            await self._if_room(self.read_keys([key]))
        await self.get_blob()
        self.session = None

    async def _if_room(self, read: Awaitable[None]) -> None:
        """Read, if other layouts' HELD blocks leave this one a place in DRAM."""
        self.done += 1
        try:
            await read
        except errors.CapacityError:
            self.crowded_out += 1
