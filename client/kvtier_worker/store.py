"""Where a preempted sequence's KV goes: the seam between the scheduler and what lies behind it."""

from typing import Protocol

from kvtier_worker.errors import CannotSuspend
from kvtier_worker.metrics import SwapFigures
from kvtier_worker.sequence import Sequence


class KvStore(Protocol):
    """Keeps the KV of sequences that lost their pages.

    The scheduler guarantees that a sequence's pages hold its first `computed_tokens` tokens when
    `save` is called and are its own until `save` returns, and that `load` finds pages for all its
    tokens.
    """

    def save(self, sequence: Sequence) -> int:
        """Copy the sequence's KV away and return how many leading tokens are kept: all of them,
        or fewer when there was no room. When it returns, the pages may be reused."""

    def load(self, sequence: Sequence) -> int:
        """Copy saved KV back into the sequence's new pages and return how many leading tokens
        are there; fewer than were saved when some were lost."""

    def expect(self, sequence: Sequence) -> None:
        """The sequence is next in line to be loaded: a hint, perhaps repeated."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended: nothing of it needs to be kept."""

    def suspend(self, sequence: Sequence) -> str:
        """Save KV, tokens and sampler state under a token (hex) that outlives this worker.

        Errors: CannotSuspend."""

    def resume(self, token: str, sequence_id: int) -> Sequence:
        """The suspended sequence, ready to be queued. Errors: CannotSuspend."""

    def figures(self) -> SwapFigures:
        """What was moved so far."""


class RecomputeStore:
    """Keeps nothing, so that every preempted token is computed again."""

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
