"""Content keys: the name of a block says which tokens it holds, and all that came before them.

    digest(b) = SHA-256(digest(b - 1) | tokens of block b | extras of block b)
    key(b)    = its first 16 bytes;  digest(-1) = SHA-256(scheme | seed)

Extras are what else decides a block's KV: pictures, adapters, salts. A partly filled block at the
end of a preempted request has the digest of the tokens that it holds. The chain is the connector's
own, so keys are the same in every process, whatever the engine hashes its own cache with.
"""

import hashlib
from collections.abc import Callable
from typing import Any, Final

import numpy as np

SCHEME: Final = b"kvtierd-vllm-keys-1"
KEY_BYTES: Final = 16
Extras = Callable[[Any, int, int], bytes]
"""`extras(request, start, end)`: what beside its tokens decides the KV of tokens start..end."""


class KeyChain:
    """The keys of one request's blocks of `block_tokens` tokens."""

    __slots__ = ("_digests", "_extras", "_request", "_root", "block_tokens")

    def __init__(self, request: Any, block_tokens: int, extras: Extras, seed: bytes) -> None:
        self.block_tokens = block_tokens
        self._request = request
        self._extras = extras
        self._root = hashlib.sha256(SCHEME + seed).digest()
        self._digests: list[bytes] = []

    def full(self, blocks: int, first: int = 0) -> list[bytes]:
        """Keys of full blocks `first..blocks`; their tokens must be known and final."""
        size, have = self.block_tokens, len(self._digests)
        if blocks > have:
            tokens = self._tokens(have * size, blocks * size)
            parent = self._digests[-1] if have else self._root
            for block in range(have, blocks):
                at = 4 * size * (block - have)
                start = block * size
                extras = self._extras(self._request, start, start + size)
                parent = hashlib.sha256(parent + tokens[at : at + 4 * size] + extras).digest()
                self._digests.append(parent)
        return [digest[:KEY_BYTES] for digest in self._digests[first:blocks]]

    def tail(self, end: int) -> bytes:
        """The key of the partly filled block whose last token is the one before `end`."""
        blocks = end // self.block_tokens
        self.full(blocks)
        parent = self._digests[blocks - 1] if blocks else self._root
        start = blocks * self.block_tokens
        extras = self._extras(self._request, start, end)
        return hashlib.sha256(parent + self._tokens(start, end) + extras).digest()[:KEY_BYTES]

    def span(self, end: int, first: int = 0) -> list[bytes]:
        """Keys of the blocks from `first` on that hold the tokens before `end`."""
        keys = self.full(end // self.block_tokens, first)
        if end % self.block_tokens:
            keys.append(self.tail(end))
        return keys

    def _tokens(self, start: int, end: int) -> bytes:
        return np.asarray(self._request.all_token_ids[start:end], dtype="<u4").tobytes()
