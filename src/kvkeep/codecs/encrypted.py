"""Encryption around another codec: AES-256-GCM, the block's name authenticated with it.

Encoded bytes:

    16    salt of the record key
    12    nonce
    n     what the inner codec wrote, encrypted
    16    tag

The record key is HKDF-SHA256 of the key with that salt and the info "kvkeep record key 1". The
tag covers the ciphertext, and as associated data the codec's number (a byte) and the bytes that
name the block. `docs/security.md` says what this protects, and what it does not.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.codecs.base import Codec, Damaged
from kvkeep.errors import InvalidValue, require

if TYPE_CHECKING:
    from typing import Any

__all__ = ["ENCRYPTED", "EncryptedCodec"]

ENCRYPTED = 64
"""The number of an encrypted codec is this more than its inner codec's."""

_SALT = 16
_NONCE = 12
_TAG = 16
_HEAD = _SALT + _NONCE
_LONGEST = 2**31 - 1  # what the cipher's library takes in one call
_KEYS_KEPT = 256


class EncryptedCodec(Codec):
    """What ``inner`` writes, encrypted under ``key`` (32 bytes) and bound to the block's name.

    Each codec object has a record key of its own, derived with a random salt: the limit of 2^32
    random nonces a key is one for the blocks that one object writes, not for all that are ever
    written with the key. Nonces are random, so that a forked process does not repeat its parent's.

    Thread safety: any number of threads; the GIL is free while the cipher works. Memory: none
    around `raw`; around others one buffer of the encoded size a call. Needs cryptography.

    Raises:
        InvalidValue: ``key`` is not 32 bytes long, or ``inner`` encrypts already.
    """

    def __init__(self, inner: Codec, key: bytes) -> None:
        if len(key) != 32:
            raise InvalidValue(f"the key has {len(key)} bytes; AES-256 takes 32")
        if inner.number >= ENCRYPTED:
            raise InvalidValue(f"{inner.name} encrypts already")
        aead = require("cryptography.hazmat.primitives.ciphers.aead", "encryption")
        hkdf = require("cryptography.hazmat.primitives.kdf.hkdf", "encryption")
        hashes = require("cryptography.hazmat.primitives.hashes", "encryption")
        self._invalid_tag: type[Exception] = require(
            "cryptography.exceptions", "encryption"
        ).InvalidTag

        def derive(salt: bytes) -> Any:
            info = b"kvkeep record key 1"
            derived = hkdf.HKDF(algorithm=hashes.SHA256(), length=32, salt=salt, info=info)
            return aead.AESGCM(derived.derive(key))

        self.inner = inner
        self.name = f"{inner.name}+aes-256-gcm"
        self.number = ENCRYPTED + inner.number
        self.exact = inner.exact
        self._cipher_of = lru_cache(maxsize=_KEYS_KEPT)(derive)
        self._salt = os.urandom(_SALT)
        self._own = derive(self._salt)

    def bound(self, raw_bytes: int) -> int:
        """What the inner codec may need, and 44 bytes."""
        return self.inner.bound(raw_bytes) + _HEAD + _TAG

    def encode(self, raw: memoryview, out: memoryview, bound_to: bytes) -> int:
        """Encode, encrypt, authenticate ``bound_to`` with it.

        Raises:
            InvalidValue: 2 GiB or more at once.
        """
        plain = raw
        if self.inner.number:
            scratch = np.empty(self.inner.bound(len(raw)), dtype=np.uint8).data
            plain = scratch[: self.inner.encode(raw, scratch, b"")]
        if len(plain) > _LONGEST - _TAG:
            raise InvalidValue(
                f"{len(plain)} bytes at once are more than can be encrypted; use smaller blocks"
            )
        nonce = os.urandom(_NONCE)
        size = _HEAD + len(plain) + _TAG
        out[:_HEAD] = self._salt + nonce
        self._own.encrypt_into(nonce, plain, self._associated(bound_to), out[_HEAD:size])
        return size

    def decode(self, encoded: memoryview, out: memoryview, bound_to: bytes) -> None:
        """Verify, decrypt, decode. `Damaged`: changed, of another block, or of another key."""
        size = len(encoded) - _HEAD - _TAG
        if not 0 <= size <= min(_LONGEST - _TAG, self.inner.bound(len(out))):
            raise Damaged(f"{len(encoded)} bytes are no encrypted form of {len(out)}")
        plain = out
        if self.inner.number:
            plain = np.empty(size, dtype=np.uint8).data
        elif size != len(out):
            raise Damaged(f"{size} encrypted bytes where there must be {len(out)}")
        cipher = self._cipher_of(bytes(encoded[:_SALT]))
        try:
            cipher.decrypt_into(
                bytes(encoded[_SALT:_HEAD]), encoded[_HEAD:], self._associated(bound_to), plain
            )
        except self._invalid_tag as error:
            raise Damaged("changed, of another block, or encrypted with another key") from error
        if self.inner.number:
            self.inner.decode(plain, out, b"")

    def _associated(self, bound_to: bytes) -> bytes:
        return bytes([self.number]) + bound_to

    def __repr__(self) -> str:
        return f"<EncryptedCodec {self.name}>"  # and never the key
