"""What users may set of the connector, in `kv_connector_extra_config`."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kvtier_client.errors import InvalidArgument

SOCKET: Final = "/run/kvtierd/kvtierd.sock"
DEADLINE_S: Final = 1.0


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys, with their defaults."""

    socket: str = SOCKET
    """The daemon's client socket."""
    write_through: bool = False
    """Store every full block as it fills, as a prefix cache that outlives the engine."""
    deadline_s: float = DEADLINE_S
    """Longest wait of a step for the daemon; after it the engine recomputes."""

    @property
    def answer_s(self) -> float:
        """Longest wait for one answer; as much is left to wait for room."""
        return self.deadline_s / 2


def settings_of(extra: Mapping[str, Any], policy: str) -> Settings:
    """Check what a user wrote. Errors: InvalidArgument, which says what to write instead."""
    if policy != "recompute":
        raise InvalidArgument(
            f'kv_load_failure_policy is "{policy}": a block that the daemon lost would fail its '
            'request; set "kv_load_failure_policy": "recompute" in --kv-transfer-config'
        )
    try:
        settings = msgspec.convert(dict(extra), Settings)
    except msgspec.ValidationError as problem:
        known = ", ".join(Settings.__struct_fields__)
        raise InvalidArgument(
            f"kv_connector_extra_config: {problem}; the keys are {known}"
        ) from None
    if not settings.socket:
        raise InvalidArgument(f'kv_connector_extra_config: socket is empty; say "{SOCKET}"')
    if not 0.0 < settings.deadline_s <= 60.0:
        raise InvalidArgument(
            f"kv_connector_extra_config: deadline_s is {settings.deadline_s}; allowed is more than "
            f"0 up to 60 s, usual is {DEADLINE_S}"
        )
    return settings
