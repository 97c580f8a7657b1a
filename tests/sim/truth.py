"""What may be read under each name, whatever has happened: the truth that readers are held to.

A name's cell knows the values that it may hold. While an operation is under way or its outcome is
unknown, there are several; `must` says that a HELD block was acknowledged, so that it has to be
there as long as no medium lost it.
"""

from dataclasses import dataclass, field

TOKENS = 16
"""Tokens of a block."""
Name = tuple[int, int]
"""Part of the session, page."""


@dataclass(slots=True)
class Cell:
    """One page of a node."""

    possible: dict[int, int] = field(default_factory=dict)
    """Value to valid tokens."""
    older: dict[int, int] = field(default_factory=dict)
    """What was replaced, and may come back where what replaced it could be dropped or lost."""
    must: bool = False

    def begin(self, value: int, valid: int) -> None:
        """A write of this value is under way."""
        self.possible[value] = valid

    def wrote(self, value: int, valid: int, held: bool) -> None:
        """The write was acknowledged; it replaced what was there, being longer."""
        self.older |= self.possible
        self.possible = {value: valid}
        self.must |= held

    def right(self, value: int, valid: int) -> bool:
        """Whether a reader may see this."""
        return self.possible.get(value) == valid or (
            not self.must and self.older.get(value) == valid
        )

    @property
    def longest(self) -> int:
        """Valid tokens of the longest value that was ever written here."""
        return max([*self.possible.values(), *self.older.values()], default=0)


@dataclass(slots=True, eq=False)
class Node:
    """A node of a session; `start` is its first own page."""

    id: int
    parent: "Node | None"
    start: int
    cells: dict[Name, Cell] = field(default_factory=dict)
    sure: bool = True
    """Whether it is there: no fork or prune of it has an unknown outcome."""
    held: bool = True
    """Whether what is written to it stays HELD: no change of retention has an unknown outcome."""

    def owner(self, page: int) -> "Node":
        """The node of this branch whose page it is."""
        node = self
        while page < node.start and node.parent is not None:
            node = node.parent
        return node

    def cell(self, part: int, page: int) -> Cell:
        """The cell that this branch sees; made when it is new."""
        return self.owner(page).cells.setdefault((part, page), Cell())

    def known(self, part: int) -> list[int]:
        """Pages of this branch that may be stored."""
        found: set[int] = set()
        node: Node | None = self
        limit = 1 << 30
        while node is not None:
            found |= {page for p, page in node.cells if p == part and page < limit}
            limit, node = min(limit, node.start), node.parent
        return sorted(found)


@dataclass(slots=True, eq=False)
class Session:
    """A session that one actor at a time works on."""

    tenant: str
    token: bytes
    parts: list[int]
    nodes: dict[int, Node] = field(default_factory=dict)
    next_node: int = 1
    opened: bool = False
    ended: bool = False
    """Closed, or it may be."""
    busy: bool = False
    blobs: dict[int, bytes] = field(default_factory=dict)
    """Versions that may be stored; 0 is none."""
    blob_sure: int = 0
    """A version that was acknowledged."""
    holds: set[bytes] = field(default_factory=set)

    def begin(self) -> None:
        """It is about to be opened for the first time."""
        self.nodes[0] = Node(0, None, 0)

    def forget_after_reboot(self, kept: set[tuple[int, int, int]]) -> None:
        """Only what was durable must still be there; `kept` has (node, part, page)."""
        for node in self.nodes.values():
            for (part, page), cell in node.cells.items():
                cell.must &= (node.id, part, page) in kept
        self.holds.clear()


@dataclass(slots=True)
class Truth:
    """All sessions and keys."""

    sessions: list[Session] = field(default_factory=list)
    keys: dict[tuple[str, bytes], set[int]] = field(default_factory=dict)
    """Values that were ever put under a tenant's key."""
    value: int = 1000

    def fresh(self) -> int:
        """A value that no block has had."""
        self.value += 1
        return self.value
