"""What may be read under each name, whatever has happened: the truth that readers are held to.

A name's cell knows the values that it may hold. While an operation is under way or its outcome is
unknown, there are several; `must` says that a HELD block was acknowledged, so that it has to be
there as long as no medium lost it. A `View` is what a branch shows of a page: the node's own cell,
and behind it the ancestors' cells, as far as forks leave them in the branch.
"""

from collections.abc import Iterator
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
    gone: bool = False
    """It was pruned: nothing of it is ever seen again."""
    torn: bool = False
    """The power went before it was durable: what is stored may turn out to be damaged."""

    def begin(self, value: int, valid: int) -> None:
        """A write of this value is under way."""
        self.possible[value] = valid

    def wrote(self, value: int, valid: int, held: bool, hurt: set[int]) -> None:
        """The write was acknowledged; it replaced what was there, being longer, and is HELD if
        that was, unless a medium had lost it by then."""
        replaced = self.possible.keys() - {value}
        self.must = held or (self.must and not replaced & hurt)
        self.older |= self.possible
        self.possible = {value: valid}
        self.torn = False

    def keep(self) -> None:
        """What is stored is HELD from now on, whichever of its values it is."""
        if not self.torn:
            self.possible |= self.older
            self.must = True

    def right(self, value: int, valid: int, cap: int = TOKENS) -> bool:
        """Whether a reader may see this, of a block that the branch shares up to `cap` tokens."""
        if self.gone:
            return False
        known = self.possible.get(value)
        if known is None and not self.must:
            known = self.older.get(value)
        return known is not None and min(known, cap) == valid

    def ever(self, value: int, valid: int, cap: int = TOKENS) -> bool:
        """Whether this was ever written here."""
        known = self.possible.get(value, self.older.get(value, -1))
        return min(known, cap) == valid

    @property
    def longest(self) -> int:
        """Valid tokens of the longest value that was ever written here."""
        return max([*self.possible.values(), *self.older.values()], default=0)


@dataclass(slots=True, frozen=True)
class View:
    """The cells in which a branch looks for a page, its own first; how many tokens of each."""

    cells: tuple[tuple[Cell, int], ...]

    @property
    def must(self) -> bool:
        """Whether there has to be a block."""
        return any(cell.must for cell, _ in self.cells)

    def right(self, value: int, valid: int) -> bool:
        """Whether a reader may see this."""
        for cell, cap in self.cells:
            if cell.right(value, valid, cap):
                return True
            if cell.must:  # what is behind it is hidden
                return False
        return False

    def ever(self, value: int, valid: int) -> bool:
        """Whether this was ever written under the name, by anybody who may be behind it."""
        return any(cell.ever(value, valid, cap) for cell, cap in self.cells)

    def lost(self, hurt: set[int]) -> bool:
        """Whether a medium may have lost what has to be here; it need not be there any more."""
        if not any(cell.possible.keys() & hurt for cell, _ in self.cells):
            return False
        for cell, _ in self.cells:
            if cell.possible.keys() & hurt:
                cell.must = False
        return True


@dataclass(slots=True, eq=False)
class Node:
    """A node of a session; its branch has `fork` tokens of its parent's."""

    id: int
    parent: "Node | None"
    fork: int
    cells: dict[Name, Cell] = field(default_factory=dict)
    sure: bool = True
    """Whether it is there: no fork or prune of it has an unknown outcome."""
    held: bool = True
    """Whether what is written to it stays HELD: no change of retention has an unknown outcome."""
    ended: bool = False
    """Whether it was, or may have been, pruned down to what its children share."""

    @property
    def start(self) -> int:
        """Its first own page; the parent's copy of it is shared up to the fork inside it."""
        return self.fork // TOKENS

    def floor(self, part: int, page: int) -> int:
        """How many valid tokens a block that is written now must exceed."""
        shared = self.fork % TOKENS if page == self.start else 0
        return max(shared, self.cell(part, page).longest)

    def cell(self, part: int, page: int) -> Cell:
        """Its own cell of a page; made when it is new."""
        assert page >= self.start
        return self.cells.setdefault((part, page), Cell())

    def lineage(self) -> Iterator[tuple["Node", int]]:
        """Itself and its ancestors, and before which token the branch takes from each."""
        node: Node | None = self
        limit = 1 << 40
        while node is not None:
            yield node, limit
            limit, node = min(limit, node.fork), node.parent

    def view(self, part: int, page: int) -> View:
        """What the branch shows of a page."""
        found = []
        for node, limit in self.lineage():
            cell = node.cells.get((part, page))
            if cell is not None and page * TOKENS < limit:
                found.append((cell, min(TOKENS, limit - page * TOKENS)))
        return View(tuple(found))

    def known(self, part: int) -> list[int]:
        """Pages of this branch that may be stored."""
        return sorted(
            {
                page
                for node, limit in self.lineage()
                for p, page in node.cells
                if p == part and page * TOKENS < limit
            }
        )

    @property
    def end(self) -> int:
        """Behind the last token that was ever written to it."""
        ends = [page * TOKENS + cell.longest for (_, page), cell in self.cells.items()]
        return max(ends, default=self.fork)


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
    closed: bool = False
    """That it is closed was acknowledged."""
    adrift: bool = False
    """An older catalog came back: what it says of the session is not what was acknowledged."""
    busy: bool = False
    blobs: dict[int, bytes] = field(default_factory=dict)
    """Versions that may be stored; 0 is none."""
    blob_sure: int = 0
    """A version that was acknowledged."""
    holds: set[bytes] = field(default_factory=set)

    def begin(self) -> None:
        """It is about to be opened for the first time."""
        self.nodes[0] = Node(0, None, 0)

    @property
    def usable(self) -> bool:
        """Whether a node of it is surely there."""
        return any(node.sure for node in self.nodes.values())

    def forget_after_reboot(self, kept: set[tuple[int, int, int]]) -> None:
        """Only what was durable must still be there; `kept` has (node, part, page)."""
        for node in self.nodes.values():
            for (part, page), cell in node.cells.items():
                durable = (node.id, part, page) in kept
                cell.must &= durable
                cell.torn |= not durable
        self.holds.clear()

    def below(self, node: Node) -> list[Node]:
        """A node and all below it."""
        return [x for x in self.nodes.values() if any(y is node for y, _ in x.lineage())]


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
