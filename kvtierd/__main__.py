"""`kvtierd`: reads the configuration, starts the daemon and runs it until it is told to stop."""

import asyncio
import gc
import logging
import shutil
import sys
import tempfile

import click
import uvloop

from kvtierd import __version__, systemd
from kvtierd import config as configuration
from kvtierd.config import Config, ConfigError
from kvtierd.daemon import Daemon
from kvtierd.start import start
from kvtierd.tiers.errors import StartError

EXIT_START = 1
GC_THRESHOLDS = (20_000, 20, 50)
"""Requests make short-lived objects that reference counting frees; look for cycles seldom."""


def _run(config: Config, path: str | None, *, discard_dram: bool, ephemeral: bool) -> int:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(systemd.LineFormatter())
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])
    gc.disable()  # a start makes much, and nothing of it is garbage
    try:
        parts = start(config, discard_dram=discard_dram)
    except StartError as error:
        _complain(error)
        return EXIT_START
    gc.freeze()  # what the start has made stays; collections need not look at it
    gc.enable()
    gc.set_threshold(*GC_THRESHOLDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(Daemon(config, parts, path, keep_memory=not ephemeral).serve())
    return 0


def _complain(error: Exception) -> None:
    click.echo(f"{systemd.prefix(logging.ERROR)}kvtierd: {error}", err=True)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
@click.option("--config", "path", type=click.Path(dir_okay=False), help="Configuration (TOML).")
@click.option("--ephemeral", is_flag=True, help="Small and temporary: for trying it out.")
@click.option("--discard-dram", is_flag=True, help="Let go of the memory of an earlier run.")
def main(path: str | None, ephemeral: bool, discard_dram: bool) -> None:
    """The KV swap daemon of this host."""
    if (path is None) == (not ephemeral):
        raise click.UsageError("give either --config FILE or --ephemeral")
    directory = ""
    try:
        if path is not None:
            config = configuration.load(path)
        else:
            directory = tempfile.mkdtemp(prefix="kvtierd-")
            config = configuration.ephemeral(directory)
            click.echo(f"socket: {config.socket.client_path}", err=True)
            click.echo(f"kvtierctl --socket {config.socket.admin_path} status", err=True)
        code = _run(config, path, discard_dram=discard_dram, ephemeral=ephemeral)
    except ConfigError as error:
        _complain(error)
        code = error.exit_code
    finally:
        if directory:
            shutil.rmtree(directory, ignore_errors=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
