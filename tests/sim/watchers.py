"""Two processes that look on: a client whose traffic never needs the disk, and an operator."""

import asyncio
import typing
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kvtier_client import admin_wire, errors, wire
from kvtier_client.aio import AsyncClient
from kvtier_client.protocol import Phase
from tests.sim.clock import Failure
from tests.sim.hand import LAYOUTS, TROUBLE
from tests.sim.parts import PROBE_UID

if TYPE_CHECKING:
    from tests.sim.run import History

BOUND_S = 1.0
"""Simulated time in which whatever needs DRAM only must have ended; all delays on its way, of the
sockets and of the loop, come to a fraction of it."""
PAGES = 4
PAUSES_S = (0.01, 0.2, 1.0)


class Probe:
    """A client of a tenant of its own, whose few blocks never leave DRAM: however long the disk is
    stuck, and whatever others do, it is served at once."""

    def __init__(self, history: "History", token: bytes | None = None) -> None:
        self.history, self.host, self.sim = history, history.host, history.sim
        self.stopping = False
        loop = self.host.process("probe", PROBE_UID)
        self.loop = loop
        self.client = AsyncClient(self.host.path, "probe", 20.0, b"g" * 16, b"s" * 16, False, 1)
        self.client._driver.inline_copy_bytes = 1 << 20
        self.token = token or self.sim.random.randbytes(16)
        self.task: Any = None
        loop.call_soon(self._begin)

    def _begin(self) -> None:
        self.task = self.loop.create_task(self._run())
        self.task.add_done_callback(self.history.ended)

    async def _run(self) -> None:
        handle: Any = None
        while True:
            try:
                if handle is None:
                    handle = await self._session()
                elif self.stopping:
                    await handle.close()
                    break
                await self._once(handle)
            except TROUBLE as error:
                away = isinstance(error, errors.TransportError | errors.ShuttingDown)
                if handle is not None and not away and not self.stopping:
                    raise  # it asks for so little that there is always room
            await asyncio.sleep(self.sim.random.choice(PAUSES_S))
        await self.client.close()

    async def _session(self) -> Any:
        await self.client.register_layout(LAYOUTS[0])  # which the catalog has to store
        try:
            return await self.client.resume_session(self.token)
        except errors.UnknownSession:
            return await self.client.open_session([LAYOUTS[0]], self.token)

    async def _once(self, handle: Any) -> None:
        """Store a block again, which is no news to the daemon, and read it."""
        began_s, sim = self.sim.now_s, self.sim
        connected = self.client._core.protocol.phase is Phase.READY
        page, which = sim.random.randrange(PAGES), LAYOUTS[0]
        record = np.full((1, which.block_bytes // 8), 1 + page, np.uint64)
        await handle.swap_out(record, [page], 1, 0, which, wire.HELD, wait_s=0.0)
        record[:] = 0
        await handle.swap_in(record, [page], 0, which, wait_s=0.0)
        if not (record == 1 + page).all():
            raise Failure(f"page {page} reads {record[0, 0]}")
        took_s = sim.now_s - began_s
        # resuming a session waits for what the catalog has to store before it
        back = connected or sim.stuck_until_s < began_s
        if back and self.host.calm_since(began_s) and took_s > BOUND_S:
            raise Failure(f"a swap within DRAM took {took_s:.2f} simulated seconds")
        self.history.counts["probes"] += 1
        self.history.counts["probes while the disk was stuck"] += began_s < sim.stuck_until_s


class Operator:
    """Asks the admin socket now and then, one request on one connection."""

    def __init__(self, history: "History") -> None:
        self.history, self.host, self.sim = history, history.host, history.sim
        self.loop = self.host.process("operator")

    def ask(self) -> None:
        """Begin a request."""
        self.loop.call_soon(lambda: self.loop.create_task(self._ask()))

    def _request(self) -> wire.Request:
        random = self.sim.random
        kind = random.choice(typing.get_args(admin_wire.AdminRequest))
        if kind is admin_wire.Evict or random.random() < 0.3:
            return admin_wire.Evict(1, random.choice(("a", "b")), random.randint(1, 40))
        if kind is admin_wire.Tree:
            return admin_wire.Tree(1, "nobody")
        request: wire.Request = kind(1)
        return request

    async def _ask(self) -> None:
        sock = self.host.network.new_socket()
        try:
            await self.loop.sock_connect(sock, self.host.config.socket.admin_path)
            encoder = msgspec.msgpack.Encoder()
            await self.loop.sock_sendall(sock, wire.frame(self._request(), encoder))
            data = b""
            while len(data) < 4 or len(data) - 4 < wire.FRAME_HEADER.unpack_from(data)[0]:
                more = await self.loop.sock_recv(sock, 65536)
                if not more:
                    return
                data += more
        except OSError:
            return
        finally:
            sock.close()
        reply = msgspec.msgpack.decode(data[4:], type=wire.AnyReply)
        self.history.counts["operator's requests"] += 1
        if isinstance(reply, wire.Report):
            self._sums(reply.data)
        elif getattr(reply, "code", 0) == errors.Internal.code:
            raise Failure(f"the operator was told {reply}")

    @staticmethod
    def _sums(data: dict[str, Any]) -> None:
        """What is shown adds up."""
        for name, tenant in data.get("tenants", {}).items():
            dram = tenant["dram"]
            if dram["used_bytes"] + dram["free_bytes"] != dram["total_bytes"]:
                raise Failure(f"tenant {name}: {dram}")
