"""A client process that works at random until it is killed, or a file says that it is over.

It uses the shipped library, checks every byte that it reads, and notes in its ledger what it asks
and what was acknowledged. Started again under its name, it goes on where the killed one was.
"""

import argparse
import asyncio
import contextlib
import inspect
import os
import random
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvtier_client.aio import AsyncClient
from kvtier_client.client import Client
from kvtier_client.errors import (
    CapacityError,
    DataError,
    InvalidArgument,
    LeaseExpired,
    UnknownBranch,
    UnknownSession,
)
from tests.fault.ledger import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    CACHED,
    HELD,
    LAYOUT,
    Ledger,
    Node,
    Session,
    Writer,
    content,
    contents,
    key_of,
)

SESSION_BLOCKS_MAX: Final = 60
NODES_MAX: Final = 6
KEYS_MAX: Final = 24
DEADLINE_S: Final = 60.0
BATCH_MAX: Final = 9
PAUSE_S: Final = 0.05


async def done(value: Any) -> Any:
    """What a call of either client returns."""
    return await value if inspect.isawaitable(value) else value


class Worker:
    """One process: `tasks` sessions at a time over one client."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.chance = random.Random(arguments.seed)
        self.ledger = Writer(Path(arguments.ledger))
        self.partner = Ledger(Path(arguments.partner)) if arguments.partner else None
        self.memory_may_go = arguments.memory_may_go
        self.next_seed = max(self.ledger.last_seed, arguments.number << 32) + 1
        kind: Any = AsyncClient if arguments.tasks > 1 else Client
        group = bytes.fromhex(arguments.group) or None
        self.client = kind(arguments.socket, deadline_s=DEADLINE_S, group=group, secret=group)
        self.tasks = arguments.tasks
        self.until = Path(arguments.until)
        self.handles: dict[str, Any] = {}
        self.running: set[int] = set()

    async def run(self) -> None:
        """Work until the file is there; then end all sessions."""
        await done(self.client.register_layout(LAYOUT))
        mine: list[list[str]] = [[] for _ in range(self.tasks)]
        for index, token in enumerate(list(self.ledger.sessions)):
            mine[index % self.tasks].append(token)
        async with asyncio.TaskGroup() as group:
            for tokens in mine:
                group.create_task(self._task(tokens))
        if self.ledger.keys:
            await done(self.client.remove(LAYOUT, [key_of(seed) for seed in self.ledger.keys]))
        await done(self.client.close())

    async def _task(self, tokens: list[str]) -> None:
        """Its sessions, one step after the other."""
        while not self.until.exists():
            await asyncio.sleep(0)  # let the other tasks in
            if len(tokens) < 2:
                tokens.append(os.urandom(16).hex())
                await self._ask("open", token=tokens[-1])
            try:
                await self._step(tokens)
            except CapacityError:
                await asyncio.sleep(PAUSE_S)
            except (DataError, InvalidArgument, LeaseExpired) as error:
                if not self.memory_may_go:
                    raise
                if not isinstance(error, LeaseExpired):  # else what was asked is asked again
                    await self._close(tokens)
        while tokens:
            await self._close(tokens)

    def _seeds(self, count: int) -> list[int]:
        first = self.next_seed
        self.next_seed += count
        return list(range(first, first + count))

    # --------------------------------------------------------------- steps

    async def _step(self, tokens: list[str]) -> None:
        token = self.chance.choice(tokens)
        if await self._finish_one(tokens):
            return
        session = self.ledger.sessions[token]
        step, chance = self.chance.random(), self.chance
        node = chance.choice(list(session.nodes))
        if sum(len(each.pages) for each in session.nodes.values()) > SESSION_BLOCKS_MAX:
            tokens.remove(token)
            await self._ask("close", token=token)
        elif step < 0.40:
            await self._out(token, node, session.nodes[node])
        elif step < 0.60:
            await self._read(token, session)
        elif step < 0.66 and len(session.nodes) < NODES_MAX:
            await self._fork(token, session, node)
        elif step < 0.69 and node:
            await self._ask("prune", token=token, node=node)
        elif step < 0.71:
            await self._ask("cache", token=token, node=node)
        elif step < 0.75:
            version = max(session.blobs, default=0) + 1
            await self._ask("blob", token=token, version=version, seeds=self._seeds(1))
        elif step < 0.80 and session.nodes[node].pages:
            handle = await self._handle(token)
            with contextlib.suppress(InvalidArgument):  # its first page was CACHED, and dropped
                await done(handle.prefetch((0, len(session.nodes[node].pages)), node))
        elif step < 0.95:
            await self._keyed(token, session)
        elif self.partner:
            await self._read_partner()

    async def _fork(self, token: str, session: Session, parent: int) -> None:
        number = max([*session.nodes, *session.gone_nodes]) + 1
        known = session.nodes[parent]
        pages = known.fork_pages + self.chance.randint(0, 3)
        if all(page in known.pages for page in range(known.fork_pages, pages)):
            await self._ask("fork", token=token, node=number, parent=parent, pages=pages)

    async def _finish_one(self, tokens: list[str]) -> bool:
        """Ask again what an earlier process, or a refused step, has left open."""
        for number, (kind, arguments) in self.ledger.asked.items():
            token = arguments.get("token", "")
            if number not in self.running and (token in tokens or not token):
                await self._carry_out(number, kind)
                if kind == "close":
                    tokens.remove(token)
                return True
        return False

    async def _out(self, token: str, node: int, known: Node) -> None:
        first = max(known.pages, default=known.fork_pages - 1) + 1
        await self._ask(
            "out", token=token, node=node, first=first,
            seeds=self._seeds(self.chance.randint(1, BATCH_MAX)),
            retention=HELD if self.chance.random() < 0.85 else CACHED,
            oneway=self.chance.random() < 0.3,
        )  # fmt: skip

    async def _keyed(self, token: str, session: Session) -> None:
        chance, keys = self.chance, sorted(self.ledger.keys)
        step = chance.random()
        if len(keys) < KEYS_MAX:
            await self._ask("put", seeds=self._seeds(chance.randint(1, BATCH_MAX)))
        elif step < 0.4:
            some = chance.sample(keys, 3)
            await self._ask("hold", token=token, keys=some)
        elif step < 0.6 and session.held:
            await self._ask("unhold", token=token, keys=sorted(session.held)[:2])
        else:
            await self._get_keys(chance.sample(keys, 4))

    async def _get_keys(self, seeds: list[int]) -> None:
        into = np.zeros((len(seeds), BLOCK_BYTES), np.uint8)
        found = await done(self.client.get_keys(LAYOUT, [key_of(s) for s in seeds], into))
        assert (into[:found] == contents(seeds[:found])).all(), "foreign bytes under a key"

    async def _read(self, token: str, session: Session) -> None:
        node = self.chance.choice(list(session.nodes))
        await self._read_pages(await self._handle(token), node, session.nodes[node])

    async def _read_pages(self, handle: Any, node: int, known: Node) -> None:
        """Read some pages; those that are sure must be there."""
        pages = [page for page, each in known.pages.items() if each.sure]
        if not pages:
            return
        pages = pages[self.chance.randrange(len(pages)) :]
        wanted = contents([known.pages[page].seed for page in pages])
        into = np.zeros_like(wanted)
        await done(handle.swap_in(into, pages, node))
        assert (into == wanted).all(), f"foreign bytes in node {node}, pages {pages}"

    async def _read_partner(self) -> None:
        """Read a session of the other process of the group, which may end it at any time."""
        assert self.partner is not None
        sessions = self.partner.read().sessions
        token = self.chance.choice(list(sessions) or [""])
        if token and sessions[token].sure:
            with contextlib.suppress(UnknownSession, UnknownBranch, InvalidArgument):
                handle = await done(self.client.resume_session(bytes.fromhex(token)))
                node = self.chance.choice(list(sessions[token].nodes))
                await self._read_pages(handle, node, sessions[token].nodes[node])

    async def _close(self, tokens: list[str]) -> None:
        token = tokens.pop()
        for number, (kind, arguments) in self.ledger.asked.items():
            if kind == "close" and arguments["token"] == token:
                await self._carry_out(number, kind)
                return
        await self._ask("close", token=token)

    # ------------------------------------------------------------- asking

    async def _ask(self, kind: str, **arguments: Any) -> None:
        await self._carry_out(self.ledger.begin(kind, **arguments), kind)

    async def _carry_out(self, number: int, kind: str) -> None:
        """Ask what was begun, perhaps by an earlier process; every request may be repeated."""
        self.running.add(number)
        try:
            result = await getattr(self, f"_do_{kind}")(**self.ledger.asked[number][1])
            self.ledger.end(number, result)
        finally:
            self.running.remove(number)

    async def _handle(self, token: str) -> Any:
        if token not in self.handles:
            self.handles[token] = await done(self.client.resume_session(bytes.fromhex(token)))
        return self.handles[token]

    async def _do_open(self, token: str) -> None:
        self.handles[token] = await done(
            self.client.open_session([LAYOUT], token=bytes.fromhex(token))
        )

    async def _do_close(self, token: str) -> None:
        with contextlib.suppress(UnknownSession):  # the killed process had closed it
            await done((await self._handle(token)).close())
        self.handles.pop(token, None)

    async def _do_fork(self, token: str, node: int, parent: int, pages: int) -> None:
        await done((await self._handle(token)).fork(node, parent, pages * BLOCK_TOKENS))

    async def _do_prune(self, token: str, node: int) -> None:
        await done((await self._handle(token)).prune(node))

    async def _do_cache(self, token: str, node: int) -> None:
        await done((await self._handle(token)).set_retention(node, CACHED))

    async def _do_blob(self, token: str, version: int, seeds: list[int]) -> None:
        data = content(seeds[0]).tobytes()
        await done((await self._handle(token)).put_blob(data, version=version))

    async def _do_out(
        self, token: str, node: int, first: int, seeds: list[int], retention: int, oneway: bool
    ) -> None:
        handle = await self._handle(token)
        records = contents(seeds)
        if not oneway:
            window = (first, first + len(seeds))
            await done(handle.swap_out(records, window, BLOCK_TOKENS, node, retention=retention))
            return
        for index, record in enumerate(records):
            await done(
                handle.swap_out(
                    record, first + index, BLOCK_TOKENS, node, retention=retention, ack=False
                )
            )
        await done(self.client.flush(DEADLINE_S))

    async def _do_put(self, seeds: list[int]) -> None:
        keys = [key_of(seed) for seed in seeds]
        await done(self.client.put_keys(LAYOUT, keys, contents(seeds)))

    async def _do_hold(self, token: str, keys: list[int]) -> int:
        handle = await self._handle(token)
        held: int = await done(handle.hold(LAYOUT, [key_of(seed) for seed in keys]))
        return held

    async def _do_unhold(self, token: str, keys: list[int]) -> None:
        handle = await self._handle(token)
        await done(handle.unhold(LAYOUT, [key_of(seed) for seed in keys]))


def main() -> None:
    """The process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("socket")
    parser.add_argument("ledger")
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--until", required=True)
    parser.add_argument("--tasks", type=int, default=1)
    parser.add_argument("--group", default="")
    parser.add_argument("--partner", default="")
    parser.add_argument("--memory-may-go", action="store_true")
    asyncio.run(Worker(parser.parse_args()).run())


if __name__ == "__main__":
    main()
