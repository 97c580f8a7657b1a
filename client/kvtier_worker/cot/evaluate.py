"""How right the model's answers are with folded steps, compared with full KV: `kvtier-worker eval`.

Problems are drawn in chunks, each from its own seed, and every chunk is answered in each mode by
some process, greedily, through the real engine and a real daemon. What is answered is kept in a
file as it comes in: whoever runs the same evaluation again goes on from there. How many problems
it takes follows from how often folded steps and full KV differ.
"""

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from enum import StrEnum
from functools import cache
from itertools import islice
from multiprocessing import get_context
from typing import Any, Final

import msgspec
import numpy as np
import torch

import kvtier_client as kv
from kvtier_worker.cot.answers import BLOCK_TOKENS, Answerer, Attended, Folded, Full
from kvtier_worker.cot.demo import require_the_task
from kvtier_worker.cot.policy import KEEP
from kvtier_worker.cot.task import SESSION_1K, Problem, Size, sample_problem
from kvtier_worker.cot.verdict import Verdict, judge, paired_answers, right_pairs
from kvtier_worker.daemon import OwnDaemon, sizes_for
from kvtier_worker.engine import block_shape
from kvtier_worker.errors import UntrainedFold
from kvtier_worker.load import load_model
from kvtier_worker.pool import BlockShape

SEED: Final = 7_000_003
"""Of the problems; training draws from other seeds."""
CHUNK_PROBLEMS: Final = 64
PILOT_PAIRS: Final = 1024
LEAST_PAIRS: Final = 4096
MOST_PAIRS: Final = 65_536
HALF_WIDTH_POINTS: Final = 0.2
ATTENDED_CHUNKS: Final = 4

Say = Callable[[str], None]
Answers = Full | Folded | Attended


class Mode(StrEnum):
    """How a chunk is answered."""

    FULL = "full"
    FOLDED = "folded"
    ATTENDED = "attended"


class About(msgspec.Struct, frozen=True):
    """What is evaluated. Results of anything else are of no use."""

    model: str
    steps: int
    rows: int
    chunk_problems: int = CHUNK_PROBLEMS
    keep: int = KEEP
    seed: int = SEED

    @property
    def size(self) -> Size:
        """The size of all problems."""
        return Size(self.steps, self.rows)

    def problems(self, chunk: int) -> list[Problem]:
        """The problems of a chunk."""
        random = np.random.default_rng((self.seed, chunk))
        return [sample_problem(random, self.size) for _ in range(self.chunk_problems)]


class Results(msgspec.Struct):
    """The answers to every chunk by mode, and the verdict on them."""

    about: About
    full: dict[int, Full] = {}
    folded: dict[int, Folded] = {}
    attended: dict[int, Attended] = {}
    verdict: Verdict | None = None

    def of(self, mode: Mode) -> dict[int, Any]:
        """The chunks that were answered in a mode."""
        chunks: dict[int, Any] = getattr(self, mode)
        return chunks

    def take(self, mode: Mode, chunk: int, answers: Answers) -> None:
        """Add the answers to a chunk, and judge anew."""
        self.of(mode)[chunk] = answers
        answered = paired_answers(self.full, self.folded)
        self.verdict = judge(answered, list(self.attended.values()))

    def chunks(self, pairs: int | None) -> int:
        """How many chunks so many pairs take; without a number as many as the interval needs."""
        return -(-(pairs or self._needed_pairs()) // self.about.chunk_problems)

    def missing(self, pairs: int | None) -> Iterator[tuple[Mode, int]]:
        """What is still to be answered, in its order."""
        chunks = range(self.chunks(pairs))
        wanted = [(mode, chunk) for chunk in chunks for mode in (Mode.FULL, Mode.FOLDED)]
        wanted += [(Mode.ATTENDED, chunk) for chunk in chunks[:ATTENDED_CHUNKS]]
        return ((mode, chunk) for mode, chunk in wanted if chunk not in self.of(mode))

    def _needed_pairs(self) -> int:
        right = right_pairs(paired_answers(self.full, self.folded))
        if right.pairs < PILOT_PAIRS:
            return PILOT_PAIRS
        return min(max(LEAST_PAIRS, right.pairs_for(HALF_WIDTH_POINTS)), MOST_PAIRS)


def evaluate(
    model_path: str,
    out: str,
    jobs: int,
    say: Say,
    pairs: int | None = None,
    size: Size = SESSION_1K,
    chunk_problems: int = CHUNK_PROBLEMS,
) -> Results:
    """Answer problems in `jobs` processes until there are enough, or `pairs` of them.

    `pairs` is rounded up to whole chunks. Answers that the file `out` has are not given again.
    Errors: UnsupportedModel, DaemonFailed; those of the client.
    """
    loaded = load_model(model_path, torch.device("cpu"))
    require_the_task(loaded)
    model = loaded.model
    if not model.config.folds_to(KEEP):
        warnings.warn(UntrainedFold(model.config.name, KEEP), stacklevel=2)
    about = About(model.config.name, size.steps, size.rows, chunk_problems)
    results = _read(out, about, say)
    with (
        _daemon(block_shape(model, BLOCK_TOKENS), about, jobs) as socket_path,
        ProcessPoolExecutor(jobs, get_context("spawn")) as processes,
    ):
        in_flight: dict[Future[Answers], tuple[Mode, int]] = {}
        while True:
            tasks = (task for task in results.missing(pairs) if task not in in_flight.values())
            for mode, chunk in list(islice(tasks, jobs - len(in_flight))):
                begun = processes.submit(_answer, model_path, socket_path, about, mode, chunk)
                in_flight[begun] = mode, chunk
            if not in_flight:
                return results
            for done in wait(in_flight, return_when=FIRST_COMPLETED).done:
                mode, chunk = in_flight.pop(done)
                results.take(mode, chunk, done.result())
                _write(out, results)
                say(f"{mode} {chunk} is answered; {_progress(results, pairs)}")


def read_results(path: str) -> Results | None:
    """The results in a file; None without any that can be read."""
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=Results)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


@cache
def _answerer(model_path: str, socket_path: str) -> Answerer:
    """This process's own; it has one thread, as there is a process for each core."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UntrainedFold)  # who started the process has said so
    client = kv.Client(socket_path, name="kvtier-worker eval")
    client.connect()
    return Answerer(load_model(model_path, torch.device("cpu")).model, client)


def _answer(model_path: str, socket_path: str, about: About, mode: Mode, chunk: int) -> Answers:
    answerer, problems = _answerer(model_path, socket_path), about.problems(chunk)
    match mode:
        case Mode.FULL:
            return answerer.full(problems)
        case Mode.FOLDED:
            return answerer.folded(problems)
        case Mode.ATTENDED:
            return answerer.attended(problems)


@contextmanager
def _daemon(shape: BlockShape, about: About, jobs: int) -> Iterator[str]:
    """The socket of a daemon whose DRAM holds all that is folded at a time."""
    blocks = about.steps * shape.blocks(about.size.step_tokens)
    room_bytes = jobs * about.chunk_problems * blocks * shape.block_bytes
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-eval-") as directory,
        OwnDaemon(directory, sizes_for(shape.block_bytes, room_bytes, room_bytes)) as daemon,
    ):
        yield daemon.socket_path


def _read(path: str, about: About, say: Say) -> Results:
    found = read_results(path)
    if found is None:
        return Results(about)
    if found.about != about:
        say(f"{path} is about something else ({found.about.model}): begun anew")
        return Results(about)
    say(f"going on from {path}: {len(found.full)} chunks with full KV, {len(found.folded)} folded")
    return found


def _write(path: str, results: Results) -> None:
    """Replace the file, so that there is a whole one at any time."""
    draft = path + ".new"
    with open(draft, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(results)))
    os.replace(draft, path)


def _progress(results: Results, pairs: int | None) -> str:
    verdict, chunks = results.verdict, results.chunks(pairs)
    assert verdict is not None
    answers = verdict.answers
    return (
        f"{answers.pairs} of {chunks * results.about.chunk_problems} pairs: full KV"
        f" {answers.first:.2f} %, folded {answers.second:.2f} %, difference"
        f" {answers.delta_points:+.2f} ({answers.low_points:+.2f} .. {answers.high_points:+.2f})"
    )
