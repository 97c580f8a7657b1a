"""Folding: pages of a branch are let go of after a grace period, and kept again.

Each operation is a generator as `effects.py` describes it.
"""

from kvtier_client import wire
from kvtier_client.core import Unfolded
from kvtier_client.effects import Op, call
from kvtier_client.errors import ProtocolError
from kvtier_client.ops import SessionCore
from kvtier_client.pages import page_range
from kvtier_client.single import settle_some


def fold(
    session: SessionCore, node: int, pages: tuple[int, int], grace_s: float, kept: int, ack: bool
) -> Op[int]:
    """Let go of pages of a branch after a grace period; returns how many blocks they have."""
    core = session.core
    first, last = page_range(pages)
    fields = (session.id, node, first, last - first, grace_s, kept)
    if not ack:
        yield from settle_some(core)
        core.send_oneway(wire.Fold, *fields, lazily=True)
        return 0
    reply = yield from call(core, wire.Done, wire.Fold, *fields)
    return reply.count


def unfold(session: SessionCore, node: int, pages: tuple[int, int]) -> Op[Unfolded]:
    """Keep again what is still there of pages of a branch."""
    first, last = page_range(pages)
    fields = (session.id, node, first, last - first)
    reply = yield from call(session.core, wire.Unfolded, wire.Unfold, *fields)
    if len(reply.gone) % 4:
        raise ProtocolError(f"pages that are gone in {len(reply.gone)} bytes are not u32s")
    gone = tuple(memoryview(reply.gone).cast("I"))
    return Unfolded((first, last), min(gone, default=last) - first, gone, reply.loading)
