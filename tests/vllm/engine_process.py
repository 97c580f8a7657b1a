"""A vLLM engine in a process of its own, driven through a pipe one JSON line at a time.

The first line has the arguments of the engine; each further one names a method of `Host`.
"""

import ctypes
import json
import os
import signal
import sys
from typing import Any, Final, TextIO

from prometheus_client import REGISTRY
from vllm import EngineArgs, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

PR_SET_PDEATHSIG: Final = 1


class Host:
    """The engine, and the tokens that its requests have got so far."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._tokens: dict[str, list[int]] = {}
        self._running: dict[str, str] = {}
        """The engine's name of each request that is not over."""

    def add(self, requests: dict[str, list[int]], tokens: int) -> None:
        """Begin requests {name: prompt}; each is to get so many tokens, the likeliest ones."""
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True,
                                detokenize=False)  # fmt: skip
        for name, prompt in requests.items():
            self._tokens[name] = []
            self._running[name] = self._engine.add_request(
                name, {"prompt_token_ids": prompt}, params
            )

    def step(self, tokens: int | None) -> int:
        """Go on until there are so many new tokens, or to the end; returns how many there were."""
        come = 0
        while self._running and (tokens is None or come < tokens):
            for output in self._engine.step():
                had = self._tokens[output.request_id]
                self._tokens[output.request_id] = [*output.outputs[0].token_ids]
                come += len(self._tokens[output.request_id]) - len(had)
                if output.finished:
                    del self._running[output.request_id]
        return come

    def abort(self, names: list[str]) -> None:
        """End requests where they are."""
        self._engine.abort_request([self._running.pop(name) for name in names], internal=True)

    def running(self) -> list[str]:
        """Requests that are not over."""
        return [*self._running]

    def take(self) -> dict[str, list[int]]:
        """The tokens of the requests that are over; they are forgotten."""
        over = {name: self._tokens[name] for name in self._tokens if name not in self._running}
        for name in over:
            del self._tokens[name]
        return over

    def forget_prefixes(self) -> bool:
        """Empty the engine's own prefix cache."""
        return self._engine.reset_prefix_cache()

    def metrics(self) -> dict[str, float]:
        """What vLLM publishes for Prometheus, by name; series of several labels are summed."""
        found: dict[str, float] = {}
        for family in REGISTRY.collect():
            if family.name.startswith("vllm:"):
                for sample in family.samples:
                    found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def close(self) -> None:
        """End the engine."""
        self._engine.engine_core.shutdown()


def serve(requests: TextIO, replies: TextIO) -> None:
    """Carry out one line after the other until there are no more."""
    host = None
    for line in requests:
        try:
            if host is None:
                host, value = Host(json.loads(line)), None
            else:
                method, arguments = json.loads(line)
                value = getattr(host, method)(*arguments)
            answer = {"value": value}
        except Exception as problem:
            answer = {"problem": f"{type(problem).__name__}: {problem}"}
        print(json.dumps(answer), file=replies, flush=True)


def end_with(parent: int) -> None:
    """A test that is killed leaves no engine behind: all its processes are in this one's group."""
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit("whoever has started this engine has ended")


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what vLLM prints goes to the log
    serve(sys.stdin, pipe)
