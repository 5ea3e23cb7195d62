"""Namespaces and chained block keys: the names under which stored KV is found.

A block key names the tokens of a block, all tokens before it, and the namespace of the KV:

    key[-1] = SHA-256( "kvkeep namespace 1\\n" + canonical namespace )
    key[i]  = SHA-256( key[i-1] + tokens of block i as little-endian int32 + its extras )

For a block without extras (`kvkeep.core.extras`), nothing follows the tokens. Keys are 32 bytes and
the same in every process and on every machine. `docs/keys.md` has the format with test vectors.
SHA-256, because a second prompt with the same key would get the KV of another: keys must withstand
deliberate collisions.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import groupby
from struct import iter_unpack
from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue, check_type, told
from kvkeep.core.extras import extra_bytes
from kvkeep.core.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from kvkeep.core.extras import Extras

__all__ = [
    "BLOCK_ID_BYTES",
    "KEY_BYTES",
    "SPACE_BYTES",
    "Namespace",
    "NamespaceLike",
    "as_namespace",
    "chain_keys",
    "root_key",
    "space_of",
]

KEY_BYTES = 32
"""Length of a SHA-256 digest: a block key, or the root key of a namespace."""
SPACE_BYTES = 16
"""Length of the head of a root key, which stands for the namespace in a block id."""
BLOCK_ID_BYTES = SPACE_BYTES + KEY_BYTES
"""Length of a block id, which names a block among all namespaces: its space, then its key."""
_MAGIC = b"kvkeep namespace 1\n"


@dataclass(frozen=True, slots=True)
class Namespace:
    """The fields that separate KV that must never be mixed: it is reused in one namespace only.

    Every field is part of every key; an empty field is a value like any other. ``tenant`` separates
    users who must not learn of each other's prompts, ``lora`` names an adapter with its version,
    ``rank`` a tensor- or pipeline-parallel shard ("tp0/2"). ``scope`` is empty, except for the KV
    that all tenants share (`kvkeep.core.public`).
    """

    tenant: str = ""
    model: str = ""
    revision: str = ""
    dtype: str = ""
    layout: str = ""
    geometry: str = ""
    lora: str = ""
    rank: str = ""
    scope: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            check_type(f"Namespace.{field.name}", value, str, "text")

    def canonical(self) -> bytes:
        """Return the bytes to hash: ``name=length:value`` per non-empty field, sorted by name.

        Lengths are in bytes of UTF-8, so no value can imitate two fields.
        """
        return b"".join(
            b"%s=%d:%s\n" % (name.encode(), len(value), value)
            for name in sorted(field.name for field in fields(self))
            if (value := getattr(self, name).encode("utf-8", "surrogatepass"))
        )


NamespaceLike = str | Namespace
"""A namespace, or a text that names a tenant: what `as_namespace` accepts."""


def as_namespace(namespace: NamespaceLike) -> Namespace:
    """Return a namespace; plain text names a tenant."""
    if isinstance(namespace, Namespace):
        return namespace
    if isinstance(namespace, str):
        return _of_tenant(namespace)
    raise InvalidValue(
        f"a namespace is a Namespace or text, got {type(namespace).__name__}: {told(namespace)}"
    )


@lru_cache(maxsize=1024)
def _of_tenant(tenant: str) -> Namespace:
    return Namespace(tenant=tenant)


@lru_cache(maxsize=1024)
def root_key(namespace: Namespace) -> bytes:
    """Return the key before the first block of ``namespace``: 32 bytes."""
    return hashlib.sha256(_MAGIC + namespace.canonical()).digest()


def space_of(namespace: Namespace) -> bytes:
    """Return the first 16 bytes of the root key, which group a namespace's blocks in a store."""
    return root_key(namespace)[:SPACE_BYTES]


def chain_keys(parent: bytes, tokens: bytes, block_bytes: int, extras: Extras = ()) -> list[bytes]:
    """Return the keys of the full blocks of ``tokens`` (little-endian int32) after ``parent``.

    ``extras`` belong to these tokens, by position. A tail shorter than ``block_bytes`` has no key.
    Cost: one SHA-256 a block, about 0.4 µs at 16 tokens a block, most of it calls of hashlib.
    """
    begin = hashlib.sha256().copy  # cheaper than to make one anew
    suffixes: dict[int, bytes] = {}  # by the number of each block that has extras
    if extras:
        size = block_bytes // TOKEN_BYTES
        for at, some in groupby(extras, key=lambda each: each.position // size):
            suffixes[at] = extra_bytes(tuple(some), at * size)
    keys: list[bytes] = []
    whole = memoryview(tokens)[: len(tokens) // block_bytes * block_bytes]
    for (block,) in iter_unpack(f"{block_bytes}s", whole):
        block_hash = begin()
        block_hash.update(parent + block)
        if suffixes and len(keys) in suffixes:
            block_hash.update(suffixes[len(keys)])
        parent = block_hash.digest()
        keys.append(parent)
    return keys
