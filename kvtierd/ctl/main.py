"""The commands of kvtierctl."""

import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from kvtier_client.errors import CapacityError, DataError, InvalidArgument, ProtocolError
from kvtierd import __version__
from kvtierd.ctl.errors import reported

SOCKET_VARIABLE: Final = "KVTIERCTL_SOCKET"
TIMEOUT_S: Final = 10.0
TIMEOUT_MAX_S: Final = 3600.0
UNHEALTHY_EXIT_CODE: Final = 1
POLL_S: Final = 0.5

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def plain(value: Any) -> Any:
    """A configuration as JSON has it; what lasts for ever is "never", as in the file."""
    import msgspec

    from kvtierd.config import Section

    if isinstance(value, Section):
        names = {field.name: field.encode_name for field in msgspec.structs.fields(value)}
        return {key: plain(getattr(value, name)) for name, key in names.items()}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return "never" if value == math.inf else value


def _print_json(document: Any) -> None:
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))


class Asker:
    """How this call reaches the daemon."""

    def __init__(self, socket_path: str | None, config_file: str | None, timeout_s: float) -> None:
        self._socket_path, self.config_file = socket_path, config_file
        self._timeout_s = timeout_s

    def ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        """One admin request. Errors: those of the taxonomy; `ConfigError`."""
        from kvtier_client.admin import AdminClient

        path = self._socket_path
        if path is None:
            from kvtierd import config

            file = self.config_file
            path = (config.Config() if file is None else config.load(file)).socket.admin_path
        with AdminClient(path, self._timeout_s) as client:
            try:
                return client.call(verb, **fields)
            except InvalidArgument as error:
                if any(fields.values()):
                    raise
                raise ProtocolError(
                    f"cannot ask {verb!r} on {path}: {error}; it is not an admin socket "
                    "(socket.admin_path), or its daemon is of another version"
                ) from error


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
@click.option("--socket", "socket_path", metavar="PATH", help="The daemon's admin socket.")
@click.option(
    "--config", "config_file", metavar="FILE",
    help=f"The configuration that names it; else ${SOCKET_VARIABLE}, else the default.",
)  # fmt: skip
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(0, TIMEOUT_MAX_S, min_open=True),
    default=TIMEOUT_S, show_default=True, metavar="SECONDS", help="Longest wait for an answer.",
)  # fmt: skip
@click.pass_context
def main(
    context: click.Context, socket_path: str | None, config_file: str | None, timeout_s: float
) -> None:
    """Look into kvtierd: a running daemon, or the files of a stopped one.

    Errors are one line on stderr; the exit code says which (docs/OPERATIONS.md).
    """
    if socket_path is None and config_file is None:
        socket_path = os.environ.get(SOCKET_VARIABLE)
    context.obj = Asker(socket_path, config_file, timeout_s)


def _show(as_json: bool, report: dict[str, Any], view: Callable[[dict[str, Any]], None]) -> None:
    if as_json:
        _print_json(report)
        return
    with reported(as_json):
        try:
            view(report)
        except KeyError as missing:
            raise ProtocolError(
                f"cannot show the report: it has no {missing}; "
                "use the kvtierctl of the daemon's version, or --json"
            ) from missing


@main.command()
@json_option
@click.pass_obj
def status(asker: Asker, as_json: bool) -> None:
    """Show whether the daemon is well, and what its tenants use.

    Exits with 1 when the daemon says that something is wrong.
    """
    from kvtierd.ctl.views import show_status

    with reported(as_json):
        stats = asker.ask("stats")
    _show(as_json, stats, show_status)
    if not stats.get("health", {}).get("ok"):
        sys.exit(UNHEALTHY_EXIT_CODE)


@main.command()
@json_option
@click.pass_obj
def tiers(asker: Asker, as_json: bool) -> None:
    """Show how full each tier is, by tenant and by spill directory."""
    from kvtierd.ctl import views

    with reported(as_json):
        stats = asker.ask("stats")
    _show(as_json, views.tiers(stats), views.show_tiers)


@main.command()
@click.option("--tenant", default="", help="Only sessions of this tenant.")
@json_option
@click.pass_obj
def sessions(asker: Asker, tenant: str, as_json: bool) -> None:
    """List the sessions, with what they keep in each tier."""
    from kvtierd.ctl.views import show_sessions

    with reported(as_json):
        report = asker.ask("sessions", tenant=tenant)
    _show(as_json, report, show_sessions)


@main.command()
@json_option
@click.pass_obj
def clients(asker: Asker, as_json: bool) -> None:
    """List client processes, and how fast they are served."""
    from kvtierd.ctl.views import show_clients

    with reported(as_json):
        report = asker.ask("clients")
    _show(as_json, report, show_clients)


@main.command()
@click.argument("session")
@json_option
@click.pass_obj
def tree(asker: Asker, session: str, as_json: bool) -> None:
    """Show the nodes of a SESSION, named by its id (hex) or name."""
    from kvtierd.ctl.views import show_tree

    with reported(as_json):
        report = asker.ask("tree", session=session)
    _show(as_json, report, show_tree)


@main.command()
@json_option
@click.pass_obj
def metrics(asker: Asker, as_json: bool) -> None:
    """Print the daemon's metrics in Prometheus' text format."""
    from kvtierd.metrics import render, samples

    with reported(as_json):
        stats = asker.ask("stats")
    if as_json:
        _print_json(samples(stats))
    else:
        click.echo(render(stats), nl=False)


@main.command()
@click.option("--wait", is_flag=True, help="Return when the pass has ended.")
@json_option
@click.pass_obj
def scrub(asker: Asker, wait: bool, as_json: bool) -> None:
    """Verify every block in the spill files, while the daemon runs.

    A pass that runs already goes on. Exits with 40 when it has found bad blocks so far.
    """
    from kvtierd.ctl.views import show_scrub

    with reported(as_json):
        report = asker.ask("scrub")
        number = report["number"]
        while wait and report["running"] and report["number"] == number:
            time.sleep(POLL_S)
            report = asker.ask("stats")["scrub"]
    _show(as_json, report, show_scrub)
    if report["bad_blocks"] or report["unreadable_blocks"]:
        sys.exit(DataError.exit_code)


@main.command()
@click.argument("tenant")
@click.option("--wait", is_flag=True, help="Go on until none is left in DRAM, or none can leave.")
@json_option
@click.pass_obj
def evict(asker: Asker, tenant: str, wait: bool, as_json: bool) -> None:
    """Move a TENANT's blocks from DRAM to the spill files.

    Clients get them back as ever. With --wait, exits with 30 when some had to stay: they are in
    use, or NVMe is full.
    """
    from kvtierd.ctl.views import show_evict

    used_bytes = -1
    with reported(as_json):
        while True:
            started = asker.ask("evict", tenant=tenant)["blocks"]
            stats = asker.ask("stats")
            before_bytes, used_bytes = used_bytes, stats["tenants"][tenant]["dram"]["used_bytes"]
            moving = stats["counters"]["mover_queued"] + stats["counters"]["spill_jobs_in_flight"]
            stays = used_bytes == before_bytes and not (started or moving)
            if not (wait and used_bytes) or stays:
                break
            time.sleep(POLL_S)
    _show(as_json, {"tenant": tenant, "dram": stats["tenants"][tenant]["dram"]}, show_evict)
    if wait and used_bytes:
        sys.exit(CapacityError.exit_code)


@main.command()
@click.option("--config", "config_file", metavar="FILE", help="The stopped daemon's configuration.")
@click.option(
    "--state-dir", metavar="DIR", help="Its state directory, with the spill files in DIR/spill."
)
@click.option("--quick", is_flag=True, help="Leave out reading every payload.")
@json_option
@click.pass_obj
def check(
    asker: Asker, config_file: str | None, state_dir: str | None, quick: bool, as_json: bool
) -> None:
    """Verify the files of a stopped daemon; nothing is changed.

    Checks the catalog, the headers and, unless --quick, the checksum of every block in the spill
    files; compares headers with the catalog and recounts the space. Run it as root or as the
    daemon's user. Encrypted blocks need --config with their key. Exits with 40 when something is
    damaged, with 20 when the files are in use.
    """
    from kvtierd import config as configuration
    from kvtierd.ctl.check import as_owner, check_files, to_builtins
    from kvtierd.ctl.views import show_check
    from kvtierd.tiers.master_key import load_master_keys

    if state_dir is None:
        config_file = config_file or asker.config_file
    if (config_file is None) == (state_dir is None):
        raise click.UsageError("give either --config FILE or --state-dir DIR")
    with reported(as_json):
        if config_file is not None:
            config = configuration.load(config_file)
        else:
            config = configuration.Config(state_dir=os.path.abspath(str(state_dir)))
        keys = config.spill.encryption
        masters = load_master_keys(keys.key, keys.old_key)
        with as_owner(config.state_dir):
            found = check_files(config.state_dir, config.spill.paths, not quick, masters)
        report = to_builtins(found)
    _show(as_json, report, show_check)
    if not report["ok"]:
        sys.exit(DataError.exit_code)


@main.command()
@click.option(
    "--only", "names", multiple=True, metavar="NAME",
    help="Only this benchmark; may be repeated. A wrong name lists all.",
)  # fmt: skip
@click.option(
    "--directory", default=".", show_default=True, metavar="DIR",
    help="Where the daemons' files go while it runs: a directory on the disk of the spill files.",
)  # fmt: skip
@click.option("--quick", is_flag=True, help="Small and noisy: whether it works, in a minute.")
@click.option("--json", "json_file", metavar="FILE", help="Add the figures to this JSON file.")
@click.option("--plot", "plot_file", metavar="FILE", help="Draw throughput by block size as PNG.")
def bench(
    names: tuple[str, ...],
    directory: str,
    quick: bool,
    json_file: str | None,
    plot_file: str | None,
) -> None:
    """Measure what this host gives, beside memcpy and fio.

    Starts daemons of its own in a temporary directory below DIR, one after the other, and removes
    all of it; a running daemon is neither asked nor stopped, but shares memory, disk and cores.
    """
    from kvtierd.ctl.bench import run_benchmarks

    paths = (None if file is None else Path(file).absolute() for file in (json_file, plot_file))
    with reported(as_json=False):
        run_benchmarks(names, Path(directory).absolute(), quick, *paths)


@main.group(name="config")
def config_group() -> None:
    """Configuration files."""


@config_group.command(name="check")
@click.argument("file")
@json_option
def config_check(file: str, as_json: bool) -> None:
    """Check a configuration FILE, as the daemon would.

    Exits with 78 when it is refused.
    """
    from kvtierd.config import load

    with reported(as_json):
        config = load(file)
    if as_json:
        _print_json({"ok": True, "file": file, "config": plain(config)})
        return
    names = ", ".join(tenant.name for tenant in config.tenants)
    click.echo(f"{file}: ok")
    click.echo(f"  state {config.state_dir}, admin socket {config.socket.admin_path}")
    click.echo(f"  tenants: {names}; spill: {', '.join(config.spill.paths)}")


if __name__ == "__main__":
    main()
