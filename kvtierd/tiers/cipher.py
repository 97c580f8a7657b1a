"""Encryption of one spill file: its data keys, and blocks encrypted and decrypted with them.

    master key ──wraps──► data key, one per file and start ──► payload: AES-256-GCM
                          (key table in the header file)       checksum: XOR with AES(nonce)

A nonce is the data key's number and a counter. Only the start that made a data key encrypts with
it, and takes a new count for every block and try, so no nonce comes twice under one key: whatever
a crash has left behind, the next start has another key. What the core knows of a block is the
additional data: other bytes, and bytes of another block, place or time, do not decrypt.

The checksum of the plaintext would tell who can read the disk which blocks are equal; it is stored
masked. Source: NIST SP 800-38D, RFC 3394. `docs/FORMATS.md` has the words.
"""

import hashlib
import hmac
import secrets
import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtierd.tiers import bodies as b
from kvtierd.tiers.headers import SpillHeaders
from kvtierd.tiers.master_key import KEY_BYTES, MasterKey
from kvtierd.tiers.records import KeyRecord, pack_keys, parse_keys
from kvtierd.tiers.superblock import KEY_COPIES, KEYS_MAX

TAG_BYTES: Final = 16
NUMBER_SHIFT: Final = 48
COUNTER_MAX: Final = (1 << NUMBER_SHIFT) - 1
"""Blocks that one data key encrypts at most; then its file takes no more until the next start."""
CRYPT_WORDS: Final = [b.W_PAYLOAD_SUM, b.W_NONCE, b.W_TAG0, b.W_TAG1]
"""The words of a body that encryption fills in, in the order of `FileCipher.encrypt`'s result."""

_NAME_WORDS: Final = [
    b.W_OWNER0, b.W_OWNER1, b.W_NODE_PAGE, b.W_VALID_LENGTH, b.W_SEQ, b.W_LAYOUT0, b.W_LAYOUT1,
]  # fmt: skip
_NAME_FLAGS: Final = np.uint64(0xFF_FFFFFFFF)
"""Tenant and block kind; retention and priority may change."""
_SHIFT: Final = np.uint64(NUMBER_SHIFT)

_U64 = NDArray[np.uint64]


class DataKey:
    """The key of one start of the daemon for one file."""

    def __init__(self, number: int, generation: int, secret: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers import algorithms
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self.number, self.generation, self.secret = number, generation, secret
        self.gcm = AESGCM(_derive(secret, b"kvtierd payload"))
        self._mask_cipher = algorithms.AES(_derive(secret, b"kvtierd checksum"))
        self._next = 1
        self._lock = threading.Lock()

    def take(self, n: int) -> _U64 | None:
        """Nonces for `n` blocks, which are never given again; None when there are not so many."""
        with self._lock:
            first = self._next
            if first + n > COUNTER_MAX:
                return None
            self._next += n
        counts: _U64 = np.arange(first, first + n, dtype=np.uint64)
        return counts | np.uint64(self.number << NUMBER_SHIFT)

    def masks(self, nonces: _U64) -> _U64:
        """What the checksums of blocks with these nonces are XORed with. Shapes: [n] → [n]."""
        from cryptography.hazmat.primitives.ciphers import Cipher, modes

        blocks = np.zeros((len(nonces), 2), np.uint64)
        blocks[:, 0] = nonces
        # one AES block per nonce, of which no two are equal: counter mode, all blocks in one call
        encryptor = Cipher(self._mask_cipher, modes.ECB()).encryptor()  # noqa: S305
        masks: _U64 = np.frombuffer(encryptor.update(blocks.tobytes()), np.uint64)[::2]
        return masks


def _derive(secret: bytes, purpose: bytes) -> bytes:
    return hmac.digest(secret, purpose, hashlib.sha256)


class FileCipher:
    """The data keys of one spill file; those of earlier starts only decrypt."""

    def __init__(self, headers: SpillHeaders, masters: Sequence[MasterKey]) -> None:
        """Reads the key table; changes nothing."""
        self._headers = headers
        self._masters = masters
        self._file = np.frombuffer(headers.superblock.payload_id, np.uint64)
        self._own: DataKey | None = None
        self.keys: dict[int, DataKey] = {}
        self.locked: set[int] = set()
        """Numbers of data keys that none of the master keys unwraps."""
        self.used: set[int] = set()
        """Numbers that blocks shown to `reveal` have."""
        self.seen_all = False
        """Every block of the file was shown, so that a key whose number is not in `used` can go."""
        records, self.damaged = parse_keys(headers.key_table())
        for record in records:
            self._unlock(record)

    def _unlock(self, record: KeyRecord) -> None:
        if record.number in self.keys:
            return  # the second copy
        for master in self._masters:
            secret = master.unwrap(record.wrapped)
            if secret is not None:
                self.keys[record.number] = DataKey(record.number, record.generation, secret)
                self.locked.discard(record.number)
                return
        self.locked.add(record.number)

    # ------------------------------------------------------------ start

    def reveal(self, bodies: b.Bodies) -> NDArray[np.bool_]:
        """Unmask the checksums of encrypted blocks, in place; returns which blocks have no key.

        Shapes: [n, 16] → [n].
        """
        missing = np.zeros(len(bodies), np.bool_)
        encrypted = np.flatnonzero(b.checksum_kinds(bodies) == b.CHECKSUM_AES_GCM)
        nonces = bodies[encrypted, b.W_NONCE]
        numbers = nonces >> _SHIFT
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            self.used.add(number)
            key = self.keys.get(number)
            if key is None:
                missing[encrypted[mine]] = True
            else:
                bodies[encrypted[mine], b.W_PAYLOAD_SUM] ^= key.masks(nonces[mine])
        return missing

    def locked_blocks(self, bodies: b.Bodies) -> NDArray[np.bool_]:
        """Which blocks cannot be decrypted for want of the right master key. [n, 16] → [n]."""
        numbers = bodies[:, b.W_NONCE] >> _SHIFT
        locked: NDArray[np.bool_] = np.isin(numbers, np.array(sorted(self.locked), np.uint64))
        locked &= b.checksum_kinds(bodies) == b.CHECKSUM_AES_GCM
        return locked

    def begin(self, generation: int, *, encrypt: bool) -> bool:
        """Bring the key table up to date: keys that no block uses go, the others are wrapped by the
        first master key, and to encrypt there is a new one.

        Returns False where there is no room for that. Durability: the table is on the disk.
        """
        assert self.seen_all or not self.locked, "keys that are in use would be lost"
        numbers = self.used if self.seen_all else self.used | self.keys.keys()
        keep = [self.keys[number] for number in sorted(numbers & self.keys.keys())]
        number = next((n for n in range(KEYS_MAX) if n not in numbers), None)
        if encrypt and number is not None:
            self._own = DataKey(number, generation, secrets.token_bytes(KEY_BYTES))
            keep.append(self._own)
        self.keys = {key.number: key for key in keep}
        wrapped = [
            KeyRecord(key.number, key.generation, self._masters[0].wrap(key.secret)) for key in keep
        ]
        table = pack_keys(wrapped)
        if self._headers.key_table() != table * KEY_COPIES:
            self._headers.write_key_table(table)
        return not encrypt or self._own is not None

    # ------------------------------------------------------------ blocks

    def encrypt(
        self,
        known: b.Bodies,
        places: _U64,
        sources: Sequence[memoryview],
        into: memoryview,
        size_bytes: int,
    ) -> _U64 | None:
        """Encrypt blocks into a buffer, one every `size_bytes`; 16 bytes beyond the last are used.

        `known` are bodies with all that names the blocks and with their checksums.
        Returns what their bodies say in CRYPT_WORDS; None when this start has no key or no nonce.
        Shapes: known [n, 16], places [n] → [n, 4].
        """
        nonces = None if self._own is None else self._own.take(len(sources))
        if self._own is None or nonces is None:
            return None
        words = np.empty((len(sources), 4), np.uint64)
        words[:, 0] = known[:, b.W_PAYLOAD_SUM] ^ self._own.masks(nonces)
        words[:, 1] = nonces
        names = self._names(known, places)
        for i, (source, nonce) in enumerate(zip(sources, nonces.tolist(), strict=True)):
            end = i * size_bytes + len(source)
            target = into[i * size_bytes : end + TAG_BYTES]
            self._own.gcm.encrypt_into(_nonce(nonce), source, names[i], target)
            words[i, 2:] = np.frombuffer(into[end : end + TAG_BYTES], np.uint64)
        return words

    def decrypt(
        self,
        known: b.Bodies,
        places: _U64,
        stored: b.Bodies,
        data: memoryview,
        size_bytes: int,
        targets: Sequence[memoryview | None],
    ) -> NDArray[np.bool_]:
        """Decrypt blocks, of which one lies every `size_bytes` of `data`, each into its target,
        which has the block's length; where that is None, nothing is done.

        `stored` are the bodies on the medium, for nonces and tags. `data` is overwritten, and 16
        bytes behind it. Returns which blocks are those that `known` names; the targets of the
        others are zeroed. Shapes: known and stored [n, 16], places [n] → [n].
        """
        from cryptography.exceptions import InvalidTag

        good = np.zeros(len(targets), np.bool_)
        names = self._names(known, places)
        nonces = stored[:, b.W_NONCE].tolist()
        tags = stored[:, [b.W_TAG0, b.W_TAG1]]
        # from the last to the first: a tag is put behind its block, where the next one begins
        for i in reversed(range(len(targets))):
            target, key = targets[i], self.keys.get(nonces[i] >> NUMBER_SHIFT)
            if target is None or key is None:
                continue
            begin = i * size_bytes
            end = begin + len(target)
            data[end : end + TAG_BYTES] = tags[i].tobytes()
            sealed = data[begin : end + TAG_BYTES]
            try:
                key.gcm.decrypt_into(_nonce(nonces[i]), sealed, names[i], target)
                good[i] = True
            except InvalidTag:
                target[:] = bytes(len(target))  # no plaintext stays where others can read it
        return good

    def _names(self, known: NDArray[Any], places: _U64) -> list[bytes]:
        """The additional data of blocks: the file, and what the core knows of each."""
        words = np.empty((len(known), 12), np.uint64)
        words[:, :2] = self._file
        words[:, 2:9] = known[:, _NAME_WORDS]
        words[:, 9] = places
        words[:, 10] = known[:, b.W_FLAGS] & _NAME_FLAGS
        words[:, 11] = known[:, b.W_PAYLOAD_SUM]
        return [row.tobytes() for row in words]


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")
