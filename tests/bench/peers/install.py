"""Brings the stores to compare with into build/peers, and says why where it cannot.

Nothing is installed in the system: a Python environment for each store that is a Python package,
and unpacked Debian packages for each that is a server program (so no service is started either).
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.bench.peers.adapters.peer import Unavailable

ROOT: Final = Path(__file__).parents[3]
PEERS: Final = ROOT / "build" / "peers"
INSTALL_MAX_S: Final = 1800.0


def environment(name: str, steps: Sequence[Sequence[str]], below: Path = PEERS) -> str:
    """The Python of an environment with the results of these `pip install`. Errors: Unavailable."""
    place = below / name
    python, ready = place / "bin" / "python", place / "ready"
    wanted = "\n".join(" ".join(step) for step in steps)
    if ready.exists() and ready.read_text() == wanted:
        return str(python)
    print(f"{name}: installing into {place}", flush=True)
    run([sys.executable, "-m", "venv", "--clear", str(place)])
    for step in steps:
        run([str(python), "-m", "pip", "install", "--quiet", *step])
    ready.write_text(wanted)
    return str(python)


def program(names: Sequence[str], below: Path = PEERS) -> str:
    """The path of the first of these programs that there is, or can be got. Errors: Unavailable."""
    for name in names:
        if found := shutil.which(name):
            return found
    for name in names:
        try:
            return unpacked(name, below)
        except Unavailable as why:
            reason = why
            shutil.rmtree(below / name, ignore_errors=True)
    raise Unavailable(f"there is no {' or '.join(names)} on the PATH, and {reason}")


def unpacked(name: str, below: Path) -> str:
    """A program from the Debian package of its name, and from what that needs."""
    root = below / name / "root"
    path = root / "usr" / "bin" / name
    if path.exists():
        return str(path)
    print(f"{name}: unpacking its Debian package into {root}", flush=True)
    archives, part = below / name / "archives", below / name / "part"
    shutil.rmtree(below / name, ignore_errors=True)
    (archives / "partial").mkdir(parents=True)
    download = [
        "apt-get", "install", "--quiet", "--yes", "--download-only", "--no-install-recommends",
        "-o", f"Dir::Cache::archives={archives}", "-o", "Debug::NoLocking=1", name,
    ]  # fmt: skip
    try:
        run(download)
    except Unavailable:
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            raise
        run(["apt-get", "update", "--quiet"])  # a fresh system has no lists of packages
        run(download)
    for archive in sorted(archives.glob("*.deb")):
        run(["dpkg-deb", "--extract", str(archive), str(part)])
    part.rename(root)
    return str(path)


def libraries(program_path: str) -> dict[str, str]:
    """The environment in which an unpacked program finds its libraries; nothing for others."""
    root = Path(program_path).parents[2]
    found = [str(path) for path in root.glob("usr/lib/*-linux-gnu*")] if root.name == "root" else []
    return {"LD_LIBRARY_PATH": ":".join(found)} if found else {}


def run(command: Sequence[str]) -> None:
    """Errors: Unavailable, with the last line of what it said."""
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=INSTALL_MAX_S,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError as problem:
        raise Unavailable(f"{command[0]} cannot be run: {problem}") from None
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{' '.join(command)} took over {INSTALL_MAX_S:.0f} s") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        raise Unavailable(f"{' '.join(command[:4])} … said: {said[-1]}")
