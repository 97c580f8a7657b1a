"""Pages behind those that are read one by one, leased before they are asked for.

    page p ──page p+1──▶ window of 2 asked ──granted──▶ read without a round trip ──half used──╮
                              ▲                                                                │
                              ╰───────── the next window, twice as long, up to a limit ◀───────╯

Only whole pages are read from a window: such a page cannot be replaced. A window ends with
whatever could make it wrong or unwanted: this client changes the session, a page is read out of
order, memory is short, the daemon restarts or asks for it back, or `AHEAD_LIFE_S` is over. So this
client never reads what it pruned itself; what another process of its group prunes, it may still
read for that long.
"""

from typing import TYPE_CHECKING, Final

from kvtier_client import wire
from kvtier_client.leases import Lease
from kvtier_client.protocol import Pending, Phase

if TYPE_CHECKING:
    from kvtier_client.core import Core
    from kvtier_client.single import Single

AHEAD_BLOCKS: Final = 32
AHEAD_BYTES: Final = 16 << 20
"""A window has at most so many blocks and bytes; two of them may be leased at a time."""
AHEAD_ARENA_SHARE: Final = 64
"""A window has at most this fraction (1/64) of the arena."""
AHEAD_FIRST: Final = 2
"""Blocks of the first window."""
AHEAD_LIFE_S: Final = 1.0
"""Nothing is read from a window that was asked for longer ago; it is given back."""
STREAMS_LIMIT: Final = 8
"""Branches that are read ahead at a time; the oldest one makes room."""
CHANGES: Final = frozenset(
    (wire.Commit, wire.Fork, wire.Prune, wire.SetRetention, wire.CloseSession)
)
"""Requests after which a session's windows are not read any more."""


class Stream:
    """One branch that is read page by page."""

    __slots__ = (
        *("asked_s", "blocks", "coming", "coming_first", "coming_s"),
        *("first", "lease", "page"),
    )

    def __init__(self, page: int) -> None:
        self.page = page
        """The page that is read next if all goes on like this."""
        self.blocks = 0
        """Length of the window that was asked for last; 0 when it came shorter than that."""
        self.lease: Lease | None = None
        self.first = 0
        self.asked_s = 0.0
        self.coming: Pending | None = None
        self.coming_first = 0
        self.coming_s = 0.0

    def has(self, lease: int) -> bool:
        """Whether one of its windows, read already or not, is this lease."""
        if self.lease is not None and self.lease.id == lease:
            return True
        granted = None if self.coming is None else self.coming.reply
        return isinstance(granted, wire.Granted) and granted.lease == lease


class ReadAhead:
    """The windows of one client; all its methods are called under the core's lock or take it."""

    def __init__(self, core: "Core") -> None:
        self._core = core
        self.streams: dict[tuple[int, int, bytes], Stream] = {}

    # --------------------------------------------------------------- reading

    def awaited(self, single: "Single") -> Pending | None:
        """The request for a window with this page, while there is no answer yet."""
        stream = self.streams.get(single.place)
        if stream is None or stream.lease is not None or stream.page != single.page:
            return None
        coming = stream.coming
        return None if coming is None or coming.done else coming

    def take(self, single: "Single") -> tuple[Lease, int] | None:
        """The lease and the number of the slot that holds a page, or None: it must be asked for.

        Leases: whoever gets one calls `leave` when the slot is copied.
        """
        with self._core.lock:
            stream = self.streams.get(single.place)
            if stream is None:
                return None
            if stream.page != single.page:
                self._forget(single.place)
                return None
            if stream.lease is None:
                self._arrive(stream, single)
            lease = stream.lease
            if lease is None:
                return None
            k, count = single.page - stream.first, len(lease.offsets)
            if not self._readable(stream, lease, k):
                self._forget(single.place)
                return None
            stream.page += 1
            lease.users += 1
            if stream.coming is None and 2 * (k + 1) >= count:
                self._ask(stream, single, stream.first + count, 2 * stream.blocks)
            if k + 1 == count:
                stream.lease = None
                self._retire(lease)
            return lease, k

    def leave(self, lease: Lease) -> None:
        """Nothing reads the slot any more."""
        core = self._core
        with core.lock:
            lease.users -= 1
            if lease.retired and lease.users == 0:
                core.end_lease(lease, lazily=True)

    def follow(self, single: "Single") -> None:
        """A page is being asked for by itself: ask for those behind it if it follows another."""
        streams = self.streams
        stream = streams.get(single.place)
        if stream is None:
            while len(streams) >= STREAMS_LIMIT:
                self._forget(next(iter(streams)))
            streams[single.place] = Stream(single.page + 1)
            return
        stream.page = single.page + 1
        if stream.lease is None and stream.coming is None:
            self._ask(stream, single, stream.page, AHEAD_FIRST)

    # ---------------------------------------------------------------- ending

    def drop(self, session: int | None = None) -> None:
        """Give back all windows, or those of one session."""
        with self._core.lock:
            for place in [p for p in self.streams if session is None or p[0] == session]:
                self._forget(place)

    def revoked(self, lease: int) -> None:
        """The daemon asks for a lease back."""
        for place in [p for p, stream in self.streams.items() if stream.has(lease)]:
            self._forget(place)

    def tidy(self, now_s: float) -> None:
        """Give back what was not used in time."""
        oldest_s = now_s - AHEAD_LIFE_S
        for place, stream in list(self.streams.items()):
            old = stream.lease is not None and stream.asked_s < oldest_s
            if old or (stream.coming is not None and stream.coming_s < oldest_s):
                self._forget(place)

    # ------------------------------------------------------------- its steps

    def _ask(self, stream: Stream, single: "Single", first: int, blocks: int) -> None:
        core, layout = self._core, single.layout
        assert core.arena is not None
        limits = core.limits()
        most_bytes = min(AHEAD_BYTES, core.arena.size_bytes // AHEAD_ARENA_SHARE)
        most = min(AHEAD_BLOCKS, most_bytes // layout.slot_bytes, limits.blocks_per_request)
        blocks = min(blocks, most, 0x1_0000_0000 - first)
        if blocks < AHEAD_FIRST or core.stats.pressure:
            return
        session, node, fingerprint = single.place
        stream.coming_s, stream.coming_first, stream.blocks = core.now_s(), first, blocks
        wait_s = min(AHEAD_LIFE_S, limits.wait_max_s)
        stream.coming = core.send(
            wire.Acquire, core.next_lease(), session, node, fingerprint, first, blocks, wait_s
        )

    def _arrive(self, stream: Stream, single: "Single") -> None:
        """Take over the window that was asked for, once there is an answer."""
        coming = stream.coming
        if coming is None or not coming.done:
            return
        if not isinstance(coming.reply, wire.Granted):
            self._forget(single.place)  # nothing is stored behind, or it cannot be had now
            return
        stream.coming = None
        lease = self._core.granted(single.layout, coming.reply, False, stream.coming_s)
        stream.lease, stream.first, stream.asked_s = lease, stream.coming_first, stream.coming_s
        if len(lease.offsets) < stream.blocks:
            stream.blocks = 0  # here the branch ends, or the room for it

    def _readable(self, stream: Stream, lease: Lease, k: int) -> bool:
        core = self._core
        now_s = core.now_s()
        return (
            0 <= k < len(lease.offsets)
            and lease.valid.item(k) == lease.layout.layout.block_tokens
            and now_s <= stream.asked_s + AHEAD_LIFE_S
            and lease.usable(now_s)
            and core.protocol.phase is Phase.READY
        )

    def _forget(self, place: tuple[int, int, bytes]) -> None:
        stream = self.streams.pop(place)
        if stream.coming is not None:
            self._core.abandon(stream.coming)
        if stream.lease is not None:
            self._retire(stream.lease)

    def _retire(self, lease: Lease) -> None:
        core = self._core
        lease.retired = True
        if lease.users == 0:
            core.end_lease(lease, lazily=True)
