"""Every error of the worker itself; those of the daemon are in `kvtier_client.errors`.

WorkerError
├── UnsupportedModel   no model there, or none that this worker runs
├── BadPrompt          the prompt is empty, or has tokens that the model has not
├── PoolTooSmall       the KV budget does not hold what was asked of it
├── TooLong            the model has no positions for so many tokens
├── QueueFull          as many sequences wait as may wait
├── CannotSuspend      the session cannot be suspended or resumed by this worker
├── CannotFork         the sequence has ended, or there is no room for a branch of it
├── CannotUnfold       there is no such folded step, or nobody keeps its full KV
├── BadStepRules       what should end a step cannot: unknown tokens, a broken pattern
├── BadBudget          a request's budget is none, or nothing can be thought with it
├── BadControl         no sequence can go on with a control sequence: empty, unknown tokens
├── BadSearch          a search was asked for that cannot be made
├── SearchFailed       no branch of a search came to an end that could be scored
└── DaemonFailed       the kvtierd that the worker started did not come up

UntrainedFold is a warning: what is folded is an approximation for this model.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier_worker.search.outcome import SearchFigures


class UntrainedFold(UserWarning):
    """Steps are folded for a model that was not trained to go on from what is kept of them."""

    def __init__(self, model: str, keep: int) -> None:
        super().__init__(
            f"model {model} was not trained to go on from {keep} entries of each step: what it"
            " writes is an approximation. Of a model without that training 95 % of the answers"
            " were right, but of the traces 24 %, where 56 % are with full KV; and what stands"
            " inside a step is gone until it is unfolded. Take a model whose config.json has"
            ' "fold_trained_keep", as the shipped one has'
        )


class WorkerError(Exception):
    """Base of the worker's own errors."""


class UnsupportedModel(WorkerError):
    """There is no model, or none that this worker runs."""


class BadPrompt(WorkerError):
    """The prompt is empty, or has tokens that the model has not."""


class PoolTooSmall(WorkerError):
    """The KV budget does not hold what was asked of it."""


class TooLong(WorkerError):
    """The model has no positions for so many tokens."""


class QueueFull(WorkerError):
    """As many sequences wait as may wait."""


class CannotSuspend(WorkerError):
    """The session cannot be suspended or resumed by this worker."""


class CannotFork(WorkerError):
    """The sequence has ended, or there is no room for a branch of it."""


class CannotUnfold(WorkerError):
    """There is no such folded step, or nobody keeps its full KV."""


class BadStepRules(WorkerError):
    """What should end a step cannot: tokens that the model has not, a pattern that is none."""


class BadBudget(WorkerError):
    """A request's budget is none, or nothing can be thought with it."""


class BadControl(WorkerError):
    """No sequence can go on with a control sequence: it is empty, or has unknown tokens."""


class BadSearch(WorkerError):
    """A search was asked for that cannot be made: no prompt, no branches, too many of them."""


class SearchFailed(WorkerError):
    """No branch of a search came to an end that could be scored; `figures` is what it took."""

    def __init__(self, message: str, figures: "SearchFigures | None" = None) -> None:
        super().__init__(message)
        self.figures = figures


class DaemonFailed(WorkerError):
    """The kvtierd that the worker started did not come up."""
