"""What a process has open, read while it may open and close more."""

import contextlib
import os


def descriptors(pid: int | str = "self") -> dict[str, str]:
    """The open descriptors of a process: path under /proc to what it leads to."""
    place = f"/proc/{pid}/fd"
    found = {}
    for fd in os.listdir(place):
        with contextlib.suppress(FileNotFoundError):  # closed since
            found[f"{place}/{fd}"] = os.readlink(f"{place}/{fd}")
    return found


def memfds(pid: int) -> dict[str, str]:
    """The kvtierd memory that a process has open, as `descriptors`."""
    return {fd: name for fd, name in descriptors(pid).items() if "memfd:kvtierd" in name}
