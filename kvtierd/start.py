"""A start, step by step; one that fails has changed nothing.

1. lock the state directory, open the catalog   2. lock and open the spill files
3. take the arenas of an earlier life, or make new ones   4. rebuild the tables from all of them
5. only then stamp the new generation and begin to serve
"""

import contextlib
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from kvtierd import systemd
from kvtierd.catalog.store import Catalog
from kvtierd.config import Config, TenantConfig
from kvtierd.core.actions import AssignSlab
from kvtierd.core.blocks import BlockTable
from kvtierd.core.leases import Member
from kvtierd.core.recover import Outcome
from kvtierd.core.slabs import SlabPool, Slabs
from kvtierd.core.state import State
from kvtierd.core.tenant import Tenant
from kvtierd.core.world import CoreLimits, World
from kvtierd.restore import Restore, set_aside, strangers
from kvtierd.tiers.arena import Arena, ArenaSettings, attach_arena, create_arena, is_outgrown
from kvtierd.tiers.errors import StartError
from kvtierd.tiers.headers import new_superblock
from kvtierd.tiers.holder import MemoryKeeper, open_keeper
from kvtierd.tiers.locks import check_socket_place, check_way, lock_directory
from kvtierd.tiers.spill import SpillTier
from kvtierd.tiers.spill_files import SpillFiles, SpillSettings
from kvtierd.tiers.spill_open import open_spill
from kvtierd.tiers.superblock import Expected, Geometry, Kind

LAYOUTS_PER_TENANT = 4096
WAITING_PER_TENANT = 8192
GENERATION_SHIFT = 40
"""Sequence numbers begin above those of all earlier lives, also of blocks that are gone. Their low
half, which ties a slot's word to its body, begins at random, so that no old body fits by chance."""

ROW_SHARE_BYTES = 128
"""Address space for rows is taken for one block per so many bytes of the host's memory at most."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Parts:
    """What a start has opened and rebuilt."""

    state: State
    arenas: dict[str, Arena]
    spill: SpillTier
    spill_files: SpillFiles
    catalog: Catalog
    keeper: MemoryKeeper
    tenant_of_uid: dict[int, Tenant]
    watched: list[Member]
    outcome: Outcome
    instance: bytes
    generation: int
    close_locks: Callable[[], None]


def tenants_of_uids(config: Config, world: World) -> dict[int, Tenant]:
    """Which tenant a client's uid belongs to."""
    return {int(uid): world.tenants[part.name] for part in config.tenants for uid in part.uids}


def tenant_number(name: str) -> int:
    """The number by which headers know a tenant."""
    return xxhash.xxh32_intdigest(name.encode())


def start(config: Config, *, discard_dram: bool = False) -> Parts:
    """Open everything and rebuild the tables. Errors: StartError, and nothing has changed."""
    try:
        return _start(config, discard_dram=discard_dram)
    except OSError as error:
        raise StartError(
            "cannot open or read what an earlier run left", str(error),
            "look at the disk (kernel log); when it reads again, start again",
        ) from error  # fmt: skip


def _start(config: Config, *, discard_dram: bool) -> Parts:
    began_s = time.monotonic()
    with contextlib.ExitStack() as undo:
        runtime, made = _lock_runtime(config.runtime_dir)
        undo.callback(_leave_runtime, config.runtime_dir, runtime, made)
        for place in (config.socket.client_path, config.socket.admin_path):
            check_socket_place(place)
        directory = lock_directory(config.state_dir)
        undo.callback(directory.discard)
        catalog = Catalog.open(directory, config.spill.durability)
        undo.callback(lambda: catalog.abandon(directory))
        files = open_spill(
            _spill_settings(config), catalog.instance, catalog.generation,
            known_files=catalog.spill_files,
        )  # fmt: skip
        undo.callback(files.abandon)
        keeper = open_keeper(config.recovery.memory, config.runtime_dir)
        undo.callback(keeper.abandon)
        arenas = _arenas(config, catalog.instance, keeper, discard_dram, undo)
        generation = catalog.generation + 1
        state = _state(config, arenas, files, generation)
        outcome, watched = Restore(state, arenas, files).run(catalog.load())
        if catalog.scrubbed_s:
            state.scrub.ended_s = state.world.now_s - max(time.time() - catalog.scrubbed_s, 0.0)
        files.begin(generation)
        for arena in arenas.values():
            arena.headers.set_generation(generation)
        catalog.stamp(generation, len(files.files))
        undo.pop_all()

    def close_locks() -> None:
        directory.close()
        os.close(runtime)

    log.info(
        "ready in %.2f s: generation %d, %d sessions (%d orphans from headers), %d blocks, %d "
        "lost, %d discarded", time.monotonic() - began_s, generation, outcome.sessions,
        outcome.orphans, outcome.blocks, outcome.lost, outcome.discarded,
    )  # fmt: skip
    return Parts(
        state, arenas, SpillTier(files), files, catalog, keeper,
        tenants_of_uids(config, state.world), watched, outcome,
        catalog.instance, generation, close_locks,
    )  # fmt: skip


def _lock_runtime(path: str) -> tuple[int, bool]:
    """Make and lock the runtime directory, for its sockets belong to one daemon; returns its
    descriptor and whether it was made now."""
    asked = f"cannot use runtime_dir {path}"
    path = os.path.abspath(path)  # a trailing slash would make the kernel follow a link
    check_way(path, asked)
    try:
        made = not os.path.isdir(path)
        os.makedirs(path, 0o755, exist_ok=True)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise StartError(asked, str(error.strerror), "make it, or set runtime_dir") from error
    found = os.fstat(fd)
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
        os.close(fd)
        raise StartError(asked, "others may write to it", f"chown it to uid {os.geteuid()}, 0755")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise StartError(
            asked, "another kvtierd runs in it", "stop that one, or set another runtime_dir"
        ) from error
    return fd, made


def _leave_runtime(path: str, fd: int, made: bool) -> None:
    if made:
        with contextlib.suppress(OSError):  # somebody has put something there
            os.rmdir(path)
    os.close(fd)


def _spill_settings(config: Config) -> SpillSettings:
    spill = config.spill
    return SpillSettings(
        spill.paths, spill.capacity_bytes, spill.slab_bytes, config.arena.min_block_bytes,
        spill.direct_io, spill.durability, spill.preallocate, spill.missing, spill.io_threads,
        spill.queue_bytes,
        spill.encryption.enabled, spill.encryption.key, spill.encryption.old_key,
    )  # fmt: skip


# -------------------------------------------------------------------- arenas


def _arenas(
    config: Config,
    instance: bytes,
    keeper: MemoryKeeper,
    discard: bool,
    undo: contextlib.ExitStack,
) -> dict[str, Arena]:
    kept = keeper.take_all()
    undo.callback(_close_all, kept)
    if discard:
        for name in list(kept):
            log.warning("memory %s of an earlier run is discarded, as asked", name)
            keeper.drop(name)
            os.close(kept.pop(name))
    settings = ArenaSettings(
        config.arena.huge_pages, config.arena.mlock, config.arena.prefault,
        config.arena.prefault_threads,
    )  # fmt: skip
    arenas = {}
    for tenant in config.tenants:
        arena = _arena(config, tenant, instance, keeper, kept, settings, undo)
        undo.callback(arena.close)
        arenas[tenant.name] = arena
    for name, fd in list(kept.items()):
        log.warning("memory %s is kept for a tenant that the configuration does not name", name)
        os.close(fd)
        del kept[name]
    return arenas


def _arena(
    config: Config,
    tenant: TenantConfig,
    instance: bytes,
    keeper: MemoryKeeper,
    kept: dict[str, int],
    settings: ArenaSettings,
    undo: contextlib.ExitStack,
) -> Arena:
    """The tenant's arena: that of an earlier life, else a new one that the keeper holds."""
    number = tenant_number(tenant.name)
    slab_bytes = config.arena.slab_bytes
    geometry = Geometry(
        tenant.arena_bytes // slab_bytes, slab_bytes, slab_bytes // config.arena.min_block_bytes
    )
    payload, headers = f"{number:08x}-payload", f"{number:08x}-headers"
    expected = Expected(Kind.ARENA, instance, geometry, number)
    found = payload in kept and headers in kept
    if found and is_outgrown(tenant.name, kept[headers], expected):
        log.info("arena %s: empty memory of another size is let go of", tenant.name)
        for name in (payload, headers):
            keeper.drop(name)
            os.close(kept.pop(name))
        found = False
    if found:
        arena = attach_arena(tenant.name, kept.pop(payload), kept.pop(headers), expected, settings)
        log.info("arena %s: taken over, %d bytes", tenant.name, geometry.payload_bytes)
        return arena
    superblock = new_superblock(
        Kind.ARENA, geometry, instance=instance, generation=0, tenant=number
    )
    arena = create_arena(tenant.name, superblock, settings, _progress(tenant.name))
    try:
        for name, fd in kept_fds(arena).items():
            keeper.put(name, fd)
            undo.callback(keeper.drop, name)
    except BaseException:
        arena.close()
        raise
    log.info(
        "arena %s: %d bytes, pages %s, locked %s%s", tenant.name, geometry.payload_bytes,
        arena.obtained.pages, arena.obtained.locked,
        "".join(f"; {note}" for note in arena.obtained.notes),
    )  # fmt: skip
    return arena


def _close_all(kept: dict[str, int]) -> None:
    for fd in kept.values():
        os.close(fd)


def kept_fds(arena: Arena) -> dict[str, int]:
    """An arena's descriptors, by the names under which the keeper knows them."""
    number = arena.headers.superblock.tenant
    return {f"{number:08x}-payload": arena.payload_fd, f"{number:08x}-headers": arena.headers.fd}


def _progress(name: str) -> Callable[[int, int], None]:
    """Tell the log and the service manager how far prefaulting is."""
    said = 0.0

    def progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said > 1.0 or done_bytes == total_bytes:
            said = now
            text = f"prefaulting arena {name}: {100 * done_bytes // total_bytes} %"
            log.info(text)
            systemd.notify(f"STATUS={text}\nEXTEND_TIMEOUT_USEC=30000000")

    return progress


# --------------------------------------------------------------------- state


def core_limits(config: Config) -> CoreLimits:
    """What of the configuration the core needs."""
    limits, arena = config.limits, config.arena
    return CoreLimits(
        blocks_per_request=limits.blocks_per_request,
        leases_per_group=limits.leases_per_group,
        lease_ttl_s=float(limits.lease_ttl_s),
        lease_ttl_max_s=float(limits.lease_ttl_max_s),
        wait_max_s=float(limits.wait_max_s),
        sessions_per_tenant=limits.sessions_per_tenant,
        nodes_per_session=limits.nodes_per_session,
        blob_bytes=int(limits.blob_bytes),
        groups=limits.groups,
        layouts_per_tenant=LAYOUTS_PER_TENANT,
        waiting_per_tenant=WAITING_PER_TENANT,
        quarantine_fraction=limits.quarantine_fraction,
        high_watermark=arena.high_watermark,
        low_watermark=arena.low_watermark,
        exchange_headroom=arena.exchange_headroom,
        orphan_ttl_s=float(config.recovery.orphan_ttl_s),
        power=config.spill.durability == "power",
        end_to_end=config.integrity == "end_to_end",
        scrub_rate_bytes=int(config.scrub.rate_bytes),
        scrub_interval_s=float(config.scrub.interval_s),
        fold_grace_max_s=float(limits.fold_grace_max_s),
    )


def _rows(arenas: dict[str, Arena], nvme_slots: int) -> int:
    """Rows to have address space for, so that tables need not be copied as they grow: one per slot
    of either tier, as far as their memory could ever come from this host."""
    slots = nvme_slots + sum(arena.headers.geometry.total_slots for arena in arenas.values())
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(slots, memory_bytes // ROW_SHARE_BYTES)


def _state(config: Config, arenas: dict[str, Arena], files: SpillFiles, generation: int) -> State:
    """An empty core over the arenas' and spill files' words."""
    geometry = files.geometry
    worlds: list[World] = []

    def assigned(tenant: str | None) -> Callable[[int, SlabPool | None], None]:
        def on_assign(slab: int, part: SlabPool | None) -> None:
            world = worlds[0]
            owner = None if tenant is None else world.tenants[tenant]
            pool = None if part is None else world.pools[part.number]
            world.actions.append(AssignSlab(owner, slab, pool))

        return on_assign

    slabs = geometry.slabs * len(files.files)
    nvme = Slabs(slabs, geometry.slab_bytes, geometry.max_slots, files.words, assigned(None))
    world = World(
        core_limits(config), nvme, boot=secrets.randbits(62) + 1, salt=secrets.randbits(64),
        generation=generation, now_s=time.monotonic(),
        table=BlockTable(_rows(arenas, slabs * geometry.max_slots)),
        seq=generation << GENERATION_SHIFT | secrets.randbits(32),
    )  # fmt: skip
    worlds.append(world)
    for tenant in config.tenants:
        headers = arenas[tenant.name].headers
        cut = headers.geometry
        arena = Slabs(
            cut.slabs, cut.slab_bytes, cut.max_slots, headers.words, assigned(tenant.name)
        )
        world.tenants[tenant.name] = Tenant(
            tenant.name, tenant_number(tenant.name), arena, nvme, int(tenant.spill_bytes),
            config.arena.exchange_headroom,
        )  # fmt: skip
    set_aside(nvme, strangers(files.slabs(), world.tenants))
    return State(world)
