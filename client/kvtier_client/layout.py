"""The layout of a block: everything that decides what its bytes mean."""

import hashlib
from typing import Final

import msgspec

DTYPE_BYTES: Final = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3": 1,
    "float8_e5m2": 1,
    "uint8": 1,
}


class Layout(msgspec.Struct, array_like=True, frozen=True):
    """The immutable description of a block; two layouts never mix.

    `latent` is the width of an MLA latent (then `kv_heads` and `head_dim` are 0). A layout that
    is `replicated` over its tensor-parallel ranks has rank 0 on every rank. `extra` names whatever
    else changes the bytes (RoPE settings, quantisation, LoRA, revision).
    """

    model: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    block_bytes: int
    latent: int = 0
    group: int = 0
    tp_rank: int = 0
    tp_size: int = 1
    replicated: bool = False
    codec: str = "raw"
    extra: str = ""

    def fingerprint(self) -> bytes:
        """16 bytes that differ when anything that changes the bytes of a block differs."""
        return hashlib.sha256(b"kvtierd-layout-1" + msgspec.msgpack.encode(self)).digest()[:16]

    def raw_block_bytes(self) -> int:
        """Bytes of one uncoded block. Errors: KeyError for an unknown dtype."""
        width = self.latent if self.latent else 2 * self.kv_heads * self.head_dim
        return self.layers * width * self.block_tokens * DTYPE_BYTES[self.dtype]
