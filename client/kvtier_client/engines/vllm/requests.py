"""What the scheduler's side knows of each request, and its questions to the daemon.

    new ──lookup──▶ offered ──load──▶ running ──preempted──▶ being saved ──reports of all ranks──▶
    being held ──hold──▶ offered ──load──▶ running …            any ──finished──▶ let go

The questions are jobs of the link's thread. They write one number, `Offer.tokens`, which the
scheduler reads at its polls: a poll never waits.
"""

import contextlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from kvtier_client.client import Client, Session
from kvtier_client.engines.vllm.groups import Groups
from kvtier_client.engines.vllm.keys import KEY_BYTES, KeyChain
from kvtier_client.engines.vllm.messages import Part
from kvtier_client.errors import UnknownSession

NAME_CHARS = 200
"""Longest name of a session."""


class Offer:
    """How many leading tokens of a request the daemon has: None until it is known."""

    __slots__ = ("asked_s", "restores", "tokens")

    def __init__(self, restores: bool, tokens: int | None = None) -> None:
        self.tokens = tokens
        self.restores = restores
        """Whether they are what a preemption took."""
        self.asked_s: float | None = None
        """When the daemon was asked; None while the blocks are still being saved."""


class Suspension:
    """The hold of a preempted request's blocks: a session of its own, named by its token."""

    __slots__ = ("parts", "request_id", "session", "token", "tokens")

    def __init__(self, request_id: str, tokens: int, parts: list[Part]) -> None:
        self.request_id = request_id
        self.tokens = tokens
        self.parts = parts
        self.token = os.urandom(16)
        self.session: Session | None = None


class Entry:
    """One request of the engine."""

    __slots__ = (
        *("blocks", "chains", "computed", "load_tokens", "local_tokens", "lost_tokens"),
        *("offer", "preemptions", "request", "suspension", "writes", "written_tokens"),
    )

    def __init__(self, request: Any, chains: tuple[KeyChain, ...], writes: bool) -> None:
        self.request = request
        self.chains = chains
        """One for each KV-cache group; groups of equal block sizes share theirs."""
        self.blocks: list[list[int]] = [[] for _ in chains]
        """Per group, the ids of its blocks in the engine's pool."""
        self.computed = 0
        """Tokens whose KV is in its blocks after the last planned step."""
        self.offer: Offer | None = None
        self.suspension: Suspension | None = None
        self.preemptions = 0
        self.lost_tokens = 0
        """What the last preemption took, until the request runs again."""
        self.local_tokens = 0
        """Where the part that the daemon would load begins."""
        self.load_tokens = 0
        """What is being loaded."""
        self.writes = writes
        """Whether its full blocks are written through."""
        self.written_tokens = 0
        """Up to where they are."""

    @property
    def final_tokens(self) -> int:
        """Leading tokens that will not change any more: all but the last that was sampled."""
        return max(0, int(self.request.num_tokens) - 1)


class Lookup:
    """Ask how much of a new request's prefix is stored, on all ranks and in all groups."""

    owed = False

    def __init__(self, offer: Offer, groups: Groups, keys: list[list[bytes]]) -> None:
        self.offer, self.groups, self.keys = offer, groups, keys

    def run(self, client: Client) -> None:
        """Leading hits of every group."""
        have = [self._hits(client, group, b"".join(keys)) for group, keys in enumerate(self.keys)]
        self.offer.tokens = self.groups.hit_tokens(have)

    def _hits(self, client: Client, group: int, keys: bytes) -> int:
        parts = self.groups.parts[group]
        return _leading(client, keys, lambda some: min(client.lookup(some, parts)))

    def fail(self) -> None:
        """A miss."""
        self.offer.tokens = 0


class Hold:
    """Hold what all ranks have saved of a preempted request, and offer it."""

    owed = False

    def __init__(self, offer: Offer, groups: Groups, suspension: Suspension) -> None:
        self.offer, self.groups, self.suspension = offer, groups, suspension

    def run(self, client: Client) -> None:
        """Open the session and hold the leading blocks that are there on every rank."""
        suspension, groups = self.suspension, self.groups
        layout = groups.parts[0][0]  # holds may be of any; of its own it has no pages
        session = client.open_session(
            [layout], suspension.token, name=suspension.request_id[:NAME_CHARS]
        )
        suspension.session = session
        have = [0] * len(groups.groups)
        for part in suspension.parts:
            have[part.group] = min(
                _leading(client, part.keys, partial(session.hold, layout))
                for layout in groups.parts[part.group]
            )
        self.offer.tokens = groups.saved_tokens(suspension.tokens, have)

    def fail(self) -> None:
        """It will be recomputed."""
        self.offer.tokens = 0


def _leading(client: Client, keys: bytes, count: Callable[[bytes], int]) -> int:
    """How many leading keys `count` finds, asked for no more at a time than a request may name."""
    step = KEY_BYTES * client.limits.blocks_per_request
    leading = 0
    for first in range(0, len(keys), step):
        part = keys[first : first + step]
        found = count(part)
        leading += found
        if found * KEY_BYTES < len(part):
            break
    return leading


class LetGo:
    """End the hold of a request that runs again or is over; its blocks are CACHED then."""

    owed = True

    def __init__(self, suspension: Suspension) -> None:
        self.suspension = suspension

    def run(self, client: Client) -> None:
        """Close its session, if there is one."""
        with contextlib.suppress(UnknownSession):
            session = self.suspension.session or client.resume_session(self.suspension.token)
            session.close()

    def fail(self) -> None:
        """The daemon refused: the session's TTL ends it."""
