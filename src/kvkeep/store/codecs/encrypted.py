"""Encryption around another codec: AES-256-GCM, the block's name authenticated with it.

Encoded bytes:

    8     key id
    16    salt of the record key
    12    nonce
    n     what the inner codec wrote, encrypted
    16    tag

The key id is HKDF-SHA256 of the key with the info "kvkeep key id 1": it tells keys apart and says
nothing about them. The record key is HKDF-SHA256 of the key with that salt and the info "kvkeep
record key 1". The tag covers the ciphertext, and as associated data the codec's number (a byte) and
the bytes that name the block. Records that were written before there were key ids are read, too:
they have the numbers from `WITHOUT_KEY_ID` on, and no key id in front. `docs/security.md` says what
this protects, and what it does not.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.errors import InvalidValue, require
from kvkeep.store.codecs.base import Codec, Damaged, OtherKey

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

__all__ = ["ENCRYPTED", "WITHOUT_KEY_ID", "EncryptedCodec", "inner_number"]

ENCRYPTED = 128
"""The number of an encrypted codec is this more than its inner codec's."""

WITHOUT_KEY_ID = 64
"""The same, of records from before there were key ids. Below it nothing is encrypted."""

_ID = 8
_SALT = 16
_NONCE = 12
_TAG = 16
_HEAD = _ID + _SALT + _NONCE
_LONGEST = 2**31 - 1  # what the cipher's library takes in one call
_KEYS_KEPT = 256


def inner_number(number: int) -> int | None:
    """The number of the codec inside of an encrypted one; None where nothing is encrypted."""
    if number < WITHOUT_KEY_ID:
        return None
    return number - (WITHOUT_KEY_ID if number < ENCRYPTED else ENCRYPTED)


class EncryptedCodec(Codec):
    """What ``inner`` writes, encrypted under ``key`` (32 bytes) and bound to the block's name.

    ``old_keys`` are for reading only. ``with_id=False`` reads records without a key id, which any
    of the keys may have encrypted, and writes such.

    Each codec object has a record key of its own, derived with a random salt: the limit of 2^32
    random nonces a key is one for the blocks that one object writes, not for all that are ever
    written with the key. Nonces are random, so that a forked process does not repeat its parent's.

    Thread safety: any number of threads; the GIL is free while the cipher works. Memory: none
    around `raw`; around others one buffer of the encoded size a call. Needs cryptography.

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

        # In no attribute of this object: a key must not be seen where objects are printed.
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
        """What the inner codec may need, and 52 bytes."""
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
        head = self._head
        size = head + len(plain) + _TAG
        out[:head] = self._id + self._salt + nonce
        self._own.encrypt_into(nonce, plain, self._associated(bound_to), out[head:size])
        return size

    def decode(self, encoded: memoryview, out: memoryview, bound_to: bytes) -> None:
        """Verify, decrypt, decode. `Damaged`: changed, of another block, or no key fits.

        `OtherKey`: it names a key that is none of these.
        """
        size = len(encoded) - self._head - _TAG
        if not 0 <= size <= min(_LONGEST - _TAG, self.inner.bound(len(out))):
            raise Damaged(f"{len(encoded)} bytes are no encrypted form of {len(out)}")
        plain = out
        if self.inner.number:
            plain = np.empty(size, dtype=np.uint8).data
        elif size != len(out):
            raise Damaged(f"{size} encrypted bytes where there must be {len(out)}")
        self._decrypt(encoded, plain, self._associated(bound_to))
        if self.inner.number:
            self.inner.decode(plain, out, b"")

    def _decrypt(self, encoded: memoryview, plain: memoryview, associated: bytes) -> None:
        head, at = self._head, len(self._id)
        ids = self._ids
        if self._with_id:
            named = bytes(encoded[:at])
            if named not in ids:
                raise OtherKey(f"it is encrypted with the key {named.hex()}")
            ids = (named,)
        salt, nonce = bytes(encoded[at : at + _SALT]), bytes(encoded[at + _SALT : head])
        for named in ids:
            try:
                self._cipher_of(named, salt).decrypt_into(nonce, encoded[head:], associated, plain)
            except self._invalid_tag:
                continue
            return
        raise Damaged("changed, of another block, or encrypted with another key")

    def _associated(self, bound_to: bytes) -> bytes:
        return bytes([self.number]) + bound_to

    def __repr__(self) -> str:
        return f"<EncryptedCodec {self.name}>"  # and never the key
