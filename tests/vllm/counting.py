"""A vLLM scheduler that counts what is computed, and what is computed again.

The counts lie in a mapped file, so that whoever has started the engine reads them at any moment.
"""

import mmap
import os
import struct
from pathlib import Path
from typing import Any, Final, NamedTuple

PATH_VARIABLE: Final = "KVTIERD_VLLM_COUNTS"


class Counts(NamedTuple):
    """What an engine has done since it started."""

    steps: int = 0
    computed_tokens: int = 0
    """Positions of requests that went through the model."""
    recomputed_tokens: int = 0
    """Those of them whose keys and values the engine had computed before for the same request."""
    preemptions: int = 0
    lost_tokens: int = 0
    """Positions whose blocks were taken from requests that were preempted."""

    def since(self, before: "Counts") -> "Counts":
        """What came after an earlier reading."""
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


_FIELDS: Final = struct.Struct(f"<{len(Counts._fields)}Q")


def create(path: Path) -> None:
    """Make the file for an engine that will be started with its path in the environment."""
    path.write_bytes(bytes(_FIELDS.size))


def read(path: Path) -> Counts:
    """The counts as they are now."""
    return Counts(*_FIELDS.unpack(path.read_bytes()))


def counting(scheduler: type[Any]) -> type[Any]:
    """A class like this scheduler of vLLM's that counts."""

    class Counting(scheduler):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            with open(os.environ[PATH_VARIABLE], "r+b") as file:
                self._file = mmap.mmap(file.fileno(), _FIELDS.size)
            self._counts = dict.fromkeys(Counts._fields, 0)
            self._reached: dict[str, int] = {}
            """How far each request has ever been computed."""

        def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
            self._counts["preemptions"] += 1
            self._counts["lost_tokens"] += request.num_computed_tokens
            super()._preempt_request(request, *args, **kwargs)

        def _update_after_schedule(self, scheduler_output: Any) -> None:
            counts, reached = self._counts, self._reached
            for name, tokens in scheduler_output.num_scheduled_tokens.items():
                begin = self.requests[name].num_computed_tokens
                known = reached.get(name, 0)
                counts["computed_tokens"] += tokens
                counts["recomputed_tokens"] += max(0, min(begin + tokens, known) - begin)
                reached[name] = max(known, begin + tokens)
            for name in scheduler_output.finished_req_ids:
                reached.pop(name, None)
            counts["steps"] += bool(scheduler_output.num_scheduled_tokens)
            _FIELDS.pack_into(self._file, 0, *counts.values())
            super()._update_after_schedule(scheduler_output)

    return Counting


def __getattr__(name: str) -> type[Any]:
    """`CountingScheduler`, made when vLLM asks for it: others read the counts without vLLM."""
    if name != "CountingScheduler":
        raise AttributeError(name)
    from vllm.v1.core.sched.scheduler import Scheduler

    return counting(Scheduler)
