"""What an operator may ask and do: the verbs of the admin socket."""

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvtier_client import admin_wire
from kvtier_client.errors import InvalidArgument
from kvtierd import __version__
from kvtierd.core import report, report_tree
from kvtierd.core.tenant import Tenant

if TYPE_CHECKING:
    from kvtierd.daemon import Daemon


class Operator:
    """Answers the admin socket; looks at the daemon, and changes nothing behind its back."""

    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon
        self._world = daemon.state.world
        self._verbs: dict[type, Callable[[Any], dict[str, object]]] = {
            admin_wire.Stats: lambda req: self.stats(),
            admin_wire.Sessions: self._sessions,
            admin_wire.Clients: lambda req: self._clients(),
            admin_wire.Tree: lambda req: report_tree.tree(self._world, req.session),
            admin_wire.Evict: self._evict,
            admin_wire.Scrub: self._scrub,
            admin_wire.Reload: lambda req: daemon.reload(),
        }

    def answer(self, req: Any) -> dict[str, object]:
        """Carry out a request. Errors: KvtierError, ConfigError."""
        return self._verbs[type(req)](req)

    def _tenant(self, name: str) -> Tenant:
        tenant = self._world.tenants.get(name)
        if tenant is None:
            known = ", ".join(sorted(self._world.tenants))
            raise InvalidArgument(f"there is no tenant {name!r}; there are: {known}")
        return tenant

    def _sessions(self, req: admin_wire.Sessions) -> dict[str, object]:
        if req.tenant:
            self._tenant(req.tenant)
        return report.sessions(self._world, req.tenant)

    def _evict(self, req: admin_wire.Evict) -> dict[str, object]:
        tenant = self._tenant(req.tenant or self._daemon.config.tenants[0].name)
        if req.blocks < 0:
            raise InvalidArgument(f"cannot evict {req.blocks} blocks; 0 is all of them")
        return {"blocks": self._daemon.state.evictor.evict(tenant, req.blocks or 1 << 30)}

    def _scrub(self, req: admin_wire.Scrub) -> dict[str, object]:
        started = self._daemon.state.scrub.start()
        return {"started": started} | self._daemon.state.scrub.report()

    def stats(self) -> dict[str, object]:
        """Counters and gauges of the daemon."""
        daemon = self._daemon
        parts, spill = daemon.parts, daemon.parts.spill.counters()
        reasons = daemon.health.reasons()
        return {
            "daemon": {
                "version": __version__,
                "boot": daemon.boot,
                "pid": os.getpid(),
                "instance": parts.instance.hex(),
                "generation": parts.generation,
                "uptime_s": round(time.time() - daemon.began_s, 3),
                "longest_stall_s": round(daemon.health.latest_s, 3),
                "integrity": daemon.config.integrity,
                "durability": daemon.config.spill.durability,
            },
            "health": {"ok": not reasons, "reasons": reasons},
            "tenants": self._tenants(),
            "nvme": self._nvme(),
            "scrub": daemon.state.scrub.report(),
            "counters": dict(self._world.counters)
            | {
                "spill_written_bytes": spill.written_bytes,
                "spill_read_bytes": spill.read_bytes,
                "spill_jobs_in_flight": spill.jobs_in_flight,
                "mover_queued": daemon.mover.queued,
                "catalog_queued": daemon.catalog.queued,
            },
        }

    def _tenants(self) -> dict[str, dict[str, object]]:
        found = report.tenants(self._world)
        for name, gauges in found.items():
            number = self._world.tenants[name].number
            gauges["served"] = self._daemon.turns.of_tenant(number).report()
        return found

    def _clients(self) -> dict[str, object]:
        served = self._daemon.turns.served
        found = report.clients(self._world)
        return {"clients": [one | served[flow].report() for flow, one in found.items()]}

    def _nvme(self) -> dict[str, object]:
        files = self._daemon.parts.spill_files
        each = files.geometry.payload_bytes
        used = report.nvme_used_bytes(self._world, len(files.files), files.geometry.slabs)
        total = each * len(used)
        return {
            "total_bytes": total,
            "used_bytes": sum(used),
            "free_bytes": total - sum(used),
            "paths": [
                {
                    "path": file.directory.path,
                    "direct_io": file.direct,
                    "total_bytes": each,
                    "used_bytes": used[index],
                }
                for index, file in enumerate(files.files)
            ],
        }
