"""The master key: 32 bytes from a file or a systemd credential, which wrap the data keys.

It never leaves the memory of the daemon, and nothing prints it. The package `cryptography` is
imported only where a key is in use.
"""

import os
import stat
from typing import Final

from kvtierd.tiers.errors import StartError

KEY_BYTES: Final = 32
CREDENTIAL_PREFIX: Final = "credential:"
_CREDENTIALS_VARIABLE: Final = "CREDENTIALS_DIRECTORY"
_OTHERS_OR_GROUP_WRITE: Final = 0o027
_MAKE: Final = "make one with: (umask 077; head -c 32 /dev/urandom > FILE)"
_RAW: Final = "a key is 32 raw bytes; a new one does not open blocks that are encrypted already"
_READABLE: Final = "let the daemon's user read it, or use LoadCredential= in the unit"


class MasterKey:
    """Wraps and unwraps data keys (RFC 3394), so that a wrong key is known for what it is."""

    def __init__(self, secret: bytes) -> None:
        assert len(secret) == KEY_BYTES
        self._secret = secret

    def wrap(self, data_key: bytes) -> bytes:
        """The 40 bytes to be stored of a data key."""
        from cryptography.hazmat.primitives.keywrap import aes_key_wrap

        return aes_key_wrap(self._secret, data_key)

    def unwrap(self, wrapped: bytes) -> bytes | None:
        """The data key; None when another master key has wrapped it."""
        from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap

        try:
            return aes_key_unwrap(self._secret, wrapped)
        except InvalidUnwrap:
            return None


def load_master_keys(key: str, old_key: str) -> list[MasterKey]:
    """The keys that `spill.encryption` names, the one that wraps first; reads files only.

    Errors: `StartError` when one is named and cannot be used.
    """
    named = (("spill.encryption.key", key), ("spill.encryption.old_key", old_key))
    secrets = [_load(setting, name) for setting, name in named if name]
    if secrets:
        _need_cryptography()
    return [MasterKey(secret) for secret in secrets]


def _need_cryptography() -> None:
    try:
        import cryptography.hazmat.primitives.ciphers.aead  # noqa: F401
    except ImportError as error:
        raise StartError(
            "cannot encrypt spill files (spill.encryption)",
            f"the package cryptography cannot be used ({error})",
            "pip install 'kvtierd[encryption]'",
        ) from error


def _load(setting: str, name: str) -> bytes:
    asked = f"cannot use {setting} = {name}"
    path = _credential(asked, name) if name.startswith(CREDENTIAL_PREFIX) else name
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        # Who is told to make a key must have none: a new one over the old would lose all blocks.
        remedy = _MAKE if isinstance(error, FileNotFoundError) else _READABLE
        raise StartError(asked, f"{path}: {error.strerror}", remedy) from error
    try:
        _check(asked, os.fstat(fd))
        secret = os.read(fd, KEY_BYTES + 1)
    finally:
        os.close(fd)
    if len(secret) != KEY_BYTES:
        found_bytes = len(secret) if len(secret) < KEY_BYTES else f"more than {KEY_BYTES}"
        raise StartError(asked, f"it has {found_bytes} bytes instead of {KEY_BYTES}", _RAW)
    return secret


def _check(asked: str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise StartError(asked, "it is not a regular file", _RAW)
    if found.st_uid not in (0, os.geteuid()):
        raise StartError(
            asked, f"it belongs to uid {found.st_uid}", f"chown it to root or {os.geteuid()}"
        )
    if found.st_mode & _OTHERS_OR_GROUP_WRITE:
        mode = stat.S_IMODE(found.st_mode)
        raise StartError(asked, f"its mode {mode:04o} lets others in", "chmod 0400 it")


def _credential(asked: str, name: str) -> str:
    directory = os.environ.get(_CREDENTIALS_VARIABLE)
    if directory is None:
        raise StartError(
            asked,
            f"the service manager gave no credentials (${_CREDENTIALS_VARIABLE} is not set)",
            "add LoadCredential= to the unit, or name a file; for kvtierctl check, set it to the "
            "directory of the key's file",
        )
    return os.path.join(directory, name.removeprefix(CREDENTIAL_PREFIX))
