"""The daemon's configuration: TOML in, frozen structs out, every wrong key refused by its name.

Sizes, durations, uids and paths are parsed here once; the rest of the daemon sees plain numbers
and strings. `configs/kvtierd.toml` documents every key with its default.
"""

import difflib
import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from kvtierd.quantities import GIB, KIB, MIB, Seconds, Size, Uid

HUGE_PAGE_BYTES = 2 * MIB
PAGE_BYTES = 4096
SLOTS_PER_SLAB_MAX = 65536
SOCKET_PATH_BYTES_MAX = 107  # sun_path holds 108 with its terminating zero
MAY_BE_NEVER = ("recovery.orphan_ttl", "scrub.interval", "limits.fold_grace_max")
FRAME_OVERHEAD_BYTES = 4096  # what a frame carries beside a blob

Effort = Literal["try", "require", "off"]


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the key and says what would be right."""

    exit_code = 78  # EX_CONFIG of sysexits.h; the service unit does not restart after it


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the file; its fields are the table's keys."""


class SocketConfig(Section, frozen=True):
    """Where the daemon listens; `{runtime_dir}` is replaced when the configuration is made."""

    client_path: str = "{runtime_dir}/kvtierd.sock"
    admin_path: str = "{runtime_dir}/admin.sock"


class ArenaConfig(Section, frozen=True):
    """How every tenant's DRAM pool is made, and when it is relieved."""

    huge_pages: Effort = "try"
    mlock: Effort = "try"
    prefault: bool = True
    prefault_threads: int = 4
    slab_bytes: Size = Size(64 * MIB)
    min_block_bytes: Size = Size(64 * KIB)
    exchange_headroom: float = 0.05
    high_watermark: float = 0.90
    low_watermark: float = 0.80


class EncryptionConfig(Section, frozen=True):
    """Whether what goes to the spill files is encrypted, and where the master keys are."""

    enabled: bool = False
    key: str = ""
    old_key: str = ""


class SpillConfig(Section, frozen=True):
    """The NVMe tier; `{state_dir}` in a path is replaced when the configuration is made."""

    paths: tuple[str, ...] = ("{state_dir}/spill",)
    capacity_bytes: Size = Size(64 * GIB)
    slab_bytes: Size = Size(256 * MIB)
    direct_io: Effort = "try"
    durability: Literal["process", "power"] = "process"
    io_threads: int = 16
    queue_bytes: Size = Size(256 * MIB)
    preallocate: bool = False
    missing: Literal["refuse", "accept"] = "refuse"
    encryption: EncryptionConfig = EncryptionConfig()


class ScrubConfig(Section, frozen=True):
    """How blocks in the spill files are verified while nobody asks for them."""

    rate_bytes: Size = msgspec.field(default=Size(32 * MIB), name="rate")
    interval_s: Seconds = msgspec.field(default=Seconds(7 * 24 * 3600), name="interval")


class RecoveryConfig(Section, frozen=True):
    """What outlives the daemon's process, and for how long."""

    memory: Literal["auto", "systemd", "holder", "off"] = "auto"
    orphan_ttl_s: Seconds = msgspec.field(default=Seconds(24 * 3600), name="orphan_ttl")


class LimitsConfig(Section, frozen=True):
    """The bound of every queue, wait, frame and batch that a client can fill."""

    frame_bytes: Size = Size(2 * MIB)
    requests_in_flight: int = 256
    blocks_per_request: int = 4096
    leases_per_group: int = 1024
    lease_ttl_s: Seconds = msgspec.field(default=Seconds(30), name="lease_ttl")
    lease_ttl_max_s: Seconds = msgspec.field(default=Seconds(600), name="lease_ttl_max")
    wait_max_s: Seconds = msgspec.field(default=Seconds(60), name="wait_max")
    sessions_per_tenant: int = 100_000
    nodes_per_session: int = 4096
    fold_grace_max_s: Seconds = msgspec.field(default=Seconds(math.inf), name="fold_grace_max")
    blob_bytes: Size = Size(MIB)
    connections: int = 2048
    groups: int = 256
    output_buffer_bytes: Size = Size(8 * MIB)
    quarantine_fraction: float = 0.25
    stuck_after_s: Seconds = msgspec.field(default=Seconds(10), name="stuck_after")


class StopConfig(Section, frozen=True):
    """How long a graceful stop may take."""

    timeout_s: Seconds = msgspec.field(default=Seconds(20), name="timeout")


class TenantConfig(Section, frozen=True):
    """A security domain: who belongs to it and what it may use."""

    name: str
    uids: tuple[Uid, ...] = msgspec.field(default_factory=lambda: (Uid.parse("self"),))
    arena_bytes: Size = Size(GIB)
    spill_bytes: Size = Size(64 * GIB)


class Config(Section, frozen=True):
    """A whole, checked configuration; one that exists is valid.

    Errors: `ConfigError`, naming the dotted key, when two values do not fit together.
    """

    runtime_dir: str = "/run/kvtierd"
    state_dir: str = "/var/lib/kvtierd"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    integrity: Literal["spill", "end_to_end"] = "spill"
    socket: SocketConfig = SocketConfig()
    arena: ArenaConfig = ArenaConfig()
    spill: SpillConfig = SpillConfig()
    scrub: ScrubConfig = ScrubConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    limits: LimitsConfig = LimitsConfig()
    stop: StopConfig = StopConfig()
    tenants: tuple[TenantConfig, ...] = (TenantConfig(name="default"),)

    def __post_init__(self) -> None:
        expand = _expander(self.runtime_dir, self.state_dir)
        socket = SocketConfig(expand(self.socket.client_path), expand(self.socket.admin_path))
        paths = tuple(expand(path) for path in self.spill.paths)
        msgspec.structs.force_setattr(self, "socket", socket)
        msgspec.structs.force_setattr(
            self, "spill", msgspec.structs.replace(self.spill, paths=paths)
        )
        _check(self)


def _expander(runtime_dir: str, state_dir: str) -> Callable[[str], str]:
    def expand(path: str) -> str:
        return path.replace("{runtime_dir}", runtime_dir).replace("{state_dir}", state_dir)

    return expand


def load(path: str | os.PathLike[str]) -> Config:
    """Reads and checks a configuration file.

    Errors: `ConfigError` when the file cannot be read, is not TOML, or `parse` refuses it.
    """
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read configuration {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration {path} is not TOML: {error}") from error
    return parse(document)


def parse(document: Mapping[str, object]) -> Config:
    """Checks a parsed TOML document and fills in the defaults.

    Errors: `ConfigError` naming the first wrong key, dotted from the top, and what it should be.
    """
    try:
        return msgspec.convert(document, Config, strict=True, dec_hook=_convert)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(_explain(str(error), document)) from None


def ephemeral(base_dir: str | os.PathLike[str]) -> Config:
    """Small, safe settings that keep everything below one temporary directory.

    Units: 256 MiB of DRAM, 1 GiB of spill files.
    """
    base = os.path.abspath(base_dir)
    return parse(
        {
            "runtime_dir": f"{base}/run",
            "state_dir": f"{base}/state",
            "arena": {"slab_bytes": "8MiB", "min_block_bytes": "4KiB"},
            "spill": {"capacity_bytes": "1GiB", "slab_bytes": "32MiB", "io_threads": 4},
            "recovery": {"orphan_ttl": "1h"},
            "tenants": [{"name": "default", "arena_bytes": "256MiB", "spill_bytes": "1GiB"}],
        }
    )


def difference(old: Config, new: Config) -> list[str]:
    """The dotted keys whose values differ, those of tables that came or went included."""
    before, after = dict(_leaves(old, "")), dict(_leaves(new, ""))
    return [key for key in {**before, **after} if before.get(key) != after.get(key)]


def with_live_parts(running: Config, new: Config) -> Config:
    """The running configuration with what may change without a restart taken from a new one.

    Live are: log_level, limits, stop, scrub, recovery.orphan_ttl, the arena's watermarks and
    headroom, and each tenant's uids and spill_bytes.

    Errors: `ConfigError` when the mixture is not valid.
    """
    replace = msgspec.structs.replace
    named = {tenant.name: tenant for tenant in new.tenants}
    return replace(
        running,
        log_level=new.log_level,
        limits=new.limits,
        stop=new.stop,
        scrub=new.scrub,
        recovery=replace(running.recovery, orphan_ttl_s=new.recovery.orphan_ttl_s),
        arena=replace(
            running.arena,
            exchange_headroom=new.arena.exchange_headroom,
            high_watermark=new.arena.high_watermark,
            low_watermark=new.arena.low_watermark,
        ),
        tenants=tuple(
            replace(old, uids=named[old.name].uids, spill_bytes=named[old.name].spill_bytes)
            if old.name in named
            else old
            for old in running.tenants
        ),
    )


def _convert(kind: type[Any], value: object) -> object:
    return kind.parse(value)


def _explain(message: str, document: Mapping[str, object]) -> str:
    """Turns a validation message into one that names the dotted key and what would be right."""
    complaint, _, place = message.partition(" - at `$")
    path = place.rstrip("`").lstrip(".")
    kind, value = _follow(path, document)
    named = re.fullmatch(r"Object (contains unknown|missing required) field `(.*)`", complaint)
    if named is None:
        return f"{path} = {_toml(value)}: must be {_expected(kind)}"
    key = f"{path}.{named[2]}" if path else named[2]
    if named[1] == "missing required":
        return f"{key}: is missing; every such table needs it"
    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    close = difflib.get_close_matches(named[2], known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{key}: unknown key; {hint}known here: {', '.join(known)}"


def _follow(path: str, document: Mapping[str, object]) -> tuple[Any, object]:
    """The declared type and the given value at a dotted path."""
    kind: Any = Config
    value: Any = document
    for token in re.findall(r"[^.\[\]]+|\[\d+\]", path):
        if token.startswith("["):
            kind, value = get_args(kind)[0], value[int(token[1:-1])]
        else:
            fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
            kind, value = fields[token], value[token]
    return kind, value


def _expected(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return f"a list, each item {_expected(get_args(kind)[0])}"
    if issubclass(kind, Section):
        return "a table"
    plain = {bool: "true or false", int: "a whole number", float: "a number", str: "text in quotes"}
    return plain[kind] if kind in plain else str(kind.expected)


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Section):
        for field, name in zip(
            value.__struct_fields__, value.__struct_encode_fields__, strict=True
        ):
            yield from _leaves(getattr(value, field), f"{path}.{name}" if path else name)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def _toml(value: object) -> str:
    """A value as it would stand in the file, for messages."""
    if isinstance(value, (str, bool)):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return "{…}" if isinstance(value, dict) else str(value)


def _check(config: Config) -> None:
    """Refuses values that are wrong by themselves or do not fit together."""
    for path, value in _leaves(config, ""):
        _check_leaf(path, value)
    _check_paths(config)
    _check_arena(config.arena)
    _check_spill(config.spill, config.arena)
    _check_limits(config.limits)
    _check_tenants(config)


def _require(condition: bool, key: str, value: object, right: str) -> None:
    if not condition:
        raise ConfigError(f"{key} = {_toml(value)}: must be {right}")


def _check_leaf(path: str, value: object) -> None:
    if isinstance(value, Seconds):
        never = path in MAY_BE_NEVER
        _require(value > 0, path, value, "longer than zero")
        right = f'a duration; only {" and ".join(MAY_BE_NEVER)} may be "never"'
        _require(never or value < math.inf, path, "never", right)
    elif isinstance(value, int) and not isinstance(value, (bool, Uid)):
        _require(0 < value < 2**63, path, value, "at least 1 and below 2^63")


def _check_paths(config: Config) -> None:
    places = {"runtime_dir": config.runtime_dir, "state_dir": config.state_dir}
    sockets = {"client_path": config.socket.client_path, "admin_path": config.socket.admin_path}
    places |= {f"socket.{name}": path for name, path in sockets.items()}
    places |= {f"spill.paths[{index}]": path for index, path in enumerate(config.spill.paths)}
    for key, path in places.items():
        _require(path.startswith("/") and "\0" not in path, key, path, "an absolute path")
    for name, path in sockets.items():
        fits = len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX
        _require(fits, f"socket.{name}", path, f"at most {SOCKET_PATH_BYTES_MAX} bytes long")
    different = os.path.normpath(sockets["client_path"]) != os.path.normpath(sockets["admin_path"])
    _require(different, "socket.admin_path", sockets["admin_path"], "other than socket.client_path")


def _check_arena(arena: ArenaConfig) -> None:
    _require(
        0 < arena.high_watermark <= 1,
        "arena.high_watermark",
        arena.high_watermark,
        "a fraction above 0 and at most 1",
    )
    _require(
        0 < arena.low_watermark < arena.high_watermark,
        "arena.low_watermark",
        arena.low_watermark,
        f"above 0 and below arena.high_watermark ({arena.high_watermark})",
    )
    _require(
        0 <= arena.exchange_headroom <= 0.5,
        "arena.exchange_headroom",
        arena.exchange_headroom,
        "a fraction from 0 to 0.5",
    )
    _require(
        arena.min_block_bytes % PAGE_BYTES == 0,
        "arena.min_block_bytes",
        arena.min_block_bytes,
        f"a multiple of {PAGE_BYTES}",
    )
    if arena.huge_pages == "off":
        _require_slab("arena.slab_bytes", arena.slab_bytes, arena.min_block_bytes, PAGE_BYTES)
    else:
        _require_slab("arena.slab_bytes", arena.slab_bytes, arena.min_block_bytes, HUGE_PAGE_BYTES)


def _require_slab(key: str, slab: Size, block: Size, unit_bytes: int) -> None:
    why = ' (a huge page; or set arena.huge_pages = "off")' if unit_bytes > PAGE_BYTES else ""
    _require(slab % unit_bytes == 0, key, slab, f"a multiple of {unit_bytes}{why}")
    _require(
        block <= slab <= block * SLOTS_PER_SLAB_MAX,
        key,
        slab,
        f"from 1 to {SLOTS_PER_SLAB_MAX} times arena.min_block_bytes ({block})",
    )


def _check_spill(spill: SpillConfig, arena: ArenaConfig) -> None:
    places = {os.path.normpath(path) for path in spill.paths}
    one_or_more_distinct = len(places) == len(spill.paths) > 0
    _require(one_or_more_distinct, "spill.paths", spill.paths, "one or more different directories")
    _require_slab("spill.slab_bytes", spill.slab_bytes, arena.min_block_bytes, PAGE_BYTES)
    _require(
        spill.capacity_bytes >= spill.slab_bytes,
        "spill.capacity_bytes",
        spill.capacity_bytes,
        f"at least one slab, spill.slab_bytes ({spill.slab_bytes})",
    )
    _check_encryption(spill.encryption)


def _check_encryption(encryption: EncryptionConfig) -> None:
    for name, value in (("key", encryption.key), ("old_key", encryption.old_key)):
        plain = re.fullmatch(r"/[^\0]*|credential:[A-Za-z0-9._-]+|", value) is not None
        right = 'an absolute path, or "credential:NAME" for a systemd credential'
        _require(plain, f"spill.encryption.{name}", value, right)
    needed = encryption.enabled or bool(encryption.old_key)
    right = "given where enabled is true or old_key is given"
    _require(bool(encryption.key) or not needed, "spill.encryption.key", encryption.key, right)


def _check_limits(limits: LimitsConfig) -> None:
    _require(
        limits.lease_ttl_s <= limits.lease_ttl_max_s,
        "limits.lease_ttl",
        limits.lease_ttl_s,
        f"at most limits.lease_ttl_max ({_toml(limits.lease_ttl_max_s)})",
    )
    _require(
        FRAME_OVERHEAD_BYTES < limits.frame_bytes < 2**32,
        "limits.frame_bytes",
        limits.frame_bytes,
        f"above {FRAME_OVERHEAD_BYTES} and below 2^32",
    )
    _require(
        limits.blob_bytes <= limits.frame_bytes - FRAME_OVERHEAD_BYTES,
        "limits.blob_bytes",
        limits.blob_bytes,
        f"at most limits.frame_bytes - {FRAME_OVERHEAD_BYTES}",
    )
    _require(
        limits.frame_bytes <= limits.output_buffer_bytes,
        "limits.output_buffer_bytes",
        limits.output_buffer_bytes,
        f"at least limits.frame_bytes ({limits.frame_bytes})",
    )
    _require(
        0 < limits.quarantine_fraction <= 1,
        "limits.quarantine_fraction",
        limits.quarantine_fraction,
        "a fraction above 0 and at most 1",
    )


def _check_tenants(config: Config) -> None:
    _require(len(config.tenants) > 0, "tenants", config.tenants, "one or more [[tenants]] tables")
    names: dict[str, int] = {}
    owners: dict[int, str] = {}
    for index, tenant in enumerate(config.tenants):
        key = f"tenants[{index}]"
        plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", tenant.name) is not None
        _require(plain, f"{key}.name", tenant.name, "1 to 64 letters, digits, '.', '_' or '-'")
        _require(tenant.name not in names, f"{key}.name", tenant.name, "unique among [[tenants]]")
        names[tenant.name] = index
        _require(len(tenant.uids) > 0, f"{key}.uids", tenant.uids, "one or more user ids")
        for uid in tenant.uids:
            owner = owners.setdefault(uid, tenant.name)
            right = f"disjoint from other tenants' uids: {uid} belongs to {_toml(owner)} too"
            _require(owner == tenant.name, f"{key}.uids", tenant.uids, right)
        slab_bytes = config.arena.slab_bytes
        _require(
            tenant.arena_bytes % slab_bytes == 0,
            f"{key}.arena_bytes",
            tenant.arena_bytes,
            f"a multiple of arena.slab_bytes ({slab_bytes})",
        )
