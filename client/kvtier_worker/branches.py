"""The worker's side of a session's tree: which node of the daemon a branch writes to.

Branches of one thought share a session. Each has two nodes of its own in it: an archive, to which
the full KV of every step it folds is appended, and a live node, which has its entries as they were
when it last left the pool. A node is made in the daemon when it is first written, below the one
that it was forked from; so what a branch shares with another is stored once. A node that nobody
writes any more is ended, and the daemon frees what no fork of it needs.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

import kvtier_client as kv

ROOT_NODE: Final = 0


class Mark(NamedTuple):
    """What is stored of a page: the xxh3-64 of its valid entries, and how many these are."""

    hash: int
    valid: int


class Family:
    """The branches of one session."""

    def __init__(self, open_session: Callable[[], kv.Session], block_tokens: int) -> None:
        self._open_session = open_session
        self._session: kv.Session | None = None
        self.block_tokens = block_tokens
        self.branches = 0
        self.shared = False
        """Whether branches that this worker does not know may be in the session."""
        self.next_id = ROOT_NODE + 1
        self.blob_version = 0
        """Of the blob that was stored or read last, the session's or a node's."""

    @property
    def session(self) -> kv.Session:
        """Their session, opened when it is first needed."""
        if self._session is None:
            self._session = self._open_session()
        return self._session

    @property
    def opened(self) -> bool:
        """Whether the daemon knows anything of them."""
        return self._session is not None


class Node:
    """A node of the tree; `fork_entry` is where it leaves its parent.

    Its parent is another node's, or None for the root and for what an earlier worker made.
    """

    def __init__(
        self, family: Family, parent: "Node | None", fork_entry: int, id: int | None = None
    ) -> None:
        self.family = family
        self.parent = parent
        self.fork_entry = fork_entry
        self.id = id
        self.closed = False
        self._heirs: list[Node] = []
        """Forks of it that the daemon does not know yet."""
        if parent is not None and id is None:
            parent._heirs.append(self)

    def make(self) -> int:
        """Its id; the daemon knows it from now on."""
        if self.id is None:
            assert self.parent is not None
            parent_id = self.parent.make()
            family = self.family
            family.session.fork(family.next_id, parent_id, self.fork_entry)
            self.id = family.next_id
            family.next_id += 1
            self.parent._heirs.remove(self)
        return self.id

    def readable_id(self) -> int:
        """The id under which its branch is read: its own, or of what it was forked from."""
        node: Node = self
        while node.id is None:
            assert node.parent is not None
            node = node.parent
        return node.id

    def close(self) -> None:
        """This worker writes to it no more; forks of it become nodes of their own."""
        self.closed = True
        if self.id is None:
            assert self.parent is not None
            for heir in list(self._heirs):
                heir.move_up()
            self.parent._heirs.remove(self)
        for heir in list(self._heirs):
            heir.fork_entry = min(heir.fork_entry, self.end_entry())
            heir.make()

    def lower(self, entry: int) -> None:
        """It is not made yet, and from `entry` on it has nothing in common with its parent.

        It forks from the parent's parent then if the parent itself begins behind that.
        """
        assert self.id is None and self.parent is not None
        self.fork_entry = min(self.fork_entry, entry)
        while self.parent.parent is not None and self.parent.fork_entry > self.fork_entry:
            self.move_up()
        if self.parent.closed:
            self.make()

    def move_up(self) -> None:
        """Fork from the parent's parent: nothing of the parent's own is in common with it."""
        parent = self.parent
        assert self.id is None and parent is not None and parent.parent is not None
        parent._heirs.remove(self)
        self.parent = parent.parent
        self.fork_entry = min(self.fork_entry, parent.fork_entry)
        self.parent._heirs.append(self)

    def leave(self) -> None:
        """Nobody writes to it any more: end it, but keep what forks of it need."""
        self.close()
        if self.id is not None:
            self.family.session.prune(self.id, subtree=False)

    def end_entry(self) -> int:
        """How far its branch is stored."""
        raise NotImplementedError


class Archive(Node):
    """Where the steps of a branch are; `end_page` is the next free page."""

    def __init__(
        self, family: Family, parent: "Archive | None", end_page: int, id: int | None = None
    ) -> None:
        super().__init__(family, parent, end_page * family.block_tokens, id)
        self.end_page = end_page

    def fork(self) -> "Archive":
        """The archive of a new branch, which has all steps so far."""
        return Archive(self.family, self, self.end_page)

    def end_entry(self) -> int:
        """How far it is stored, whole pages."""
        return self.end_page * self.family.block_tokens


class Live(Node):
    """A branch's entries as they last left the pool, from the root of the tree on."""

    def __init__(
        self, family: Family, parent: Node, fork_entry: int, id: int | None = None
    ) -> None:
        super().__init__(family, parent, fork_entry, id)
        self.torn = False
        """Whether more may be stored than is noted, as a swap-out did not get to its end."""
        self._entries = 0
        self._marks: list[Mark] = []

    @property
    def first_page(self) -> int:
        """Its first page of its own."""
        return self.fork_entry // self.family.block_tokens

    @property
    def own_marks(self) -> list[Mark]:
        """What is stored in its own pages."""
        return self._marks

    @property
    def entries(self) -> int:
        """How many of its branch's entries are stored."""
        if self._marks:
            return self._entries
        return min(self.parent.entries, self.fork_entry) if isinstance(self.parent, Live) else 0

    def end_entry(self) -> int:
        """How many of its branch's entries are stored."""
        return self.entries

    def mark(self, page: int) -> Mark:
        """What is stored of a page of its branch."""
        node = self._holder(page)
        return node._marks[page - node.first_page]

    def owner(self, page: int) -> int:
        """The id of the node that a page of its branch is stored under."""
        id = self._holder(page).id
        assert id is not None
        return id

    def _holder(self, page: int) -> "Live":
        node = self
        while not (node._marks and page >= node.first_page):
            assert isinstance(node.parent, Live)
            node = node.parent
        return node

    def put(self, first_page: int, marks: list[Mark], entries: int) -> None:
        """Note that its pages from `first_page` on are stored, up to so many entries."""
        self.torn = False
        self._marks[first_page - self.first_page :] = marks
        self._entries = entries

    def fork(self, entries: int) -> "Live":
        """The live node of a new branch that has the first entries in common with this one."""
        return Live(self.family, self, entries)

    def cut(self, entry: int) -> "Live":
        """The live node of its branch when nothing from `entry` on is as it was."""
        if self.id is None:
            for heir in [each for each in self._heirs if each.fork_entry > entry]:
                heir.move_up()  # it has more in common with what this one was forked from
            self.lower(entry)
            return self
        if self.entries <= entry and not self.torn:
            for heir in list(self._heirs):
                heir.lower(entry)
            return self
        parent: Node = self
        while parent.fork_entry >= entry and isinstance(parent, Live):
            assert parent.parent is not None
            parent = parent.parent
        other = Live(self.family, parent, entry)
        other.make()
        self.leave()
        return other


class Branch:
    """What the daemon has of one sequence."""

    def __init__(self, family: Family, archive: Archive, live: Live) -> None:
        self.family = family
        self.archive = archive
        self.live = live
        self.expected = False
        family.branches += 1

    @classmethod
    def first(cls, family: Family) -> "Branch":
        """The branch that a session begins with; its archive is the root."""
        archive = Archive(family, None, 0, ROOT_NODE)
        return cls(family, archive, Live(family, archive, 0))

    @property
    def alone(self) -> bool:
        """Whether the whole session is this branch's."""
        return self.family.branches == 1 and not self.family.shared

    def fork(self, entries: int) -> "Branch":
        """Another branch that has its steps and first entries in common with this one."""
        return Branch(self.family, self.archive.fork(), self.live.fork(entries))

    def hand_over(self) -> None:
        """It belongs to another worker from now on, or to nobody."""
        self.live.close()
        self.archive.close()
        self.family.branches -= 1
        self.family.shared = True

    def leave(self) -> None:
        """End it; with the last branch the session ends."""
        family, alone = self.family, self.alone
        family.branches -= 1
        if alone or not family.opened:
            if family.opened:
                family.session.close()
            for node in (self.live, self.archive):  # else each parent and its heirs hold the other
                if node.id is None:
                    node.close()
            return
        self.live.leave()
        if family.branches or len(family.session.nodes()) > 1:
            self.archive.leave()
        if not family.branches and len(family.session.nodes()) == 1:
            family.session.close()
