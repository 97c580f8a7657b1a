"""A store's adapter as the driver sees it: a process to ask, with a limit, and to end for sure."""

import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.bench.peers.adapters.peer import Unavailable
from tests.bench.peers.install import ROOT

START_MAX_S: Final = 180.0
ROUND_MAX_S: Final = 60.0
END_MAX_S: Final = 15.0
ANSWER_MAX_BYTES: Final = 1 << 16


class PeerFailed(Exception):
    """The adapter met an error, ended, or did not answer in time."""


class AdapterProcess:
    """Leads a process group of its own, with the store's servers in it."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.log = log
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output,
            )  # fmt: skip

    def ask(self, message: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Its answer to one line. Errors: PeerFailed; Unavailable."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise PeerFailed(f"its adapter ended; see {self.log}") from None
        answer: dict[str, Any] = json.loads(self._line(limit_s))
        if why := answer.get("unavailable"):
            raise Unavailable(f"{why}; see {self.log}")
        if why := answer.get("failed"):
            raise PeerFailed(f"{why}; see {self.log}")
        return answer

    def _line(self, limit_s: float) -> bytes:
        assert self.process.stdout is not None
        descriptor, line = self.process.stdout.fileno(), b""
        while not line.endswith(b"\n"):
            if not select.select([descriptor], [], [], limit_s)[0]:
                raise PeerFailed(f"no answer within {limit_s:.0f} s; see {self.log}")
            data = os.read(descriptor, ANSWER_MAX_BYTES)
            if not data:
                raise PeerFailed(f"its adapter ended; see {self.log}")
            line += data
        return line

    def end(self) -> None:
        """Let it clean up, then kill what is left of its group."""
        assert self.process.stdin is not None and self.process.stdout is not None
        leader = os.pidfd_open(self.process.pid)
        try:
            self.process.stdin.close()
            select.select([leader], [], [], END_MAX_S)
            os.killpg(self.process.pid, signal.SIGKILL)  # not waited for yet: the id is still its
            self.process.wait()
        finally:
            os.close(leader)
            self.process.stdout.close()
