"""The engine: submits prompts, runs steps, and ties scheduler, model, pool and store together."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from time import perf_counter
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtier_worker.budget import Budget
from kvtier_worker.entries import Entries
from kvtier_worker.errors import (
    BadBudget,
    BadPrompt,
    CannotFork,
    CannotSuspend,
    CannotUnfold,
    TooLong,
    WorkerError,
)
from kvtier_worker.folding import Folder, FoldPolicy
from kvtier_worker.governor import Governor, GovernPolicy
from kvtier_worker.metrics import BudgetFigures, Clock, RunFigures
from kvtier_worker.model import Llama, Watch
from kvtier_worker.pool import BlockShape, PagedPool
from kvtier_worker.sampler import Sampling, choose
from kvtier_worker.scheduler import Chunk, Limits, Scheduler
from kvtier_worker.sequence import AT_REST, Sequence, State
from kvtier_worker.store import KvStore
from kvtier_worker.tile import Row, build_tile

DEFAULT_LIMITS: Final = Limits()


class Engine:
    """Runs sequences to their end on one model, one pool and one store.

    Calls that change a sequence are made between steps. A sequence is a branch of a thought: `fork`
    makes another that has everything so far in common with it, `prune` ends one.
    """

    def __init__(
        self,
        model: Llama,
        pool: PagedPool,
        store: KvStore,
        limits: Limits = DEFAULT_LIMITS,
        folding: FoldPolicy | None = None,
        governing: GovernPolicy | None = None,
    ) -> None:
        """Without `folding` nothing is folded, without `governing` no request has a budget.

        Errors: BadStepRules; BadControl.
        """
        self.model = model
        self.pool = pool
        self.store = store
        self.folder = Folder(model, pool, store, folding)
        self.scheduler = Scheduler(pool, store, self.folder, limits)
        self.governor: Governor | None = None
        if governing is not None:
            self.governor = Governor(governing, model.config.vocab, pool, self.folder)
        self.clock = Clock()
        self.peak_pool_bytes = 0
        self.peak_request_bytes = 0
        self._attended: list[tuple[Sequence, NDArray[np.float32]]] = []
        self._next_id = 0

    def submit(
        self,
        prompt: Seq[int],
        new_tokens: int,
        sampling: Sampling,
        stop_token: int | None = None,
        budget: Budget | None = None,
    ) -> Sequence:
        """Queue a prompt. With a budget its thought is governed.

        Errors: BadPrompt; TooLong; PoolTooSmall and QueueFull of the scheduler; BadBudget,
        BadControl.
        """
        assert new_tokens > 0
        vocab = self.model.config.vocab
        if not prompt or not all(0 <= token < vocab for token in prompt):
            raise BadPrompt(
                "the prompt is empty, or has tokens that the model has not (0 to"
                f" {vocab - 1}); take the ids from the model's own tokenizer"
            )
        sequence = Sequence(
            id=self._take_id(),
            tokens=list(prompt),
            prompt_tokens=len(prompt),
            end_tokens=len(prompt) + new_tokens,
            sampling=sampling,
            kv=Entries(self.pool),
            stop_token=stop_token,
        )
        if budget is not None:
            if self.governor is None:
                raise BadBudget(
                    "a budget was given, and the engine does not know how a thought lands: make it"
                    " with `governing`"
                )
            self.governor.govern(sequence, budget)
        return self._queue(sequence)

    def step(self) -> bool:
        """Compute the next tokens of whoever is scheduled; false when nothing is left to do."""
        began_s = perf_counter()
        chunks = self.scheduler.plan()
        self._note_peaks()
        if not chunks:
            return bool(self.scheduler.waiting)
        if self.governor is not None:
            self.governor.feel()
        self._attended.clear()
        logits = self._compute(chunks)
        for chunk in chunks:
            sequence = chunk.sequence
            if not chunk.samples:
                self.scheduler.complete(chunk, None)
                continue
            self.scheduler.complete(chunk, self._next_token(sequence, logits[sequence.id]))
            if self.governor is not None:
                self.governor.accepted(sequence)
        for sequence, masses in self._attended:
            if sequence.state is State.RUNNING:
                self.folder.attended(sequence, masses)
        self.clock.step(began_s, len(chunks), bool(self.scheduler.waiting))
        return True

    def run(self, on_step: Callable[["Engine"], None] | None = None) -> None:
        """Step until every sequence has ended, calling `on_step` after each step."""
        while self.step():
            if on_step is not None:
                on_step(self)

    # ---------------------------------------------------------------- branches

    def fork(self, sequence: Sequence, sampling: Sampling | None = None) -> Sequence:
        """Another branch of a sequence's thought, where it is now, with its own sampling.

        It shares the sequence's pages and what the daemon has of it. Both go on by themselves; the
        fork of a parked sequence is parked, that of a paused one goes on. Errors: CannotFork.
        """
        if sequence.state in AT_REST:
            raise CannotFork(f"sequence {sequence.id} is {sequence.state.value}: nothing goes on")
        scheduler = self.scheduler
        if (
            sequence.state is State.RUNNING and len(scheduler.running) >= scheduler.limits.running
        ) or len(scheduler.waiting) >= scheduler.limits.waiting:
            raise CannotFork(
                f"{len(scheduler.running)} sequences run and {len(scheduler.waiting)} wait, which"
                " is as many as may: park or prune one, or raise the limits"
            )
        child = Sequence(
            id=self._take_id(),
            tokens=list(sequence.tokens),
            prompt_tokens=sequence.prompt_tokens,
            end_tokens=sequence.end_tokens,
            sampling=sampling or sequence.sampling,
            kv=sequence.kv.fork(),
            stop_token=sequence.stop_token,
            arrival_step=sequence.arrival_step,
            state=sequence.state,
            thoughts=sequence.thoughts.fork(),
            computed_tokens=sequence.computed_tokens,
            reached_tokens=sequence.reached_tokens,
            saved_entries=sequence.saved_entries,
            saved_tokens=sequence.saved_tokens,
            course=None if sequence.course is None else sequence.course.fork(),
        )
        self.store.branch(sequence, child)
        self.folder.fork(sequence, child)
        scheduler.adopt(child)
        return child

    def prune(self, sequence: Sequence) -> None:
        """End a branch at once: what no other branch needs of it is freed, here and there."""
        if sequence.state in AT_REST:
            return
        self.scheduler.remove(sequence)
        self.store.forget(sequence)
        self.folder.forget(sequence)
        sequence.state = State.PRUNED

    def park(self, sequence: Sequence) -> None:
        """Take a branch out of the pool until it is woken; its KV moves down the tiers."""
        if sequence.state not in (*AT_REST, State.PARKED):
            self.scheduler.park(sequence)

    def pause(self, sequence: Sequence) -> None:
        """Let a branch rest in the pool, before its newest token is computed, until it is woken.

        It is parked if others need its room.
        """
        sequence.paused = sequence.state not in AT_REST

    def wake(self, sequence: Sequence) -> None:
        """Let a paused or parked branch go on. Errors: QueueFull."""
        if sequence.state is State.PARKED:
            self.scheduler.wake(sequence)
        sequence.paused = False

    # ------------------------------------------------------------------- steps

    def unfold(self, sequence: Sequence, step: int, pinned: bool = False) -> None:
        """Have the full KV of a folded step back before the next token.

        It is folded again when the step that is open now ends, unless it is pinned. If the daemon
        does not have it any more, the sequence goes on with the summary: `folder.notes` and
        `folder.figures` tell. Errors: CannotUnfold.
        """
        if sequence.state in AT_REST:
            raise CannotUnfold(
                f"sequence {sequence.id} is {sequence.state.value}: it has no steps any more"
            )
        self.folder.ask_unfold(sequence, step, pinned)

    def refold(self, sequence: Sequence, step: int) -> None:
        """Fold an unfolded step again, or take back that it should be unfolded.

        Errors: CannotUnfold when there is no such step.
        """
        if sequence.state not in AT_REST:
            self.folder.ask_refold(sequence, step)

    # ------------------------------------------------------ suspend and resume

    def suspend(self, sequence: Sequence) -> str:
        """Hand an unfinished sequence, KV and all, to the daemon.

        The result is the token by which any worker with the same model resumes it: the session's
        in hex, and for one branch of several a dot and its number.
        Errors: `CannotSuspend` without a daemon, or of what has ended; those of the client.
        """
        if sequence.state in AT_REST:
            raise CannotSuspend(
                f"sequence {sequence.id} is {sequence.state.value}: nothing goes on"
            )
        if sequence.state is State.RUNNING:
            self.folder.pack(sequence)
        token = self.store.suspend(sequence)
        self.scheduler.remove(sequence)
        self.folder.forget(sequence)
        sequence.state = State.SUSPENDED
        return token

    def resume(self, token: str) -> Sequence:
        """Queue a suspended sequence again; it goes on with the very next token.

        Where it has no room, its token stays good.
        Errors: `CannotSuspend` without a daemon, or when it is another model's; UnknownSession;
        PoolTooSmall and QueueFull of the scheduler.
        """
        sequence = self.store.resume(token, self._take_id())
        try:
            return self._queue(sequence)
        except WorkerError:
            self.store.leave(sequence)
            raise

    def figures(self, policy: str) -> RunFigures:
        """The run's figures so far."""
        wall_s = self.clock.elapsed_s
        p50_ms, p99_ms = self.clock.tpot_ms([50, 99])
        counters = self.scheduler.counters
        return RunFigures(
            policy=policy,
            sessions=counters.finished,
            generated_tokens=self.clock.tokens,
            wall_s=wall_s,
            tokens_per_s=self.clock.tokens / wall_s,
            tpot_p50_ms=p50_ms,
            tpot_p99_ms=p99_ms,
            peak_running=counters.peak_running,
            mean_running=self.clock.mean_running,
            preemptions=counters.preemptions,
            recomputed_tokens=counters.recomputed_tokens,
            pool_bytes=(self.pool.pages + 1) * self.pool.page_bytes,
            peak_pool_bytes=self.peak_pool_bytes,
            peak_request_bytes=self.peak_request_bytes,
            swap=self.store.figures(),
            folding=self.folder.figures,
            budgets=BudgetFigures() if self.governor is None else self.governor.figures,
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

    def _next_token(self, sequence: Sequence, logits: NDArray[np.float32]) -> int:
        """The token that comes next: the one that is forced, or else the one that is chosen."""
        if sequence.course is not None and sequence.course.forced:
            return sequence.course.forced.pop(0)
        sequence.token_at_s = self.clock.token(sequence.token_at_s)
        return choose(logits, sequence.sampling, len(sequence.tokens))

    def _compute(self, chunks: Seq[Chunk]) -> dict[int, NDArray[np.float32]]:
        """Run all rows of a step, tile by tile. The result: logits by id, where one samples."""
        rows = [(chunk.sequence, row) for chunk in chunks for row in self._rows(chunk)]
        logits: dict[int, NDArray[np.float32]] = {}
        rows_max = self.model.tile_sizes[-1]
        for start in range(0, len(rows), rows_max):
            part = rows[start : start + rows_max]
            hidden = self._forward(part)
            last = {
                sequence.id: i
                for i, (sequence, row) in enumerate(part)
                if row.position == len(sequence.tokens) - 1
            }
            if last:
                out = self.model.logits(hidden).cpu().numpy()
                logits.update((id_, out[i]) for id_, i in last.items())
        return logits

    def _rows(self, chunk: Chunk) -> list[Row]:
        sequence = chunk.sequence
        slots = sequence.kv.slots
        behind = len(slots) - chunk.first - chunk.tokens  # entries less tokens
        biased = sequence.thoughts.biased
        rows = [
            Row(sequence.tokens[at], at, slots[: at + behind + 1], biased)
            for at in range(chunk.first, chunk.first + chunk.tokens)
        ]
        groups = self.folder.groups(sequence, len(slots)) if chunk.samples else None
        if groups is not None:
            rows[-1] = replace(rows[-1], groups=groups)
        return rows

    def _forward(self, part: Seq[tuple[Sequence, Row]]) -> Tensor:
        """Shapes: the last hidden state [tile rows, hidden]."""
        pool, rows = self.pool, [row for _, row in part]
        model = self.model
        tile = build_tile(rows, model.tile_sizes, pool.scratch_slot, model.device)
        if tile.groups is None:
            return model.forward(tile, pool.kv)
        masses = torch.zeros(len(rows), tile.group_count, device=model.device)
        hidden = model.forward(tile, pool.kv, Watch(masses=masses))
        for (sequence, row), mass in zip(part, masses.cpu().numpy(), strict=True):
            if row.groups is not None:
                self._attended.append((sequence, mass))
        return hidden

    def _note_peaks(self) -> None:
        self.peak_pool_bytes = max(self.peak_pool_bytes, self.pool.used_bytes)
        pages = max((len(s.pages) for s in self.scheduler.running), default=0)
        self.peak_request_bytes = max(self.peak_request_bytes, pages * self.pool.page_bytes)


def block_shape(model: Llama, block_tokens: int) -> BlockShape:
    """The block shape of a model's KV."""
    c = model.config
    return BlockShape(c.layers, block_tokens, c.kv_heads, c.head_dim)
