"""The async client: the same calls as `client.py`, awaited on an event loop (uvloop too).

    async with AsyncClient("/run/kvtierd/kvtierd.sock", name="engine") as client:
        session = await client.open_session([layout])
        await session.swap_out(records, pages=range(8), valid=16)
        async with session.acquire(pages=(0, 8)) as lease: ...

Each call is described at its twin in `client.py`. A client belongs to one loop; any number of its
tasks may use it. A cancelled copy ends only when nothing touches its slots any more.
"""

import contextlib
import os
from collections.abc import Callable, Coroutine, Generator, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvtier_client import folds, keyed, ops, swap, wire
from kvtier_client.core import DEFAULT_DEADLINE_S, NodeState, TicketResult, Unfolded
from kvtier_client.errors import TransportError
from kvtier_client.handles import (
    ClientState,
    LeaseState,
    ReadState,
    SessionState,
    TicketState,
    WriteState,
    new_core,
)
from kvtier_client.leases import Lease
from kvtier_client.link import CLOSE_TIMEOUT_S
from kvtier_client.looping import AsyncDriver
from kvtier_client.ops import LayoutRef, SessionCore
from kvtier_client.protocol import Pending
from kvtier_client.records import Records

H = TypeVar("H", bound="_Ending")


class Opening(Generic[H]):
    """A lease being asked for: await it, or enter it with `async with`."""

    def __init__(self, granted: Callable[[], Coroutine[Any, Any, H]]) -> None:
        self._granted = granted
        self._handle: H | None = None

    def __await__(self) -> Generator[Any, None, H]:
        return self._granted().__await__()

    async def __aenter__(self) -> H:
        self._handle = await self._granted()
        return self._handle

    async def __aexit__(self, *problem: object) -> None:
        assert self._handle is not None
        await self._handle.close()


class AsyncClient(ClientState):
    """A connection to kvtierd that survives its restarts."""

    def __init__(
        self,
        socket_path: str | os.PathLike[str],
        name: str = "",
        deadline_s: float = DEFAULT_DEADLINE_S,
        group: bytes | None = None,
        secret: bytes | None = None,
        prefault: bool = False,
        copy_threads: int | None = None,
    ) -> None:
        """Prepare a client; it connects with its first call."""
        core = new_core(socket_path, name, deadline_s, group, secret, prefault, copy_threads)
        super().__init__(core)
        self._driver = AsyncDriver(self._core)
        self._run = self._driver.run

    # ----------------------------------------------------------- connection

    async def connect(self) -> None:
        """Connect now. Errors: ConnectionLost at the deadline; NotOwner for an unlisted uid."""
        await self._run(ops.connect(self._core))

    async def close(self) -> None:
        """Give everything back and close the connection; sessions stay with the daemon."""
        core, driver = self._core, self._driver
        if driver.closed or core.is_child() or not core.greeting.done:
            await driver.close()
            return
        try:
            await self._run(ops.close(core, CLOSE_TIMEOUT_S))
        finally:
            await driver.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if problem is None:
            await self.close()
            return
        with contextlib.suppress(Exception):  # the first problem is the one to see
            await self.close()

    async def flush(self, timeout_s: float = DEFAULT_DEADLINE_S) -> None:
        """Return when all one-way commits are acknowledged: their source pages may be reused."""
        await self._run(ops.flush(self._core, timeout_s))

    # --------------------------------------------------------------- sessions

    async def register_layout(self, layout: wire.Layout) -> bytes:
        """Make a layout known; returns its fingerprint. Errors: LayoutMismatch."""
        return await self._run(ops.register_layout(self._core, layout))

    async def open_session(
        self,
        layouts: Sequence[LayoutRef],
        token: bytes | None = None,
        priority: int = 0,
        name: str = "",
    ) -> "AsyncSession":
        """Create a session with one part per layout, or return the one of this token."""
        opened = await self._run(ops.open_session(self._core, layouts, token, priority, name))
        return AsyncSession(self, opened)

    async def resume_session(self, token: bytes) -> "AsyncSession":
        """Return the session of a token, of this or an earlier process. Errors: UnknownSession."""
        return AsyncSession(self, await self._run(ops.resume_session(self._core, token)))

    def reserve(
        self,
        layout: LayoutRef,
        blocks: int,
        wait_s: float = 0.0,
        ahead: int = 0,
        draw: "AsyncWriteLease | None" = None,
        ttl_s: float = 0.0,
    ) -> "Opening[AsyncWriteLease]":
        """Lease `blocks` free slots for writing, all or none; `async with` it, or await it."""

        async def granted() -> AsyncWriteLease:
            source = None if draw is None else draw._lease
            op = ops.reserve(self._core, layout, blocks, wait_s, ahead, source, ttl_s)
            return AsyncWriteLease(self, await self._run(op))

        return Opening(granted)

    # ------------------------------------------------------------------ keyed

    async def lookup(
        self, keys: bytes | Sequence[bytes], layouts: LayoutRef | Sequence[LayoutRef]
    ) -> list[int]:
        """How many leading keys are stored, for each layout. Takes no lease."""
        return await self._run(keyed.lookup(self._core, keys, layouts))

    async def put_keys(
        self,
        layout: LayoutRef,
        keys: bytes | Sequence[bytes],
        records: Records,
        pages: Any = None,
        valid: Any = None,
        wait_s: float = 0.0,
    ) -> int:
        """Store the blocks of those keys that are not stored yet; returns how many were."""
        op = keyed.put_keys(self._core, layout, keys, records, pages, valid, wait_s)
        return await self._run(op)

    async def get_keys(
        self,
        layout: LayoutRef,
        keys: bytes | Sequence[bytes],
        records: Records,
        wait_s: float = 5.0,
    ) -> int:
        """Copy the leading stored blocks into records; returns how many. A miss is no error."""
        return await self._run(keyed.get_keys(self._core, layout, keys, records, wait_s))

    async def remove(self, layout: LayoutRef, keys: bytes | Sequence[bytes]) -> int:
        """Drop keyed blocks that nobody holds or reads; returns how many."""
        return await self._run(keyed.remove(self._core, layout, keys))


class AsyncSession(SessionState):
    """One request's KV in the daemon: a tree of nodes that only its end frees."""

    def __init__(self, client: AsyncClient, core: SessionCore) -> None:
        super().__init__(core)
        self._client = client
        self._run = client._driver.run

    async def nodes(self) -> list[NodeState]:
        """Its nodes, and which pages are stored of each."""
        return await self._run(ops.describe(self._session))

    async def fork(self, node: int, parent: int, fork_tokens: int) -> None:
        """Add node `node` (never used before) that leaves `parent` after `fork_tokens`."""
        await self._run(ops.simple(self._session, wire.Fork, node, parent, fork_tokens))

    async def prune(self, node: int, subtree: bool = True) -> int:
        """End a node, with its subtree or only past its children; returns dropped blocks."""
        return await self._run(ops.simple(self._session, wire.Prune, node, subtree))

    async def close(self) -> int:
        """End the session and drop all it owns; returns dropped blocks. May be repeated."""
        return await self._run(ops.close_session(self._session))

    async def set_priority(self, priority: int) -> None:
        """Protect its blocks more (or less) from demotion."""
        await self._run(ops.set_priority(self._session, priority))

    async def set_retention(self, node: int | None, retention: int) -> int:
        """Make the blocks of a node (None: of all) HELD or CACHED; returns how many."""
        place = wire.NO_NODE if node is None else node
        return await self._run(ops.simple(self._session, wire.SetRetention, place, retention))

    async def fold(
        self,
        node: int,
        pages: tuple[int, int],
        grace_s: float,
        *,
        kept: int = 0,
        ack: bool = True,
    ) -> int:
        """Let go of folded pages `(first, last)` of a branch after `grace_s`."""
        return await self._run(folds.fold(self._session, node, pages, grace_s, kept, ack))

    async def unfold(self, node: int, pages: tuple[int, int]) -> Unfolded:
        """Keep pages `(first, last)` of a branch again, and start to bring them to DRAM."""
        return await self._run(folds.unfold(self._session, node, pages))

    async def put_blob(self, data: bytes, node: int | None = None, *, version: int) -> None:
        """Replace the blob of the session or a node; a version not above the stored is a repeat."""
        await self._run(ops.put_blob(self._session, data, node, version))

    async def get_blob(self, node: int | None = None) -> tuple[int, bytes]:
        """Version and bytes of the blob; version 0 when there is none."""
        return await self._run(ops.get_blob(self._session, node))

    def acquire(
        self,
        pages: tuple[int, int],
        node: int = 0,
        layout: LayoutRef | None = None,
        wait_s: float = 5.0,
        ttl_s: float = 0.0,
    ) -> "Opening[AsyncReadLease]":
        """Lease a leading window of pages for reading; `async with` it, or await it."""

        async def granted() -> AsyncReadLease:
            op = ops.acquire(self._session, pages, node, layout, wait_s, ttl_s)
            return AsyncReadLease(self._client, await self._run(op))

        return Opening(granted)

    async def swap_out(
        self,
        records: Records,
        pages: Any,
        valid: Any,
        node: int = 0,
        layout: LayoutRef | None = None,
        retention: int = wire.HELD,
        wait_s: float = 30.0,
        ack: bool = True,
        draw: "AsyncWriteLease | None" = None,
    ) -> None:
        """Store records as pages of a node, in windows."""
        source = None if draw is None else draw._lease
        op = swap.swap_out(
            self._session, records, pages, valid, node, layout, retention, wait_s, ack, source
        )
        await self._run(op)

    async def swap_in(
        self,
        records: Records,
        pages: Any,
        node: int = 0,
        layout: LayoutRef | None = None,
        wait_s: float = 30.0,
    ) -> NDArray[np.uint32]:
        """Copy pages of a branch into records, in windows; returns each block's valid tokens."""
        return await self._run(swap.swap_in(self._session, records, pages, node, layout, wait_s))

    async def prefetch(
        self,
        pages: tuple[int, int],
        node: int = 0,
        layout: LayoutRef | None = None,
        priority: int = 0,
        deadline_s: float = 1.0,
    ) -> "AsyncTicket":
        """Ask for pages to be in DRAM soon; it leaves demand loads their room."""
        op = ops.prefetch(self._session, pages, node, layout, priority, deadline_s)
        number, ticket = await self._run(op)
        return AsyncTicket(self._client, number, ticket)

    async def hold(self, layout: LayoutRef, keys: bytes | Sequence[bytes]) -> int:
        """Keep the leading stored keys until `unhold` or the session's end; returns how many."""
        return await self._run(keyed.hold(self._session, wire.Hold, layout, keys))

    async def unhold(self, layout: LayoutRef, keys: bytes | Sequence[bytes]) -> int:
        """Let go of held keys; returns how many."""
        return await self._run(keyed.hold(self._session, wire.Unhold, layout, keys))


class _Ending(LeaseState):
    """What write and read leases have in common."""

    def __init__(self, client: AsyncClient, lease: Lease) -> None:
        super().__init__(lease)
        self._client = client
        self._run = client._driver.run

    async def renew(self, ttl_s: float = 0.0) -> None:
        """Live `ttl_s` more from now on (0: as long as at first). Errors: LeaseExpired."""
        await self._run(ops.renew(self._lease, ttl_s))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *problem: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End it; may be repeated. Nothing of this process may touch its slots any more."""
        with contextlib.suppress(TransportError):  # a lost lease is given back with the connection
            await self._run(ops.end_lease(self._lease))


class AsyncWriteLease(_Ending, WriteState):
    """Slots to write; `commit` names them, the end of the with-statement gives back the rest."""

    async def commit(
        self,
        session: AsyncSession,
        node: int,
        pages: Any,
        valid: Any,
        retention: int = wire.HELD,
        oneway: bool = False,
        index: Any = None,
    ) -> None:
        """Publish slots as pages of a node: those of `index`, else the next unnamed ones."""
        op = ops.commit(self._lease, session._session, node, pages, valid, retention, oneway, index)
        await self._run(op)


class AsyncReadLease(_Ending, ReadState):
    """Slots to read, until the end of the with-statement."""


class AsyncTicket(TicketState):
    """A prefetch under way."""

    def __init__(self, client: AsyncClient, number: int, pending: Pending) -> None:
        super().__init__(number, pending)
        self._client = client

    async def wait(self, timeout_s: float = DEFAULT_DEADLINE_S) -> TicketResult:
        """Wait until it has ended; after a restart of the daemon it ends with nothing loaded."""
        client = self._client
        ready = await client._run(ops.ticket_wait(client._core, self._pending, timeout_s))
        return TicketResult(ready.loaded, ready.failed)

    async def cancel(self) -> None:
        """Stop it; may be repeated, and after its end."""
        await self._client._run(ops.ticket_cancel(self._client._core, self._number))
