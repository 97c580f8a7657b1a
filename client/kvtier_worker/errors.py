"""Every error of the worker itself; those of the daemon are in `kvtier_client.errors`.

WorkerError
├── UnsupportedModel   no model there, or none that this worker runs
├── PoolTooSmall       the KV budget does not hold what was asked of it
├── TooLong            the model has no positions for so many tokens
├── QueueFull          as many sequences wait as may wait
├── CannotSuspend      the session cannot be suspended or resumed by this worker
├── CannotFork         the sequence has ended, or there is no room for a branch of it
├── CannotUnfold       there is no such folded step, or nobody keeps its full KV
├── BadStepRules       what should end a step cannot: unknown tokens, a broken pattern
└── DaemonFailed       the kvtierd that the worker started did not come up
"""


class WorkerError(Exception):
    """Base of the worker's own errors."""


class UnsupportedModel(WorkerError):
    """There is no model, or none that this worker runs."""


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


class DaemonFailed(WorkerError):
    """The kvtierd that the worker started did not come up."""
