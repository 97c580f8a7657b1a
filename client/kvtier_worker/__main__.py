"""The command line of the decode worker."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import TYPE_CHECKING, Final

import click
import msgspec

import kvtier_client as kv
from kvtier_client.errors import KvtierError
from kvtier_worker.errors import WorkerError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from kvtier_worker.demo import Progress
    from kvtier_worker.engine import Engine
    from kvtier_worker.load import LoadedModel
    from kvtier_worker.tokenizer import Tokenizer

BLOCK_TOKENS: Final = 16
SWAP_WAIT_S: Final = 30.0

_model = click.option(
    "--model", "model_path", required=True, help="Hugging Face directory, or GGUF file."
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


@click.group()
def main() -> None:
    """Decode with a paged KV pool that swaps to kvtierd."""


@main.command()
@_model
@_threads
@click.option("--sessions", default=16, show_default=True, type=click.IntRange(1, 4096))
@click.option("--tokens", default=256, show_default=True, type=click.IntRange(2))
@click.option(
    "--pressure",
    default=4,
    show_default=True,
    type=click.IntRange(2),
    help="The pool is the unpressured peak divided by this.",
)
@click.option("--daemon", "socket_path", help="kvtierd's socket; without it one is started.")
@click.option("--admin", "admin_path", help="Its admin socket; default: admin.sock beside it.")
@click.option("--out", default="run.json", show_default=True, help="Figures; a .png goes beside.")
def demo(
    model_path: str,
    threads: int,
    sessions: int,
    tokens: int,
    pressure: int,
    socket_path: str | None,
    admin_path: str | None,
    out: str,
) -> None:
    """Run sessions unpressured, with recomputation and with swap, and compare."""
    from rich.console import Console

    from kvtier_worker.chart import draw_tiers
    from kvtier_worker.demo import Demo, DemoPlan
    from kvtier_worker.table import result_table

    questions = files("kvtier_worker").joinpath("prompts.txt").read_text("utf-8").splitlines()
    plan = DemoPlan(
        prompts=tuple(questions[i % len(questions)] for i in range(sessions)),
        new_tokens=tokens,
        block_tokens=BLOCK_TOKENS,
        pressure=pressure,
        socket_path=socket_path,
        admin_path=admin_path,
    )
    console = Console()
    with _told():
        loaded = _load(model_path, threads)
        with _progress_bar(console, sessions * tokens) as progress:
            report = Demo(loaded, plan, progress).run()
    console.print(result_table(report))
    png = os.path.splitext(out)[0] + ".png"
    with open(out, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(report)))
    draw_tiers(report.samples, png)
    console.print(f"figures: {out}, chart: {png}")
    for failure in report.failures:
        click.echo(f"failed: {failure}", err=True)
    sys.exit(1 if report.failures else 0)


@main.command()
@_model
@_threads
@_kv_mib
@click.option("--prompt", required=True, help="A question; the model's chat template is applied.")
@click.option("--tokens", default=128, show_default=True, type=click.IntRange(1))
@click.option("--temperature", default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**64 - 1))
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
    socket_path: str | None,
    suspend_after: int | None,
) -> None:
    """Answer one prompt, or begin to and suspend."""
    from kvtier_worker.sampler import Sampling

    with _told(), _engine(model_path, threads, kv_mib, socket_path) as (engine, tokenizer):
        sequence = engine.submit(
            tokenizer.encode_prompt(prompt),
            tokens,
            Sampling(temperature, seed),
            stop_token=tokenizer.end_token,
        )
        wanted = tokens if suspend_after is None else suspend_after
        while len(sequence.generated) < wanted and engine.step():
            pass
        click.echo(tokenizer.decode(sequence.generated))
        if suspend_after is not None and not sequence.ended:
            click.echo(f"token: {engine.suspend(sequence)}")


@main.command()
@_model
@_threads
@_kv_mib
@click.option("--token", required=True, help="What `generate --suspend-after` printed.")
@click.option("--daemon", "socket_path", required=True, help="kvtierd's socket.")
def resume(model_path: str, threads: int, kv_mib: int, token: str, socket_path: str) -> None:
    """Go on with a suspended session, from its next token to its end."""
    with _told(), _engine(model_path, threads, kv_mib, socket_path) as (engine, tokenizer):
        sequence = engine.resume(token)
        before = len(sequence.generated)
        engine.run()
        click.echo(tokenizer.decode(sequence.generated[before:]))


@contextmanager
def _told() -> Iterator[None]:
    """Say an expected error in one line and exit with its code."""
    try:
        yield
    except (WorkerError, KvtierError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code if isinstance(error, KvtierError) else 1)


@contextmanager
def _engine(
    model_path: str, threads: int, kv_mib: int, socket_path: str | None
) -> "Iterator[tuple[Engine, Tokenizer]]":
    """An engine for one session, with a store at the daemon if one is named."""
    from kvtier_worker.engine import Engine, block_shape
    from kvtier_worker.pool import PagedPool
    from kvtier_worker.store import RecomputeStore
    from kvtier_worker.swap import DaemonStore

    loaded = _load(model_path, threads)
    model = loaded.model
    pool = PagedPool(block_shape(model, BLOCK_TOKENS), kv_mib << 20, model.device)
    if socket_path is None:
        yield Engine(model, pool, RecomputeStore()), loaded.tokenizer
        return
    with kv.Client(socket_path, name="kvtier-worker") as client:
        store = DaemonStore(client, pool, model.config.name, SWAP_WAIT_S)
        yield Engine(model, pool, store), loaded.tokenizer


def _load(model_path: str, threads: int) -> "LoadedModel":
    # OpenMP reads it when torch is loaded. Spinning threads take the core from the one they wait
    # for as soon as anything else runs on the machine: ten times slower on two busy cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    from kvtier_worker.load import load_model

    torch.set_num_threads(threads)
    return load_model(model_path, torch.device("cpu"))


@contextmanager
def _progress_bar(console: "Console", total_tokens: int) -> "Iterator[Progress]":
    """A bar per policy, in tokens; in a log, a line per tenth."""
    if not console.is_terminal:
        yield _progress_lines(console, total_tokens)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description:>10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def show(policy: str, tokens: int) -> None:
            if policy not in tasks:
                tasks[policy] = bars.add_task(policy, total=total_tokens)
            bars.update(tasks[policy], completed=tokens)

        yield show


def _progress_lines(console: "Console", total_tokens: int) -> "Progress":
    tenths: dict[str, int] = {}

    def show(policy: str, tokens: int) -> None:
        tenth = 10 * tokens // total_tokens
        if tenth > tenths.get(policy, 0):
            tenths[policy] = tenth
            console.print(f"{policy}: {tokens} of {total_tokens} tokens")

    return show


if __name__ == "__main__":
    main()
