"""The store: KV that outlives the GPU, the process and the machine.

kv/        KVStore: put, get, lookup and prefetch of KV tensors, by tokens
blocks/    BlockStore: the same for opaque bytes, by block keys
identity/  `model_identity`: a digest of everything that decides the numbers of a model's KV
tiers/     memory, disks and servers, fastest first: where blocks are, and when they move
codecs/    KV to bytes and back: raw, lossless, quantised, encrypted
backends/  storage of records: memory, a directory, Valkey or Redis, object stores

`KVStore` and `model_identity` need torch; the rest of the store is imported without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvkeep.store.blocks import BlockStore, Lookup, Put, StoreStats
    from kvkeep.store.identity import model_identity, weights_digest
    from kvkeep.store.kv import (
        Get,
        KVStore,
        LoadChoice,
        LoadPiece,
        Prefetch,
        Snapshot,
        choose_load,
    )
    from kvkeep.store.tiers import Miss, Removed

__all__ = [
    "BlockStore",
    "Get",
    "KVStore",
    "LoadChoice",
    "LoadPiece",
    "Lookup",
    "Miss",
    "Prefetch",
    "Put",
    "Removed",
    "Snapshot",
    "StoreStats",
    "choose_load",
    "model_identity",
    "weights_digest",
]  # fmt: skip

_ROOMS = {
    **dict.fromkeys(("BlockStore", "Lookup", "Put", "StoreStats"), "blocks"),
    **dict.fromkeys(("model_identity", "weights_digest"), "identity"),
    **dict.fromkeys(
        ("Get", "KVStore", "LoadChoice", "LoadPiece", "Prefetch", "Snapshot", "choose_load"), "kv"
    ),
    **dict.fromkeys(("Miss", "Removed"), "tiers"),
}


def __getattr__(name: str) -> object:
    """Import a public name at its first use, so that torch is imported only for names that need
    it.
    """
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"kvkeep.store.{_ROOMS[name]}"), name)
    globals()[name] = found
    return found
