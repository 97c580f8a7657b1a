"""Why a tier cannot be opened: errors for the operator, before any client is served."""

from typing import Literal

Reason = Literal[
    "magic",
    "version",
    "checksum",
    "kind",
    "instance",
    "geometry",
    "size",
    "tenant",
    "file_index",
    "payload",
    "not_empty",
    "seals",
    "unreadable",
]
"""What about a medium was wrong."""


class StartError(Exception):
    """The daemon was asked for something that it cannot have; nothing was left behind."""

    def __init__(self, asked: str, obstacle: str, remedy: str) -> None:
        super().__init__(f"{asked}: {obstacle}; {remedy}")
        self.asked = asked
        self.obstacle = obstacle
        self.remedy = remedy


class FormatError(StartError):
    """A header file is not what this daemon wrote or not what its configuration names.

    `reason` names the check that failed, so that callers need not read the message.
    """

    def __init__(self, reason: Reason, asked: str, obstacle: str, remedy: str) -> None:
        super().__init__(asked, obstacle, remedy)
        self.reason = reason
