"""The test's side of an engine process: starts it, drives it, and ends all its processes."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tests.vllm import counting
from tests.vllm.counting import Counts

ROOT: Final = Path(__file__).parents[2]
MODEL: Final = ROOT / "build" / "vllm" / "model"
BLOCK_TOKENS: Final = 32
ANSWER_MAX_S: Final = 420.0
END_MAX_S: Final = 60.0
ENVIRONMENT: Final = {
    "LD_PRELOAD": f"{sys.prefix}/lib/libiomp5.so",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # One thread computes, as vLLM itself would choose on two cores: the other is for the rest.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "KMP_BLOCKTIME": "0",
}


def connector(socket_path: str, **extra: Any) -> dict[str, Any]:
    """The `--kv-transfer-config` of an engine that swaps to the daemon of this socket."""
    return {
        "kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier_client.engines.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": socket_path, **extra},
    }


class EngineFailed(Exception):
    """An engine process has ended, or answers no more; with the end of its log."""


class Engine:
    """A running engine. Its methods raise EngineFailed when it does not do what it is asked."""

    def __init__(self, directory: Path, transfer: dict[str, Any] | None, **arguments: Any) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.counts_path, self._log_path = directory / "counts", directory / "engine.log"
        self._named = 0
        counting.create(self.counts_path)
        environment = os.environ | ENVIRONMENT | {
            counting.PATH_VARIABLE: str(self.counts_path), "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        with open(self._log_path, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.engine_process", str(os.getpid())],
                cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, start_new_session=True,
            )  # fmt: skip
        self._send({
            "model": str(MODEL), "skip_tokenizer_init": True, "enforce_eager": True,
            "block_size": BLOCK_TOKENS, "max_model_len": 1024, "max_num_seqs": 16,
            "scheduler_cls": "tests.vllm.counting.CountingScheduler",
            "disable_log_stats": False, "kv_transfer_config": transfer,
        } | arguments)  # fmt: skip

    # ------------------------------------------------------------- requests

    def wait_until_ready(self) -> "Engine":
        """Wait for the end of the start, which takes half a minute."""
        self._receive()
        return self

    def add(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[str]:
        """Begin requests that are to get so many tokens; returns their names."""
        names = [str(self._named + i) for i in range(len(prompts))]
        self._named += len(prompts)
        self.do("add", dict(zip(names, prompts, strict=True)), tokens)
        return names

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        """What follows each prompt, all of them served at once."""
        names = self.add(prompts, tokens)
        return self.finish(names)

    def finish(self, names: Sequence[str]) -> list[list[int]]:
        """Let all requests end; returns the tokens of these."""
        self.step()
        over = self.do("take")
        return [over[name] for name in names]

    def step(self, tokens: int | None = None) -> int:
        """Go on until there are so many new tokens, or to the end; returns how many there were."""
        return int(self.do("step", tokens))

    def abort(self, names: Sequence[str]) -> None:
        self.do("abort", names)

    def running(self) -> list[str]:
        """Requests that are not over."""
        return [*self.do("running")]

    def forget_prefixes(self) -> None:
        """Empty its own prefix cache, as a restart would."""
        assert self.do("forget_prefixes")

    # -------------------------------------------------------------- looking

    def metrics(self) -> dict[str, float]:
        """What vLLM publishes for Prometheus."""
        return dict(self.do("metrics"))

    def counts(self) -> Counts:
        """What it has computed since it started."""
        return counting.read(self.counts_path)

    def log(self) -> str:
        """Everything that its processes have said."""
        return self._log_path.read_text(errors="replace")

    # -------------------------------------------------------------- process

    def close(self) -> None:
        """End it well; may be repeated."""
        if self._process.returncode is None:
            self.do("close")
            self.end()

    def end(self) -> None:
        """End all its processes, whatever state they are in."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if self._process.returncode is not None:
            return
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_MAX_S)
        with contextlib.suppress(ProcessLookupError):  # its session: the engine's core and workers
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()

    def do(self, method: str, *arguments: Any) -> Any:
        """Have the process call a method of `Host`."""
        self._send([method, arguments])
        return self._receive()

    def _send(self, line: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(line).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EngineFailed(self._told("has ended")) from None

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_MAX_S)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            raise EngineFailed(self._told("has ended" if ready else "does not answer"))
        answer = json.loads(line)
        if "problem" in answer:
            raise EngineFailed(self._told(answer["problem"]))
        return answer["value"]

    def _told(self, what: str) -> str:
        return f"an engine {what}; its log ends:\n" + "\n".join(self.log().splitlines()[-40:])


@contextlib.contextmanager
def engine(directory: Path, transfer: dict[str, Any] | None, **arguments: Any) -> Iterator[Engine]:
    """A running engine that is ended afterwards."""
    started = Engine(directory, transfer, **arguments)
    try:
        yield started.wait_until_ready()
        started.close()
    finally:
        started.end()
