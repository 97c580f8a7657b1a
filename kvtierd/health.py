"""Whether the daemon is well: what is stuck and what fails, for who asks and who watches.

Work is stuck when it is under way for longer than `limits.stuck_after` and nothing like it has
ended meanwhile. Being unwell changes one thing only: while NVMe is stuck, room in DRAM is made of
CACHED blocks alone, so that nobody waits for a disk that does not answer.
"""

import logging
import os
import time
from typing import TYPE_CHECKING, Final

from kvtierd import systemd

if TYPE_CHECKING:
    from kvtierd.daemon import Daemon

LATE_S: Final = 1.0
"""A tick that comes so much too late means that the event loop stood still."""
LATE_SHOWN_S: Final = 60.0
"""How long a standstill of the event loop is a reason to be unwell."""

log = logging.getLogger(__name__)


class Health:
    """Looks at the daemon at every tick; lives on the event loop's thread."""

    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon
        self._looked_s = time.monotonic()
        self._late_s, self._late_at_s = 0.0, float("-inf")
        self._told: list[str] = []
        self._ping_s = int(os.environ.get("WATCHDOG_USEC", "0")) / 4e6
        self._next_ping_s = 0.0
        self.latest_s = 0.0
        """The longest time by which a tick came too late since the start."""

    def look(self, every_s: float) -> None:
        """Called every `every_s`: notice what is stuck, and tell when that changes."""
        now_s = time.monotonic()
        late_s = now_s - self._looked_s - every_s
        self._looked_s = now_s
        self.latest_s = max(self.latest_s, late_s)
        if late_s > LATE_S:
            self._late_s, self._late_at_s = late_s, now_s
        world = self._daemon.state.world
        world.nvme_stuck = self._daemon.parts.spill.stuck_s(now_s) > self._patience_s
        told, self._told = self._told, self.reasons()
        if [_kind(each) for each in self._told] != [_kind(each) for each in told]:
            self._tell(told, self._told)
        if self._ping_s and now_s >= self._next_ping_s:
            self._next_ping_s = now_s + self._ping_s
            systemd.notify("WATCHDOG=1")

    @property
    def _patience_s(self) -> float:
        return float(self._daemon.limits.stuck_after_s)

    @staticmethod
    def _tell(told: list[str], reasons: list[str]) -> None:
        known = {_kind(each) for each in told}
        for reason in reasons:
            if _kind(reason) not in known:
                log.error("unwell: %s", reason)
        if not reasons:
            log.warning("well again")
        systemd.notify("STATUS=" + ("; ".join(reasons) or "serving"))

    def reasons(self) -> list[str]:
        """Why the daemon is not well; empty when it is."""
        daemon, now_s = self._daemon, time.monotonic()
        found = []
        if daemon.faults:
            found.append(f"faults inside the daemon: {daemon.faults}; its log has the traces")
        if now_s - self._late_at_s < LATE_SHOWN_S:
            found.append(
                f"event loop: it stood still for {self._late_s:.1f} s, less than "
                f"{LATE_SHOWN_S:.0f} s ago; is the host overloaded or swapping?"
            )
        found += self._nvme(now_s) + self._catalog(now_s)
        if daemon.keeper_lost:
            found.append("keeper: the memory would not outlive this process; see the log")
        for tenant in daemon.state.world.tenants.values():
            limit = daemon.limits.quarantine_fraction * tenant.arena_bytes()
            if tenant.quarantined_bytes() >= limit:
                found.append(
                    f"quarantine: tenant {tenant.name} has {tenant.quarantined_bytes()} bytes that "
                    "clients without an answer may still be writing; end those processes"
                )
        return found

    def _nvme(self, now_s: float) -> list[str]:
        daemon, found = self._daemon, []
        stuck_s = daemon.parts.spill.stuck_s(now_s)
        if stuck_s > self._patience_s:
            paths = ", ".join(daemon.config.spill.paths)
            found.append(
                f"NVMe: no read or write has ended for {stuck_s:.0f} s ({paths}); blocks in DRAM "
                "are served, those on NVMe are not"
            )
        found += [
            f"NVMe: writing blocks of tenant {tenant.name} fails; see the log for the error"
            for tenant in daemon.state.world.tenants.values()
            if tenant.spill_fails
        ]
        if daemon.mover.queued and not daemon.mover.running and not daemon.mover.closed:
            found.append(f"NVMe: {daemon.mover.queued} moves wait although nothing is under way")
        return found

    def _catalog(self, now_s: float) -> list[str]:
        daemon, found = self._daemon, []
        if not daemon.catalog.alive:
            found.append("catalog: its thread has ended; restart the daemon")
        stuck_s = daemon.catalog.stuck_s(now_s)
        if stuck_s > self._patience_s:
            found.append(
                f"catalog: a transaction has not ended for {stuck_s:.0f} s (the disk of "
                f"{daemon.config.state_dir}); sessions and branches cannot be opened or closed"
            )
        if refused := daemon.ledger.refused:
            found.append(f"catalog: {refused} changes could not be stored yet")
        return found


def _kind(reason: str) -> str:
    """What a reason is about; its numbers change all the time."""
    return reason.partition(":")[0]
