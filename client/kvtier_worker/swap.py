"""The store that swaps to kvtierd: entries to arena slots and back, each block with its hash.

The branches of a thought have one session in the daemon, from the first swap-out or fold to the
end of the last of them (see `branches.py`). KV that has once been swapped out stays there, so a
later preemption writes only what was computed since: new blocks, and the partly filled one again
with more valid entries. A fold changes entries that may have been stored: then its branch goes on
in a new node from there.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from time import perf_counter
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

import kvtier_client as kv
from kvtier_client import errors
from kvtier_worker.branches import Branch, Family, Live, Mark
from kvtier_worker.metrics import SwapFigures, plus
from kvtier_worker.pool import PagedPool
from kvtier_worker.saved import open_saved, save_session
from kvtier_worker.sequence import Sequence, State
from kvtier_worker.thoughts import Archived, Step
from kvtier_worker.tile import Slots

PREFETCH_DEADLINE_S: Final = 10.0
RECORDS_MAX: Final = 32
"""Most blocks that are on their way between pool and arena at once, in memory of their own."""

Views = Seq[NDArray[np.uint8]]

_NOT_SAVED = (
    errors.CapacityError,
    errors.LeaseExpired,
    errors.QuotaExceeded,
    errors.ShuttingDown,
    errors.TransportError,
    errors.UnknownSession,
)
"""What may befall a swap-out: then the tokens that are not kept are computed again."""

_KV_IS_GONE = (
    errors.CapacityError,
    errors.DataError,
    errors.LeaseExpired,
    errors.ShuttingDown,
    errors.TransportError,
    errors.UnknownSession,
)
"""What may befall a swap-in, with the same end. Other errors are faults, to be seen."""

_NOT_ENDED = (
    errors.QuotaExceeded,
    errors.ShuttingDown,
    errors.TransportError,
    errors.UnknownSession,
)
"""What may befall the end of a node or session: the node then stays as long as its session."""


@dataclass(slots=True)
class _Arrival:
    """Which blocks of a swap-in came, and were what had been stored."""

    right: NDArray[np.bool_]
    wrong: NDArray[np.bool_]
    lost: int = 0

    @property
    def leading(self) -> int:
        """How many leading blocks are good."""
        return len(self.right) if self.right.all() else int(self.right.argmin())


class DaemonStore:
    """Keeps preempted and folded KV in the daemon; satisfies `KvStore`."""

    unfolds = True

    def __init__(
        self,
        client: kv.Client,
        pool: PagedPool,
        model: str,
        wait_s: float,
        grace_s: float = inf,
    ) -> None:
        """`model` is the model's identity; `wait_s` is how long a swap may wait for room.

        `grace_s` is how long the full KV of a folded step is surely kept.
        """
        shape = pool.shape
        self._client = client
        self._pool = pool
        self._wait_s = wait_s
        self._grace_s = grace_s
        self.layout = kv.Layout(
            model=model,
            dtype="float32",
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            block_tokens=shape.block_tokens,
            block_bytes=shape.block_bytes,
        )
        client.register_layout(self.layout)
        self._branches: dict[int, Branch] = {}
        self._unheard = False
        self._figures = SwapFigures()

    # ------------------------------------------------------- whole sequences

    def save(self, sequence: Sequence) -> int:
        """Swap out what the daemon has not got yet; without room or answer, that is not kept."""
        branch = self._branch(sequence)
        with self._saving():
            self._write(branch.live, sequence.kv.slots)
            branch.expected = False
            self._count(swap_outs=1)
        return branch.live.entries

    def load(self, sequence: Sequence) -> int:
        """Swap in; a block that is lost, or whose hash differs, ends what is given back."""
        branch = self._branches[sequence.id]
        live, entries = branch.live, branch.live.entries
        blocks = self._pool.shape.blocks(entries)
        marks = [live.mark(page) for page in range(blocks)]
        arrival = self._read(branch, live.readable_id(), range(blocks), marks, sequence.kv.slots)
        self._count(swap_ins=1)
        good = min(entries, arrival.leading * self._pool.shape.block_tokens)
        if good < entries:
            # Its names are taken by bytes that are no good: its next swap-out gets new ones.
            self.cut(sequence, good)
        return good

    def expect(self, sequence: Sequence) -> None:
        """Ask the daemon, once per swap-out, to have the sequence's blocks in DRAM soon."""
        branch = self._branches[sequence.id]
        if branch.expected:
            return
        branch.expected = True
        blocks = self._pool.shape.blocks(branch.live.entries)
        self._prefetch(branch, branch.live.readable_id(), (0, blocks))

    def forget(self, sequence: Sequence) -> None:
        """End the sequence's branch; the session ends with the last one."""
        branch = self._branches.pop(sequence.id, None)
        if branch is None:
            return
        self._flush()
        try:
            branch.leave()
        except _NOT_ENDED:
            return

    def leave(self, sequence: Sequence) -> None:
        """Know nothing more of a suspended sequence; the daemon keeps it."""
        self._branches.pop(sequence.id).hand_over()

    def branch(self, sequence: Sequence, child: Sequence) -> None:
        """The child's branch starts from what the sequence has stored and has in the pool."""
        entries = len(sequence.kv) if sequence.state is State.RUNNING else sequence.saved_entries
        unfolded = sequence.thoughts.unfolded_entries()
        self._branches[child.id] = self._branch(sequence).fork(entries - unfolded)

    def cut(self, sequence: Sequence, entry: int) -> None:
        """Go on in a new node from `entry` on, if more than that was stored."""
        branch = self._branches.get(sequence.id)
        if branch is None:
            return
        try:
            branch.live = branch.live.cut(entry)
        except _NOT_SAVED:
            self._let_go(sequence)

    # ------------------------------------------------------------------ steps

    def keep_step(self, sequence: Sequence, step: Step, slots: Slots) -> bool:
        """Append the step's full KV to its branch's archive, without waiting for the commit."""
        branch = self._branch(sequence)
        archive = branch.archive
        first = archive.end_page
        with self._saving():
            pages = range(first, first + self._pool.shape.blocks(len(slots)))
            self._unheard = True
            marks = self._store(branch, archive.make(), pages, slots, ack=False)
            archive.end_page = pages.stop
            step.archived = Archived(first, tuple(mark.hash for mark in marks))
            self._count(kept_steps=1)
            return True
        if archive.id is not None:
            branch.archive = archive.fork()  # some of the pages may have got their names
        return False

    def folded(self, sequence: Sequence, step: Step) -> None:
        """Let the grace period of the step's full KV begin; nobody waits for the daemon's word."""
        branch = self._branches.get(sequence.id)
        if branch is None or step.archived is None:
            return
        node, pages = branch.archive.readable_id(), step.archived.pages
        try:
            branch.family.session.fold(node, pages, self._grace_s, kept=step.kept, ack=False)
        except _NOT_SAVED:
            return  # it stays HELD, which is more than was asked

    def expect_step(self, sequence: Sequence, step: Step) -> None:
        """Ask the daemon to have the step's blocks in DRAM soon."""
        branch = self._branches.get(sequence.id)
        if branch is not None and step.archived is not None:
            self._prefetch(branch, branch.archive.readable_id(), step.archived.pages)

    def bring_step(self, sequence: Sequence, step: Step, slots: Slots) -> bool:
        """Read the step's pages of the archive; all must be there, and be what was stored."""
        branch = self._branches.get(sequence.id)
        if branch is None or step.archived is None:
            return False
        node, archived = branch.archive.readable_id(), step.archived
        if not self._held_again(branch, node, archived):
            return False
        tokens = self._pool.shape.block_tokens
        valid = [min(tokens, len(slots) - i * tokens) for i in range(len(archived.hashes))]
        marks = [Mark(*pair) for pair in zip(archived.hashes, valid, strict=True)]
        arrival = self._read(branch, node, range(*archived.pages), marks, slots)
        self._count(brought_steps=1)
        return bool(arrival.right.all())

    def _held_again(self, branch: Branch, node: int, archived: Archived) -> bool:
        """Whether all of a step is there; it is HELD from now on, and on its way to DRAM."""
        try:
            return not branch.family.session.unfold(node, archived.pages).gone
        except _KV_IS_GONE:
            return False

    def _flush(self) -> None:
        """Hear what became of the steps that nobody waited for; one that failed is a miss later."""
        if not self._unheard:
            return
        self._unheard = False
        try:
            self._client.flush(self._wait_s)
        except errors.KvtierError:
            self._count(refused=1)

    # ------------------------------------------------------ suspend and resume

    def suspend(self, sequence: Sequence) -> str:
        """Swap out and leave everything that a resume needs in the session's blob."""
        if sequence.state is State.RUNNING:
            sequence.saved_entries = self.save(sequence) if sequence.computed_tokens else 0
            sequence.saved_tokens = sequence.computed_tokens
        self._flush()
        token = save_session(sequence, self._branch(sequence), self.layout.fingerprint())
        self.leave(sequence)
        return token

    def resume(self, token: str, sequence_id: int) -> Sequence:
        """Take a suspended session over; what the daemon lost of it meanwhile is not relied on."""
        sequence, branch, lost = open_saved(
            token, sequence_id, self._client, self._pool, self.layout.fingerprint()
        )
        self._branches[sequence_id] = branch
        if lost:
            self._count(lost=lost)
        return sequence

    def figures(self) -> SwapFigures:
        """What was moved so far."""
        return self._figures

    # -------------------------------------------------------------- internals

    def _branch(self, sequence: Sequence) -> Branch:
        """The sequence's branch; the first of a session of its own if it has none."""
        branch = self._branches.get(sequence.id)
        if branch is None:
            # It knows the client alone: a session that is still in use holds no pool.
            open_session = partial(self._client.open_session, layouts=[self.layout])
            family = Family(open_session, self._pool.shape.block_tokens)
            branch = self._branches[sequence.id] = Branch.first(family)
        return branch

    def _let_go(self, sequence: Sequence) -> None:
        """Begin a session anew: what was stored of the sequence is not relied on any more."""
        self.forget(sequence)
        for step in sequence.thoughts.steps:
            step.archived = None

    @contextmanager
    def _saving(self) -> Iterator[None]:
        try:
            yield
        except _NOT_SAVED:
            self._count(refused=1)

    def _write(self, live: Live, slots: Slots) -> None:
        """Store a branch's entries, as far as they are not stored: first what it shares."""
        tokens = self._pool.shape.block_tokens
        parent = live.parent
        if live.id is None and isinstance(parent, Live) and not parent.closed:
            shared = live.fork_entry // tokens * tokens
            if parent.entries < shared:
                self._write(parent, slots[:shared])
            live.lower(parent.entries)
        if len(slots) == live.entries:
            return
        first = max(live.entries // tokens, live.first_page)
        pages = range(first, self._pool.shape.blocks(len(slots)))
        node = live.make()
        live.torn = True
        marks = self._store(live, node, pages, slots[first * tokens :])
        live.put(first, marks, len(slots))

    def _store(
        self, owner: Branch | Live, node: int, pages: range, slots: Slots, ack: bool = True
    ) -> list[Mark]:
        """Swap entries out as pages of a node; without `ack` nobody waits for the daemon's word.

        Shapes: `slots` those of the pages' entries.
        """
        tokens = self._pool.shape.block_tokens
        valid = [min(tokens, len(slots) - i * tokens) for i in range(len(pages))]
        hashes = [0] * len(pages)
        started_s = perf_counter()

        def fill(views: Views, first: int, end: int) -> None:
            for start in range(first, end, RECORDS_MAX):
                stop = min(start + RECORDS_MAX, end)
                records = self._pool.read_records(slots[start * tokens : stop * tokens])
                for i, record in zip(range(start, stop), records, strict=True):
                    views[i - first][:] = record.reshape(-1).view(np.uint8)
                    hashes[i] = _hash(record, valid[i])

        owner.family.session.swap_out(fill, pages, valid, node=node, wait_s=self._wait_s, ack=ack)
        self._count(
            out_blocks=len(pages),
            out_bytes=len(pages) * self.layout.block_bytes,
            out_s=perf_counter() - started_s,
        )
        return [Mark(*pair) for pair in zip(hashes, valid, strict=True)]

    def _read(
        self, branch: Branch, node: int, pages: range, marks: list[Mark], slots: Slots
    ) -> _Arrival:
        """Swap pages in, each into one page of the pool. Shapes: `slots` those of all entries."""
        tokens = self._pool.shape.block_tokens
        arrival = _Arrival(np.zeros(len(pages), np.bool_), np.zeros(len(pages), np.bool_))
        right, wrong = arrival.right, arrival.wrong
        targets = (slots[::tokens] // tokens).tolist()
        started_s = perf_counter()

        def drain(views: Views, first: int, end: int) -> None:
            for start in range(first, end, RECORDS_MAX):
                stop = min(start + RECORDS_MAX, end)
                # Hash what is kept, not what lies in the slot: a lease can end while we read.
                bytes_ = np.stack(views[start - first : stop - first])
                records = bytes_.view(np.float32).reshape(-1, *self._pool.shape.record)
                for i, record in zip(range(start, stop), records, strict=True):
                    right[i] = _hash(record, marks[i].valid) == marks[i].hash
                    wrong[i] = not right[i]
                self._pool.write_blocks(targets[start:stop], torch.from_numpy(records))

        try:
            branch.family.session.swap_in(drain, pages, node=node, wait_s=self._wait_s)
        except _KV_IS_GONE:
            arrival.lost = int((~right & ~wrong).sum())
        self._count(
            lost=arrival.lost,
            in_blocks=arrival.leading,
            in_bytes=arrival.leading * self.layout.block_bytes,
            in_s=perf_counter() - started_s,
            hashes_checked=int((right | wrong).sum()),
            hashes_wrong=int(wrong.sum()),
        )
        return arrival

    def _prefetch(self, branch: Branch, node: int, pages: tuple[int, int]) -> None:
        try:
            branch.family.session.prefetch(pages=pages, node=node, deadline_s=PREFETCH_DEADLINE_S)
        except _KV_IS_GONE:
            return  # only a hint; the swap-in itself will say what is wrong

    def _count(self, **more: float) -> None:
        self._figures = plus(self._figures, more)


def _hash(record: NDArray[np.float32], valid: int) -> int:
    """xxh3-64 of a record's valid bytes. Shapes: `record` BlockShape.record."""
    return xxh3_64_intdigest(np.ascontiguousarray(record[:, :, :valid]).data)
