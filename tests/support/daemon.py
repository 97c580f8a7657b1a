"""A real daemon process with small media in a directory of a test."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.raw import RawClient
from tests.support.wait import until

START_S = 120.0
STOP_S = 60.0

DEFAULTS: dict[str, dict[str, Any]] = {
    "arena": {
        "huge_pages": "off", "mlock": "off", "prefault": False, "slab_bytes": 512 << 10,
        "min_block_bytes": 4096,
    },
    "spill": {"capacity_bytes": 64 << 20, "slab_bytes": 1 << 20, "io_threads": 4},
    "recovery": {"memory": "holder"},
    "limits": {},
    "stop": {"timeout": "30s"},
}  # fmt: skip
ARENA_BYTES = 8 << 20
"""128 blocks of 64 KiB."""


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return str(value)


class DaemonProcess:
    """Starts `python -m kvtierd` on a configuration that a test may change between starts.

    `sections` are laid over `DEFAULTS`; `tenants` replace the only one.
    """

    def __init__(
        self,
        directory: Path,
        tenants: list[dict[str, Any]] | None = None,
        **sections: dict[str, Any],
    ) -> None:
        self.directory = directory
        self.sections = {name: DEFAULTS[name] | sections.get(name, {}) for name in DEFAULTS}
        self.top: dict[str, Any] = {}
        self.tenants = tenants or [{"name": "t", "uids": ["self"], "arena_bytes": ARENA_BYTES}]
        self.config_path = directory / "kvtierd.toml"
        self.log_path = directory / "kvtierd.log"
        self.client_path = str(directory / "run" / "kvtierd.sock")
        self.admin_path = str(directory / "run" / "admin.sock")
        self.state_path = directory / "state"
        self.process: subprocess.Popen[bytes] | None = None
        self.wrapper: list[str] = []
        """A command that runs the daemon under other limits."""
        self.arguments: list[str] = []
        """More arguments of the daemon."""

    # --------------------------------------------------------------- config

    def write_config(self) -> None:
        """Write the configuration file as it now should be."""
        top = {"runtime_dir": str(self.directory / "run"), "state_dir": str(self.state_path)}
        lines = [f"{key} = {_toml(value)}" for key, value in (top | self.top).items()]
        for name, section in self.sections.items():
            lines += [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in section.items())]
        for tenant in self.tenants:
            lines += ["[[tenants]]", *(f"{key} = {_toml(value)}" for key, value in tenant.items())]
        self.config_path.write_text("\n".join(lines) + "\n")

    # -------------------------------------------------------------- process

    def launch(self) -> subprocess.Popen[bytes]:
        """Start the process and do not wait for it."""
        self.write_config()
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                [
                    *self.wrapper, sys.executable, "-m", "kvtierd",
                    "--config", str(self.config_path), *self.arguments,
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        return self.process

    def start(self) -> "DaemonProcess":
        """Start it and wait until it serves."""
        process = self.launch()
        until(lambda: self._serves() or process.poll() is not None, "the daemon serves", START_S)
        assert process.poll() is None, self.log()
        return self

    def refuse(self) -> str:
        """Start it, expect it to give up, and return what it said."""
        before = len(self.log())
        process = self.launch()
        process.wait(START_S)
        assert process.returncode != 0
        self.process = None
        return self.log()[before:]

    def _serves(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            return probe.connect_ex(self.admin_path) == 0

    def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def freeze(self) -> None:
        """SIGSTOP; when this returns it has stopped."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        """SIGCONT."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def kill_keeper(self) -> None:
        """End what keeps the memory of a daemon that does not run: as a reboot does."""
        assert self.process is None
        for pid in self.holders():
            os.kill(pid, signal.SIGKILL)
        until(lambda: not self.holders(), "the memory is gone")

    def stop(self) -> None:
        """SIGTERM; the daemon must end by itself and well."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(STOP_S)
        self.process = None
        assert code == 0, self.log()

    def restart(self) -> None:
        """kill -9, then a new life."""
        self.kill()
        self.start()

    def end(self) -> None:
        """After a test: end the daemon and its holder, whatever state they are in."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
        for pid in self.holders():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def holders(self) -> list[int]:
        """The holder processes that serve this daemon's directory."""
        path = str(self.directory / "run" / "holder.sock").encode()
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    command = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
                    if path in command:
                        found.append(int(entry))
        return found

    # -------------------------------------------------------------- looking

    def log(self) -> str:
        """Everything that all its lives have logged."""
        return self.log_path.read_text() if self.log_path.exists() else ""

    def assert_no_faults(self) -> None:
        """The log shows no exception that nobody expected."""
        log = self.log()
        assert "Traceback" not in log and " failed\n" not in log, log

    def client(self, **options: bytes) -> RawClient:
        """A client that has said HELLO."""
        client = RawClient(self.client_path, **options)
        client.hello()
        return client

    def admin(self, verb: str, *fields: Any) -> Any:
        """Ask the admin socket."""
        with RawClient(self.admin_path) as client:
            reply = client.ask(verb, *fields)
        return reply[4]

    def tenant(self, name: str = "t") -> dict[str, Any]:
        """A tenant's gauges."""
        found: dict[str, Any] = self.admin("stats")["tenants"][name]
        return found

    def is_empty(self) -> bool:
        """Whether nothing is stored, leased or on its way."""
        tenant = self.tenant()
        used = tenant["dram"]["used_bytes"] + tenant["nvme"]["used_bytes"]
        return bool(tenant["sessions"] == tenant["leases"] == used == 0)

    def ails(self) -> list[str]:
        """Why it is unwell; that a busy machine has held up its loop is left out."""
        reasons: list[str] = self.admin("stats")["health"]["reasons"]
        return [reason for reason in reasons if not reason.startswith("event loop")]

    def counters(self) -> dict[str, int]:
        found: dict[str, int] = self.admin("stats")["counters"]
        return found
