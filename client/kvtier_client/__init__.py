"""The client library of kvtierd: sessions, leases and copies over its socket and arena.

`Client` is the sync shell; the async one is `kvtier_client.aio.AsyncClient`, the admin socket's is
`kvtier_client.admin.AdminClient`. A newcomer's map: `client.py` and `aio.py` are what callers
hold; `ops.py`, `folds.py`, `swap.py` and `keyed.py` are what they do; `core.py`, `leases.py`,
`pool.py` and `ahead.py` what they know; `protocol.py` and `wire.py` what goes over the socket;
`arena.py`, `records.py` and `cuda.py` where bytes are copied, `crew.py` by how many threads.

The names below are loaded when they are first used, so that tools which need only a part (the
daemon its wire, `kvtierctl` the admin client) do not pay for numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier_client.client import Client, ReadLease, Session, Ticket, WriteLease
    from kvtier_client.core import Counters, Folded, NodeState, TicketResult, Unfolded
    from kvtier_client.cost import Action, CostModel, Decision
    from kvtier_client.errors import (
        ArenaFull,
        BlockLost,
        CapacityError,
        ChecksumMismatch,
        ConnectionLost,
        DaemonError,
        DataError,
        Internal,
        InvalidArgument,
        KvtierError,
        LayoutMismatch,
        LeaseExpired,
        NotOwner,
        ProtocolError,
        QuotaExceeded,
        RemoteFull,
        RequestError,
        ShuttingDown,
        SpillFull,
        Timeout,
        TransportError,
        UnknownBranch,
        UnknownSession,
    )
    from kvtier_client.wire import (
        CACHED,
        HELD,
        NO_NODE,
        TIER_DRAM,
        TIER_LOST,
        TIER_NONE,
        TIER_NVME,
        Layout,
        Limits,
    )

_HOMES = {
    "client": "Client ReadLease Session Ticket WriteLease",
    "core": "Counters Folded NodeState TicketResult Unfolded",
    "cost": "Action CostModel Decision",
    "wire": "CACHED HELD NO_NODE TIER_DRAM TIER_LOST TIER_NONE TIER_NVME Layout Limits",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
"""The module of every public name that is not an error."""

__all__ = [
    "CACHED",
    "HELD",
    "NO_NODE",
    "TIER_DRAM",
    "TIER_LOST",
    "TIER_NONE",
    "TIER_NVME",
    "Action",
    "ArenaFull",
    "BlockLost",
    "CapacityError",
    "ChecksumMismatch",
    "Client",
    "ConnectionLost",
    "CostModel",
    "Counters",
    "DaemonError",
    "DataError",
    "Decision",
    "Folded",
    "Internal",
    "InvalidArgument",
    "KvtierError",
    "Layout",
    "LayoutMismatch",
    "LeaseExpired",
    "Limits",
    "NodeState",
    "NotOwner",
    "ProtocolError",
    "QuotaExceeded",
    "ReadLease",
    "RemoteFull",
    "RequestError",
    "Session",
    "ShuttingDown",
    "SpillFull",
    "Ticket",
    "TicketResult",
    "Timeout",
    "TransportError",
    "Unfolded",
    "UnknownBranch",
    "UnknownSession",
    "WriteLease",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOME_OF.get(name, "errors")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
