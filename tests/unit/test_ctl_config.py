"""kvtierctl reads a configuration as the daemon does, and refuses a wrong one by the key's name."""

import json
from pathlib import Path

import pytest

from tests.unit.test_ctl import run


def config_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "kvtierd.toml"
    path.write_text(text)
    return str(path)


def test_a_sound_configuration_is_shown_as_the_daemon_reads_it(tmp_path: Path) -> None:
    config = config_file(tmp_path, 'state_dir = "/srv/kv"\n[recovery]\norphan_ttl = "never"\n')
    result = run("config", "check", config)
    assert result.exit_code == 0
    assert "/srv/kv/spill" in result.stdout
    document = json.loads(run("config", "check", config, "--json").stdout)
    assert document["ok"] and document["config"]["spill"]["paths"] == ["/srv/kv/spill"]
    assert document["config"]["recovery"]["orphan_ttl"] == "never"
    assert document["config"]["limits"]["lease_ttl"] == 30


@pytest.mark.parametrize("command", [["config", "check"], ["check", "--config"]])
def test_a_wrong_configuration_is_refused_by_the_keys_name(
    tmp_path: Path, command: list[str]
) -> None:
    config = config_file(tmp_path, "[arena]\nhigh_watermrk = 0.9\n")
    result = run(*command, config)
    assert result.exit_code == 78
    assert "arena.high_watermrk" in result.stderr and result.stderr.count("\n") == 1
