"""The daemon as one process of the engine sees it: there or away, never waited for too long.

    up   ──a call times out, the connection is lost──▶ away
    away ──a greeting is answered (tried by the link's own thread, each PROBE_S)──▶ up

Whoever must not wait asks `up` first, or uses `call`, which refuses at once while the daemon is
away. Everything else is a job for the link's thread. So the engine waits for a daemon that hangs
once, for `deadline_s`, and for one that is away not at all.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

from kvtier_client.client import Client
from kvtier_client.errors import ConnectionLost, KvtierError, ShuttingDown, TransportError

PROBE_S: Final = 1.0
"""How often a daemon that is away is greeted."""
JOBS_LIMIT: Final = 65536
"""Jobs that wait; more fail at once."""
OWED_LIMIT: Final = 65536
"""Jobs that wait for a daemon that is away; the oldest are dropped, and its TTL ends what they
would have given back."""
CLOSE_S: Final = 5.0
"""How long an end of the engine waits for jobs under way."""
T = TypeVar("T")
log = logging.getLogger("vllm.kvtier")


class Job(Protocol):
    """Work with the daemon that nobody waits for."""

    @property
    def owed(self) -> bool:
        """Whether it is kept for a daemon that comes back, instead of failing."""

    def run(self, client: Client) -> None:
        """Do it, on the link's thread. Errors: KvtierError."""

    def fail(self) -> None:
        """It cannot be done; called on any thread."""


class Link:
    """One client, its state, and the thread that works with it."""

    def __init__(self, client: Client, greet: Callable[[Client], None]) -> None:
        """`greet` makes a round trip and whatever the process needs registered."""
        self._client = client
        self._greet = greet
        self._jobs: queue.Queue[Job | None] = queue.Queue(JOBS_LIMIT)
        self._owed: deque[Job] = deque(maxlen=OWED_LIMIT)
        self._greeted = False
        self._closed = False
        self._probe_s = 0.0
        self._told: bool | None = None
        self._thread = threading.Thread(target=self._work, name="kvtier-link", daemon=True)
        self._thread.start()

    @property
    def up(self) -> bool:
        """Whether the daemon answered last time and is connected."""
        return self._greeted and self._client.connected and not self._closed

    def call(self, work: Callable[[Client], T]) -> T:
        """Work with the daemon now. Errors: ConnectionLost at once while it is away; others."""
        if not self.up:
            raise ConnectionLost("kvtierd is away: this process greets it again each second")
        try:
            return work(self._client)
        except (TransportError, ShuttingDown) as problem:
            self._away(problem)
            raise

    def submit(self, job: Job) -> None:
        """Have a job done; one that nobody can do now, and that is not owed, fails at once."""
        if (self.up or job.owed) and not self._closed:
            try:
                self._jobs.put_nowait(job)
            except queue.Full:
                log.warning("%d jobs for kvtierd wait already: one more fails", JOBS_LIMIT)
            else:
                return
        job.fail()

    def close(self) -> None:
        """Do what was submitted, as far as CLOSE_S allows, and close the connection."""
        if self._closed:
            return
        deadline_s = time.monotonic() + CLOSE_S
        try:
            self._jobs.put(None, timeout=CLOSE_S)
        except queue.Full:
            log.warning("kvtierd: %d jobs were not done in %.0f s", self._jobs.qsize(), CLOSE_S)
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        self._closed = True
        try:
            self._client.close()
        except KvtierError as problem:
            log.warning("closing the connection to kvtierd: %s", problem)

    # ------------------------------------------------------------- the thread

    def _work(self) -> None:
        while not self._closed:
            self._probe()
            for _ in range(len(self._owed)):
                if not self.up:
                    break
                self._do(self._owed.popleft())
            try:
                job = self._jobs.get(timeout=PROBE_S / 2)
            except queue.Empty:
                continue
            if job is None:
                return
            self._do(job)

    def _probe(self) -> None:
        now_s = time.monotonic()
        if self.up or now_s < self._probe_s:
            return
        self._probe_s = now_s + PROBE_S
        try:
            self._greet(self._client)
        except (KvtierError, OSError) as problem:
            self._away(problem)
        except Exception as problem:
            log.exception("greeting kvtierd failed")
            self._away(problem)
        else:
            self._greeted = True
            if self._told is not True:
                log.info("kvtierd is there: preempted requests are swapped")
            self._told = True

    def _away(self, problem: BaseException) -> None:
        self._greeted = False
        if self._told is not False:
            log.warning("kvtierd is away, preempted requests are recomputed: %s", problem)
        self._told = False

    def _do(self, job: Job) -> None:
        if not self.up:
            self._put_off(job)
            return
        try:
            job.run(self._client)
        except (TransportError, ShuttingDown) as problem:
            self._away(problem)
            self._put_off(job)
        except (KvtierError, OSError) as problem:
            log.warning("kvtierd refused %s: %s", type(job).__name__.lower(), problem)
            job.fail()
        except Exception:
            log.exception("%s failed", type(job).__name__.lower())
            job.fail()

    def _put_off(self, job: Job) -> None:
        if job.owed:
            self._owed.append(job)
        else:
            job.fail()
