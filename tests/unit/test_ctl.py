"""kvtierctl shows what the daemon reports, and says in its exit code what stood in the way."""

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvtier_client import admin_wire, wire
from kvtier_client.errors import BY_CODE, InvalidArgument, KvtierError, UnknownSession
from kvtierd import __version__, metrics
from kvtierd.core.world import COUNTERS
from kvtierd.ctl.main import SOCKET_VARIABLE, main
from tests.unit.ctl_daemon import (
    CLIENTS,
    SESSIONS,
    STATS,
    TENANT,
    TREE,
    WAIT_S,
    Daemon,
    node,
)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    running = Daemon(tmp_path / "admin.sock")
    yield running
    running.stop()


def run(*arguments: str, env: dict[str, str] | None = None) -> Result:
    result = CliRunner().invoke(main, arguments, env=env)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def ask(daemon: Daemon, *arguments: str) -> Result:
    return run("--socket", daemon.path, *arguments)


# ------------------------------------------------------------------ reports


@pytest.mark.parametrize(
    ("arguments", "report"),
    [
        (["status"], STATS),
        (
            ["tiers"],
            {
                "dram": dict.fromkeys(STATS["tenants"], TENANT["dram"]),
                "nvme": dict.fromkeys(STATS["tenants"], TENANT["nvme"]),
                "spill": STATS["nvme"],
            },
        ),
        (["sessions"], SESSIONS),
        (["clients"], CLIENTS),
        (["tree", "proof"], TREE),
    ],
)
def test_json_is_the_report_itself(
    daemon: Daemon, arguments: list[str], report: dict[str, Any]
) -> None:
    result = ask(daemon, *arguments, "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (0, report)


def test_status_is_one_line_of_the_daemon_and_one_per_tenant(daemon: Daemon) -> None:
    lines = ask(daemon, "status").stdout.splitlines()
    assert lines[0].startswith("kvtierd 1.2.3: healthy, up 3h 12m, pid 4242, start 4")
    assert re.search(r"^research\s+1\.5 GiB\s+4\.0 GiB\s+1\.0 GiB\s+8\.0 GiB\s+12\s+2", lines[4])


def test_status_and_scrub_say_how_far_the_scrub_is_and_what_it_found(daemon: Daemon) -> None:
    said = (
        "scrub: 25% done, last ended 1d 1h ago; pass 2: 5000 blocks (5.0 GiB) verified, 3 bad, "
        "1 unreadable, 2 lost"
    )
    assert ask(daemon, "status").stdout.splitlines()[1] == said
    result = ask(daemon, "scrub")
    assert result.stdout.splitlines() == [said]
    assert result.exit_code == 40  # something bad was found
    daemon.reports[admin_wire.Stats] = STATS | {
        "scrub": STATS["scrub"] | {"running": False, "bad_blocks": 0, "unreadable_blocks": 0}
    }
    result = ask(daemon, "scrub", "--wait")
    assert result.exit_code == 0 and result.stdout.startswith("scrub: idle, last ended 1d 1h ago")


def test_a_daemon_that_has_not_scrubbed_since_its_start_says_so(daemon: Daemon) -> None:
    idle = STATS["scrub"] | {"running": False, "number": 0}
    daemon.reports[admin_wire.Stats] = STATS | {"scrub": idle}
    said = "scrub: idle, last ended 1d 1h ago; no pass since the start"
    assert ask(daemon, "status").stdout.splitlines()[1] == said


def test_status_of_an_unwell_daemon_says_why_and_fails(daemon: Daemon) -> None:
    daemon.reports[admin_wire.Stats] = STATS | {
        "health": {"ok": False, "reasons": ["spill: /nvme/a: EIO"]}
    }
    result = ask(daemon, "status")
    assert result.exit_code == 1
    assert "UNHEALTHY" in result.stdout and "! spill: /nvme/a: EIO" in result.stdout


def test_tiers_shows_every_directory_and_the_sum(daemon: Daemon) -> None:
    text = ask(daemon, "tiers").stdout
    assert re.search(r"/nvme/b +8\.0 GiB +1\.0 GiB +7\.0 GiB +no", text)
    assert re.search(r"all +16\.0 GiB +2\.0 GiB +14\.0 GiB", text)
    assert "80% to 90%" in text


def test_clients_shows_first_who_takes_most_of_the_daemons_time(daemon: Daemon) -> None:
    head, first, second = ask(daemon, "clients").stdout.splitlines()
    assert head.split()[:3] == ["pid", "uid", "tenant"]
    assert [first.split()[0], second.split()[0]] == ["12", "11"]
    assert "200 us" in first


def test_sessions_are_those_of_the_tenant_asked_for_the_longest_idle_last(daemon: Daemon) -> None:
    lines = ask(daemon, "sessions", "--tenant", "research").stdout.splitlines()
    [request] = daemon.asked
    assert isinstance(request, admin_wire.Sessions) and request.tenant == "research"
    assert [line.split()[0] for line in lines[1:]] == ["00000000000000aa", "00000000000000ff"]
    assert lines[2].endswith("1h 1m")


def test_what_a_client_calls_its_session_does_nothing_to_the_terminal(daemon: Daemon) -> None:
    name = "a\x1b[2J\nfake\x07 Ä"
    sessions = [SESSIONS["sessions"][0] | {"name": name}]
    daemon.reports[admin_wire.Sessions] = {"sessions": sessions}
    daemon.reports[admin_wire.Tree] = TREE | {"name": name}
    for text in (ask(daemon, "sessions").stdout, ask(daemon, "tree", "proof").stdout):
        assert r"a\x1b[2J\nfake\x07 Ä" in text
    assert "\x1b[2J" not in on_terminal(daemon, 200, "sessions")
    assert json.loads(ask(daemon, "sessions", "--json").stdout) == {"sessions": sessions}


def test_a_tree_shows_every_node_below_its_parent(daemon: Daemon) -> None:
    lines = ask(daemon, "tree", "proof").stdout.splitlines()
    assert lines[0] == "session 00000000000000ff (proof)"
    nodes = [line for line in lines if "node" in line]
    assert [line.partition(":")[0] for line in nodes] == [
        "├── node 0",
        "│   ├── node 5 from token 32",
        "│   │   └── node 7 from token 96",
        "│   └── node 3 from token 64",
    ]
    assert [line.partition(": ")[2].partition(" ·")[0] for line in nodes] == [
        "held, ended", "held", "cached", "held",
    ]  # fmt: skip
    for line in nodes:
        assert line.endswith(
            "44 tokens in 3 pages · blocks: 2 dram, 1 nvme · 1.5 MiB own, 1.0 MiB shared"
        )


def test_a_tree_shows_what_of_each_node_is_folded_and_for_how_long_it_is_kept(
    daemon: Daemon,
) -> None:
    lines = ask(daemon, "tree", "proof").stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if "node 5" in line)
    assert [line.partition("─ ")[2] for line in lines[at + 1 : at + 4]] == [
        "pages 0..15 folded to 4 entries: held · blocks: 9 dram, 7 nvme",
        "pages 16..31 folded to 4 entries: held 3m 20s more · blocks: 9 dram, 7 nvme",
        "pages 32..47 folded to 4 entries: cached · blocks: 9 dram, 7 nvme",
    ]
    assert all(line.startswith("│   │   ├") for line in lines[at + 1 : at + 4])
    assert lines[-1] == "└── and 12 folds more"


def test_a_tree_says_what_is_lost(daemon: Daemon) -> None:
    daemon.reports[admin_wire.Tree] = TREE | {
        "nodes": [node(0, wire.NO_NODE, 0) | {"lost_blocks": 3}], "folds_left_out": 0,
    }  # fmt: skip
    lines = ask(daemon, "tree", "proof").stdout.splitlines()
    assert len(lines) == 2 and "blocks: 2 dram, 1 nvme, 3 lost" in lines[1]


def test_a_tree_whose_root_is_missing_is_shown_all_the_same(daemon: Daemon) -> None:
    daemon.reports[admin_wire.Tree] = TREE | {"nodes": [node(7, 5, 96), node(3, 0, 64)]}
    assert len(ask(daemon, "tree", "proof").stdout.splitlines()) == 4


def test_a_deep_tree_is_shown_to_its_leaf(daemon: Daemon) -> None:
    chain = [node(0, wire.NO_NODE, 0), *(node(i, i - 1, 8 * i) for i in range(1, 500))]
    daemon.reports[admin_wire.Tree] = TREE | {
        "nodes": [each | {"folds": []} for each in chain], "folds_left_out": 0,
    }  # fmt: skip
    lines = ask(daemon, "tree", "proof").stdout.splitlines()
    assert len(lines) == 501
    assert "node 499 from token 3992" in lines[-1] and lines[-1].endswith("shared")


def on_terminal(daemon: Daemon, columns: int, *arguments: str) -> str:
    """What kvtierctl prints on a terminal of so many columns."""
    reader, writer = pty.openpty()
    try:
        subprocess.run(
            [sys.executable, "-m", "kvtierd.ctl.main", "--socket", daemon.path, *arguments],
            stdout=writer, check=True, timeout=WAIT_S,
            env=os.environ | {"TERM": "xterm", "COLUMNS": str(columns)},
        )  # fmt: skip
        return os.read(reader, 65536).decode()
    finally:
        os.close(reader)
        os.close(writer)


def test_a_terminal_gets_the_same_numbers(daemon: Daemon) -> None:
    text = on_terminal(daemon, 120, "tiers")
    assert "─" in text, "drawn by rich"
    assert re.search(r"all\s+16\.0 GiB\s+2\.0 GiB\s+14\.0 GiB", text)


def test_a_narrow_terminal_gets_every_name_in_full(daemon: Daemon) -> None:
    text = on_terminal(daemon, 40, "sessions").replace("\r\n", "\n")
    assert text == ask(daemon, "sessions").stdout


# ------------------------------------------------------------------ metrics


def test_every_number_of_the_report_is_a_metric(daemon: Daemon) -> None:
    result = ask(daemon, "metrics")
    assert result.exit_code == 0
    for table in (metrics.DAEMON, metrics.TENANT, metrics.SPILL_PATH):
        for _, name, text in table:
            assert f"# HELP {name} {text}\n" in result.stdout
    assert 'kvtierd_dram_used_bytes{tenant="research"} 1.610612736e+09\n' in result.stdout
    assert 'kvtierd_nvme_path_direct_io{path="/nvme/b"} 0.0\n' in result.stdout
    assert "# TYPE kvtierd_spilled_bytes_total counter\n" in result.stdout
    assert "kvtierd_spilled_bytes_total 1.099511627776e+12\n" in result.stdout
    assert "# TYPE kvtierd_mover_queued gauge\n" in result.stdout
    paths = {path for path, _, _ in metrics.TENANT}
    parts = ("dram", "nvme", "served")
    told = {f"{part}.{key}" for part in parts for key in TENANT[part]}  # type: ignore[attr-defined]
    assert paths == told | {key for key in TENANT if key not in parts}


def test_metric_names_are_unique_and_say_their_unit(daemon: Daemon) -> None:
    tables = (*metrics.DAEMON, *metrics.TENANT, *metrics.SPILL_PATH)
    names = [name for _, name, _ in tables]
    assert len(set(names)) == len(names)
    for path, name, _ in tables:
        assert name.startswith("kvtierd_")
        assert path.endswith("_bytes") == name.endswith("_bytes")
        assert path.endswith("_s") == name.endswith("_seconds")


def test_metrics_as_json_are_the_same_samples(daemon: Daemon) -> None:
    samples = json.loads(ask(daemon, "metrics", "--json").stdout)
    assert {"name": "kvtierd_healthy", "labels": {}, "value": 1.0} in samples
    text = ask(daemon, "metrics").stdout
    assert len(samples) == len([line for line in text.splitlines() if line[0] != "#"])


def test_what_a_report_lacks_is_left_out() -> None:
    text = metrics.render({"daemon": {"version": "1"}, "tenants": {"t": {"sessions": 3}}}).decode()
    assert 'kvtierd_sessions{tenant="t"} 3.0' in text
    assert "kvtierd_leases" not in text and "kvtierd_healthy" not in text


# ------------------------------------------------------------------- errors


@pytest.mark.parametrize("failure", BY_CODE.values(), ids=lambda failure: failure.__name__)
def test_the_daemons_error_is_one_line_and_its_exit_code(
    daemon: Daemon, failure: type[KvtierError]
) -> None:
    daemon.failure = failure
    result = ask(daemon, "tree", "nobody")
    assert result.exit_code == failure.exit_code
    assert result.stderr == f"kvtierctl: {failure.__name__}: what stood in the way\n"
    assert result.stdout == ""


def test_an_error_can_be_had_as_json(daemon: Daemon) -> None:
    daemon.failure = UnknownSession
    result = ask(daemon, "tree", "nobody", "--json")
    assert json.loads(result.stderr) == {
        "error": "UnknownSession", "exit_code": 21, "message": "what stood in the way",
    }  # fmt: skip


@pytest.mark.parametrize("command", ["status", "tiers", "sessions", "clients", "tree"])
def test_a_report_of_another_version_is_a_protocol_error(daemon: Daemon, command: str) -> None:
    daemon.reports = {
        admin_wire.Stats: {"tenants": {}},
        admin_wire.Sessions: {},
        admin_wire.Clients: {},
        admin_wire.Tree: {"nodes": [], "name": ""},
    }
    result = ask(daemon, command, *(["s"] if command == "tree" else []))
    assert result.exit_code == 13
    assert "use the kvtierctl of the daemon's version" in result.stderr


def test_no_daemon_is_connection_lost(tmp_path: Path) -> None:
    result = run("--socket", str(tmp_path / "none.sock"), "status")
    assert result.exit_code == 11
    assert "none.sock" in result.stderr and "is kvtierd running?" in result.stderr


def test_a_socket_that_is_not_the_admin_socket_is_named(daemon: Daemon) -> None:
    daemon.failure = InvalidArgument
    result = ask(daemon, "status")
    assert result.exit_code == 13
    assert daemon.path in result.stderr and "socket.admin_path" in result.stderr


@pytest.mark.parametrize("timeout", ["0", "-1", "inf", "1e300", "soon"])
def test_a_timeout_that_is_none_is_a_usage_error(daemon: Daemon, timeout: str) -> None:
    assert run("--socket", daemon.path, "--timeout", timeout, "status").exit_code == 2
    assert daemon.asked == []


def test_the_version_is_the_daemons() -> None:
    assert run("--version").stdout.split()[-1] == __version__


def test_a_daemon_that_says_nothing_is_a_timeout(daemon: Daemon) -> None:
    daemon.silent = True
    result = run("--socket", daemon.path, "--timeout", "0.05", "status")
    assert result.exit_code == 12
    assert "within 0.05 s" in result.stderr


def test_usage_errors_are_told_from_all_others() -> None:
    assert run("tree").exit_code == 2
    assert run("check").exit_code == 2
    assert 2 not in {error.exit_code for error in BY_CODE.values()}


# ------------------------------------------------------------ configuration


def test_the_socket_is_the_configurations_unless_it_is_named(
    daemon: Daemon, tmp_path: Path
) -> None:
    config = tmp_path / "kvtierd.toml"
    config.write_text(f'runtime_dir = "{tmp_path}"\n')
    assert run("--config", str(config), "status").exit_code == 0
    assert run("status", env={SOCKET_VARIABLE: daemon.path}).exit_code == 0
    elsewhere = {SOCKET_VARIABLE: "/nowhere"}
    assert run("--config", str(config), "status", env=elsewhere).exit_code == 0
    assert run("--socket", daemon.path, "status", env=elsewhere).exit_code == 0
    assert len(daemon.asked) == 4


# ------------------------------------------------------------------ start-up


@pytest.mark.parametrize("arguments", [["--help"], ["status"], ["sessions", "--json"]])
def test_heavy_modules_are_left_out_of_the_start(daemon: Daemon, arguments: list[str]) -> None:
    code = (
        "import sys, atexit\n"
        "heavy = {'numpy', 'rich', 'prometheus_client', 'asyncio', 'uvloop', 'torch', 'sqlite3'}\n"
        "atexit.register(lambda: print(heavy & set(sys.modules), file=sys.stderr))\n"
        "from kvtierd.ctl.main import main\n"
        "main()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=WAIT_S,
        env=os.environ | {SOCKET_VARIABLE: daemon.path}, check=True,
    )  # fmt: skip
    assert result.stderr == "set()\n"
    assert result.stdout


# ---------------------------------------------------------------- the manual


def test_the_manual_lists_every_exit_code_with_what_it_means() -> None:
    text = Path(__file__).parents[2].joinpath("docs", "OPERATIONS.md").read_text()
    told = re.findall(r"^\| (\d+) \| `?([^`|]+?)`? \| ([^|]+?) \|", text, re.MULTILINE)
    listed = {int(code): (name, meaning) for code, name, meaning in told}
    for error in BY_CODE.values():
        assert error.__doc__ is not None
        meaning = " ".join(error.__doc__.split())
        assert listed.pop(error.exit_code) == (error.__name__, meaning)
    assert set(listed) == {0, 2, 78}


def test_every_metric_that_the_manual_names_is_exported() -> None:
    manual = Path(__file__).parents[2].joinpath("docs", "OPERATIONS.md").read_text()
    told = set(re.findall(r"`(kvtierd_[a-z_0-9]+)", manual))
    samples = metrics.samples(STATS | {"counters": dict.fromkeys(COUNTERS, 0)})
    assert told and told <= {sample["name"] for sample in samples}
