"""What a suspended session leaves in its blob besides KV: tokens, sampler, and block hashes."""

from typing import Final

import msgspec

from kvtier_worker.errors import CannotSuspend
from kvtier_worker.sampler import Sampling

FORMAT: Final = 1


class SavedSession(msgspec.Struct, frozen=True):
    """A session at rest. `kept_tokens` of its tokens have their KV in the daemon.

    `layout` is the fingerprint of the KV's layout; `hashes` has one xxh3-64 per kept block.
    """

    layout: bytes
    tokens: list[int]
    prompt_tokens: int
    end_tokens: int
    stop_token: int | None
    sampling: Sampling
    reached_tokens: int
    kept_tokens: int
    hashes: list[int]
    format: int = FORMAT


def encode_saved(saved: SavedSession) -> bytes:
    """The session as a blob."""
    return msgspec.msgpack.encode(saved)


def decode_saved(blob: bytes) -> SavedSession:
    """Errors: CannotSuspend when the blob is not one that this worker writes."""
    try:
        saved = msgspec.msgpack.decode(blob, type=SavedSession)
    except (msgspec.MsgspecError, ValueError) as error:
        raise CannotSuspend(
            f"the session's blob is not a suspended session of this worker ({error});"
            " it was opened by another program, or never suspended"
        ) from error
    if saved.format != FORMAT:
        raise CannotSuspend(
            f"the session's blob has format {saved.format}, this worker reads {FORMAT};"
            " resume it with the version that suspended it"
        )
    return saved
