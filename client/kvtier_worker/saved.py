"""What a suspended sequence leaves in the daemon besides KV, and how it is taken up again.

The blob has the tokens, the sampler's settings, the steps with their forms and history, and which
pages of which nodes its KV is in. A sequence that has its session to itself leaves it with the
session; one that shares it with other branches, with its own node, and its token names the node.
"""

import re
import secrets
from typing import Final, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

import kvtier_client as kv
from kvtier_client import wire
from kvtier_worker.branches import ROOT_NODE, Archive, Branch, Family, Live, Mark, Node
from kvtier_worker.budget import Cause, Course
from kvtier_worker.entries import Entries
from kvtier_worker.errors import CannotSuspend
from kvtier_worker.pool import BlockShape, PagedPool
from kvtier_worker.sampler import Sampling
from kvtier_worker.sequence import Sequence, State
from kvtier_worker.thoughts import Archived, Event, Form, Step, Thoughts

FORMAT: Final = 3
_READABLE: Final = (2, FORMAT)
"""Format 2 has no `course`."""
_TOKEN: Final = re.compile(r"([0-9a-f]{32})(?:\.([0-9]{1,10}))?")
_NODE_IDS: Final = (2**31, 2**32 - 2**20)
"""Where a worker that does not have the session to itself begins to number its nodes."""


class SavedStep(msgspec.Struct, frozen=True, array_like=True):
    """A step at rest; `bias` are float32 [layers, kept, kv_heads]."""

    first: int
    end: int
    form: Form
    kept: int
    bias: bytes | None
    first_page: int
    hashes: list[int] | None
    wanted: bool
    away: bool
    pinned: bool
    rests_until: int
    idle_tokens: int


class SavedNode(msgspec.Struct, frozen=True, array_like=True):
    """A node with entries of the sequence; one mark per page of its own."""

    id: int
    fork_entry: int
    entries: int
    marks: list[tuple[int, int]]


class SavedCourse(msgspec.Struct, frozen=True, array_like=True):
    """A budget, and how far its sequence is on the way to its end."""

    tokens: int
    kv_entries: int | None
    cause: Cause | None
    begun_at: int
    landed_at: int | None
    forced: list[int]
    probe_failed: bool


class SavedSession(msgspec.Struct, frozen=True):
    """A sequence at rest. `layout` is the fingerprint of its KV's layout."""

    layout: bytes
    tokens: list[int]
    prompt_tokens: int
    end_tokens: int
    stop_token: int | None
    sampling: Sampling
    reached_tokens: int
    saved_tokens: int
    saved_entries: int
    steps: list[SavedStep]
    decided: int
    events: list[tuple[int, int, Form]]
    replay: list[tuple[int, int, Form]]
    alone: bool
    archive_id: int
    archive_end_page: int
    path: list[SavedNode]
    next_id: int
    course: SavedCourse | None = None
    format: int = FORMAT


class Opened(NamedTuple):
    """A resumed sequence, what the daemon has of it, and how many of its blocks are lost."""

    sequence: Sequence
    branch: Branch
    lost_blocks: int


def save_session(sequence: Sequence, branch: Branch, layout: bytes) -> str:
    """Leave the sequence's blob with the daemon; returns its token. Errors: the client's."""
    thoughts, family, alone = sequence.thoughts, branch.family, branch.alone
    node = None if alone else branch.live.make()
    saved = SavedSession(
        layout=layout,
        tokens=sequence.tokens,
        prompt_tokens=sequence.prompt_tokens,
        end_tokens=sequence.end_tokens,
        stop_token=sequence.stop_token,
        sampling=sequence.sampling,
        reached_tokens=sequence.reached_tokens,
        saved_tokens=sequence.saved_tokens,
        saved_entries=sequence.saved_entries,
        steps=[_saved_step(step) for step in thoughts.steps],
        decided=thoughts.decided,
        events=[(event.at, event.step, event.form) for event in thoughts.events],
        replay=[(event.at, event.step, event.form) for event in thoughts.replay],
        alone=alone,
        archive_id=branch.archive.make(),
        archive_end_page=branch.archive.end_page,
        path=_saved_path(branch.live),
        next_id=family.next_id,
        course=_saved_course(sequence.course),
    )
    data = msgspec.msgpack.encode(saved)
    family.blob_version += 1
    family.session.put_blob(data, node, version=family.blob_version)
    token = family.session.token.hex()
    return token if node is None else f"{token}.{node}"


def open_saved(
    token: str, sequence_id: int, client: kv.Client, pool: PagedPool, layout: bytes
) -> Opened:
    """Take a suspended sequence up. Errors: CannotSuspend; UnknownSession; UnknownBranch."""
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise CannotSuspend(
            "a session's token has 32 hex digits, then perhaps a dot and a branch's number, and"
            " this one has not"
        )
    session = client.resume_session(bytes.fromhex(match[1]))
    version, data = session.get_blob(None if match[2] is None else int(match[2]))
    saved = _decode(data)
    if saved.layout != layout:
        raise CannotSuspend(
            "the session was suspended by another model, or with another block size; resume"
            " it with the model and block_tokens that it had"
        )
    branch = _opened_branch(saved, session, pool.shape.block_tokens)
    branch.family.blob_version = version
    stored = min(saved.saved_entries, branch.live.entries)
    entries = min(stored, _leading_entries(branch, session))
    lost = pool.shape.blocks(stored) - pool.shape.blocks(entries)
    if lost:
        branch.live = branch.live.cut(entries)
    sequence = Sequence(
        id=sequence_id,
        tokens=saved.tokens,
        prompt_tokens=saved.prompt_tokens,
        end_tokens=saved.end_tokens,
        sampling=saved.sampling,
        kv=Entries(pool),
        stop_token=saved.stop_token,
        thoughts=_opened_thoughts(saved, pool.shape),
        reached_tokens=saved.reached_tokens,
        saved_entries=entries,
        saved_tokens=saved.saved_tokens,
        course=_opened_course(saved.course),
    )
    if entries:
        sequence.state = State.SWAPPED
    else:
        sequence.thoughts.lose(0, saved.saved_tokens)
    return Opened(sequence, branch, lost)


def _decode(blob: bytes) -> SavedSession:
    try:
        head = msgspec.msgpack.decode(blob)
        if isinstance(head, dict) and head.get("format", FORMAT) not in _READABLE:
            raise CannotSuspend(
                f"the session's blob has format {head['format']}, this worker reads"
                f" {' and '.join(map(str, _READABLE))};"
                " resume it with the version that suspended it"
            )
        return msgspec.convert(head, SavedSession)
    except (msgspec.MsgspecError, ValueError) as error:
        raise CannotSuspend(
            f"the session's blob is not a suspended session of this worker ({error});"
            " it was opened by another program, or never suspended"
        ) from error


def _saved_course(course: Course | None) -> SavedCourse | None:
    if course is None:
        return None
    return SavedCourse(*(getattr(course, name) for name in SavedCourse.__struct_fields__))


def _opened_course(saved: SavedCourse | None) -> Course | None:
    return None if saved is None else Course(**msgspec.structs.asdict(saved))


# -------------------------------------------------------------------- the branch


def _saved_path(live: Live) -> list[SavedNode]:
    """The live nodes from the top down to a branch's own; the last may not be made yet."""
    path = []
    node: Node | None = live
    while isinstance(node, Live):
        if node.id is not None:
            marks = [(mark.hash, mark.valid) for mark in node.own_marks]
            path.append(SavedNode(node.id, node.fork_entry, node.entries, marks))
        node = node.parent
    return path[::-1]


def _opened_branch(saved: SavedSession, session: kv.Session, block_tokens: int) -> Branch:
    family = Family(lambda: session, block_tokens)
    family.shared = not saved.alone
    family.next_id = saved.next_id if saved.alone else _any_id()
    assert family.session is session
    top: Node = Archive(family, None, 0, ROOT_NODE)
    for node in saved.path:
        live = Live(family, top, node.fork_entry, node.id)
        if node.marks:
            live.put(live.first_page, [Mark(*mark) for mark in node.marks], node.entries)
        top.closed = True
        top = live
    if not isinstance(top, Live):
        top = Live(family, top, 0)
    archive = Archive(family, None, saved.archive_end_page, saved.archive_id)
    return Branch(family, archive, top)


def _any_id() -> int:
    low, high = _NODE_IDS
    return low + secrets.randbelow(high - low)


def _leading_entries(branch: Branch, session: kv.Session) -> int:
    """How many entries from the first on the daemon still has."""
    there = {}
    for node in session.nodes():
        kept = np.asarray(node.tiers[0]) != wire.TIER_LOST
        there[node.node] = set(np.asarray(node.pages[0])[kept].tolist())
    block_tokens = branch.family.block_tokens
    for page in range(-(-branch.live.entries // block_tokens)):
        if page not in there.get(branch.live.owner(page), set()):
            return page * block_tokens
    return branch.live.entries


# ------------------------------------------------------------------- the thoughts


def _saved_step(step: Step) -> SavedStep:
    assert step.form is not Form.UNFOLDED
    archived = step.archived
    return SavedStep(
        first=step.first,
        end=step.end,
        form=step.form,
        kept=step.kept,
        bias=None if step.bias is None else step.bias.cpu().numpy().tobytes(),
        first_page=0 if archived is None else archived.first_page,
        hashes=None if archived is None else list(archived.hashes),
        wanted=step.wanted,
        away=step.away,
        pinned=step.pinned,
        rests_until=step.rests_until,
        idle_tokens=step.idle_tokens,
    )


def _opened_thoughts(saved: SavedSession, shape: BlockShape) -> Thoughts:
    steps = [
        Step(
            number=number,
            first=step.first,
            end=step.end,
            form=step.form,
            kept=step.kept,
            bias=_opened_bias(step, shape),
            archived=None if step.hashes is None else Archived(step.first_page, tuple(step.hashes)),
            wanted=step.wanted,
            away=step.away,
            pinned=step.pinned,
            rests_until=step.rests_until,
            idle_tokens=step.idle_tokens,
        )
        for number, step in enumerate(saved.steps)
    ]
    thoughts = Thoughts(steps, saved.decided, [Event(*event) for event in saved.events])
    thoughts.replay.extend(Event(*event) for event in saved.replay)
    return thoughts


def _opened_bias(step: SavedStep, shape: BlockShape) -> Tensor | None:
    if step.bias is None:
        return None
    flat = np.frombuffer(step.bias, np.float32).copy()
    return torch.from_numpy(flat).view(shape.layers, step.kept, shape.kv_heads)
