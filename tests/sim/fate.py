"""What happens now and then to a machine: kills, loss of power, SIGSTOP, cuts, a stuck disk, jumps.

Fate strikes between any two steps. How often is drawn from the seed.
"""

from typing import TYPE_CHECKING

import numpy as np

from kvtierd.core.blocks import F_FILLING, NONE
from kvtierd.core.sessions import token_hash
from tests.sim.files import PAGE_BYTES

if TYPE_CHECKING:
    from tests.sim.run import History

GAPS = [(0.02, 0.05, 0.15), (0.05, 0.15, 0.4)]
"""Steps from one stroke to the next, as parts of the history."""
GAP_STEPS = 40
"""And so many more: what happens in between is what is struck."""
STUCK_S = (2.0, 15.0, 60.0)
"""In a brief history never so long that little but its end would happen meanwhile."""
JUMPS_S = (-86400.0 * 30, -60.0, 3600.0, 86400.0 * 30)


class Fate:
    """The strokes of one history."""

    def __init__(self, history: "History") -> None:
        self.history, self.host, self.sim = history, history.host, history.sim
        self._gaps = [
            int(part * history.steps) + GAP_STEPS for part in self.sim.random.choice(GAPS)
        ]
        self._next = self.sim.random.choice(self._gaps)
        self._strokes = [
            (5, self.kill_daemon), (7, self.kill_in_call), (3, self.reboot), (2, self.host.stop),
            (6, self.kill_client), (8, self.stop_process), (5, self.cut), (5, self.corrupt),
            (3, self.stick), (2, self.jump), (3, self.host.snapshot), (9, self.ask),
        ]  # fmt: skip
        self._weights = [weight for weight, _ in self._strokes]

    def after(self) -> None:
        """A step was taken."""
        sim = self.sim
        if sim.steps < self._next or not self.host.faults:
            return
        self._next = sim.steps + sim.random.choice(self._gaps)
        [(_, stroke)] = sim.random.choices(self._strokes, self._weights)
        if self.host.up:
            stroke()
        self.history.crowd()

    def kill_daemon(self) -> None:
        """SIGKILL between two steps, at whatever its tasks wait for."""
        self.host.recount()
        self.host.kill("kills between events")

    def kill_in_call(self) -> None:
        """SIGKILL inside one of the next system calls."""
        self.host.medium.calls_left = self.sim.random.randint(1, 60)

    def kill_client(self) -> None:
        """SIGKILL of a client."""
        living = self.history.living
        if living:
            self.history.counts["clients killed"] += 1
            self.sim.random.choice(living).loop.kill()
            self.history.bury()

    def stop_process(self) -> None:
        """SIGSTOP, for longer than a lease lives."""
        host = self.host
        self.history.counts["SIGSTOP"] += 1
        loops = [*(worker.loop for worker in self.history.living), host.loop]
        loop = self.sim.random.choice(loops)
        assert loop is not None
        loop.stopped_until_s = self.sim.now_s + self.sim.random.choice((0.2, 4.0, 9.0))
        if loop is host.loop:
            host.disturbed_s = loop.stopped_until_s

    def cut(self) -> None:
        """A connection breaks."""
        living = self.history.living
        socks = [sock for worker in living for sock in worker.loop.sockets if sock.peer]
        if socks:
            self.history.counts["connections cut"] += 1
            self.sim.random.choice(socks).cut()

    def corrupt(self) -> None:
        """A page of the spill file changes, mostly one of a block."""
        file, daemon = self.host.parts.spill_files.files[0], self.host.daemon
        if file.payload_fd < 0 or daemon is None:  # it is about to stop
            return
        table, random = daemon.state.world.table, self.sim.random
        page = random.randrange(file.headers.geometry.payload_bytes // PAGE_BYTES)
        rows = np.flatnonzero(table.used_mask() & (table.nvme != NONE))
        if len(rows) and self.sim.chance(0.8):
            row = random.choice(rows.tolist())
            pool = daemon.state.world.pools[int(table.pool[row])]
            place = daemon.state.world.nvme.offset(pool.nvme, int(table.nvme[row]))
            page = place // PAGE_BYTES
        self.host.medium.corrupt(file.payload_fd, page)

    def stick(self) -> None:
        """The disk ends nothing for a while."""
        self.history.counts["disk stuck"] += 1
        choices = STUCK_S[: 2 if self.history.brief else 3]
        until_s = self.sim.now_s + self.sim.random.choice(choices)
        self.sim.stuck_until_s = max(self.sim.stuck_until_s, until_s)

    def jump(self) -> None:
        """Somebody sets the wall clock."""
        self.history.counts["clock jumps"] += 1
        self.sim.wall_s += self.sim.random.choice(JUMPS_S)

    def ask(self) -> None:
        """The operator asks for something."""
        self.history.operator.ask()

    def reboot(self) -> None:
        """The power goes; under "power", what had reached NVMe must be there again."""
        host, truth = self.host, self.history.truth
        kept = self._on_nvme() if host.power else {}
        adrift = host.reboot()
        self.history.bury()
        host.medium.hurt.update(*truth.keys.values())  # found or not, they may be torn
        for session in truth.sessions:
            session.forget_after_reboot(
                kept.get((session.tenant, token_hash(session.token)), set())
            )
            session.adrift |= adrift
            session.closed &= host.power  # headers that were cleared without a sync come back

    def _on_nvme(self) -> dict[tuple[str, bytes], set[tuple[int, int, int]]]:
        assert self.host.daemon is not None
        world = self.host.daemon.state.world
        kept: dict[tuple[str, bytes], set[tuple[int, int, int]]] = {}
        for tenant in world.tenants.values():
            for session in tenant.sessions.values():
                kept[tenant.name, session.token_hash] = {
                    (node.id, part, page + run.start)
                    for node in session.nodes.values()
                    for part, run in enumerate(node.runs)
                    for page in np.flatnonzero(run.rows != NONE).tolist()
                    if world.table.nvme[run.rows[page]] != NONE
                    and not world.table.flags[run.rows[page]] & F_FILLING
                }
        return kept
