"""The service unit keeps what the daemon promises: its memory, its time to stop, its privacy."""

import re
from pathlib import Path

from kvtierd import config

UNIT = Path(__file__).parents[2] / "systemd" / "kvtierd.service"


def settings() -> dict[str, str]:
    lines = UNIT.read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def test_a_graceful_stop_ends_before_the_service_manager_loses_patience() -> None:
    assert int(settings()["TimeoutStopSec"]) > config.parse({}).stop.timeout_s


def test_memory_is_lockable_and_outlives_restarts_stops_and_starts_that_fail() -> None:
    unit = settings()
    assert unit["LimitMEMLOCK"] == "infinity"
    assert unit["FileDescriptorStorePreserve"] == "yes"
    assert int(unit["FileDescriptorStoreMax"]) > 0


def test_readiness_is_told_and_a_reload_is_a_check_and_then_a_hangup() -> None:
    assert settings()["Type"] == "notify"
    file = settings()["ExecStart"].rpartition(" ")[2]
    check, hangup = re.findall(r"^ExecReload=(.+)$", UNIT.read_text(), re.MULTILINE)
    assert check.endswith(f"kvtierctl config check {file}")
    assert hangup.endswith("kill -HUP $MAINPID")


def test_an_unusable_configuration_is_not_tried_again() -> None:
    assert int(settings()["RestartPreventExitStatus"]) == config.ConfigError.exit_code


def test_directories_are_the_defaults_and_state_is_private() -> None:
    unit, defaults = settings(), config.parse({})
    assert defaults.runtime_dir == f"/run/{unit['RuntimeDirectory']}"
    assert defaults.state_dir == f"/var/lib/{unit['StateDirectory']}"
    assert unit["StateDirectoryMode"] == "0700"
