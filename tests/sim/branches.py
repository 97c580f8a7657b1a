"""An actor's sessions and branches: open, fork, prune, retention, blobs; and those adrift."""

import numpy as np

from kvtier_client import errors, wire
from tests.sim.clock import Failure
from tests.sim.hand import GONE, LAYOUTS, TROUBLE
from tests.sim.truth import TOKENS, Node, Session
from tests.sim.writing import Writing

PARTS = [[0], [0, 1], [1]]
NODES_MAX = 8


class Branches(Writing):
    """The verbs on sessions and nodes."""

    async def enter(self) -> None:
        """Take a session that nobody works on, or a new one."""
        free = [x for x in self.truth.sessions if x.tenant == self.tenant and not x.busy]
        free = [x for x in free if not x.ended and x.usable]
        new = not free or self.sim.chance(0.15)
        if new:
            session = Session(self.tenant, self.random.randbytes(16), self.random.choice(PARTS))
            session.begin()
            self.truth.sessions.append(session)
        else:
            session = self.random.choice(free)
        session.busy = True
        try:
            if session.adrift:
                await self.revisit(session)
            else:
                await self.open(session)
                self.session = session
                for _ in range(2 * new):
                    await self.swap_out()
                if new and self.sim.chance(0.5):  # most of what a prune drops is a fork's
                    await self.fork()
                    await self.swap_out()
        finally:
            if self.session is None:
                session.busy = False

    async def open(self, session: Session) -> None:
        """Open or resume it."""
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
        session, self.session = self.mine(), None
        session.ended = True
        session.busy = False
        await self.handle.close()
        session.closed = True

    async def revisit(self, session: Session) -> None:
        """Of a session of which only an older state may be there, nothing foreign is read."""
        try:
            handle = await self.client.resume_session(session.token)
        except errors.UnknownSession:
            session.ended = True
            return
        for info in await handle.nodes():
            node = session.nodes.get(info.node)
            for fingerprint, pages in zip(handle.layouts, info.pages, strict=True):
                # an orphan has only the layouts of which blocks were found
                part, which = next(
                    (part, LAYOUTS[number]) for part, number in enumerate(session.parts)
                    if LAYOUTS[number].fingerprint() == fingerprint
                )  # fmt: skip
                for page in pages.tolist() if node is not None else ():
                    records = np.zeros((1, which.block_bytes // 8), np.uint64)
                    try:
                        valid = await handle.swap_in(
                            records, [page], info.node, which, wait_s=self.wait_s
                        )
                    except (*GONE, *TROUBLE, errors.InvalidArgument):
                        continue
                    value = int(records[0, 0])
                    right = node is not None and node.view(part, page).ever(value, int(valid[0]))
                    if not right or not (records == value).all():
                        raise Failure(f"{info.node}/{page} reads {value}, never written there")
        session.ended = True
        await handle.close()

    # ------------------------------------------------------------------ nodes

    async def fork(self) -> None:
        """A branch leaves another one between or inside its blocks."""
        session, parent = self.mine(), self.node(writable=True)
        if len(session.nodes) > NODES_MAX or parent.ended:
            return
        fork = self.random.randint(parent.fork, parent.end + 2 * TOKENS)
        if self.sim.chance(0.4):
            fork = max(fork // TOKENS * TOKENS, parent.fork)
        node = Node(session.next_node, parent, fork, sure=False)
        session.next_node += 1
        session.nodes[node.id] = node
        await self.handle.fork(node.id, parent.id, fork)
        node.sure = True

    async def prune(self) -> None:
        """A branch ends, or only what goes on from its last fork."""
        session, node = self.mine(), self.node()
        forked = any(each.parent is node and each.sure for each in session.nodes.values())
        if forked and not node.ended and self.sim.chance(0.5):
            node.ended, node.sure = True, False
            self._trim(session, node, surely=False)
            await self.handle.prune(node.id, subtree=False)
            node.sure = True
            self._trim(session, node, surely=True)
        elif node.parent is not None:
            gone = session.below(node)
            for each in gone:
                each.sure = False
            self._unneeded(session, node.parent, surely=False)
            await self.handle.prune(node.id)
            for each in gone:
                del session.nodes[each.id]
            self._unneeded(session, node.parent, surely=True)

    def _unneeded(self, session: Session, node: Node, *, surely: bool) -> None:
        """An ended node that is left without children goes with them; one that stays is cut."""
        while node.ended and node.parent is not None:
            children = [x for x in session.nodes.values() if x.parent is node]
            if any(child.sure for child in children):
                break
            if surely and not children and node.sure:
                del session.nodes[node.id]
            node.sure = False
            node = node.parent
        if node.ended:
            self._trim(session, node, surely=surely and node.sure)

    @staticmethod
    def _trim(session: Session, node: Node, *, surely: bool) -> None:
        """What no child shares goes; with an uncertain outcome, it may be there or not."""
        children = [x for x in session.nodes.values() if x.parent is node]
        all_end = max((x.fork for x in children), default=0)
        sure_end = max((x.fork for x in children if x.sure), default=0)
        for (_, page), cell in node.cells.items():
            if page * TOKENS >= sure_end:
                cell.must = False
            if surely and page * TOKENS >= all_end:
                cell.gone = True

    async def set_retention(self) -> None:
        """What is stored of a node may be dropped from now on."""
        node = self.node()
        for cell in node.cells.values():
            cell.must = False
        held, node.held = node.held, False
        await self.handle.set_retention(node.id, wire.CACHED)
        node.held = held

    async def keep(self) -> None:
        """What is stored of a node is kept from now on."""
        node = self.node()
        await self.handle.set_retention(node.id, wire.HELD)
        if not node.held or not node.sure:
            return
        info = next(x for x in await self.handle.nodes() if x.node == node.id)
        for part, (pages, tiers) in enumerate(zip(info.pages, info.tiers, strict=True)):
            for page, tier in zip(pages.tolist(), tiers.tolist(), strict=True):
                if tier in (wire.TIER_DRAM, wire.TIER_NVME):
                    node.cell(part, page).keep()

    def _step(self, node: Node) -> tuple[int, int]:
        """Own pages of a node that are folded together; of a few, so that they meet again."""
        first = -(-node.start // 4) * 4 + 4 * self.random.randrange(3)
        return first, first + 4

    async def fold(self) -> None:
        """Pages of a node are kept for a grace period only."""
        node = self.node()
        first, end = self._step(node)
        cells = [cell for (_, page), cell in node.cells.items() if first <= page < end]
        grace_s = self.random.choice((0.0, 2.0, 30.0, 1e9))

        def let_go() -> None:
            for cell in cells:
                cell.must = False

        if not grace_s:
            let_go()
        elif grace_s < 1e9:  # the daemon's time never runs ahead of the world's
            self.sim.outside.call_later(grace_s, let_go)
        await self.handle.fold(node.id, (first, end), grace_s, kept=4)

    async def unfold(self) -> None:
        """What is still there of pages of a node is kept from now on."""
        node = self.node()
        first, end = self._step(node)
        found = await self.handle.unfold(node.id, (first, end))
        for page in range(first, end):
            parts = range(len(self.mine().parts))
            cells = [node.cells[part, page] for part in parts if (part, page) in node.cells]
            if page in found.gone:
                hurt = [not x.must or x.possible.keys() & self.medium.hurt for x in cells]
                if len(cells) == len(parts) and not any(hurt):
                    raise Failure(f"HELD page {page} of node {node.id} is gone at its unfold")
            elif node.held and node.sure:
                for cell in cells:
                    cell.keep()

    async def set_priority(self) -> None:
        await self.handle.set_priority(self.random.randrange(8))

    # ------------------------------------------------------------------ blobs

    async def put_blob(self) -> None:
        session = self.mine()
        version = max(session.blobs, default=0) + 1
        session.blobs[version] = self.random.randbytes(20)
        await self.handle.put_blob(session.blobs[version], version=version)
        session.blob_sure = version

    async def get_blob(self) -> None:
        session = self.mine()
        sure = session.blob_sure
        version, data = await self.handle.get_blob()
        if data != session.blobs.get(version, b"") or version < sure:
            raise Failure(f"blob {version} {data!r}, not {sure} or later")
