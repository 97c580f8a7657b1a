"""Header bodies: what they say of blocks, and their place in the arena's header memfd.

In DRAM a body is written before the word of its slot becomes READY, so that a daemon killed
between the two has published nothing, and the writer's lease is still what the word says.
"""

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier_client.wire import CACHED, HELD, NO_NODE
from kvtierd.core.blocks import F_HELD, NONE, Rows, Slots, span
from kvtierd.core.tenant import Pool
from kvtierd.core.tree import Node
from kvtierd.core.world import NodeBlocks, OneBlock, World
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
    table, nodes, at = world.table, world.node_table, span(rows)
    checksum, index = table.checksum[at], _common(table.node[at])
    return BodyFields(
        kind=int(kind),
        slot=slots,
        owner0=table.owner0[at],
        owner1=table.owner1[at],
        node=_plain(nodes.node[index]),
        page=table.page[at],
        valid_tokens=table.valid[at],
        length_bytes=pool.layout.block_bytes,
        payload_sum=checksum,
        seq=table.seq[at],
        layout0=pool.layout0,
        layout1=pool.layout1,
        lease=lease,
        parent=_plain(nodes.parent[index]),
        fork_tokens=_plain(nodes.fork_tokens[index]),
        tenant=pool.tenant.number,
        block_kind=_either(index == NONE, BLOCK_KEYED, BLOCK_SESSION),
        retention=np.where(table.flags[at] & F_HELD, HELD, CACHED),
        checksum_kind=np.where(checksum, CHECKSUM_XXH3, CHECKSUM_NONE),
        priority=table.priority[at],
        created_s=int(time.time()),
        generation=world.generation,
    )


def _common(column: NDArray[Any]) -> Any:
    """The value that all rows share, as an int that costs no array arithmetic; else the column."""
    first = column.item(0)
    return first if (column == first).all() else column


def _plain(value: Any) -> Any:
    """A numpy scalar as an int, an array as it is."""
    return value if isinstance(value, np.ndarray) else int(value)


def _either(test: Any, yes: int, no: int) -> Any:
    """`np.where`, and an int where the test is one value for all rows."""
    if isinstance(test, bool):
        return yes if test else no
    return np.where(test, yes, no)


def body_template(world: World, pool: Pool, node: Node, kept: bool, checksum: int) -> BodyTemplate:
    """What the DRAM bodies of one node's blocks have in common."""
    session, parent = node.session, node.parent
    return BodyTemplate(
        BodyFields(
            kind=int(Kind.ARENA), slot=0, owner0=session.owner0, owner1=session.owner1,
            node=node.id, page=0, valid_tokens=0, length_bytes=pool.layout.block_bytes,
            payload_sum=checksum, seq=0, layout0=pool.layout0, layout1=pool.layout1,
            lease=0, parent=NO_NODE if parent is None else parent.id,
            fork_tokens=node.fork_tokens, tenant=pool.tenant.number, block_kind=BLOCK_SESSION,
            retention=HELD if kept else CACHED,
            checksum_kind=CHECKSUM_XXH3 if checksum else CHECKSUM_NONE,
            priority=session.priority, created_s=int(time.time()), generation=world.generation,
        )
    )  # fmt: skip


class DramHeaders:
    """The core's `Publisher`, over the arenas' header files."""

    def __init__(self, world: World, arenas: dict[str, Arena]) -> None:
        self._world, self._arenas = world, arenas
        self._second = 0
        self._templates: dict[tuple[Node, int, bool, int, int], BodyTemplate] = {}

    def publish(self, pool: Pool, rows: Rows, slots: Slots, lease: int) -> None:
        """Write the bodies of blocks that are about to become READY."""
        fields = body_fields(self._world, pool, rows, Kind.ARENA, slots, lease)
        self._arenas[pool.tenant.name].headers.write_bodies(slots, compose(len(rows), fields))

    def publish_node(self, blocks: NodeBlocks) -> None:
        """The same for blocks of one node."""
        template = self._template(blocks.pool, blocks.node, blocks.kept, 0)
        bodies = template.seal_many(
            blocks.slots, blocks.pages, blocks.valid, blocks.seqs, blocks.lease
        )
        self._arenas[blocks.pool.tenant.name].headers.write_bodies(blocks.slots, bodies)

    def publish_one(self, block: OneBlock) -> None:
        """The same for one block."""
        template = self._template(block.pool, block.node, block.kept, block.checksum)
        body = template.seal(block.slot, block.page, block.valid, block.seq, block.lease)
        self._arenas[block.pool.tenant.name].headers.write_body(block.slot, body)

    def _template(self, pool: Pool, node: Node, kept: bool, checksum: int) -> BodyTemplate:
        """Only five words of a body differ within a node and a second."""
        second = int(time.monotonic())
        if second != self._second:
            self._second = second
            self._templates.clear()
        # the node object itself: another node may have its index in the same second
        what = (node, pool.number, kept, checksum, node.session.priority)
        template = self._templates.get(what)
        if template is None:
            template = body_template(self._world, pool, node, kept, checksum)
            self._templates[what] = template
        return template
