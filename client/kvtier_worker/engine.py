"""The engine: submits prompts, runs steps, and ties scheduler, model, pool and store together."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvtier_worker.errors import TooLong
from kvtier_worker.metrics import Clock, RunFigures
from kvtier_worker.model import Llama
from kvtier_worker.pool import BlockShape, PagedPool
from kvtier_worker.sampler import Sampling, choose
from kvtier_worker.scheduler import Chunk, Limits, Scheduler
from kvtier_worker.sequence import Sequence, State
from kvtier_worker.store import KvStore
from kvtier_worker.tile import TILE_ROWS, Row, build_tile

DEFAULT_LIMITS: Final = Limits()


class Engine:
    """Runs sequences to their end on one model, one pool and one store."""

    def __init__(
        self, model: Llama, pool: PagedPool, store: KvStore, limits: Limits = DEFAULT_LIMITS
    ) -> None:
        self.model = model
        self.pool = pool
        self.store = store
        self.scheduler = Scheduler(pool, store, limits)
        self.clock = Clock()
        self.finished: list[Sequence] = []
        self.peak_pool_bytes = 0
        self.peak_request_bytes = 0
        self._next_id = 0

    def submit(
        self, prompt: Seq[int], new_tokens: int, sampling: Sampling, stop_token: int | None = None
    ) -> Sequence:
        """Queue a prompt. Errors: TooLong; PoolTooSmall and QueueFull of the scheduler."""
        assert prompt and new_tokens > 0
        return self._queue(
            Sequence(
                id=self._take_id(),
                tokens=list(prompt),
                prompt_tokens=len(prompt),
                end_tokens=len(prompt) + new_tokens,
                sampling=sampling,
                stop_token=stop_token,
            )
        )

    def step(self) -> bool:
        """Compute the next tokens of whoever is scheduled; false when nothing is left to do."""
        chunks = self.scheduler.plan()
        self._note_peaks()
        if not chunks:
            return False
        logits = self._compute(chunks)
        for chunk in chunks:
            sequence = chunk.sequence
            if not chunk.samples:
                self.scheduler.complete(chunk, None)
                continue
            token = choose(logits[sequence.id], sequence.sampling, len(sequence.tokens))
            self.clock.token(sequence.id)
            self.scheduler.complete(chunk, token)
            if sequence.state is State.FINISHED:
                self.finished.append(sequence)
        return True

    def run(self, on_step: Callable[["Engine"], None] | None = None) -> None:
        """Step until every sequence has ended, calling `on_step` after each step."""
        while self.step():
            if on_step is not None:
                on_step(self)

    def suspend(self, sequence: Sequence) -> str:
        """Hand an unfinished sequence, KV and all, to the daemon.

        The result is the token, in hex, by which any worker with the same model resumes it.
        Errors: `CannotSuspend` without a daemon; those of the client.
        """
        assert sequence.state not in (State.FINISHED, State.SUSPENDED)
        token = self.store.suspend(sequence)
        self.scheduler.remove(sequence)
        sequence.state = State.SUSPENDED
        return token

    def resume(self, token: str) -> Sequence:
        """Queue a suspended sequence again; it goes on with the very next token.

        Errors: `CannotSuspend` without a daemon, or when it is another model's; UnknownSession.
        """
        return self._queue(self.store.resume(token, self._take_id()))

    def figures(self, policy: str) -> RunFigures:
        """The run's figures so far."""
        wall_s = self.clock.elapsed_s
        p50_ms, p99_ms = self.clock.tpot_ms([50, 99])
        counters = self.scheduler.counters
        return RunFigures(
            policy=policy,
            sessions=len(self.finished),
            generated_tokens=self.clock.tokens,
            wall_s=wall_s,
            tokens_per_s=self.clock.tokens / wall_s,
            tpot_p50_ms=p50_ms,
            tpot_p99_ms=p99_ms,
            peak_running=counters.peak_running,
            preemptions=counters.preemptions,
            recomputed_tokens=counters.recomputed_tokens,
            pool_bytes=(self.pool.pages + 1) * self.pool.shape.block_bytes,
            peak_pool_bytes=self.peak_pool_bytes,
            peak_request_bytes=self.peak_request_bytes,
            swap=self.store.figures(),
        )

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _queue(self, sequence: Sequence) -> Sequence:
        if sequence.end_tokens > self.model.config.max_positions:
            raise TooLong(
                f"{sequence.end_tokens} tokens were asked for, prompt included; the model has"
                f" {self.model.config.max_positions} positions; ask for fewer"
            )
        self.scheduler.submit(sequence)
        return sequence

    def _compute(self, chunks: Seq[Chunk]) -> dict[int, NDArray[np.float32]]:
        """Run all rows of a step, tile by tile. The result: logits by id, where one samples."""
        rows = [
            (chunk.sequence, Row(chunk.sequence.tokens[at], at, chunk.sequence.pages))
            for chunk in chunks
            for at in range(chunk.first, chunk.first + chunk.tokens)
        ]
        logits: dict[int, NDArray[np.float32]] = {}
        for start in range(0, len(rows), TILE_ROWS):
            part = rows[start : start + TILE_ROWS]
            hidden = self._forward([row for _, row in part])
            last = {
                sequence.id: i
                for i, (sequence, row) in enumerate(part)
                if row.position == len(sequence.tokens) - 1
            }
            if last:
                out = self.model.logits(hidden).cpu().numpy()
                logits.update((id_, out[i]) for id_, i in last.items())
        return logits

    def _forward(self, rows: Seq[Row]) -> Tensor:
        shape = self.pool.shape
        tile = build_tile(
            rows, shape.block_tokens, shape.kv_heads, self.pool.scratch_page, self.model.device
        )
        return self.model.forward(tile, self.pool.k_pages, self.pool.v_pages)

    def _note_peaks(self) -> None:
        self.peak_pool_bytes = max(self.peak_pool_bytes, self.pool.used_bytes)
        pages = max((len(s.pages) for s in self.scheduler.running), default=0)
        self.peak_request_bytes = max(self.peak_request_bytes, pages * self.pool.shape.block_bytes)


def block_shape(model: Llama, block_tokens: int) -> BlockShape:
    """The block shape of a model's KV."""
    c = model.config
    return BlockShape(c.layers, block_tokens, c.kv_heads, c.head_dim)
