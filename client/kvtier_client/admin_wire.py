"""The messages of the admin socket; its replies are `wire.Report` and `wire.Error`."""

from kvtier_client.wire import Request


class Stats(Request, frozen=True, tag="stats"):
    """Counters and gauges of the whole daemon."""


class Sessions(Request, frozen=True, tag="sessions"):
    """One line per session; `tenant` empty means all."""

    tenant: str = ""


class Clients(Request, frozen=True, tag="clients"):
    """One line per connected client process, with how long its requests take."""


class Tree(Request, frozen=True, tag="tree"):
    """The nodes of one session, by its id in hex or its name."""

    session: str


class Evict(Request, frozen=True, tag="evict"):
    """Move up to `blocks` blocks of a tenant out of DRAM (0 = all that can move)."""

    tenant: str
    blocks: int = 0


class Scrub(Request, frozen=True, tag="scrub"):
    """Begin to verify every block in the spill files, unless that is under way."""


class Reload(Request, frozen=True, tag="reload"):
    """Read the configuration again, as SIGHUP does."""


AdminRequest = Stats | Sessions | Clients | Tree | Evict | Scrub | Reload
