"""The connector in a worker's process: copies between its blocks and the arena, and reports.

Stores are made by the engine's own thread, since its blocks are overwritten as soon as it goes on;
each step waits for the daemon at most `deadline_s`, and not at all while it is away. Loads are
jobs of the link's thread; the engine goes on and asks at each step which ones have ended.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import msgspec
import numpy as np

from kvtier_client.arena import Arena
from kvtier_client.client import Client
from kvtier_client.engines.vllm.keys import KEY_BYTES
from kvtier_client.engines.vllm.link import Job
from kvtier_client.engines.vllm.messages import Load, Part, Report, Save
from kvtier_client.engines.vllm.stats import Tally
from kvtier_client.errors import ConnectionLost, KvtierError, Timeout
from kvtier_client.wire import Layout

LOAD_DEADLINES: Final = 10
"""A load waits for blocks from NVMe, or for room to bring them to, this many deadlines long."""
log = logging.getLogger("vllm.kvtier")
T = TypeVar("T")


class Memory(Protocol):
    """Where the blocks of one KV-cache group lie in this process."""

    def prepare(self, arena: Arena) -> None:
        """What takes time and is done once for an arena, before anybody waits for a copy."""

    def windows(self, ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Cut blocks into windows that are copied at a time: first and last, excluded."""

    def source(self, ids: Sequence[int]) -> Any:
        """Records to store from."""

    def target(self, ids: Sequence[int], after: Any) -> tuple[Any, Callable[[int], None]]:
        """Records to load into, and what to call with how many were, before they are used."""

    def moment(self) -> Any:
        """What is under way on the engine's thread now; loads write after it."""


class Place(msgspec.Struct, frozen=True):
    """One KV-cache group of this worker."""

    layout: Layout
    memory: Memory
    stores: bool
    """Whether this rank stores, rather than another one that has the same bytes."""
    block_tokens: int


class Calls(Protocol):
    """What the worker's side needs of a link."""

    def call(self, work: Callable[[Client], T]) -> T:
        """Work with the daemon now."""

    def submit(self, job: Job) -> None:
        """Have a job done."""


class WorkerSide:
    """The blocks of one rank."""

    def __init__(self, places: Sequence[Place], link: Calls, deadline_s: float) -> None:
        self.places = tuple(places)
        self._link = link
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._tally = Tally()
        self._report = Report()
        self._ended: set[str] = set()
        self._bad_ids: set[int] = set()
        self._failed: set[str] = set()

    # ------------------------------------------------------------------ stores

    def store(self, saves: Sequence[Save]) -> None:
        """Store blocks; returns when their bytes are in the arena or the deadline has passed."""
        if not saves:
            return
        began_s = time.monotonic()
        until_s = began_s + self._deadline_s
        for save in saves:
            stored = self._store(save, until_s)
            with self._lock:
                self._report.ended[save.number] = 1
                if not stored:
                    self._report.failed.add(save.number)
        with self._lock:
            self._tally.add("save_us", round(1e6 * (time.monotonic() - began_s)))

    def _store(self, save: Save, until_s: float) -> bool:
        try:
            for part in save.parts:
                if self.places[part.group].stores:
                    self._store_part(part, until_s)
        except ConnectionLost:
            return False
        except (KvtierError, OSError) as problem:
            log.warning("%d blocks were not saved: %s", len(part.ids), problem)
            return False
        except Exception:
            log.exception("saving %d blocks failed", len(part.ids))
            return False
        return True

    def _store_part(self, part: Part, until_s: float) -> None:
        place = self.places[part.group]
        for first, last in place.memory.windows(part.ids):
            left_s = until_s - time.monotonic()
            if left_s <= 0.0:
                raise Timeout(
                    f"this step's saves took longer than {self._deadline_s} s; the rest is "
                    "recomputed when it is needed; allow more with deadline_s"
                )
            count = last - first
            valid = np.full(count, place.block_tokens, np.uint32)
            if last == len(part.ids):
                valid[-1] = part.tail_tokens
            pages = range(part.first + first, part.first + last)
            keys = part.keys[KEY_BYTES * first : KEY_BYTES * last]
            records = place.memory.source(part.ids[first:last])
            room_s = left_s / 2  # the other half is for the answer
            put = partial(_put, place.layout, keys, records, pages, valid, room_s)
            stored = self._link.call(put)
            with self._lock:
                self._tally.add("saved_blocks", stored)
                self._tally.add("saved_bytes", stored * place.layout.block_bytes)

    # ------------------------------------------------------------------- loads

    def load(self, loads: Sequence[Load]) -> None:
        """Begin to load; `ended` will tell of each."""
        for load in loads:
            moments = [place.memory.moment() for place in self.places]
            job = Loading(self, load, moments)
            if load.whole:
                self._link.submit(job)
            else:
                job.fail()

    def fetch(self, client: Client, part: Part, moment: Any) -> int:
        """Load the blocks of a part; returns how many leading ones are there."""
        place = self.places[part.group]
        done = 0
        for first, last in place.memory.windows(part.ids):
            keys = part.keys[KEY_BYTES * first : KEY_BYTES * last]
            records, finish = place.memory.target(part.ids[first:last], moment)
            got = client.get_keys(
                place.layout, keys, records, wait_s=LOAD_DEADLINES * self._deadline_s
            )
            finish(got)
            done += got
            if got < last - first:
                break
        return done

    def loaded(self, load: Load, got: Sequence[int], restored_bytes: int, took_s: float) -> None:
        """A load has ended with so many leading blocks of each part."""
        short, bad, blocks, size_bytes = [], set[int](), 0, 0
        for part, count in zip(load.parts, got, strict=True):
            place = self.places[part.group]
            blocks += count
            size_bytes += count * place.layout.block_bytes
            if count < len(part.ids):
                short.append((part.first + count) * place.block_tokens)
                bad.update(part.ids[count:])
        if not load.whole:
            short.append(0)
        with self._lock:
            self._ended.add(load.request_id)
            if short:
                self._report.short[load.request_id] = min(short)
                self._bad_ids |= bad
                self._failed.add(load.request_id)
            self._tally.add("loaded_blocks", blocks)
            self._tally.add("loaded_dram_bytes", max(0, size_bytes - restored_bytes))
            self._tally.add("loaded_nvme_bytes", restored_bytes)
            self._tally.add("load_us", round(1e6 * took_s))

    # ----------------------------------------------------------------- reports

    def ended(self) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended, and those of them whose blocks are not all there."""
        with self._lock:
            ended, self._ended = self._ended, set()
            failed, self._failed = self._failed, set()
        return ended, failed

    def bad_ids(self) -> set[int]:
        """Blocks that were to be loaded and were not."""
        with self._lock:
            bad, self._bad_ids = self._bad_ids, set()
        return bad

    def report(self) -> Report | None:
        """What was done since the last report."""
        with self._lock:
            report, self._report = self._report, Report()
        return report or None

    def take_stats(self) -> dict[str, float]:
        """Counters since they were last taken."""
        with self._lock:
            return self._tally.take()


class Loading:
    """One request's load on this rank."""

    owed = False

    def __init__(self, side: WorkerSide, load: Load, moments: list[Any]) -> None:
        self._side, self._load, self._moments = side, load, moments
        self._got = [0] * len(load.parts)
        self._restored_bytes = 0
        self._took_s = 0.0

    def run(self, client: Client) -> None:
        """Load part after part; a part that is cut short ends it."""
        began_s, before = time.monotonic(), client.stats.restored_bytes
        try:
            for index, part in enumerate(self._load.parts):
                self._got[index] = self._side.fetch(client, part, self._moments[part.group])
                if self._got[index] < len(part.ids):
                    break
        finally:
            self._restored_bytes = client.stats.restored_bytes - before
            self._took_s = time.monotonic() - began_s
        self._tell()

    def fail(self) -> None:
        """What was not loaded is recomputed."""
        self._tell()

    def _tell(self) -> None:
        self._side.loaded(self._load, self._got, self._restored_bytes, self._took_s)


def _put(
    layout: Layout,
    keys: bytes,
    records: Any,
    pages: range,
    valid: Any,
    wait_s: float,
    client: Client,
) -> int:
    """Store what is missing of some keys; returns how many blocks were."""
    return client.put_keys(layout, keys, records, pages, valid, wait_s)
