"""Every error of the worker itself; those of the daemon are in `kvtier_client.errors`.

WorkerError
├── UnsupportedModel   no model there, or none that this worker runs
├── PoolTooSmall       the KV budget does not hold what was asked of it
├── TooLong            the model has no positions for so many tokens
├── QueueFull          as many sequences wait as may wait
├── CannotSuspend      the session cannot be suspended or resumed by this worker
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


class DaemonFailed(WorkerError):
    """The kvtierd that the worker started did not come up."""
