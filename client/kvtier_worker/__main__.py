"""The command line of the decode worker."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, Final, TextIO

import click

import kvtier_client as kv
from kvtier_client.errors import KvtierError
from kvtier_worker.budget import EFFORTS, Budget
from kvtier_worker.cot.shipped import shipped_model_path
from kvtier_worker.errors import UntrainedFold, WorkerError

if TYPE_CHECKING:
    from kvtier_worker.engine import Engine
    from kvtier_worker.load import LoadedModel
    from kvtier_worker.sequence import Sequence
    from kvtier_worker.tokenizer import Tokenizer

BLOCK_TOKENS: Final = 16
SWAP_WAIT_S: Final = 30.0
THOUGHTS: Final = 20
QUESTIONS: Final = 16
STRATEGIES: Final = ("vote", "best-of-n", "beam", "mcts")
LANDING: Final = "\n\nThe answer is:"
ANSWER_TOKENS: Final = 32
"""What an answer may still have when its thought was brought to an end."""

_model = click.option(
    "--model",
    "model_path",
    default=shipped_model_path,
    show_default="the shipped reasoning model",
    help="Hugging Face directory, or GGUF file.",
)
_threads = click.option(
    "--threads",
    default=lambda: len(os.sched_getaffinity(0)),
    show_default="all cores",
    type=click.IntRange(1),
    help="Threads that compute.",
)

_kv_mib = click.option(
    "--kv-mib", default=256, show_default=True, type=click.IntRange(1), help="KV pool, in MiB."
)
_landing = click.option(
    "--landing",
    default=LANDING,
    show_default=repr(LANDING),
    help="What it has to go on with when its budget is used up.",
)


def _check_place(_: click.Context, __: click.Parameter, path: str) -> str:
    """A file that is written at the end can be written: told before hours of work, not after."""
    directory = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.access(directory, os.W_OK):
        raise click.BadParameter(
            f"{path!r} cannot be written: name a file in a directory that can be written."
        )
    return path


@contextmanager
def _usage() -> Iterator[None]:
    """What was typed and cannot be is an error of usage."""
    try:
        yield
    except ValueError as error:
        raise click.UsageError(str(error)) from error


@click.group()
def main() -> None:
    """Decode with a paged KV pool that swaps to kvtierd."""


@main.command()
@_model
@_threads
@click.option(
    "--sessions",
    type=click.IntRange(1, 4096),
    help=f"Default: {THOUGHTS} problems for the reasoning model, {QUESTIONS} questions for others.",
)
@click.option(
    "--tokens",
    default=256,
    show_default=True,
    type=click.IntRange(2),
    help="Of each answer; the reasoning model's problems have their own length.",
)
@click.option(
    "--pressure",
    default=4,
    show_default=True,
    type=click.IntRange(2),
    help="For other models: the pool is the unpressured peak divided by this.",
)
@click.option("--daemon", "socket_path", help="kvtierd's socket; without it one is started.")
@click.option("--admin", "admin_path", help="Its admin socket; default: admin.sock beside it.")
@click.option(
    "--out",
    default="run.json",
    show_default=True,
    callback=_check_place,
    help="Figures; a .png goes beside.",
)
def demo(
    model_path: str,
    threads: int,
    sessions: int | None,
    tokens: int,
    pressure: int,
    socket_path: str | None,
    admin_path: str | None,
    out: str,
) -> None:
    """Run the same sessions with too little KV memory under several policies, and compare.

    The reasoning model solves problems: with full KV, with swap, with steps folded, and with steps
    that come back when they are needed. Other models answer questions, with and without swap.
    """
    with _told():
        loaded = _load(model_path, threads)
        from kvtier_worker.cot.demo import ThoughtPlan, knows_the_task
        from kvtier_worker.demo import DemoPlan
        from kvtier_worker.show import show_swap, show_thoughts

        if knows_the_task(loaded):
            problems = ThoughtPlan(
                sessions or THOUGHTS, socket_path=socket_path, admin_path=admin_path
            )
            failures = show_thoughts(loaded, problems, out)
        else:
            text = files("kvtier_worker").joinpath("prompts.txt").read_text("utf-8")
            questions = cycle(text.splitlines())
            plan = DemoPlan(
                prompts=tuple(islice(questions, sessions or QUESTIONS)),
                new_tokens=tokens,
                block_tokens=BLOCK_TOKENS,
                pressure=pressure,
                socket_path=socket_path,
                admin_path=admin_path,
            )
            failures = show_swap(loaded, plan, out)
    for failure in failures:
        click.echo(f"failed: {failure}", err=True)
    sys.exit(1 if failures else 0)


@main.command("eval")
@_model
@click.option(
    "--jobs",
    default=lambda: len(os.sched_getaffinity(0)),
    show_default="all cores",
    type=click.IntRange(1, 256),
    help="Processes that compute, one thread each.",
)
@click.option(
    "--pairs",
    type=click.IntRange(1),
    help="Problems; default: as many as the interval of the difference needs.",
)
@click.option(
    "--out",
    default="eval.json",
    show_default=True,
    callback=_check_place,
    help="Answers; goes on from them.",
)
def evaluate_folds(model_path: str, jobs: int, pairs: int | None, out: str) -> None:
    """Compare answers with folded steps, with and without unfolds, with those of full KV."""
    with _told():
        _quiet_threads()
        from rich.console import Console

        from kvtier_worker.cot.evaluate import evaluate
        from kvtier_worker.table import verdict_table

        console = Console()
        results = evaluate(model_path, out, jobs, console.print, pairs)
    console.print(verdict_table(results))


@main.command()
@_model
@_threads
@_kv_mib
@click.option(
    "--strategy",
    "names",
    multiple=True,
    type=click.Choice(STRATEGIES),
    help="May be given several times; default: all of them.",
)
@click.option("--problems", default=8, show_default=True, type=click.IntRange(1, 4096))
@click.option("--steps", default=8, show_default=True, help="Of each problem.")
@click.option("--rows", default=12, show_default=True, help="Of each step.")
@click.option("--n", default=8, show_default=True, help="Branches of vote and best-of-n.")
@click.option("--width", default=4, show_default=True, help="Branches that a beam keeps.")
@click.option("--expand", default=4, show_default=True, help="Ways on from the end of a step.")
@click.option("--visits", default=8, show_default=True, help="Steps that mcts adds.")
@click.option("--rollouts", default=4, show_default=True, help="From each of these to the end.")
@click.option("--temperature", default=1.0, show_default=True)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**63 - 1))
@click.option("--daemon", "socket_path", help="kvtierd's socket; without it one is started.")
@click.option("--admin", "admin_path", help="Its admin socket; default: admin.sock beside it.")
def search(
    model_path: str,
    threads: int,
    kv_mib: int,
    names: tuple[str, ...],
    steps: int,
    rows: int,
    **options: Any,
) -> None:
    """Search for solutions of the reasoning task, and compare with single samples.

    Branches share what they have in common, and are folded; those that mcts does not visit are
    parked with the daemon. Shown are a table of all strategies, and the tree of the last search.
    """
    with _told():
        loaded = _load(model_path, threads)
        from kvtier_worker.cot.task import Size
        from kvtier_worker.search.command import search_and_show
        from kvtier_worker.search.trial import TrialPlan

        with _usage():
            size = Size(steps, rows)
        pool_bytes = kv_mib << 20
        plan = TrialPlan(names or STRATEGIES, size=size, pool_bytes=pool_bytes, **options)
        search_and_show(loaded, plan)


@main.command()
@_model
@_threads
@_kv_mib
@click.option("--prompt", required=True, help="A question; the model's chat template is applied.")
@click.option("--tokens", default=128, show_default=True, type=click.IntRange(1))
@click.option("--temperature", default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**64 - 1))
@click.option("--effort", type=click.Choice(list(EFFORTS)), help="How much of the budget to use.")
@click.option(
    "--budget-tokens",
    type=click.IntRange(1),
    help="After so many tokens it has to answer; default with --effort: what --tokens leaves.",
)
@_landing
@click.option("--daemon", "socket_path", help="kvtierd's socket; needed to suspend.")
@click.option(
    "--suspend-after",
    type=click.IntRange(1),
    help="After so many tokens leave the session with the daemon and print its token.",
)
def generate(
    model_path: str,
    threads: int,
    kv_mib: int,
    prompt: str,
    tokens: int,
    temperature: float,
    seed: int,
    effort: str | None,
    budget_tokens: int | None,
    landing: str,
    socket_path: str | None,
    suspend_after: int | None,
) -> None:
    """Answer one prompt, or begin to and suspend."""
    from kvtier_worker.sampler import Sampling

    with _usage():
        sampling = Sampling(temperature, seed)
    if suspend_after is not None and socket_path is None:
        raise click.UsageError("--suspend-after needs --daemon: nobody else keeps the session.")
    with _told(), _engine(model_path, threads, kv_mib, socket_path, landing) as (engine, tokenizer):
        budget = None
        if effort is not None or budget_tokens is not None:
            budget = Budget(budget_tokens, effort=effort or "high")
        sequence = engine.submit(
            tokenizer.encode_prompt(prompt),
            tokens,
            sampling,
            stop_token=tokenizer.end_token,
            budget=budget,
        )
        wanted = tokens if suspend_after is None else suspend_after
        while len(sequence.generated) < wanted and engine.step():
            pass
        click.echo(tokenizer.decode(sequence.generated))
        _tell_cause(sequence)
        if suspend_after is not None and not sequence.ended:
            click.echo(f"token: {engine.suspend(sequence)}")


@main.command()
@_model
@_threads
@_kv_mib
@_landing
@click.option("--token", required=True, help="What `generate --suspend-after` printed.")
@click.option("--daemon", "socket_path", required=True, help="kvtierd's socket.")
def resume(
    model_path: str, threads: int, kv_mib: int, landing: str, token: str, socket_path: str
) -> None:
    """Go on with a suspended session, from its next token to its end."""
    with _told(), _engine(model_path, threads, kv_mib, socket_path, landing) as (engine, tokenizer):
        sequence = engine.resume(token)
        before = len(sequence.generated)
        engine.run()
        click.echo(tokenizer.decode(sequence.generated[before:]))
        _tell_cause(sequence)


def _tell_cause(sequence: "Sequence") -> None:
    """Say why a thought was brought to its end, if it was."""
    course = sequence.course
    if course is not None and course.landed_at is not None and course.cause is not None:
        after = course.landed_at - sequence.prompt_tokens
        cut = ", and the answer was cut off" if course.stopped else ""
        click.echo(f"landed after {after} tokens: {course.cause.value}{cut}", err=True)


@contextmanager
def _told() -> Iterator[None]:
    """Say an expected error in one line and exit with its code; say a warning once."""
    said: set[str] = set()

    def say(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if str(message) not in said:
            said.add(str(message))
            click.echo(f"warning: {message}", err=True)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", UntrainedFold)
            warnings.showwarning = say
            yield
    except (WorkerError, KvtierError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code if isinstance(error, KvtierError) else 1)


@contextmanager
def _engine(
    model_path: str, threads: int, kv_mib: int, socket_path: str | None, landing: str = LANDING
) -> "Iterator[tuple[Engine, Tokenizer]]":
    """An engine for one session, with a store at the daemon if one is named."""
    from kvtier_worker.engine import Engine, block_shape
    from kvtier_worker.governor import GovernPolicy, Landing
    from kvtier_worker.loops import LoopRules
    from kvtier_worker.pool import PagedPool
    from kvtier_worker.store import RecomputeStore
    from kvtier_worker.swap import DaemonStore

    loaded = _load(model_path, threads)
    model = loaded.model
    pool = PagedPool(block_shape(model, BLOCK_TOKENS), kv_mib << 20, model.device)
    control = tuple(loaded.tokenizer.encode(landing))
    governing = GovernPolicy(Landing(control, ANSWER_TOKENS), loops=LoopRules())
    if socket_path is None:
        yield Engine(model, pool, RecomputeStore(), governing=governing), loaded.tokenizer
        return
    with kv.Client(socket_path, name="kvtier-worker") as client:
        store = DaemonStore(client, pool, model.config.name, SWAP_WAIT_S)
        yield Engine(model, pool, store, governing=governing), loaded.tokenizer


def _quiet_threads() -> None:
    # OpenMP reads it when torch is loaded. Spinning threads take the core from the one they wait
    # for as soon as anything else runs on the machine: ten times slower on two busy cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _load(model_path: str, threads: int) -> "LoadedModel":
    _quiet_threads()
    import torch

    from kvtier_worker.load import load_model

    torch.set_num_threads(threads)
    return load_model(model_path, torch.device("cpu"))


if __name__ == "__main__":
    main()
