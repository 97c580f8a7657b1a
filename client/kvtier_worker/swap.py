"""The store that swaps to kvtierd: pages to arena slots and back, each block with its hash.

A sequence has one session in the daemon, from its first swap-out to its end. KV that has once been
swapped out stays there, so a later preemption writes only what was computed since: new blocks, and
the partly filled one again with more valid tokens.
"""

import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_64_intdigest

import kvtier_client as kv
from kvtier_client import errors, wire
from kvtier_worker.errors import CannotSuspend
from kvtier_worker.metrics import SwapFigures
from kvtier_worker.pool import PagedPool
from kvtier_worker.saved import SavedSession, decode_saved, encode_saved
from kvtier_worker.sequence import Sequence, State

ROOT_NODE: Final = 0
PREFETCH_DEADLINE_S: Final = 10.0

Views = Seq[NDArray[np.uint8]]

_NOT_SAVED = (
    errors.CapacityError,
    errors.LeaseExpired,
    errors.QuotaExceeded,
    errors.ShuttingDown,
    errors.TransportError,
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


@dataclass(slots=True)
class _Kept:
    """What the daemon has of one sequence: its first `tokens` tokens, one hash per block."""

    session: kv.Session
    tokens: int = 0
    hashes: list[int] = field(default_factory=list)
    expected: bool = False
    blob_version: int = 0


class DaemonStore:
    """Keeps preempted KV in the daemon; satisfies `KvStore`."""

    def __init__(self, client: kv.Client, pool: PagedPool, model: str, wait_s: float) -> None:
        """`model` is the model's identity; `wait_s` is how long a swap may wait for room."""
        shape = pool.shape
        self._client = client
        self._pool = pool
        self._wait_s = wait_s
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
        self._kept: dict[int, _Kept] = {}
        self._figures = SwapFigures()

    def save(self, sequence: Sequence) -> int:
        """Swap out what the daemon has not got yet; without room or answer, that is not kept."""
        kept = self._kept.get(sequence.id)
        started_s = perf_counter()
        try:
            if kept is None:
                session = self._client.open_session(layouts=[self.layout])
                kept = self._kept[sequence.id] = _Kept(session)
            written = self._write(sequence, kept)
        except _NOT_SAVED:
            self._count(refused=1)
            return 0 if kept is None else kept.tokens
        kept.expected = False
        self._count(
            swap_outs=1,
            out_blocks=written,
            out_bytes=written * self.layout.block_bytes,
            out_s=perf_counter() - started_s,
        )
        return kept.tokens

    def load(self, sequence: Sequence) -> int:
        """Swap in; a block that is lost, or whose hash differs, ends what is given back."""
        kept = self._kept[sequence.id]
        blocks = self._pool.shape.blocks(kept.tokens)
        started_s = perf_counter()
        right = np.zeros(blocks, np.bool_)
        wrong = np.zeros(blocks, np.bool_)

        def drain(views: Views, first: int, end: int) -> None:
            for i, view in zip(range(first, end), views, strict=True):
                # Hash what is kept, not what lies in the slot: a lease can end while we read.
                record = self._record(view.copy())
                right[i] = _hash(record, self._valid(i, kept.tokens)) == kept.hashes[i]
                wrong[i] = not right[i]
                self._pool.write_blocks([sequence.pages[i]], record)

        try:
            kept.session.swap_in(drain, range(blocks), wait_s=self._wait_s)
        except _KV_IS_GONE:
            self._count(lost=int((~right & ~wrong).sum()))
        verified = blocks if right.all() else int(right.argmin())
        restored_tokens = min(kept.tokens, verified * self._pool.shape.block_tokens)
        self._count(
            swap_ins=1,
            in_blocks=verified,
            in_bytes=verified * self.layout.block_bytes,
            in_s=perf_counter() - started_s,
            hashes_checked=int((right | wrong).sum()),
            hashes_wrong=int(wrong.sum()),
        )
        if verified < blocks:
            # Its names are taken by bytes that are no good: the next swap-out starts a new session.
            self.forget(sequence)
        return restored_tokens

    def expect(self, sequence: Sequence) -> None:
        """Ask the daemon, once per swap-out, to have the sequence's blocks in DRAM soon."""
        kept = self._kept[sequence.id]
        if kept.expected:
            return
        kept.expected = True
        pages = (0, self._pool.shape.blocks(kept.tokens))
        try:
            kept.session.prefetch(pages=pages, deadline_s=PREFETCH_DEADLINE_S)
        except _KV_IS_GONE:
            return  # only a hint; the swap-in itself will say what is wrong

    def forget(self, sequence: Sequence) -> None:
        """Close the sequence's session, if it has one."""
        kept = self._kept.pop(sequence.id, None)
        if kept is None:
            return
        try:
            kept.session.close()
        except (errors.TransportError, errors.UnknownSession, errors.ShuttingDown):
            return  # a session that nobody resumes ends by itself

    def suspend(self, sequence: Sequence) -> str:
        """Swap out and leave everything that a resume needs in the session's blob."""
        if sequence.state is State.RUNNING and sequence.computed_tokens:
            self.save(sequence)
        kept = self._kept.get(sequence.id)
        if kept is None:
            kept = _Kept(self._client.open_session(layouts=[self.layout]))
        saved = SavedSession(
            layout=self.layout.fingerprint(),
            tokens=sequence.tokens,
            prompt_tokens=sequence.prompt_tokens,
            end_tokens=sequence.end_tokens,
            stop_token=sequence.stop_token,
            sampling=sequence.sampling,
            reached_tokens=sequence.reached_tokens,
            kept_tokens=kept.tokens,
            hashes=kept.hashes,
        )
        kept.session.put_blob(encode_saved(saved), version=kept.blob_version + 1)
        self._kept.pop(sequence.id, None)
        return kept.session.token.hex()

    def resume(self, token: str, sequence_id: int) -> Sequence:
        """Take a suspended session over; what the daemon lost of it meanwhile is not relied on."""
        if not re.fullmatch("[0-9a-f]{32}", token):
            raise CannotSuspend("a session's token has 32 hex digits, and this one has not")
        session = self._client.resume_session(bytes.fromhex(token))
        version, data = session.get_blob()
        saved = decode_saved(data)
        if saved.layout != self.layout.fingerprint():
            raise CannotSuspend(
                "the session was suspended by another model, or with another block size; resume"
                " it with the model and block_tokens that it had"
            )
        present = _leading_pages(session) * self._pool.shape.block_tokens
        kept_tokens = min(saved.kept_tokens, present)
        if kept_tokens < saved.kept_tokens:
            self._count(lost=self._pool.shape.blocks(saved.kept_tokens - kept_tokens))
        blocks = self._pool.shape.blocks(kept_tokens)
        self._kept[sequence_id] = _Kept(
            session, kept_tokens, saved.hashes[:blocks], blob_version=version
        )
        return Sequence(
            id=sequence_id,
            tokens=saved.tokens,
            prompt_tokens=saved.prompt_tokens,
            end_tokens=saved.end_tokens,
            sampling=saved.sampling,
            stop_token=saved.stop_token,
            state=State.SWAPPED if kept_tokens else State.WAITING,
            reached_tokens=saved.reached_tokens,
        )

    def figures(self) -> SwapFigures:
        """What was moved so far."""
        return self._figures

    def _write(self, sequence: Sequence, kept: _Kept) -> int:
        """Swap out the blocks that grew since the last time; the result is how many."""
        tokens = sequence.computed_tokens
        start = kept.tokens // self.layout.block_tokens
        if tokens == kept.tokens:
            return 0
        pages = range(start, self._pool.shape.blocks(tokens))
        hashes = [0] * len(pages)

        def fill(views: Views, first: int, end: int) -> None:
            for i, view in zip(range(first, end), views, strict=True):
                record = self._record(view)
                self._pool.read_blocks([sequence.pages[pages[i]]], record)
                hashes[i] = _hash(record, self._valid(pages[i], tokens))

        valid = [self._valid(page, tokens) for page in pages]
        kept.session.swap_out(fill, pages, valid, wait_s=self._wait_s)
        kept.hashes[start:] = hashes
        kept.tokens = tokens
        return len(pages)

    def _valid(self, page: int, tokens: int) -> int:
        return min(self.layout.block_tokens, tokens - page * self.layout.block_tokens)

    def _record(self, view: NDArray[np.uint8]) -> Tensor:
        """A slot's bytes as one block record. Shapes: [1, *BlockShape.record]."""
        return torch.from_numpy(view).view(torch.float32).view(1, *self._pool.shape.record)

    def _count(self, **more: float) -> None:
        self._figures = msgspec.structs.replace(
            self._figures, **{name: getattr(self._figures, name) + n for name, n in more.items()}
        )


def _hash(record: Tensor, valid: int) -> int:
    """xxh3-64 of a record's valid bytes. Shapes: `record` [1, layers, 2, block_tokens, ...]."""
    return xxh3_64_intdigest(np.ascontiguousarray(record[:, :, :, :valid].numpy()).data)


def _leading_pages(session: kv.Session) -> int:
    """How many pages from the first on the daemon still has of the session's root."""
    for node in session.nodes():
        if node.node == ROOT_NODE:
            there = np.asarray(node.tiers[0]) != wire.TIER_LOST
            pages = np.sort(np.asarray(node.pages[0])[there])
            return int((pages == np.arange(len(pages))).sum())
    return 0
