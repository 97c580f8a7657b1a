"""What a client process was promised: written to a file before and after each of its requests.

The file outlives kill -9 of its writer, so that a judge (and the writer's successor) knows what was
acknowledged, and what was asked and not answered: that may have been done, or not.
"""

import contextlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier_client.wire import CACHED, HELD, Layout

BLOCK_BYTES: Final = 16 << 10
BLOCK_TOKENS: Final = 16
LAYOUT: Final = Layout("kill", "uint8", 1, 8, 64, BLOCK_TOKENS, BLOCK_BYTES)
_STEPS: Final = np.arange(BLOCK_BYTES // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def content(seed: int) -> NDArray[np.uint8]:
    """A block's bytes: no two seeds, no shift and no mixture look alike. Shapes: [BLOCK_BYTES]."""
    return (_STEPS ^ np.uint64(seed)).view(np.uint8)


def contents(seeds: list[int]) -> NDArray[np.uint8]:
    """Several blocks. Shapes: [n, BLOCK_BYTES]."""
    return (_STEPS[None] ^ np.array(seeds, np.uint64)[:, None]).view(np.uint8)


def key_of(seed: int) -> bytes:
    """The content key of a block."""
    return seed.to_bytes(16, "big")


@dataclass
class Page:
    """One block under a node."""

    seed: int
    sure: bool = False
    """It was acknowledged as HELD, and nothing was asked since that may drop it."""


@dataclass
class Node:
    """A node, once it was asked for."""

    parent: int
    fork_pages: int
    pages: dict[int, Page] = field(default_factory=dict)


@dataclass
class Session:
    """A session, once it was asked for."""

    sure: bool = False
    nodes: dict[int, Node] = field(default_factory=lambda: {0: Node(-1, 0)})
    gone_nodes: set[int] = field(default_factory=set)
    blobs: dict[int, int] = field(default_factory=dict)  # version -> seed
    blob_version: int = 0
    held: set[int] = field(default_factory=set)  # seeds of keyed blocks

    def subtree(self, node: int) -> list[int]:
        """A node and all below it."""
        found = [node]
        for number, each in self.nodes.items():
            if each.parent in found:
                found.append(number)
        return found

    def doubt(self, nodes: list[int]) -> None:
        """Something was asked that may drop all blocks of these nodes."""
        for node in nodes:
            for page in self.nodes[node].pages.values():
                page.sure = False


class Ledger:
    """Reads a file of `["begin", number, kind, arguments]` and `["end", number, result]`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sessions: dict[str, Session] = {}
        self.closed: set[str] = set()
        self.keys: set[int] = set()
        self.asked: dict[int, tuple[str, dict[str, Any]]] = {}
        """What was begun and has not ended."""
        self.events = 0
        self.last_number = 0
        self.last_seed = 0
        self._at = 0

    def read(self) -> "Ledger":
        """Take in what was written since the last time; half a line is not written yet."""
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._at += len(line)
                with contextlib.suppress(json.JSONDecodeError):  # cut by a kill, then gone on
                    self.apply(json.loads(line))
        return self

    def apply(self, event: list[Any]) -> None:
        """Take in one line."""
        self.events += 1
        number = event[1]
        self.last_number = max(self.last_number, number)
        if event[0] == "begin":
            self.asked[number] = (event[2], event[3])
            self.last_seed = max(self.last_seed, *event[3].get("seeds", [0]))
            getattr(self, f"_begin_{event[2]}", self._nothing)(**event[3])
        else:
            kind, arguments = self.asked.pop(number)
            getattr(self, f"_end_{kind}", self._nothing)(event[2], **arguments)

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Requests that change no promise."""

    # ------------------------------------------------------------- sessions

    def _begin_open(self, token: str) -> None:
        self.sessions[token] = Session()

    def _end_open(self, _: Any, token: str) -> None:
        self.sessions[token].sure = True

    def _begin_close(self, token: str) -> None:
        session = self.sessions[token]
        session.sure = False
        session.held.clear()
        session.doubt(list(session.nodes))

    def _end_close(self, _: Any, token: str) -> None:
        del self.sessions[token]
        self.closed.add(token)

    def _begin_fork(self, token: str, node: int, parent: int, pages: int) -> None:
        self.sessions[token].nodes[node] = Node(parent, pages)

    def _begin_prune(self, token: str, node: int) -> None:
        session = self.sessions[token]
        session.doubt(session.subtree(node))

    def _end_prune(self, _: Any, token: str, node: int) -> None:
        session = self.sessions[token]
        for each in session.subtree(node):
            del session.nodes[each]
            session.gone_nodes.add(each)

    def _begin_cache(self, token: str, node: int) -> None:
        self.sessions[token].doubt([node])

    def _begin_blob(self, token: str, version: int, seeds: list[int]) -> None:
        self.sessions[token].blobs[version] = seeds[0]

    def _end_blob(self, _: Any, token: str, version: int, seeds: list[int]) -> None:
        self.sessions[token].blob_version = version

    # --------------------------------------------------------------- blocks

    def _begin_out(
        self, token: str, node: int, first: int, seeds: list[int], retention: int, oneway: bool
    ) -> None:
        pages = self.sessions[token].nodes[node].pages
        for index, seed in enumerate(seeds):
            pages.setdefault(first + index, Page(seed))

    def _end_out(
        self, _: Any, token: str, node: int, first: int, seeds: list[int], retention: int,
        oneway: bool,
    ) -> None:  # fmt: skip
        pages = self.sessions[token].nodes[node].pages
        for index in range(len(seeds)):
            pages[first + index].sure = retention == HELD

    def _begin_put(self, seeds: list[int]) -> None:
        self.keys |= set(seeds)

    def _end_hold(self, held: int, token: str, keys: list[int]) -> None:
        self.sessions[token].held |= set(keys[:held])

    def _begin_unhold(self, token: str, keys: list[int]) -> None:
        self.sessions[token].held -= set(keys)


class Writer(Ledger):
    """The ledger of this process; goes on where an earlier process of its name was killed."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.read()
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.write(self._fd, b"\n")  # ends a line that a kill has cut

    def begin(self, kind: str, **arguments: Any) -> int:
        """Note what will be asked; returns its number."""
        number = self.last_number + 1
        self._note(["begin", number, kind, arguments])
        return number

    def end(self, number: int, result: Any) -> None:
        """Note that it was acknowledged."""
        self._note(["end", number, result])

    def _note(self, event: list[Any]) -> None:
        os.write(self._fd, json.dumps(event).encode() + b"\n")
        self.apply(event)


__all__ = [
    "BLOCK_BYTES", "BLOCK_TOKENS", "CACHED", "HELD", "LAYOUT", "Ledger", "Node", "Page", "Session",
    "Writer", "content", "contents", "key_of",
]  # fmt: skip
