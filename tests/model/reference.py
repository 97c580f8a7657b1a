"""The simple model: dicts that say what a correct daemon may answer."""

from dataclasses import dataclass, field

TOKENS = 4
"""Tokens of a block, in all layouts of the model."""


@dataclass(slots=True)
class Block:
    """What was committed under a name."""

    value: int
    valid: int
    held: bool
    older: list[int] = field(default_factory=list)  # values that it replaced


@dataclass(slots=True)
class Fold:
    """Pages `first, end` that were folded, and the blocks that they had."""

    pages: tuple[int, int]
    grace_s: float
    until_s: float
    blocks: list[Block]


@dataclass(slots=True)
class Node:
    """A node; `pages` has one dict per part of the session."""

    id: int
    parent: "Node | None"
    fork: int
    pages: list[dict[int, Block]]
    ended: bool = False
    children: "list[Node]" = field(default_factory=list)
    folds: list[Fold] = field(default_factory=list)

    def grow_old(self, now_s: float) -> None:
        """What was folded may be dropped when its grace period is over."""
        for fold in self.folds:
            if fold.until_s <= now_s:
                for block in fold.blocks:
                    block.held = False
                fold.blocks = []

    @property
    def start(self) -> int:
        return self.fork // TOKENS


@dataclass(slots=True)
class Session:
    """A session of one tenant."""

    tenant: str
    token: bytes
    id: int
    layouts: list[int]
    nodes: dict[int, Node] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)
    holds: set[tuple[int, bytes]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.add(0, None, 0)

    def add(self, node: int, parent: Node | None, fork: int) -> None:
        """Fork."""
        self.nodes[node] = Node(node, parent, fork, [{} for _ in self.layouts])
        self.used.add(node)
        if parent is not None:
            parent.children.append(self.nodes[node])

    def prune(self, node: Node) -> None:
        """End a node with its subtree, and what its ancestors kept only for it."""
        parent = node.parent
        assert parent is not None
        parent.children.remove(node)
        gone = [node]
        for each in gone:
            gone.extend(each.children)
        while parent.ended and not parent.children and parent.parent is not None:
            gone.append(parent)
            parent.parent.children.remove(parent)
            parent = parent.parent
        for each in gone:
            del self.nodes[each.id]
        if parent.ended:
            self.trim(parent)

    @staticmethod
    def trim(node: Node) -> None:
        """Keep of an ended node what its children share."""
        fork = max((child.fork for child in node.children), default=0)
        last = -(-fork // TOKENS)
        for pages in node.pages:
            for page in [page for page in pages if page >= last]:
                del pages[page]

    @staticmethod
    def readable(node: Node, part: int, page: int) -> list[tuple[Block, int]]:
        """The block that a reader of this page sees and its valid tokens; more than one when the
        first may have been dropped."""
        found: list[tuple[Block, int]] = []
        at: Node | None = node
        limit: int | None = None
        while at is not None:
            block = at.pages[part].get(page)
            last = -(-limit // TOKENS) if limit is not None else page + 1
            if block is not None and at.start <= page < last:
                valid = block.valid
                if limit is not None and page == limit // TOKENS:
                    valid = min(valid, limit % TOKENS)
                found.append((block, valid))
                if block.held:
                    break
            limit = at.fork if limit is None else min(limit, at.fork)
            at = at.parent
        return found
