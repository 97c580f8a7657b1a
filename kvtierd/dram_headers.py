"""Header bodies: what they say of blocks, and their place in the arena's header memfd.

In DRAM a body is written before the word of its slot becomes READY, so that a daemon killed
between the two has published nothing, and the writer's lease is still what the word says.
"""

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier_client.wire import CACHED, HELD, NO_NODE
from kvtierd.core.blocks import F_HELD, NONE, Rows, Slots
from kvtierd.core.tenant import Pool
from kvtierd.core.tree import Node
from kvtierd.core.world import OneBlock, World
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.bodies import (
    BLOCK_KEYED,
    BLOCK_SESSION,
    CHECKSUM_NONE,
    CHECKSUM_XXH3,
    BodyFields,
    BodyTemplate,
    compose,
)
from kvtierd.tiers.superblock import Kind


def body_fields(
    world: World, pool: Pool, rows: Rows, kind: Kind, slots: Slots | int, lease: int
) -> BodyFields:
    """What the header bodies of rows say."""
    table, nodes = world.table, world.node_table
    checksum, flags = _common(table.checksum[rows]), _common(table.flags[rows] & F_HELD)
    index = _common(table.node[rows])
    keyed = index == NONE
    return BodyFields(
        kind=int(kind),
        slot=slots,
        owner0=_common(table.owner0[rows]),
        owner1=_common(table.owner1[rows]),
        node=_either(keyed, NO_NODE, nodes.node[index]),
        page=table.page[rows],
        valid_tokens=table.valid[rows],
        length_bytes=pool.layout.block_bytes,
        payload_sum=checksum,
        seq=table.seq[rows],
        layout0=pool.layout0,
        layout1=pool.layout1,
        lease=lease,
        parent=_either(keyed, NO_NODE, nodes.parent[index]),
        fork_tokens=_either(keyed, 0, nodes.fork_tokens[index]),
        tenant=pool.tenant.number,
        block_kind=_either(keyed, BLOCK_KEYED, BLOCK_SESSION),
        retention=_either(flags != 0, HELD, CACHED),
        checksum_kind=_either(checksum != 0, CHECKSUM_XXH3, CHECKSUM_NONE),
        priority=_common(table.priority[rows]),
        created_s=int(time.time()),
        generation=world.generation,
    )


def _common(column: NDArray[Any]) -> Any:
    """The value that all rows share, as an int that costs no array arithmetic; else the column."""
    first = column.item(0)
    return first if (column == first).all() else column


def _either(test: Any, yes: int, no: Any) -> Any:
    """`np.where`, and an int where the test is one value for all rows."""
    if isinstance(test, bool):
        return yes if test else int(no)
    return np.where(test, yes, no)


def body_template(generation: int, block: OneBlock) -> BodyTemplate:
    """What the DRAM bodies of one node's blocks have in common."""
    pool, node = block.pool, block.node
    session, parent = node.session, node.parent
    return BodyTemplate(
        BodyFields(
            kind=int(Kind.ARENA), slot=0, owner0=session.owner0, owner1=session.owner1,
            node=node.id, page=0, valid_tokens=0, length_bytes=pool.layout.block_bytes,
            payload_sum=block.checksum, seq=0, layout0=pool.layout0, layout1=pool.layout1,
            lease=0, parent=NO_NODE if parent is None else parent.id,
            fork_tokens=node.fork_tokens, tenant=pool.tenant.number, block_kind=BLOCK_SESSION,
            retention=HELD if block.kept else CACHED,
            checksum_kind=CHECKSUM_XXH3 if block.checksum else CHECKSUM_NONE,
            priority=session.priority, created_s=int(time.time()), generation=generation,
        )
    )  # fmt: skip


class DramHeaders:
    """The core's `Publisher`, over the arenas' header files."""

    def __init__(self, world: World, arenas: dict[str, Arena]) -> None:
        self._world, self._arenas = world, arenas
        self._second = 0
        self._templates: dict[tuple[Node, int, bool, int, int], BodyTemplate] = {}  # its own

    def publish(self, pool: Pool, rows: Rows, slots: Slots, lease: int) -> None:
        """Write the bodies of blocks that are about to become READY."""
        fields = body_fields(self._world, pool, rows, Kind.ARENA, slots, lease)
        self._arenas[pool.tenant.name].headers.write_bodies(slots, compose(len(rows), fields))

    def publish_one(self, block: OneBlock) -> None:
        """The same for one block: only five words of a body differ within a node and a second."""
        second = int(time.monotonic())
        if second != self._second:
            self._second = second
            self._templates.clear()
        node = block.node  # the object itself: another node may have its index in the same second
        what = (node, block.pool.number, block.kept, block.checksum, node.session.priority)
        template = self._templates.get(what)
        if template is None:
            template = body_template(self._world.generation, block)
            self._templates[what] = template
        body = template.seal(block.slot, block.page, block.valid, block.seq, block.lease)
        self._arenas[block.pool.tenant.name].headers.write_body(block.slot, body)
