"""The sync client: sessions, leases and keyed blocks over a blocking socket.

    with Client("/run/kvtierd/kvtierd.sock", name="worker") as client:
        session = client.open_session([layout])
        session.swap_out(records, pages=range(8), valid=16)
        session.swap_in(records, pages=range(8))

Every call reconnects by itself, repeats what was not answered, and ends at its deadline. A client
may be used by many threads. After a fork it belongs to the parent alone.
"""

import contextlib
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvtier_client import folds, keyed, ops, swap, wire
from kvtier_client.blocking import Driver
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
from kvtier_client.ops import LayoutRef, SessionCore
from kvtier_client.protocol import Pending
from kvtier_client.records import Records
from kvtier_client.single import single_of


class Client(ClientState):
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
        """Prepare a client; it connects with its first call.

        `deadline_s` bounds every wait for the daemon (not a whole copy, which may be many waits).
        Clients that give the same `group` and `secret` (16 bytes each) share leases. `prefault`
        enters the arena into the page table at once, so that first copies do not fault. Copies of
        a few MiB and more are shared by `copy_threads` threads, the calling one among them; usually
        by one for each core that the process may use, at most 4.
        """
        core = new_core(socket_path, name, deadline_s, group, secret, prefault, copy_threads)
        super().__init__(core)
        self._driver = Driver(self._core)
        self._run = self._driver.run

    # ----------------------------------------------------------- connection

    def connect(self) -> None:
        """Connect now. Errors: ConnectionLost at the deadline; NotOwner for an unlisted uid."""
        self._run(ops.connect(self._core))

    def close(self) -> None:
        """Give everything back and close the connection; sessions stay with the daemon.

        Copies of other threads end before their slots go back; their calls raise ConnectionLost.
        With something to give back it waits up to `link.CLOSE_TIMEOUT_S` for a daemon that is
        away; what could not be given back by then goes with the process.
        Errors: the first failure of a one-way commit that no `flush` has told; ConnectionLost when
        some were not acknowledged in time, so that their blocks may not be stored.
        """
        core, driver = self._core, self._driver
        if driver.closed.is_set() or core.is_child() or not core.greeting.done:
            driver.close()
            return
        try:
            self._run(ops.close(core, CLOSE_TIMEOUT_S))
        finally:
            driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if problem is None:
            self.close()
            return
        with contextlib.suppress(Exception):  # the first problem is the one to see
            self.close()

    def flush(self, timeout_s: float = DEFAULT_DEADLINE_S) -> None:
        """Return when all one-way commits are acknowledged: their source pages may be reused.

        Errors: the first failure of a one-way commit since the last flush; Timeout.
        """
        self._run(ops.flush(self._core, timeout_s))

    # --------------------------------------------------------------- sessions

    def register_layout(self, layout: wire.Layout) -> bytes:
        """Make a layout known; returns its fingerprint. Errors: LayoutMismatch."""
        return self._run(ops.register_layout(self._core, layout))

    def open_session(
        self,
        layouts: Sequence[LayoutRef],
        token: bytes | None = None,
        priority: int = 0,
        name: str = "",
    ) -> "Session":
        """Create a session with one part per layout, or return the one of this token."""
        opened = self._run(ops.open_session(self._core, layouts, token, priority, name))
        return Session(self, opened)

    def resume_session(self, token: bytes) -> "Session":
        """Return the session of a token, of this or an earlier process. Errors: UnknownSession."""
        return Session(self, self._run(ops.resume_session(self._core, token)))

    def reserve(
        self,
        layout: LayoutRef,
        blocks: int,
        wait_s: float = 0.0,
        ahead: int = 0,
        draw: "WriteLease | None" = None,
        ttl_s: float = 0.0,
    ) -> "WriteLease":
        """Lease `blocks` free slots for writing, all or none.

        `ahead` promises that many more, which a later `reserve` takes with `draw=` this lease.
        Leases: ended by the with-statement, which gives back what was not committed.
        Errors: ArenaFull or SpillFull when `wait_s` did not help; QuotaExceeded.
        """
        source = None if draw is None else draw._lease
        lease = self._run(ops.reserve(self._core, layout, blocks, wait_s, ahead, source, ttl_s))
        return WriteLease(self, lease)

    # ------------------------------------------------------------------ keyed

    def lookup(
        self, keys: bytes | Sequence[bytes], layouts: LayoutRef | Sequence[LayoutRef]
    ) -> list[int]:
        """How many leading keys are stored, for each layout. Takes no lease."""
        return self._run(keyed.lookup(self._core, keys, layouts))

    def put_keys(
        self,
        layout: LayoutRef,
        keys: bytes | Sequence[bytes],
        records: Records,
        pages: Any = None,
        valid: Any = None,
        wait_s: float = 0.0,
    ) -> int:
        """Store the blocks of those keys that are not stored yet; returns how many were.

        `pages` is each key's place in its prefix (default 0, 1, …), so that tails are dropped
        before heads. Records may be a callable as for `swap_out`; it is asked for what is stored.
        Errors: ArenaFull; QuotaExceeded.
        """
        return self._run(keyed.put_keys(self._core, layout, keys, records, pages, valid, wait_s))

    def get_keys(
        self,
        layout: LayoutRef,
        keys: bytes | Sequence[bytes],
        records: Records,
        wait_s: float = 5.0,
    ) -> int:
        """Copy the leading stored blocks into records; returns how many. A miss is no error."""
        return self._run(keyed.get_keys(self._core, layout, keys, records, wait_s))

    def remove(self, layout: LayoutRef, keys: bytes | Sequence[bytes]) -> int:
        """Drop keyed blocks that nobody holds or reads; returns how many."""
        return self._run(keyed.remove(self._core, layout, keys))


class Session(SessionState):
    """One request's KV in the daemon: a tree of nodes that only its end frees."""

    def __init__(self, client: Client, core: SessionCore) -> None:
        super().__init__(core)
        self._client = client
        self._run = client._driver.run

    def nodes(self) -> list[NodeState]:
        """Its nodes, and which pages are stored of each."""
        return self._run(ops.describe(self._session))

    def fork(self, node: int, parent: int, fork_tokens: int) -> None:
        """Add node `node` (never used before) that leaves `parent` after `fork_tokens`."""
        self._run(ops.simple(self._session, wire.Fork, node, parent, fork_tokens))

    def prune(self, node: int, subtree: bool = True) -> int:
        """End a node, with its subtree or only past its children; returns dropped blocks."""
        return self._run(ops.simple(self._session, wire.Prune, node, subtree))

    def close(self) -> int:
        """End the session and drop all it owns; returns dropped blocks. May be repeated."""
        return self._run(ops.close_session(self._session))

    def set_priority(self, priority: int) -> None:
        """Protect its blocks more (or less) from demotion."""
        self._run(ops.set_priority(self._session, priority))

    def set_retention(self, node: int | None, retention: int) -> int:
        """Make the blocks of a node (None: of all) HELD or CACHED; returns how many."""
        place = wire.NO_NODE if node is None else node
        return self._run(ops.simple(self._session, wire.SetRetention, place, retention))

    def fold(
        self,
        node: int,
        pages: tuple[int, int],
        grace_s: float,
        *,
        kept: int = 0,
        ack: bool = True,
    ) -> int:
        """Let go of folded pages `(first, last)` of a branch (`last` excluded) after `grace_s`.

        They are HELD for `grace_s` of the daemon's running time (0: not at all, `math.inf`: until
        they are unfolded or their session ends), and may be dropped from then on. While that time
        runs, the same call again changes nothing. `kept` says how many entries of them the engine
        keeps, for who looks at the tree. Pages that were folded together are named together.
        `ack=False` waits for no answer: `flush()` raises a failure, and what a crash forgets stays
        HELD. Returns how many blocks they have (0 without `ack`).
        Errors: UnknownBranch; InvalidArgument; SpillFull when they were CACHED and cannot be HELD.
        """
        return self._run(folds.fold(self._session, node, pages, grace_s, kept, ack))

    def unfold(self, node: int, pages: tuple[int, int]) -> Unfolded:
        """Keep pages `(first, last)` of a branch again, and start to bring them to DRAM.

        Within the grace period of their fold none is gone; after it that is a result, no error.
        What is not gone is HELD from now on. May be repeated.
        Errors: UnknownBranch; InvalidArgument; SpillFull, with nothing changed, when what is there
        cannot be HELD.
        """
        return self._run(folds.unfold(self._session, node, pages))

    def put_blob(self, data: bytes, node: int | None = None, *, version: int) -> None:
        """Replace the blob of the session or a node; a version not above the stored is a repeat."""
        self._run(ops.put_blob(self._session, data, node, version))

    def get_blob(self, node: int | None = None) -> tuple[int, bytes]:
        """Version and bytes of the blob; version 0 when there is none."""
        return self._run(ops.get_blob(self._session, node))

    def acquire(
        self,
        pages: tuple[int, int],
        node: int = 0,
        layout: LayoutRef | None = None,
        wait_s: float = 5.0,
        ttl_s: float = 0.0,
    ) -> "ReadLease":
        """Lease a leading window of pages `(first, last)` (`last` excluded) for reading.

        Leases: the window may be shorter than what was asked; ended by the with-statement.
        Errors: BlockLost for a lost first page; InvalidArgument for one never written; ArenaFull.
        """
        op = ops.acquire(self._session, pages, node, layout, wait_s, ttl_s)
        return ReadLease(self._client, self._run(op))

    def swap_out(
        self,
        records: Records,
        pages: Any,
        valid: Any,
        node: int = 0,
        layout: LayoutRef | None = None,
        retention: int = wire.HELD,
        wait_s: float = 30.0,
        ack: bool = True,
        draw: "WriteLease | None" = None,
    ) -> None:
        """Store records as pages of a node, in windows.

        `records` is an array or tensor [n, ...], a sequence of n buffers, or `fill(views, i, j)`
        that writes blocks i..j into the views it is given. `pages` is `(first, last)`, one number
        or a sequence; `valid` one number of tokens or one for each block.

        Durability: with `ack` it returns when the daemon has committed every block; the source
        pages may then be reused. `ack=False` returns when the bytes are in the arena and the
        commits are on their way (those of a few blocks wait up to half a second for company): a
        daemon killed now may still need the client to repeat them, which it does by itself, so
        keep the records only if you could not bear a refusal, and call `flush()` before you rely
        on the blocks; it raises what a commit met.
        Errors: ArenaFull or SpillFull after `wait_s`, with earlier windows stored; repeating the
        call is harmless.
        """
        if type(pages) is int and type(valid) is int and not ack and draw is None:
            one = single_of(self._session, layout, node, pages, records)
            if one is not None and self._client._driver.out_now(one, valid, retention):
                return
        source = None if draw is None else draw._lease
        op = swap.swap_out(
            self._session, records, pages, valid, node, layout, retention, wait_s, ack, source
        )
        self._run(op)

    def swap_in(
        self,
        records: Records,
        pages: Any,
        node: int = 0,
        layout: LayoutRef | None = None,
        wait_s: float = 30.0,
    ) -> NDArray[np.uint32]:
        """Copy pages of a branch into records, in windows; returns each block's valid tokens.

        Records as for `swap_out`; a callable is `drain(views, i, j)`. On an error, records hold
        nothing that may be used. Arrays of one block each, read page after page, are read ahead:
        what this client prunes or closes is never read any more, what another process of its group
        prunes may be for a second (`ahead.AHEAD_LIFE_S`).
        Errors: BlockLost, ChecksumMismatch (with `pages`); ArenaFull.
        """
        if type(pages) is int:
            one = single_of(self._session, layout, node, pages, records)
            if one is not None and one.row.flags.writeable:
                tokens = self._client._driver.in_now(one, wait_s)
                if tokens is not None:
                    return np.array((tokens,), np.uint32)
        return self._run(swap.swap_in(self._session, records, pages, node, layout, wait_s))

    def prefetch(
        self,
        pages: tuple[int, int],
        node: int = 0,
        layout: LayoutRef | None = None,
        priority: int = 0,
        deadline_s: float = 1.0,
    ) -> "Ticket":
        """Ask for pages to be in DRAM soon; it leaves demand loads their room."""
        op = ops.prefetch(self._session, pages, node, layout, priority, deadline_s)
        number, ticket = self._run(op)
        return Ticket(self._client, number, ticket)

    def hold(self, layout: LayoutRef, keys: bytes | Sequence[bytes]) -> int:
        """Keep the leading stored keys until `unhold` or the session's end; returns how many."""
        return self._run(keyed.hold(self._session, wire.Hold, layout, keys))

    def unhold(self, layout: LayoutRef, keys: bytes | Sequence[bytes]) -> int:
        """Let go of held keys; returns how many."""
        return self._run(keyed.hold(self._session, wire.Unhold, layout, keys))


class _Ending(LeaseState):
    """What write and read leases have in common."""

    def __init__(self, client: Client, lease: Lease) -> None:
        super().__init__(lease)
        self._client = client
        self._run = client._driver.run

    def renew(self, ttl_s: float = 0.0) -> None:
        """Live `ttl_s` more from now on (0: as long as at first). Errors: LeaseExpired."""
        self._run(ops.renew(self._lease, ttl_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def close(self) -> None:
        """End it; may be repeated. Nothing of this process may touch its slots any more."""
        with contextlib.suppress(TransportError):  # a lost lease is given back with the connection
            self._run(ops.end_lease(self._lease))


class WriteLease(_Ending, WriteState):
    """Slots to write; `commit` names them, the end of the with-statement gives back the rest."""

    def commit(
        self,
        session: Session,
        node: int,
        pages: Any,
        valid: Any,
        retention: int = wire.HELD,
        oneway: bool = False,
        index: Any = None,
    ) -> None:
        """Publish slots as pages of a node: those of `index`, else the next unnamed ones.

        Durability: committed blocks survive the daemon. With `oneway` the acknowledgement comes
        later (`Client.flush`). Errors: LeaseExpired; UnknownBranch; LayoutMismatch.
        """
        op = ops.commit(self._lease, session._session, node, pages, valid, retention, oneway, index)
        self._run(op)


class ReadLease(_Ending, ReadState):
    """Slots to read, until the end of the with-statement."""


class Ticket(TicketState):
    """A prefetch under way."""

    def __init__(self, client: Client, number: int, pending: Pending) -> None:
        super().__init__(number, pending)
        self._client = client

    def wait(self, timeout_s: float = DEFAULT_DEADLINE_S) -> TicketResult:
        """Wait until it has ended; after a restart of the daemon it ends with nothing loaded."""
        client = self._client
        ready = client._run(ops.ticket_wait(client._core, self._pending, timeout_s))
        return TicketResult(ready.loaded, ready.failed)

    def cancel(self) -> None:
        """Stop it; may be repeated, and after its end."""
        self._client._run(ops.ticket_cancel(self._client._core, self._number))
