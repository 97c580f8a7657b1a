"""The engine's KV-cache groups, as far as saving and restoring them goes.

A group is a set of layers that share a block table. One of full attention needs all its blocks to
go on at some token; one of sliding-window attention those that the window of the next token covers.
"""

import math
from collections.abc import Sequence

import msgspec

from kvtier_client.wire import Layout


class Group(msgspec.Struct, frozen=True):
    """One KV-cache group."""

    block_tokens: int
    window_tokens: int = 0
    """How far back its attention reaches, with what the engine keeps beside; 0 for everything."""

    def first_block(self, end: int) -> int:
        """The first block that is needed to go on after `end` tokens."""
        if not self.window_tokens:
            return 0
        return max(0, end - self.window_tokens + 1) // self.block_tokens

    def blocks(self, end: int) -> int:
        """How many blocks hold `end` tokens, the last one perhaps partly."""
        return -(-end // self.block_tokens)

    def tail_tokens(self, end: int) -> int:
        """Tokens in the last of them."""
        return end % self.block_tokens or self.block_tokens


class Groups:
    """All groups of an engine, with the layouts of their parts on every rank."""

    def __init__(self, groups: Sequence[Group], layouts: Sequence[Sequence[Layout]]) -> None:
        """`layouts[rank][group]` as the workers registered them."""
        self.groups = tuple(groups)
        self.ranks = len(layouts)
        self.step_tokens = math.lcm(*(group.block_tokens for group in groups))
        """Where full blocks of all groups end together."""
        self.parts: list[list[Layout]] = [
            list(dict.fromkeys(rank[index] for rank in layouts)) for index in range(len(groups))
        ]
        """The distinct layouts of each group: one for each rank, or one that all ranks share."""

    def saved_tokens(self, end: int, have: Sequence[int]) -> int:
        """How many leading tokens can be restored of `end` that were saved.

        `have[group]` is how many leading blocks of those from `first_block` on are there on all
        ranks.
        """
        tokens = end
        for group, blocks in zip(self.groups, have, strict=True):
            if blocks >= group.blocks(end) - group.first_block(end):
                continue
            tokens = min(tokens, 0 if group.window_tokens else blocks * group.block_tokens)
        return tokens if tokens == end else self.aligned(tokens)

    def hit_tokens(self, have: Sequence[int]) -> int:
        """How many leading tokens can be loaded when `have[group]` full blocks are there."""
        found = zip(self.groups, have, strict=True)
        return self.aligned(min(blocks * group.block_tokens for group, blocks in found))

    def aligned(self, tokens: int) -> int:
        """The last place before `tokens` where full blocks of all groups end."""
        return tokens - tokens % self.step_tokens
