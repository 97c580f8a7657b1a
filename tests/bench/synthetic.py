"""Fills the media of a stopped daemon with any number of blocks, as a long life would leave them.

Headers are real and in the project's own formats, payloads are holes: what a restart reads is
there, and ten million blocks need the room of their headers only. Half of the blocks are keyed,
half are pages of sessions; a tenth of them is in DRAM, half of that with a clean copy on NVMe.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier_client import Layout
from kvtier_client.wire import CACHED, HELD, NO_NODE
from kvtierd.catalog import rows
from kvtierd.catalog.store import Catalog
from kvtierd.core.slabs import ready_words
from kvtierd.start import tenant_number
from kvtierd.tiers.bodies import (
    BLOCK_KEYED,
    BLOCK_SESSION,
    CHECKSUM_NONE,
    CHECKSUM_XXH3,
    BodyFields,
    compose,
)  # fmt: skip
from kvtierd.tiers.headers import ArenaHeaders, HeaderFile, SpillHeaders, open_headers
from kvtierd.tiers.holder import open_keeper
from kvtierd.tiers.locks import lock_directory
from kvtierd.tiers.records import SlabEntry
from kvtierd.tiers.superblock import Expected, Kind

KIB: Final = 1 << 10
SLAB_BYTES: Final = 1024 * KIB
MIN_BLOCK_BYTES: Final = 4 * KIB
"""As many slots in a slab as the default configuration has of blocks of 1 MiB."""
BLOCK_TOKENS: Final = 16
RUN_BLOCKS: Final = 32
"""Blocks that were written together and lie beside each other."""
SESSION_BLOCKS: Final = 256
DRAM_SHARE: Final = 0.1
SEQ: Final = 1 << 41

NODES: Final = ((0, NO_NODE, 0, 96), (1, 0, 64, 64), (2, 0, 96, 64), (3, 2, 128, 32))
"""A session's tree: id, parent, page of the fork and pages of each node."""

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Part:
    """The blocks of one layout of one tenant."""

    tenant: str
    layout: Layout
    sessions: int

    @property
    def blocks(self) -> int:
        """Pages of sessions, and as many keyed blocks."""
        return 2 * self.sessions * SESSION_BLOCKS

    @property
    def dram_blocks(self) -> int:
        """Those of them that are in DRAM."""
        return int(DRAM_SHARE * self.blocks)

    @property
    def slots_per_slab(self) -> int:
        return SLAB_BYTES // self.layout.block_bytes

    def slabs(self, blocks: int) -> int:
        """How many slabs some blocks need."""
        return -(-blocks // self.slots_per_slab)


def parts(blocks: int) -> list[Part]:
    """Four pools of two tenants, the largest with 0.4 of the blocks."""
    shares = (("a", 1, 0.4), ("a", 2, 0.25), ("b", 1, 0.2), ("b", 2, 0.15))
    return [
        Part(
            tenant,
            Layout(
                "bench", "uint8", layers=1, kv_heads=pages, head_dim=128, block_tokens=BLOCK_TOKENS,
                block_bytes=pages * MIN_BLOCK_BYTES,
            ),
            max(1, round(share * blocks / 2 / SESSION_BLOCKS)),
        )
        for tenant, pages, share in shares
    ]  # fmt: skip


def owners(part: Part, number: int) -> U64:
    """The hashed tokens of its sessions. Shapes: [sessions, 2]."""
    rng = np.random.default_rng([number, 1])
    found: U64 = rng.integers(0, 2**64, (part.sessions, 2), np.uint64)
    return found


def keys(part: Part, number: int) -> U64:
    """The keys of its keyed blocks. Shapes: [blocks / 2, 2]."""
    rng = np.random.default_rng([number, 2])
    found: U64 = rng.integers(0, 2**64, (part.blocks // 2, 2), np.uint64)
    return found


def sections(some: list[Part]) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Tenants and sections of a configuration with room for the parts and a quarter more."""

    def room(slabs: int) -> int:
        return (slabs + slabs // 4 + 64) * SLAB_BYTES

    tenants = [
        {
            "name": name,
            "uids": [uid],
            "arena_bytes": room(sum(p.slabs(p.dram_blocks) for p in some if p.tenant == name)),
            "spill_bytes": room(sum(p.slabs(p.blocks) for p in some if p.tenant == name)),
        }
        for name, uid in (("a", "self"), ("b", 65534))
    ]
    capacity = sum(int(str(tenant["spill_bytes"])) for tenant in tenants)
    sizes = {"slab_bytes": SLAB_BYTES}
    return tenants, {
        "arena": sizes | {"min_block_bytes": MIN_BLOCK_BYTES, "prefault": False},
        "spill": sizes | {"capacity_bytes": capacity},
        "recovery": {"memory": "holder"},
    }


def fill(some: list[Part], state: Path, runtime: Path) -> None:
    """Fill the spill files, the arenas that the holder keeps, and the catalog."""
    directory = lock_directory(str(state))
    catalog = Catalog.open(directory)
    for number, part in enumerate(some):
        catalog.apply(list(_changes(part, number)))
    catalog.close()
    directory.close()
    keeper = open_keeper("holder", str(runtime))
    kept = keeper.take_all()
    with open(state / "spill" / "headers.kv", "r+b", buffering=0) as file:
        spill = open_headers(os.dup(file.fileno()), Expected(Kind.SPILL), "spill")
        assert isinstance(spill, SpillHeaders)
        used: dict[object, int] = {}
        for number, part in enumerate(some):
            fd = kept[f"{tenant_number(part.tenant):08x}-headers"]
            arena = open_headers(os.dup(fd), Expected(Kind.ARENA), "arena")
            assert isinstance(arena, ArenaHeaders)
            blocks = _Blocks(part, number)
            for headers, key, which in (
                (spill, "spill", blocks.on_nvme), (arena, part.tenant, blocks.in_dram)
            ):  # fmt: skip
                first = used.get(key, 0)
                used[key] = first + part.slabs(len(which))
                _publish(headers, part, blocks, which, first)
            arena.close()
        spill.close()
    os.truncate(state / "spill" / "blocks.kv", spill.geometry.payload_bytes)
    for fd in kept.values():
        os.close(fd)
    keeper.close()


def _changes(part: Part, number: int) -> Iterator[Any]:
    yield rows.SaveLayout(part.tenant, part.layout)
    print_ = part.layout.fingerprint()
    nodes = tuple(
        rows.NodeRecord(node, parent, page * BLOCK_TOKENS, HELD, ended=False)
        for node, parent, page, _ in NODES
    )
    for index, owner in enumerate(owners(part, number)):
        hashed = owner.tobytes()
        yield rows.SaveSession(part.tenant, hashed, f"s{index}", 0, (print_,), 0.0)
        yield rows.SaveNodes(part.tenant, hashed, nodes)


class _Blocks:
    """What the bodies of a part's blocks say; blocks are numbers: pages first, then keyed ones."""

    def __init__(self, part: Part, number: int) -> None:
        self.part = part
        self.number = number
        self.owners, self.keys = owners(part, number), keys(part, number)
        counts = [pages for *_, pages in NODES]
        self.node = np.repeat(np.arange(len(NODES)), counts)
        first = np.repeat([page for _, _, page, _ in NODES], counts)
        self.page = first + np.concatenate([np.arange(count) for count in counts])
        rng = np.random.default_rng([number, 3])
        runs = rng.permutation(part.blocks // RUN_BLOCKS)
        order = (runs[:, None] * RUN_BLOCKS + np.arange(RUN_BLOCKS)).ravel()
        self.in_dram: I64 = order[: part.dram_blocks]
        # Half of those have no copy on NVMe yet.
        self.on_nvme: I64 = order[part.dram_blocks // 2 :]

    def bodies(self, kind: Kind, blocks: I64, slots: I64) -> tuple[U64, U64]:
        """Bodies and words of some blocks in slots of a file."""
        part, half = self.part, self.part.blocks // 2
        keyed = blocks >= half
        session, inside = np.divmod(np.where(keyed, 0, blocks), SESSION_BLOCKS)
        node = np.where(keyed, 0, self.node[inside])
        key = np.where(keyed, blocks - half, 0)
        owner = np.where(keyed[:, None], self.keys[key], self.owners[session])
        tree = np.array(NODES, np.int64)[node]
        seqs = (SEQ + self.number * (1 << 32) + blocks).astype(np.uint64)
        print_ = part.layout.fingerprint()
        fields = BodyFields(
            kind=kind, slot=slots, owner0=owner[:, 0], owner1=owner[:, 1], node=node,
            page=np.where(keyed, 0, self.page[inside]), valid_tokens=BLOCK_TOKENS,
            length_bytes=part.layout.block_bytes,
            payload_sum=seqs * np.uint64(0x9E3779B97F4A7C15) if kind is Kind.SPILL else 0,
            seq=seqs, layout0=int.from_bytes(print_[:8], "little"),
            layout1=int.from_bytes(print_[8:], "little"), lease=1,
            parent=np.where(keyed, 0, tree[:, 1]),
            fork_tokens=np.where(keyed, 0, tree[:, 2] * BLOCK_TOKENS),
            tenant=tenant_number(part.tenant),
            block_kind=np.where(keyed, BLOCK_KEYED, BLOCK_SESSION),
            retention=np.where(keyed, CACHED, HELD),
            checksum_kind=CHECKSUM_XXH3 if kind is Kind.SPILL else CHECKSUM_NONE,
            priority=0, created_s=1_700_000_000, generation=1,
        )  # fmt: skip
        return compose(len(slots), fields), ready_words(seqs)


def _publish(headers: HeaderFile, part: Part, blocks: _Blocks, which: I64, first: int) -> None:
    """Give some slabs from `first` on to a part, and write its blocks into them."""
    per_slab, max_slots = part.slots_per_slab, headers.geometry.max_slots
    slabs = part.slabs(len(which))
    for number in range(first, first + slabs):
        headers.assign_slab(
            SlabEntry(
                number, part.layout.fingerprint(), tenant_number(part.tenant),
                part.layout.block_bytes, per_slab, part.layout.block_bytes,
            )
        )  # fmt: skip
    step = 512 * per_slab
    for start in range(0, len(which), step):
        some = which[start : start + step]
        slab, place = np.divmod(np.arange(start, start + len(some)), per_slab)
        slots = (first + slab) * max_slots + place
        bodies, words = blocks.bodies(headers.superblock.kind, some, slots)
        headers.write_bodies(slots, bodies)
        headers.words[slots] = words
        headers.write_words(slots, words)
