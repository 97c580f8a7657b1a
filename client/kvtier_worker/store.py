"""Where KV that leaves the pool goes: the seam between the scheduler and what lies behind it."""

from typing import Protocol

from kvtier_worker.errors import CannotSuspend
from kvtier_worker.metrics import SwapFigures
from kvtier_worker.sequence import Sequence
from kvtier_worker.thoughts import Step
from kvtier_worker.tile import Slots


class KvStore(Protocol):
    """Keeps the KV of sequences that lost their pages, and of steps that were folded.

    The scheduler guarantees that a sequence's slots hold the KV of its first `computed_tokens`
    tokens, less what is folded away, when `save` is called, that no step of it is unfolded then,
    and that the slots are its own until `save` returns; `load` finds slots for all that was saved.
    """

    @property
    def unfolds(self) -> bool:
        """Whether the full KV of folded steps is kept, so that folds can be undone."""

    def save(self, sequence: Sequence) -> int:
        """Copy the sequence's KV away and return how many leading entries are kept: all of them,
        or fewer when there was no room. When it returns, the pages may be reused."""

    def load(self, sequence: Sequence) -> int:
        """Copy saved KV back into the sequence's new slots and return how many leading entries
        are there; fewer than were saved when some were lost."""

    def expect(self, sequence: Sequence) -> None:
        """The sequence is next in line to be loaded: a hint, perhaps repeated."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended: nothing of it needs to be kept that no fork of it needs."""

    def leave(self, sequence: Sequence) -> None:
        """A suspended sequence belongs to another worker from now on, or to nobody."""

    def branch(self, sequence: Sequence, child: Sequence) -> None:
        """The child was forked from the sequence: what is kept of one is kept of both."""

    def keep_step(self, sequence: Sequence, step: Step, slots: Slots) -> bool:
        """Copy a step's full KV away, before it is folded; whether there was room for it."""

    def bring_step(self, sequence: Sequence, step: Step, slots: Slots) -> bool:
        """Copy a step's full KV back, into slots that fill whole pages but the last.

        False is a miss: it was not kept, or was dropped since; the slots hold nothing then."""

    def expect_step(self, sequence: Sequence, step: Step) -> None:
        """The step may be brought back soon: a hint."""

    def folded(self, sequence: Sequence, step: Step) -> None:
        """The step is folded from now on: its full KV may be dropped after a while."""

    def cut(self, sequence: Sequence, entry: int) -> None:
        """The sequence's entries from this one on are not those any more that were saved."""

    def suspend(self, sequence: Sequence) -> str:
        """Save KV, tokens and sampler state under a token (hex) that outlives this worker.

        Errors: CannotSuspend."""

    def resume(self, token: str, sequence_id: int) -> Sequence:
        """The suspended sequence, ready to be queued. Errors: CannotSuspend."""

    def figures(self) -> SwapFigures:
        """What was moved so far."""


class RecomputeStore:
    """Keeps nothing, so that every preempted token is computed again and no fold is undone."""

    unfolds = False

    def save(self, sequence: Sequence) -> int:
        """Keep none."""
        return 0

    def load(self, sequence: Sequence) -> int:
        """Never called, as nothing is ever saved."""
        raise AssertionError(f"sequence {sequence.id} was never saved")

    def expect(self, sequence: Sequence) -> None:
        """Do nothing."""

    def forget(self, sequence: Sequence) -> None:
        """Do nothing."""

    def leave(self, sequence: Sequence) -> None:
        """Do nothing."""

    def branch(self, sequence: Sequence, child: Sequence) -> None:
        """Do nothing."""

    def keep_step(self, sequence: Sequence, step: Step, slots: Slots) -> bool:
        """Keep none."""
        return False

    def bring_step(self, sequence: Sequence, step: Step, slots: Slots) -> bool:
        """Nothing was kept."""
        return False

    def expect_step(self, sequence: Sequence, step: Step) -> None:
        """Do nothing."""

    def folded(self, sequence: Sequence, step: Step) -> None:
        """Do nothing."""

    def cut(self, sequence: Sequence, entry: int) -> None:
        """Do nothing."""

    def suspend(self, sequence: Sequence) -> str:
        """Errors: CannotSuspend."""
        raise CannotSuspend(
            f"sequence {sequence.id} cannot be suspended: this worker has no daemon to keep it;"
            " start it with --daemon SOCKET"
        )

    def resume(self, token: str, sequence_id: int) -> Sequence:
        """Errors: CannotSuspend."""
        raise CannotSuspend(
            "no session can be resumed: this worker has no daemon; start it with --daemon SOCKET"
        )

    def figures(self) -> SwapFigures:
        """All zero."""
        return SwapFigures()
