"""Encryption around another codec: AES-256-GCM, the block's name authenticated with it.

Encoded bytes:

    8     key id
    16    salt of the record key
    12    nonce
    n     output of the inner codec, encrypted
    16    tag

The key id is HKDF-SHA256 of the key with the info "kvkeep key id 1"; it identifies a key without
revealing it. The record key is HKDF-SHA256 of the key with the salt and the info "kvkeep record
key 1". The tag covers the ciphertext and, as associated data, the codec's number (one byte) and the
bytes that name the block. Older records without a key id are still read: their codec numbers start
at `WITHOUT_KEY_ID`. `docs/security.md` says what encryption protects and what not.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.errors import InvalidValue, require
from kvkeep.store.codecs.base import Codec, Damaged, OtherKey

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

__all__ = [
    "ENCRYPTED",
    "WITHOUT_KEY_ID",
    "EncryptedCodec",
    "generate_key",
    "inner_number",
    "load_key",
]

ENCRYPTED = 128
"""Added to the inner codec's number, it is the number of the encrypted codec."""

WITHOUT_KEY_ID = 64
"""The same for older records without a key id. Smaller numbers are not encrypted."""

_ID = 8
_SALT = 16
_NONCE = 12
_TAG = 16
_HEAD = _ID + _SALT + _NONCE
_LONGEST = 2**31 - 1  # bytes that the cipher's library takes in one call
_KEYS_KEPT = 256
KEY_FILE_BYTES = 32
_HEX = re.compile(rb"[0-9a-fA-F]{64}\s*")
_LONGEST_FILE = 4 * KEY_FILE_BYTES  # bytes; a longer file is not a key and is not read


def inner_number(number: int) -> int | None:
    """Return the number of the codec inside an encrypted one; None if not encrypted."""
    if number < WITHOUT_KEY_ID:
        return None
    return number - (WITHOUT_KEY_ID if number < ENCRYPTED else ENCRYPTED)


class EncryptedCodec(Codec):
    """Encrypts the output of ``inner`` with ``key`` (32 bytes), bound to the block's name.

    ``old_keys`` are for reading only. ``with_id=False`` reads and writes records without a key id,
    for which every key is tried.

    Each object derives its own record key with a random salt, so the limit of 2^32 random nonces
    per key applies to the blocks that one object writes. Nonces are random, so a forked process
    does not repeat its parent's.

    The GIL is released during encryption. Memory: none around `raw`; around other codecs one
    buffer of the encoded size per call. Needs cryptography.

    Raises:
        InvalidValue: a key is not 32 bytes long, or ``inner`` encrypts already.
    """

    def __init__(
        self,
        inner: Codec,
        key: bytes,
        old_keys: Sequence[bytes] = (),
        *,
        with_id: bool = True,
    ) -> None:
        for one in (key, *old_keys):
            if len(one) != 32:
                raise InvalidValue(f"the key has {len(one)} bytes; AES-256 takes 32")
        if inner.number >= WITHOUT_KEY_ID:
            raise InvalidValue(f"{inner.name} encrypts already")
        aead = require("cryptography.hazmat.primitives.ciphers.aead", "encryption")
        hkdf = require("cryptography.hazmat.primitives.kdf.hkdf", "encryption")
        hashes = require("cryptography.hazmat.primitives.hashes", "encryption")
        self._invalid_tag: type[Exception] = require(
            "cryptography.exceptions", "encryption"
        ).InvalidTag

        def expand(key: bytes, length: int, salt: bytes | None, info: bytes) -> bytes:
            derived = hkdf.HKDF(algorithm=hashes.SHA256(), length=length, salt=salt, info=info)
            expanded: bytes = derived.derive(key)
            return expanded

        # Keys live in closures, not in attributes, so that printing the object cannot reveal them.
        keys = {expand(one, _ID, None, b"kvkeep key id 1"): one for one in (key, *old_keys)}

        def derive(named: bytes, salt: bytes) -> Any:
            return aead.AESGCM(expand(keys[named], 32, salt, b"kvkeep record key 1"))

        self.inner = inner
        self.name = f"{inner.name}+aes-256-gcm"
        self.number = (ENCRYPTED if with_id else WITHOUT_KEY_ID) + inner.number
        self.exact = inner.exact
        self._cipher_of = lru_cache(maxsize=_KEYS_KEPT)(derive)
        self._salt = os.urandom(_SALT)
        self._with_id = with_id
        self._ids = tuple(keys)
        self._own = derive(self._ids[0], self._salt)
        self._id = self._ids[0] if with_id else b""
        self._head = len(self._id) + _SALT + _NONCE

    def bound(self, raw_bytes: int) -> int:
        """Return the inner codec's bound plus 52 bytes."""
        return self.inner.bound(raw_bytes) + _HEAD + _TAG

    def encode(self, raw: memoryview, out: memoryview, bound_to: bytes) -> int:
        """Encode, encrypt, and authenticate ``bound_to``.

        Raises:
            InvalidValue: 2 GiB or more.
        """
        plain = raw
        if self.inner.number:
            scratch = np.empty(self.inner.bound(len(raw)), dtype=np.uint8).data
            plain = scratch[: self.inner.encode(raw, scratch, b"")]
        if len(plain) > _LONGEST - _TAG:
            raise InvalidValue(
                f"{len(plain)} bytes exceed what one call encrypts (2 GiB); use smaller blocks"
            )
        nonce = os.urandom(_NONCE)
        head = self._head
        size = head + len(plain) + _TAG
        out[:head] = self._id + self._salt + nonce
        self._own.encrypt_into(nonce, plain, self._associated(bound_to), out[head:size])
        return size

    def decode(self, encoded: memoryview, out: memoryview, bound_to: bytes) -> None:
        """Verify, decrypt, decode.

        Raises:
            Damaged: the bytes were changed, are another block's, or fit none of the keys.
            OtherKey: the bytes name a key that this codec does not have.
        """
        size = len(encoded) - self._head - _TAG
        if not 0 <= size <= min(_LONGEST - _TAG, self.inner.bound(len(out))):
            raise Damaged(f"{len(encoded)} bytes cannot be the encrypted form of {len(out)} bytes")
        plain = out
        if self.inner.number:
            plain = np.empty(size, dtype=np.uint8).data
        elif size != len(out):
            raise Damaged(f"{size} encrypted bytes where {len(out)} are expected")
        self._decrypt(encoded, plain, self._associated(bound_to))
        if self.inner.number:
            self.inner.decode(plain, out, b"")

    def _decrypt(self, encoded: memoryview, plain: memoryview, associated: bytes) -> None:
        head, at = self._head, len(self._id)
        ids = self._ids
        if self._with_id:
            named = bytes(encoded[:at])
            if named not in ids:
                raise OtherKey(f"the record is encrypted with the key {named.hex()}")
            ids = (named,)
        salt, nonce = bytes(encoded[at : at + _SALT]), bytes(encoded[at + _SALT : head])
        for named in ids:
            try:
                self._cipher_of(named, salt).decrypt_into(nonce, encoded[head:], associated, plain)
            except self._invalid_tag:
                continue
            return
        raise Damaged("bytes were changed, are another block's, or were encrypted with another key")

    def _associated(self, bound_to: bytes) -> bytes:
        return bytes([self.number]) + bound_to

    def __repr__(self) -> str:
        return f"<EncryptedCodec {self.name}>"  # and never the key


def load_key(path: str | os.PathLike[str]) -> bytes:
    """Read a key from a file of 32 bytes, or of 64 hexadecimal digits and a newline.

    Raises:
        InvalidValue: the file cannot be read, is no key file, or not only its owner can access it.
            The group may read a file of root's: secrets are mounted and credentials passed so.
    """
    place = Path(path)
    try:
        with open(place, "rb", opener=_nonblocking) as file:
            found = os.fstat(file.fileno())
            content = file.read(_LONGEST_FILE + 1) if stat.S_ISREG(found.st_mode) else b""
    except OSError as error:
        raise InvalidValue(f"the key file {place} cannot be read: {error.strerror}") from error
    if not _is_private(found):
        mode = stat.S_IMODE(found.st_mode)
        raise InvalidValue(
            f"the key file {place} has mode {mode:04o}: users other than its owner "
            f"can access it; run chmod 600 {place}"
        )
    if len(content) == KEY_FILE_BYTES:
        return content
    if len(content) <= _LONGEST_FILE and _HEX.fullmatch(content):
        return bytes.fromhex(content.decode("ascii"))
    raise InvalidValue(
        f"{place} is no key file: that is 32 bytes or 64 hexadecimal digits, see generate_key"
    )


def _is_private(found: os.stat_result) -> bool:
    """Whether only its owner can access a file, or if that is root, those root lets read it."""
    if os.name != "posix":
        return True
    allowed = stat.S_IRGRP if found.st_uid == 0 != os.geteuid() else 0
    return not found.st_mode & 0o077 & ~allowed


def _nonblocking(path: str, flags: int) -> int:
    """Open without waiting for a writer, in case the file is a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def generate_key(path: str | os.PathLike[str]) -> None:
    """Write a new random key to a new file of mode 0600, as 64 hexadecimal digits.

    Raises:
        InvalidValue: the file exists (replacing its key would make everything encrypted with it
            unreadable), or cannot be written; then no file is left.
    """
    place = Path(path)
    try:
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise InvalidValue(f"{place} is there already; name a new file for the key") from error
    except OSError as error:
        raise InvalidValue(f"the key file {place} cannot be created: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_hex(KEY_FILE_BYTES).encode("ascii") + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        place.unlink(missing_ok=True)
        raise InvalidValue(f"the key file {place} cannot be written: {error.strerror}") from error
